"""What drafts guess and how often they are right, what sampling draws, and when guessing pays."""

import copy
import functools
import itertools

import pytest
import torch

from deepseek_accel import (
    Attention,
    FusedExperts,
    FusedLayers,
    KVCache,
    OptimizeConfig,
    PlanError,
    Speculative,
    models,
    optimize,
    plan,
    report,
    restore,
)
from deepseek_accel.generation.drafts import NGram, catch_up
from deepseek_accel.generation.latency import FIRST_PROBE, LAST_PROBE, Acceptance, Costs, Pace, tokens_per_step
from deepseek_accel.testing import picture, tiny_model

PASSES = (Attention(), FusedExperts(), FusedLayers(), KVCache(page_size=16))


def config(draft, number=4):
    return OptimizeConfig((*PASSES, Speculative(draft, number)), allow_skips=True)


def plain(model):
    return optimize(model, OptimizeConfig(PASSES, allow_skips=True))


@functools.cache
def bundled_draft():
    return plain(models.load_tiny("deepseek-tiny-draft", dtype=torch.float32)[0])


@functools.cache
def bundled(mode, number=4):
    model, tokenizer = models.load_tiny(dtype=torch.float32)
    return optimize(model, config(bundled_draft() if mode == "model" else mode, number)), tokenizer


def heldout(tokenizer, most, count=9):
    texts = models.heldout_documents()[:count]
    ids = tokenizer(texts, add_special_tokens=False, truncation=True, max_length=most).input_ids
    return [torch.tensor([row]) for row in ids]


# --- sampling keeps the distribution (open case P01)


def chi_square_p(counts, probabilities):
    """The chance of counts this far from `probabilities`, those expected fewer than five times together."""
    total, few, rest = sum(counts.values()), 0.0, 0
    statistic, cells = 0.0, 0
    for outcome, p in probabilities.items():
        if total * p < 5:
            few, rest = few + total * p, rest + counts.get(outcome, 0)
        else:
            statistic += (counts.get(outcome, 0) - total * p) ** 2 / (total * p)
            cells += 1
    assert sum(counts.get(outcome, 0) for outcome in probabilities) == total  # nothing impossible was drawn
    if few >= 1:
        statistic, cells = statistic + (rest - few) ** 2 / few, cells + 1
    return torch.special.gammaincc(torch.tensor((cells - 1) / 2), torch.tensor(statistic / 2)).item()


def exact(model, prompt, warpers, new):
    """{tokens: probability} of what sampling `new` tokens after prompt [1, T] gives, from the model's own forward."""
    known = {(): 1.0}
    for _ in range(new):
        longer = {}
        for tokens, p in known.items():
            ids = torch.cat((prompt, torch.tensor([tokens], dtype=torch.long)), 1)
            with torch.no_grad():
                scores = model(ids, use_cache=False).logits[:, -1].float()
            for warper in warpers:
                scores = warper(ids, scores)
            for token, q in enumerate(scores.softmax(-1)[0].tolist()):
                if q > 0:
                    longer[(*tokens, token)] = p * q
        known = longer
    return known


def warpers(temperature, top_k=None, top_p=None):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    return [
        TemperatureLogitsWarper(temperature),
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p else []),
    ]


def draws(model, prompt, new, rows=500, **options):
    counts = {}
    for seed in range(5):
        torch.manual_seed(seed)
        mask = torch.ones_like(prompt)  # else tokens that look like padding are hidden
        out = model.generate(
            prompt, attention_mask=mask, do_sample=True, max_new_tokens=new, num_return_sequences=rows, **options
        )
        for row in out[:, prompt.shape[1] :].tolist():
            counts[tuple(row)] = counts.get(tuple(row), 0) + 1
    return counts


@pytest.mark.parametrize("mode", ["ngram", "model", "self"])
def test_sampling_keeps_the_distribution(mode):
    from deepseek_accel.testing import randomize

    sizes = {"vocab_size": 8, "eos_token_id": None, "pad_token_id": 0}
    kind = "deepseek_v3" if mode == "self" else "llama"
    target = randomize(tiny_model(kind, **sizes), 0, 0.35 if kind == "llama" else 0.1).eval()
    prompt = torch.randint(0, 8, (1, 60), generator=torch.Generator().manual_seed(30))  # most pairs stand in it
    expected = exact(target, prompt, warpers(0.8, top_p=0.9), 3)
    draft = plain(randomize(tiny_model("llama", **sizes), 1, 0.35).eval()) if mode == "model" else mode
    optimize(target, config(draft, 3))
    options = {"temperature": 0.8, "top_p": 0.9, "top_k": 0, "pad_token_id": 0}
    assert chi_square_p(draws(target, prompt, 3, **options), expected) > 1e-3
    seen = report(target).counters
    assert 0 < seen["speculative: accepted tokens"] < seen["speculative: drafted tokens"]


def test_sampling_keeps_the_distribution_with_the_mtp_layer():
    stock, tokenizer = models.load_tiny(dtype=torch.float32)
    prompt = tokenizer("def __init__(self, value):\n    self.", return_tensors="pt").input_ids
    expected = exact(stock, prompt, warpers(1.5, top_k=3), 3)
    model, _ = bundled("mtp")
    assert chi_square_p(draws(model, prompt, 3, 150, temperature=1.5, top_k=3, eos_token_id=None), expected) > 1e-3
    seen = report(model).counters
    assert 0 < seen["speculative: accepted tokens"] < seen["speculative: drafted tokens"]


def test_the_distribution_test_sees_a_fault():
    """The two-token case of P01: a greedy guess taken as if it had been drawn gives 0.75 for 0.6."""
    assert chi_square_p({(0,): 1875, (1,): 625}, {(0,): 0.6, (1,): 0.4}) < 1e-3


# --- how often guesses are right


ACCEPTED = {"model": (1.4, 9), "mtp": (1.5, 9), "ngram": (0.2, 2), "self": (1.8, 2)}
"""At least so many tokens of 4 guessed, over so many of the held-out files."""


@pytest.mark.parametrize("mode", ACCEPTED)
def test_accepted_tokens_on_held_out_code(mode):
    """64 tokens greedily after the first 600 of each held-out file, four guesses at a time: tokens accepted a step."""
    least, files = ACCEPTED[mode]
    model, tokenizer = bundled(mode)
    restore(model)
    prompts = heldout(tokenizer, 600, files)
    expected = [greedy(tokenizer, i) for i in range(len(prompts))]
    optimize(model, config(bundled_draft() if mode == "model" else mode))
    for prompt, text in zip(prompts, expected, strict=True):
        assert model.generate(prompt, do_sample=False, max_new_tokens=64).tolist() == text
    seen = report(model).counters
    accepted = seen["speculative: accepted tokens"] / seen["speculative: rows in steps"]
    print(f"{mode}: {accepted:.2f} of 4 accepted a step")
    assert accepted >= least


@functools.cache
def greedy(tokenizer, i):
    model = plain_bundled()
    return model.generate(heldout(tokenizer, 600)[i], do_sample=False, max_new_tokens=64).tolist()


@functools.cache
def plain_bundled():
    return plain(models.load_tiny(dtype=torch.float32)[0])


@pytest.mark.parametrize("mode", ["ngram", "model", "mtp", "self"])
def test_batches_of_held_out_code(mode):
    """Eight rows of different lengths, 128 tokens: the text is that of plain decoding."""
    model, tokenizer = bundled(mode)
    prompts = [row[:, : 40 + 11 * i] for i, row in enumerate(heldout(tokenizer, 130, 8))]
    size = max(row.shape[1] for row in prompts)
    ids = torch.cat([torch.nn.functional.pad(row, (size - row.shape[1], 0), value=2) for row in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(r), (size - r.shape[1], 0)) for r in prompts])
    options = {"input_ids": ids, "attention_mask": mask, "do_sample": False, "max_new_tokens": 128}
    assert model.generate(**options).tolist() == plain_bundled().generate(**options).tolist()


# --- drafts by themselves


def test_ngrams_find_what_followed():
    draft = NGram([0, 2])
    rows = [[1, 2, 3, 4, 5, 9, 1, 2, 3], [0, 0, 7, 7, 7, 7]]
    assert draft.propose(rows, [3, 4], None) == [[4, 5, 9], [7, 7, 7, 7]]
    rows = [[*rows[0], 8, 2, 3], [*rows[1], 1]]
    assert draft.propose(rows, [2, 2], None) == [[8, 2], []]  # the latest time that 2 3 stood there
    assert draft.propose(rows, [0, 1], None) == [[], []]


def test_rows_that_catch_up_end_together():
    runs = catch_up([300, 1, 0, 128])
    assert [sum(run[r] for run in runs) for r in range(4)] == [300, 1, 0, 128]
    assert max(map(max, runs)) <= 128 and runs[-1] == [128, 1, 0, 128]


# --- the pace


def paced(verify, draft, right, steps=200):
    """The numbers of drafts chosen when verifying n tokens takes verify(n) ms and `right` of 10 guesses are right."""
    pace, chosen, tenths = Pace(), [], itertools.cycle(range(10))
    for _ in range(steps):
        drafts = pace.choose([pace.acceptance.rate])
        stood = next((i for i in range(drafts) if next(tenths) >= right), drafts)
        if drafts:
            pace.acceptance.learn(drafts, stood)
        pace.spend(1, 1 + drafts, drafts, draft * drafts, verify(1 + drafts), 1 + stood)
        chosen.append(drafts)
    return pace, chosen


def test_as_many_drafts_as_pay():
    pace, chosen = paced(lambda n: 10 + 0.1 * n, 0.1, 9)
    assert min(chosen[50:]) >= 4 and pace.speedup(chosen[-1], [0.9]) > 1.5 and pace.measured_speedup() > 1.5
    for costs in (
        (lambda n: 10.0 * n, 0.1, 9),  # each token costs a whole step
        (lambda n: 10 + 0.5 * n, 0.5, 0),  # never right
        (lambda n: 10 + 0.1 * n, 9.0, 9),  # guessing costs as much as the model
    ):
        pace, chosen = paced(*costs)
        assert sum(drafts > 0 for drafts in chosen[50:]) <= 150 // FIRST_PROBE
        assert pace.measured_speedup() < 1.02


def test_calls_rest_once_guessing_was_tried_in_vain():
    pace, _ = paced(lambda n: 10.0 * n, 0.1, 9, steps=40)
    assert not pace.rests(1)  # not tried since the first guesses
    pace, _ = paced(lambda n: 10.0 * n, 0.1, 9, steps=100)
    assert pace.rests(1) and pace.rests(4)
    for _ in range(8):
        calls = 0
        while pace.rests(1):
            pace.called(1, False, 640.0, 64)
            calls += 1
        assert 0 < calls <= LAST_PROBE // 64
        assert pace.choose([0.9]) == 2 and pace.tries  # the next call that does not rest tries at once
        pace.spend(1, 3, 2, 0.2, 30.0, 3)
    pace, _ = paced(lambda n: 10 + 0.1 * n, 0.1, 9)
    assert not pace.rests(1)


def test_whole_calls_are_compared_with_plain_ones():
    """The loop's own step of one token may be dearer than plain decoding's, so that guessing seems to pay."""
    pace, _ = paced(lambda n: 10 + 4.0 * n, 0.1, 7)
    assert 1 < pace.measured_speedup() < 1.5 and not pace.rests(4)
    pace.called(4, True, 900.0, 100)
    assert pace.rests(4) and not pace.rests(2)  # plain calls have to be seen: one to load things, one that counts
    pace.called(4, False, 2000.0, 100)
    assert pace.rests(4)
    pace.called(4, False, 500.0, 100)
    assert not pace.rests(4)
    pace.called(4, True, 600.0, 100)  # slower than plain: left alone for a while, longer each time
    rests = []
    for _ in range(5):
        rests.append(0)
        while pace.rests(4):
            pace.called(4, False, 5.0, 1)  # too short to say how fast
            rests[-1] += 1
        pace.called(4, True, 600.0, 100)
    assert rests == [512, 1024, 2048, 4096, 4096]
    while pace.rests(4):
        pace.called(4, False, 500.0, 100)
    pace.called(4, True, 400.0, 100)  # the text became easy
    assert not pace.rests(4)
    sure, _ = paced(lambda n: 10 + 0.1 * n, 0.1, 9)
    sure.called(1, True, 900.0, 100)
    assert sure.measured_speedup() > 1.5 and not sure.rests(1)


def test_the_slowest_row_counts():
    assert tokens_per_step(2, [0.5]) == 1.75
    assert tokens_per_step(2, [1.0, 0.0]) == 0.75 * 1 + 0.25 * 2


def test_the_estimate_follows_the_text():
    seen = Acceptance()
    for _ in range(200):
        seen.learn(4, 4)
    assert seen.rate > 0.95
    for _ in range(200):
        seen.learn(4, 0)
    assert seen.rate < 0.1
    again = Acceptance(seen.rate)
    again.learn(8, 8)
    assert again.rate > 0.4  # a new call does not wait for what the old ones taught


def test_costs_between_and_beyond_what_was_measured():
    costs = Costs(0.1, True)
    for size, ms in ((1, 9.0), (1, 2.0), (1, 5.0), (5, 9.0), (5, 4.0)):
        costs.add(size, ms)
    assert (costs.of(1), costs.of(5), costs.of(3), costs.of(7)) == (2.0, 4.0, 3.0, 5.0)


# --- what can be asked for


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Speculative("eagle"), "ngram, mtp, self, or a model"),
        (lambda: Speculative(3), "got int"),
        (lambda: Speculative(num_draft_tokens=0), '"auto" or 1 to 8'),
        (lambda: Speculative(num_draft_tokens=True), '"auto" or 1 to 8'),
        (lambda: plan(tiny_model("llama"), config(tiny_model("llama"))), "draft=optimize"),
        (lambda: plan(tiny_model("llama", vocab_size=64), config(llama_draft())), "128 tokens and the model 64"),
        (lambda: plan(tiny_model("llama"), config("self")), "llama has none"),
        (lambda: plan(tiny_model("llama"), config("mtp")), "not of llama"),
        (lambda: plan(tiny_model("deepseek_v3"), config("mtp")), "is no directory here"),
        (lambda: plan(tiny_model("llama"), (Attention(), Speculative())), "needs the layers, kv_cache passes too"),
        (lambda: plan(tiny_model("deepseek_v32"), (*PASSES, Speculative())), "its cache also holds"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_changes(make, words):
    with pytest.raises(PlanError) as raised:
        make()
    assert words in str(raised.value)


@functools.cache
def llama_draft():
    return plain(tiny_model("llama"))


def test_it_is_asked_for_by_name():
    assert "speculative" not in OptimizeConfig.lossless().to_dict()
    options = config("self", 2).to_dict()
    assert options["speculative"] == {"draft": "self", "num_draft_tokens": 2}
    assert OptimizeConfig.from_dict(options) == config("self", 2)
    assert config(llama_draft()).to_dict()["speculative"]["draft"] == "a LlamaForCausalLM"
    assert len(repr(Speculative(llama_draft()))) < 100


@pytest.mark.parametrize("mode", ["ngram", "model", "mtp", "self"])
def test_restore_leaves_nothing_and_copies_are_their_own(mode):
    model, tokenizer = models.load_tiny(dtype=torch.float32)
    before = picture(model)
    draft = bundled_draft()
    drawn = picture(draft)
    optimize(model, config(draft if mode == "model" else mode))
    keys = list(model.state_dict())
    prompt = heldout(tokenizer, 50)[1]
    text = model.generate(prompt, do_sample=False, max_new_tokens=12).tolist()
    assert model.generate(prompt, do_sample=False, max_new_tokens=12).tolist() == text
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert twin.generate(prompt, do_sample=False, max_new_tokens=12).tolist() == text
    assert report(twin).counters["speculative: loops"] > report(model).counters["speculative: loops"]
    assert not any("draft" in key for key in keys) and keys == list(restore(model).state_dict())
    assert picture(model) == before and picture(draft) == drawn  # caller's configs included


def test_what_cannot_speculate_says_so():
    model = optimize(tiny_model("llama"), config("ngram"))
    prompt = torch.tensor([[3, 5, 1, 3, 5, 1]])
    options = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False}
    stock = tiny_model("llama")
    for more in ({"num_beams": 2}, {"use_cache": False}, {"num_beams": 3, "num_return_sequences": 3}):
        expected = stock.generate(prompt, **options, **more)
        assert model.generate(prompt, **options, **more).tolist() == expected.tolist()
    said = report(model).counters
    assert said["speculative: stock loop (beam search)"] == 2
    assert said["speculative: stock loop (not a paged cache)"] == 1


def test_the_report_says_what_it_was_good_for():
    model, _ = bundled("mtp", "auto")
    prompt = heldout(bundled("mtp")[1], 100)[1]
    for _ in range(2):
        model.generate(prompt, do_sample=False, max_new_tokens=40)
    facts = report(model).cache
    assert facts["speculative_tokens_per_step_and_row"] >= 1
    assert 0 < facts["speculative_acceptance_estimate"] < 1
    for word in ("plain step", "guesses", "predicted"):
        assert word in facts["speculative_with_1_row"]
    assert facts["speculative_measured_speed_up"].partition("x")[0].replace(".", "").isdigit()

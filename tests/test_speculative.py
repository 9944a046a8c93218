"""Speculative decoding against the stock model: what comes out, and all that a caller can observe on the way.

A loop that checks several tokens at once shows in what it does behind an end, in rows that accept different numbers of
tokens, and in processors, streamers and caches that are meant to see one token at a time.
"""

import functools

import pytest
import torch
from transformers import LogitsProcessor, MaxTimeCriteria, StoppingCriteria
from transformers.generation import BaseStreamer

from deepseek_accel import (
    Attention,
    FusedExperts,
    FusedLayers,
    KVCache,
    MixedPrecision,
    OptimizeConfig,
    Speculative,
    models,
    optimize,
    report,
)
from deepseek_accel.testing import relative_error, tiny_model
from deepseek_accel.versions import cache_argument

NEW = 24
MODES = ("ngram", "model", "self")
LENGTHS = [(23,), (23, 9, 1)]


def config(draft="ngram", number=3, **cache):
    passes = (Attention(), FusedExperts(), FusedLayers(), KVCache(**{"page_size": 16} | cache))
    return OptimizeConfig((*passes, Speculative(draft, number)), allow_skips=True)


def plain_config(**cache):
    return OptimizeConfig(config(**cache).passes[:-1], allow_skips=True)


@functools.cache
def stock(model_type):
    return tiny_model(model_type)


@functools.cache
def near(model_type):
    """A draft that is right now and then: the model with noise on its head."""
    draft = tiny_model(model_type)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        draft.lm_head.weight.add_(0.03 * torch.randn(draft.lm_head.weight.shape, generator=generator))
    return optimize(draft, plain_config())


@functools.cache
def fast(model_type, mode="ngram", number=3):
    draft = near(model_type) if mode == "model" else mode
    return optimize(tiny_model(model_type), config(draft, number))


def batch(*lengths, seed=0):
    """Random prompts, left-padded with 0. Their halves repeat, so that n-grams are found."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        half = torch.randint(2, 128, (-(-length // 2),), generator=generator)
        row[max(lengths) - length :] = torch.cat((half, half))[:length]
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def run(model, inputs, **options):
    torch.manual_seed(11)
    return model.generate(**inputs, **{"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **options})


def counters(model):
    return report(model).counters


@functools.cache
def free_tokens(model_type, lengths):
    """[B, NEW] what greedy decoding gives when nothing stops it. Every test that stops it takes its cause from here."""
    return run(stock(model_type), batch(*lengths))[:, max(lengths) :]


# --- the tokens


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "llama", "qwen2"])
def test_the_text_is_that_of_plain_decoding(model_type, mode, lengths):
    if mode == "self" and model_type in ("llama", "qwen2"):
        pytest.skip("no experts")
    for number in (1, 4, 8) if model_type == "deepseek_v3" else (4,):
        model = optimize(tiny_model(model_type), config(near(model_type) if mode == "model" else mode, number))
        got = run(model, batch(*lengths))
        assert got.tolist() == run(stock(model_type), batch(*lengths)).tolist()
        seen = counters(model)
        assert seen["speculative: loops"] == 1 and seen["speculative: drafted tokens"] > 0
        if mode != "ngram":
            assert 0 < seen["speculative: accepted tokens"] < seen["speculative: drafted tokens"]
            assert seen["speculative: steps"] < NEW


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_a_draft_that_is_the_model_is_always_right(model_type):
    model = optimize(tiny_model(model_type), config(optimize(tiny_model(model_type), plain_config()), 4))
    got = run(model, batch(23, 9, 1), max_new_tokens=21)
    assert got.tolist() == run(stock(model_type), batch(23, 9, 1), max_new_tokens=21).tolist()
    seen = counters(model)
    assert seen["speculative: accepted tokens"] == seen["speculative: drafted tokens"]
    assert seen["speculative: steps"] == 4  # the prompt gives one token, each step five


@pytest.mark.parametrize("mode", MODES)
def test_sampling_gives_the_tokens_of_the_same_seed(mode):
    model = fast("deepseek_v3", mode)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    for lengths in LENGTHS:
        for more in ({}, {"repetition_penalty": 1.3}):
            expected = run(stock("deepseek_v3"), batch(*lengths), **options, **more)
            left = torch.random.get_rng_state()
            assert run(model, batch(*lengths), **options, **more).tolist() == expected.tolist()
            assert torch.equal(torch.random.get_rng_state(), left)  # what comes next is drawn as after plain decoding
    assert not [name for name in counters(model) if "plain loop" in name]


def test_entries_of_pages_that_were_never_written_do_not_matter():
    model = fast("deepseek_v3", "model")
    empty, poisoned = torch.empty, lambda *a, **k: fill(empty(*a, **k))

    def fill(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    try:
        torch.empty = poisoned
        got = run(model, batch(40, 9, 1), max_new_tokens=90)
    finally:
        torch.empty = empty
    assert got.tolist() == run(stock("deepseek_v3"), batch(40, 9, 1), max_new_tokens=90).tolist()


# --- the end


@pytest.mark.parametrize("at", [0, 4, 6])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_an_end_inside_a_draft(lengths, at):
    ends = free_tokens("llama", lengths)[:, at].tolist()
    for mode in ("ngram", "model"):
        for eos in (ends[0], ends):
            got, theirs, ours = twice("llama", mode, batch(*lengths), eos_token_id=eos, streamer=True)
            assert ours == theirs
            if len(lengths) == 1:
                assert got.shape[1] <= lengths[0] + at + 1 and got[0, -1] == ends[0]


def twice(model_type, mode, inputs, streamer=False, **options):
    """(our tokens, equal to stock's, and what stock's and our streamers got)."""
    outs, streams = [], []
    for model in (stock(model_type), fast(model_type, mode)):
        streams.append(Recorder())
        outs.append(run(model, inputs, **options, **({"streamer": streams[-1]} if streamer else {})))
    assert outs[0].tolist() == outs[1].tolist()
    return outs[1], streams[0].events, streams[1].events


class Recorder(BaseStreamer):
    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append((value.dtype, value.device.type, tuple(value.shape), value.tolist()))

    def end(self):
        self.events.append("end")


@pytest.mark.parametrize("new", [1, 2, 3, 20])
def test_lengths(new):
    for lengths in LENGTHS:
        got, theirs, ours = twice("llama", "model", batch(*lengths), streamer=True, max_new_tokens=new)
        assert got.shape[1] == max(lengths) + new and ours == theirs
    twice("llama", "model", batch(23), max_new_tokens=None, max_length=23 + new)


def test_a_shortest_length_keeps_the_end_away():
    eos = free_tokens("llama", (23,))[0, 6].item()
    got, *_ = twice("llama", "model", batch(23), eos_token_id=eos, min_new_tokens=12)
    assert got.shape[1] >= 23 + 12


def test_time_ends_it_after_one_token():
    got, *_ = twice("llama", "model", batch(23), max_time=0.0)
    assert got.shape[1] == 24
    got, *_ = twice("llama", "model", batch(23, 9), stopping_criteria=[MaxTimeCriteria(0.0)])
    assert "speculative: plain loop (several rows, and a stopping criterion that may tell rows apart)" in counters(
        fast("llama", "model")
    )
    assert got.shape[1] == 24


def test_stop_strings_inside_a_draft():
    model, tokenizer = models.load_tiny(dtype=torch.float32)
    inputs = tokenizer(["def main(self):\n    return", "import os\nimport"], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    options = {"max_new_tokens": 40, "stop_strings": ["self", "\n\n"], "tokenizer": tokenizer, "do_sample": False}
    expected = model.generate(**inputs, **options)
    optimize(model, config("mtp", 5))
    assert model.generate(**inputs, **options).tolist() == expected.tolist()
    assert expected.shape[1] < inputs["input_ids"].shape[1] + 40
    assert counters(model)["speculative: loops"] == 1


# --- processors and criteria


class Seen(LogitsProcessor):
    """Notes what it is shown, and changes the scores by it: what is skipped or shown twice changes the text."""

    def __init__(self):
        self.rows = []

    def __call__(self, input_ids, scores):
        self.rows.append(input_ids.tolist())
        scores[:, (7 * len(self.rows)) % 128] += 2.0
        return scores


def test_a_processor_sees_each_prefix_once_and_no_rejected_token():
    seen = []
    for model in (stock("llama"), fast("llama", "model")):
        seen.append(Seen())
        run(model, batch(23), logits_processor=[seen[-1]])
    assert seen[0].rows == seen[1].rows
    assert counters(fast("llama", "model"))["speculative: steps"]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [7, 9]]},
        {"prefix_allowed_tokens_fn": lambda row, ids: [2 + (len(ids) + 3 * i) % 126 for i in range(40)]},
        {"suppress_tokens": [3, 4, 5], "exponential_decay_length_penalty": (3, 1.2), "eos_token_id": 9},
    ],
    ids=lambda options: "_".join(options),
)
def test_processors(options):
    model = optimize(tiny_model("llama"), config(near("llama")))
    for lengths in LENGTHS:
        expected = run(stock("llama"), batch(*lengths), **options)
        assert run(model, batch(*lengths), **options).tolist() == expected.tolist()
    plain = [name for name in counters(model) if "plain loop" in name]
    assert bool(plain) == ("prefix_allowed_tokens_fn" in options)  # it knows rows by their number
    assert counters(model)["speculative: loops"] == 2 - len(plain)


class StopAt(StoppingCriteria):
    def __init__(self, length):
        self.length, self.calls = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.shape[1])
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_a_criterion_of_the_caller_is_asked_for_each_token():
    stops = [StopAt(30), StopAt(30)]
    outs = [
        run(m, batch(23), stopping_criteria=[s])
        for m, s in zip((stock("llama"), fast("llama", "model")), stops, strict=True)
    ]
    assert outs[0].tolist() == outs[1].tolist() and outs[0].shape[1] == 30
    assert stops[0].calls == stops[1].calls == list(range(24, 31))


# --- what is returned


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_scores_logits_and_the_cache(model_type, lengths):
    eos = free_tokens(model_type, lengths)[0, 4].item()
    for more in ({}, {"eos_token_id": eos}, {"repetition_penalty": 1.3, "eos_token_id": eos}):
        options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **more}
        expected, got = (run(m, batch(*lengths), **options) for m in (stock(model_type), fast(model_type, "model")))
        assert type(got) is type(expected) and got.sequences.tolist() == expected.sequences.tolist()
        for ours, theirs in ((got.scores, expected.scores), (got.logits, expected.logits)):
            assert len(ours) == len(theirs)
            for a, b in zip(ours, theirs, strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype) and relative_error(a, b) <= 1e-4
        ours, theirs = got[cache_argument()], expected[cache_argument()]
        assert ours.get_seq_length() == theirs.get_seq_length() == got.sequences.shape[1] - 1
        for a, b in zip(ours.layers, theirs.layers, strict=True):
            real = batch(*lengths)["attention_mask"].bool()
            real = torch.nn.functional.pad(real, (0, ours.get_seq_length() - real.shape[1]), value=True)
            assert relative_error(a.keys.transpose(1, 2)[real], b.keys.transpose(1, 2)[real]) <= 1e-4


def test_a_returned_cache_goes_on_as_the_stock_one():
    eos = free_tokens("deepseek_v3", (23, 9, 1))[0, 4].item()
    texts = []
    for model in (stock("deepseek_v3"), fast("deepseek_v3", "model")):
        first = run(model, batch(23, 9, 1), return_dict_in_generate=True, eos_token_id=eos)
        ids = torch.cat((first.sequences, torch.full((3, 4), 17)), 1)
        mask = torch.nn.functional.pad(batch(23, 9, 1)["attention_mask"], (0, ids.shape[1] - 23), value=1)
        again = {"input_ids": ids, "attention_mask": mask, cache_argument(): first[cache_argument()]}
        texts.append(run(model, again, max_new_tokens=10).tolist())
    assert texts[0] == texts[1]


def test_other_passes_with_it():
    expected = run(stock("deepseek_v3"), batch(40, 23)).tolist()
    shared = optimize(tiny_model("deepseek_v3"), config("self", 3, reuse_prefix=True))
    prompt = {"input_ids": torch.cat((batch(40, seed=3)["input_ids"], batch(9)["input_ids"]), 1)}
    whole = run(stock("deepseek_v3"), prompt).tolist()
    assert [run(shared, prompt).tolist() for _ in range(3)] == [whole] * 3
    assert counters(shared)["kv_cache: calls that found a kept prefix"] == 2
    limited = optimize(tiny_model("deepseek_v3"), config("self", 3, max_pages=2 * 4))
    assert run(limited, batch(40, 23)).tolist() == expected  # 64 tokens a row, and none to spare for guesses
    fp8 = {"dtype": "fp8_e4m3"}
    rounded = [optimize(tiny_model("deepseek_v3"), c) for c in (plain_config(**fp8), config("self", 3, **fp8))]
    assert run(rounded[0], batch(40, 23)).tolist() == run(rounded[1], batch(40, 23)).tolist()


@pytest.mark.parametrize("mode", ["ngram", "self", "model"])
def test_packed_weights_are_speculated_on(mode):
    packed = MixedPrecision(method="rtn", group_size=32)
    draft = near("deepseek_v3") if mode == "model" else mode
    configs = plain_config(), config(draft, 3)
    plain, speculating = (
        optimize(tiny_model("deepseek_v3"), OptimizeConfig((packed, *c.passes), allow_skips=True)) for c in configs
    )
    expected = run(plain, batch(40, 23, 1)).tolist()
    assert expected != run(stock("deepseek_v3"), batch(40, 23, 1)).tolist()  # other weights, other tokens
    assert run(speculating, batch(40, 23, 1)).tolist() == expected
    assert counters(speculating)["speculative: accepted tokens"] > 0


@pytest.mark.parametrize("mode", ["model", "self", "ngram", "mtp"])
@pytest.mark.parametrize("sample", [False, True])
def test_calls_without_guesses_have_the_same_tokens(mode, sample, monkeypatch):
    plain, model = (
        models.load_tiny(dtype=torch.float32)[0] if mode == "mtp" else tiny_model("deepseek_v3") for _ in range(2)
    )
    optimize(plain, plain_config(reuse_prefix=True))
    optimize(model, config(near("deepseek_v3") if mode == "model" else mode, "auto", reuse_prefix=True))
    pace = vars(model)["_accel_speculation"].pace
    resting = iter([False, True, True, False])
    monkeypatch.setattr(type(pace), "rests", lambda self, rows: next(resting))
    steps: list[int] = []
    monkeypatch.setattr(type(pace), "called", lambda self, rows, guessed, ms, count: guessed or steps.append(count))
    for seed in range(4):
        given = batch(40, 23, 1, seed=seed // 2)  # the second time from pages that were kept
        options = {"do_sample": sample, "eos_token_id": None}
        assert run(model, given, **options).tolist() == run(plain, given, **options).tolist()
    counted = counters(model)
    assert counted["speculative: calls without guesses (they have not paid)"] == 2
    assert counted["speculative: loops"] == 2
    assert steps == [NEW, NEW]  # which count for when to try again

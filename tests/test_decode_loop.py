"""What callers of `generate` can observe of the decode loop, against the stock model: not only which tokens come out.

A loop that runs ahead of its checks shows in how often a processor is called, in what a streamer gets, in the random
numbers it used up and in the length of the cache it hands back; one that reuses buffers shows in the outputs it kept.
"""

import contextlib
import copy
import functools
import threading
import types
import warnings
from collections import Counter

import pytest
import torch
import transformers
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria
from transformers.generation import BaseStreamer

from deepseek_accel import families, models, optimize, report
from deepseek_accel.cache import PagedCache, paged_cache
from deepseek_accel.generation.graphs import StepGraphs
from deepseek_accel.generation.lines import read_model
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.testing import relative_error, tiny_model
from deepseek_accel.versions import cache_argument

CACHE = cache_argument()
CONFIG = {name: {} for name in PASSES} | {"kv_cache": {"page_size": 16}, "allow_skips": True}
MODELS = ("deepseek", "deepseek_v2", "deepseek_v3", "llama", "qwen2")
NEW = 10
both_attentions = pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])


@functools.cache
def stock(model_type, **options):
    return tiny_model(model_type, **options)


@functools.cache
def fast(model_type, **options):
    return optimize(tiny_model(model_type, **options), CONFIG)


def batch(*lengths, seed=0):
    """Random prompts, left-padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        row[max(lengths) - length :] = torch.randint(2, 128, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def run(model, inputs, **options):
    return model.generate(**inputs, **{"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **options})


def twice(model_type, inputs, make=dict, **options):
    """(what stock gives, what we give, stock's `make()`, ours): `make` returns the options that hold state."""
    outs, made = [], []
    for model in (stock(model_type), fast(model_type)):
        made.append(make())
        torch.manual_seed(11)
        outs.append(run(model, inputs, **made[-1], **options))
    return *outs, *made


def same(model_type, inputs, make=dict, **options):
    """The tokens of the optimized model, which must be those of the stock model."""
    expected, got, *_ = twice(model_type, inputs, make, **options)
    assert got.tolist() == expected.tolist()
    return got


def free_tokens(model_type, *lengths):
    """[B, NEW] what greedy decoding gives when nothing stops it. Every test that stops it takes its cause from here."""
    return run(stock(model_type), batch(*lengths))[:, max(lengths) :]


def assert_steps_equal(got, expected):
    """Per-step tensors [B, V] as stock's: -inf in the same places, the rest within fp32 noise, no step overwritten."""
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine == -torch.inf, theirs == -torch.inf)
        finite = theirs != -torch.inf
        assert relative_error(mine[finite], theirs[finite]) <= 1e-4


# --- streamers


class Recorder(BaseStreamer):
    """Keeps what it is given, copied at once, so that a buffer written again later does not hide a fault."""

    def __init__(self, fail_at=None, call=None):
        self.events, self.ends = [], 0
        self.fail_at, self.call = fail_at, call

    def put(self, value):
        if self.fail_at is not None and len(self.events) == self.fail_at:
            raise RuntimeError("the listener left")
        self.events.append((value.dtype, value.device.type, tuple(value.shape), value.tolist()))
        if self.call is not None:
            self.call(len(self.events))

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("lengths", [(23,), (23, 9, 1)])
@pytest.mark.parametrize("model_type", MODELS)
def test_a_streamer_gets_the_prompt_then_every_token_once(model_type, lengths):
    for options in ({}, {"eos_token_id": free_tokens(model_type, *lengths)[0, 4].item()}, {"max_new_tokens": 1}):
        expected, got, theirs, ours = twice(model_type, batch(*lengths), lambda: {"streamer": Recorder()}, **options)
        assert got.tolist() == expected.tolist()
        assert ours["streamer"].events == theirs["streamer"].events
        assert ours["streamer"].ends == theirs["streamer"].ends == 1
        streamed = [event[-1] for event in ours["streamer"].events[1:]]
        assert torch.tensor(streamed).T.tolist() == got[:, max(lengths) :].tolist()


@both_attentions
def test_tokens_are_streamed_as_they_come(model_type):
    """Not kept until the end: a caller who leaves after three tokens finds a cache only a little further on."""
    cache = paged_cache(fast(model_type), 16)
    with pytest.raises(RuntimeError, match="listener left"):
        run(fast(model_type), batch(23), max_new_tokens=40, streamer=Recorder(fail_at=4), **{CACHE: cache})
    assert cache.get_seq_length() <= 23 + 5


@both_attentions
def test_beams_cannot_be_streamed(model_type):
    for model in (stock(model_type), fast(model_type)):
        with pytest.raises(ValueError, match="streamer"):
            run(model, batch(23), num_beams=2, streamer=Recorder())


# --- the end


@pytest.mark.parametrize("model_type", MODELS)
def test_rows_end_at_different_steps(model_type):
    """Ended rows get padding, the call ends with the last row: not a step earlier, not a step later."""
    inputs, free = batch(23, 9, 16), free_tokens(model_type, 23, 9, 16)
    for steps in ((0, 4, 7), (2, 2, 2), (0, 0, 0), (NEW - 1, 1, 3), (NEW - 1, NEW - 1, NEW - 1)):
        ends = [free[row, step].item() for row, step in enumerate(steps)]
        same(model_type, inputs, eos_token_id=ends)
        same(model_type, inputs, eos_token_id=ends, pad_token_id=3)
        same(model_type, inputs, eos_token_id=ends, pad_token_id=ends[0])


@both_attentions
def test_the_end_at_every_single_step(model_type):
    free = free_tokens(model_type, 23)[0].tolist()
    for step, token in enumerate(free):
        tokens = same(model_type, batch(23), eos_token_id=token, max_new_tokens=NEW + 4)
        assert tokens.shape[1] == 23 + free.index(token) + 1, step


@both_attentions
def test_no_pad_token(model_type):
    """Stock pads with the first end token then."""
    free = free_tokens(model_type, 23, 9)
    same(model_type, batch(23, 9), eos_token_id=[free[0, 2].item(), free[1, 6].item()], pad_token_id=None)


@both_attentions
@pytest.mark.parametrize("new", [1, 2, 3])
def test_few_tokens(model_type, new):
    assert same(model_type, batch(23, 9), max_new_tokens=new).shape[1] == 23 + new
    assert same(model_type, batch(23, 9), max_new_tokens=None, max_length=23 + new).shape[1] == 23 + new


@both_attentions
def test_fewest_tokens(model_type):
    end = free_tokens(model_type, 23)[0, 2].item()
    for options in (dict(min_new_tokens=6), dict(min_length=29), dict(min_new_tokens=NEW)):
        assert same(model_type, batch(23), eos_token_id=end, **options).shape[1] >= 29


@both_attentions
def test_time_runs_out(model_type, monkeypatch):
    """The clock is read once a step, and once before the first one."""
    for limit in (0.0, 0.5, 3.5):
        counts = []
        for model in (stock(model_type), fast(model_type)):
            ticks = iter(range(1000))
            clock = types.SimpleNamespace(time=lambda ticks=ticks: float(next(ticks)))
            monkeypatch.setattr("transformers.generation.stopping_criteria.time", clock)
            counts.append((run(model, batch(23, 9), max_time=limit).tolist(), next(ticks)))
            monkeypatch.undo()
        assert counts[1] == counts[0]
        assert len(counts[1][0][0]) == 23 + int(limit) + 1


@functools.cache
def with_tokenizer():
    """(stock, ours, tokenizer): tiny models with the vocabulary of the bundled tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.path(), padding_side="left")
    theirs, ours = (tiny_model("deepseek_v3", vocab_size=2048) for _ in range(2))
    return theirs, optimize(ours, CONFIG), tokenizer


def test_stop_strings_end_each_row_by_itself():
    theirs, ours, tokenizer = with_tokenizer()
    texts = ["import os\n\ndef main(", "x", "for i in range(10):\n    print(i"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    width = inputs["input_ids"].shape[1]
    free = run(theirs, inputs)[:, width:]
    stops = [tokenizer.decode(free[row, step : step + 2]) for row, step in enumerate((2, 5, 7))]
    assert all(stops)
    # stock pads rows that ended only if there is an end token too; this one is never chosen
    unused = next(token for token in range(2, 2048) if not (free == token).any())
    for options in ({}, {"eos_token_id": unused}):
        options |= dict(stop_strings=stops, tokenizer=tokenizer)
        got, expected = run(ours, inputs, **options), run(theirs, inputs, **options)
        assert got.tolist() == expected.tolist()
        assert width + 7 <= got.shape[1] < width + NEW
    assert (got[0, -3:] == 0).all() and stops[0] in tokenizer.decode(got[0, width:])


# --- criteria and processors


class Watch(StoppingCriteria):
    """Keeps its arguments. stops: row -> the length at which that row ends."""

    def __init__(self, stops=None, answer_bool=False, fail_at=None):
        self.calls, self.stops, self.answer_bool, self.fail_at = [], stops or {}, answer_bool, fail_at

    def __call__(self, input_ids, scores, **kwargs):
        if self.fail_at == len(self.calls):
            raise RuntimeError("the criterion failed")
        kept = scores if scores is None else [step.clone() for step in scores]
        self.calls.append((input_ids.tolist(), input_ids.dtype, kept, sorted(kwargs)))
        length = input_ids.shape[1]
        if self.answer_bool:
            return length >= min(self.stops.values(), default=10**9)
        rows = range(input_ids.shape[0])
        return torch.tensor([length >= self.stops.get(row, 10**9) for row in rows], device=input_ids.device)


def assert_same_calls(ours, theirs):
    assert [call[:2] for call in ours] == [call[:2] for call in theirs]
    for (*_, mine, names), (*_, other, other_names) in zip(ours, theirs, strict=True):
        assert names == other_names
        assert (mine is None) == (other is None)
        assert_steps_equal(mine or (), other or ())


@both_attentions
@pytest.mark.parametrize("answer_bool", [False, True])
def test_criteria_are_asked_once_a_step_about_all_tokens_so_far(model_type, answer_bool):
    def make():
        return {"stopping_criteria": [Watch({0: 30, 1: 27}, answer_bool), Watch()]}

    for options in ({}, dict(output_scores=True, return_dict_in_generate=True)):
        expected, got, theirs, ours = twice(model_type, batch(23, 9), make, **options)
        sequences, expected = (getattr(out, "sequences", out) for out in (got, expected))
        assert sequences.tolist() == expected.tolist()
        assert sequences.shape[1] == (27 if answer_bool else 30)
        for mine, other in zip(ours["stopping_criteria"], theirs["stopping_criteria"], strict=True):
            assert_same_calls(mine.calls, other.calls)


class Touch(LogitsProcessor):
    """Keeps its arguments, and bans a token at every second call: one call too many changes what comes after."""

    def __init__(self, in_place=False, fail_at=None):
        self.calls, self.in_place, self.fail_at = [], in_place, fail_at

    def __call__(self, input_ids, scores):
        if self.fail_at == len(self.calls):
            raise RuntimeError("the processor failed")
        self.calls.append((input_ids.tolist(), input_ids.dtype, [scores.clone()], []))
        scores = scores if self.in_place else scores.clone()
        if len(self.calls) % 2:
            scores[:, scores[0].argmax()] = -torch.inf
        return scores


@both_attentions
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_processors_are_called_once_a_step_with_fp32_scores(model_type, in_place, sampled):
    options = dict(output_scores=True, return_dict_in_generate=True, repetition_penalty=1.3)
    if sampled:
        options |= dict(do_sample=True, temperature=0.8, top_k=30)

    def make():
        return {"logits_processor": [Touch(in_place), Touch()]}

    expected, got, theirs, ours = twice(model_type, batch(23, 9), make, **options)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert_steps_equal(got.scores, expected.scores)
    for mine, other in zip(ours["logits_processor"], theirs["logits_processor"], strict=True):
        assert len(mine.calls) == NEW
        assert_same_calls(mine.calls, other.calls)


@pytest.mark.parametrize(
    "options",
    [
        dict(repetition_penalty=1.7),
        dict(no_repeat_ngram_size=1),
        dict(bad_words_ids=[[6, 7], *([k] for k in range(10, 70))]),
        dict(suppress_tokens=list(range(40))),
        dict(begin_suppress_tokens=list(range(120))),
        dict(forced_eos_token_id=9),
        dict(sequence_bias=[[[17], 4.0], [[3, 4], -3.0]]),
        dict(exponential_decay_length_penalty=(3, 1.5), eos_token_id=7),
        dict(prefix_allowed_tokens_fn=lambda row, ids: [(ids[-1].item() + row + k) % 126 + 2 for k in range(5)]),
        dict(guidance_scale=1.5),
        dict(remove_invalid_values=True, renormalize_logits=True),
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_of_the_configuration(options):
    for model_type in ("deepseek_v3", "llama"):
        lengths = (23,) if "guidance_scale" in options else (23, 9)
        tokens = same(model_type, batch(*lengths), **options)
        assert tokens.tolist() != run(stock(model_type), batch(*lengths)).tolist() or "remove_invalid_values" in options


# --- what is returned


@both_attentions
@pytest.mark.parametrize("sampled", [False, True])
def test_every_output(model_type, sampled):
    options = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    options |= dict(do_sample=True, temperature=0.7, top_k=12, top_p=0.9) if sampled else {}
    free = free_tokens(model_type, 23, 9)
    for extra in ({}, {"eos_token_id": [free[0, 3].item(), free[1, 6].item()]}):
        expected, got, *_ = twice(model_type, batch(23, 9), **options, **extra)
        assert type(got) is type(expected)
        assert list(got.keys()) == list(expected.keys())
        assert got.sequences.dtype == expected.sequences.dtype
        assert got.sequences.tolist() == expected.sequences.tolist()
        assert_steps_equal(got.scores, expected.scores)
        assert_steps_equal(got.logits, expected.logits)
        assert len({step.data_ptr() for step in got.logits}) == len(got.logits), "steps share one buffer"
        assert got[CACHE].get_seq_length() == expected[CACHE].get_seq_length() == got.sequences.shape[1] - 1


def test_hidden_states_and_attentions():
    options = dict(return_dict_in_generate=True, output_hidden_states=True, output_attentions=True)
    for model_type in ("deepseek_v3", "llama"):
        outs = []
        for model in (stock, fast):
            outs.append(run(model(model_type, attn_implementation="eager"), batch(23, 9), **options))
        expected, got = outs
        assert got.sequences.tolist() == expected.sequences.tolist()
        for name in ("hidden_states", "attentions"):
            assert len(got[name]) == len(expected[name]) == NEW
            for mine, theirs in zip(got[name], expected[name], strict=True):
                for one, other in zip(mine, theirs, strict=True):
                    assert relative_error(one[:, :, -1], other[:, :, -1]) <= 1e-4


@both_attentions
def test_outputs_survive_the_next_call(model_type):
    """Nothing a call returned may live in a buffer that the next call writes."""
    model = fast(model_type)
    options = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    first = run(model, batch(23, 9), **options)
    kept = copy.deepcopy((first.sequences, first.scores, first.logits))
    for lengths in ((16, 5), (40,), (3, 3)):
        run(model, batch(*lengths, seed=5), **options)
    assert torch.equal(first.sequences, kept[0])
    for steps, before in zip((first.scores, first.logits), kept[1:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(steps, before, strict=True))


@both_attentions
def test_several_sequences_of_a_prompt(model_type):
    options = dict(do_sample=True, num_return_sequences=3, return_dict_in_generate=True, output_scores=True)
    expected, got, *_ = twice(model_type, batch(23, 9), **options)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert_steps_equal(got.scores, expected.scores)
    for model in (stock(model_type), fast(model_type)):
        with pytest.raises(ValueError, match="num_return_sequences"):
            run(model, batch(23), num_return_sequences=2)


def test_arguments_are_left_as_they_were():
    for model_type in ("deepseek_v3", "llama"):
        model, inputs = fast(model_type), batch(23, 9)
        config = transformers.GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
        before = copy.deepcopy((inputs, config.to_dict(), model.generation_config.to_dict()))
        got = model.generate(**inputs, generation_config=config)
        assert got.tolist() == run(stock(model_type), inputs, max_new_tokens=5).tolist()
        assert (config.to_dict(), model.generation_config.to_dict()) == before[1:]
        assert all(torch.equal(inputs[name], before[0][name]) for name in inputs)


# --- chance


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(temperature=0.3),
        dict(temperature=5.0),
        dict(top_k=1),
        dict(top_k=5),
        dict(top_p=0.5),
        dict(temperature=0.9, top_k=20, top_p=0.9),
        dict(min_p=0.1),
        dict(typical_p=0.6),
        dict(epsilon_cutoff=0.01, eta_cutoff=0.01),
        dict(temperature=1.4, repetition_penalty=1.2),
    ],
    ids=str,
)
def test_seeds(options):
    """Same seed, same tokens as stock, and the next call goes on with the same random numbers."""
    for model_type in ("deepseek_v3", "llama"):
        models_ = stock(model_type), fast(model_type)
        runs = []
        for model in models_:
            torch.manual_seed(7)
            calls = [run(model, batch(23, 9), do_sample=True, **{"top_k": 0, **options}).tolist() for _ in range(2)]
            runs.append((calls, torch.get_rng_state().tolist()))
        assert runs[1] == runs[0]
        if options.get("top_k") != 1:
            assert runs[1][0][0] != runs[1][0][1], "both calls drew the same numbers"


@both_attentions
def test_chance_after_an_early_end(model_type):
    """Rows that ended, and steps behind the end, use up exactly the random numbers stock uses."""
    torch.manual_seed(7)
    free = run(stock(model_type), batch(23, 9), do_sample=True)
    ends = [free[0, 25].item(), free[1, 28].item()]
    states = []
    for model in (stock(model_type), fast(model_type)):
        torch.manual_seed(7)
        tokens = run(model, batch(23, 9), do_sample=True, eos_token_id=ends).tolist()
        states.append((tokens, torch.get_rng_state().tolist()))
    assert states[1] == states[0]
    assert len(states[1][0][0]) < 23 + NEW


# --- caches


@both_attentions
def test_a_returned_cache_goes_on_after_an_early_end(model_type):
    """A loop that looks one step behind has written a token too many by then; the cache must not hold it."""
    inputs, caches = batch(23, 9), {}
    models_ = {"stock": stock(model_type), "fast": fast(model_type)}
    for turn in range(3):
        width = inputs["input_ids"].shape[1]
        free = run(models_["stock"], inputs)[:, width:]
        ends = [free[0, 3].item(), free[1, 5 - turn].item()]
        outs = {}
        for name, model in models_.items():
            options = {CACHE: caches[name]} if name in caches else {}
            outs[name] = run(model, inputs, eos_token_id=ends, return_dict_in_generate=True, **options)
            caches[name] = outs[name][CACHE]
        assert outs["fast"].sequences.tolist() == outs["stock"].sequences.tolist()
        length = outs["fast"].sequences.shape[1]
        assert caches["fast"].get_seq_length() == caches["stock"].get_seq_length() == length - 1
        assert isinstance(caches["fast"], PagedCache)
        for mine, other in zip(caches["fast"].layers, caches["stock"].layers, strict=True):
            assert relative_error(mine.keys, other.keys) <= 1e-4
        more = batch(5, 5, seed=turn + 1)["input_ids"]
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, length - width + 5), value=1)
        inputs = {"input_ids": torch.cat([outs["fast"].sequences, more], 1), "attention_mask": mask}


@both_attentions
def test_a_cropped_cache_goes_on(model_type):
    inputs = batch(23)
    out = run(fast(model_type), inputs, return_dict_in_generate=True)
    cache = out[CACHE]
    cache.crop(-6)
    ids = out.sequences[:, : cache.get_seq_length() + 1]
    rest = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert run(fast(model_type), rest, **{CACHE: cache}).tolist() == run(stock(model_type), rest).tolist()


@both_attentions
def test_a_cache_of_the_caller(model_type):
    for make in (lambda m: DynamicCache(config=m.config), lambda m: paged_cache(m, 32)):
        model = fast(model_type)
        cache = make(model)
        assert run(model, batch(23, 9), **{CACHE: cache}).tolist() == run(stock(model_type), batch(23, 9)).tolist()
        assert cache.get_seq_length() == 23 + NEW - 1


# --- other ways in


@both_attentions
def test_embeddings_as_the_prompt(model_type):
    """Processors, criteria and streamers then see new tokens only."""
    inputs = batch(23, 9)
    embeds = stock(model_type).get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}

    def make():
        return dict(logits_processor=[Touch()], stopping_criteria=[Watch({0: 6, 1: 4})], streamer=Recorder())

    expected, got, theirs, ours = twice(model_type, given, make)
    assert got.tolist() == expected.tolist()
    assert got.shape[1] == 6
    assert ours["streamer"].events == theirs["streamer"].events
    for name in ("logits_processor", "stopping_criteria"):
        assert_same_calls(ours[name][0].calls, theirs[name][0].calls)
    same(model_type, given | {"input_ids": inputs["input_ids"]})


@both_attentions
def test_a_custom_loop_of_the_caller(model_type):
    """`custom_generate=` runs what it is given, with what stock would give it."""

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        seen.append(sorted(kwargs))
        new = torch.full_like(input_ids[:, :1], 9)
        return torch.cat([input_ids, new], 1)

    seen = []
    for model in (stock(model_type), fast(model_type)):
        assert run(model, batch(23), custom_generate=loop)[0, 23:].tolist() == [9]
    assert seen[0] == seen[1]


@both_attentions
@pytest.mark.parametrize("outer_first", [False, True])
def test_adapters(model_type, outer_first):
    """LoRA counts in every step, through the wrapper and through the model inside."""
    peft = pytest.importorskip("peft")
    names = ["o_proj", "q_proj" if model_type == "llama" else "q_b_proj"]

    def wrap(model):
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=names, init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT reads attributes transformers 5.24 renamed
            wrapped = peft.get_peft_model(model, config).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        return wrapped

    plain = tiny_model(model_type)
    theirs = wrap(tiny_model(model_type))
    ours = optimize(wrap(plain), CONFIG) if outer_first else wrap(optimize(plain, CONFIG))
    expected = run(theirs, batch(23, 9))
    assert run(ours, batch(23, 9)).tolist() == expected.tolist()
    assert run(plain, batch(23, 9)).tolist() == expected.tolist()
    assert expected.tolist() != run(stock(model_type), batch(23, 9)).tolist()
    with ours.disable_adapter():
        assert run(ours, batch(23, 9)).tolist() == run(stock(model_type), batch(23, 9)).tolist()


def test_pipeline_with_chance():
    theirs, ours, tokenizer = with_tokenizer()
    texts = []
    for model in (theirs, ours):
        pipe = transformers.pipeline("text-generation", model, tokenizer=tokenizer)
        torch.manual_seed(2)
        options = dict(max_new_tokens=8, do_sample=True, top_k=20, num_return_sequences=2)
        texts.append(pipe(["import os", "def f(x):\n"], batch_size=2, **options))
    assert texts[0] == texts[1]


# --- what else may run, change or fail meanwhile


@both_attentions
@pytest.mark.parametrize("what", ["streamer", "stopping_criteria", "logits_processor"])
@pytest.mark.parametrize("step", [0, 1, 5])
def test_an_error_of_the_caller_leaves_the_model_usable(model_type, what, step):
    model, failing = fast(model_type), {"streamer": Recorder, "stopping_criteria": Watch, "logits_processor": Touch}
    failing = failing[what](fail_at=step)
    with pytest.raises(RuntimeError, match=r"failed|left"):
        run(model, batch(23, 9), **{what: failing if what == "streamer" else [failing]})
    same(model_type, batch(23, 9))
    same(model_type, batch(40))


@both_attentions
def test_generate_inside_generate(model_type):
    """A streamer that asks the same model something else: both answers are right."""
    model, inner = fast(model_type), []

    def ask(event):
        if event in (1, 4):
            inner.append(run(model, batch(16, 5, seed=3)).tolist())

    outer = run(model, batch(23, 9), streamer=Recorder(call=ask))
    assert outer.tolist() == run(stock(model_type), batch(23, 9)).tolist()
    assert inner == [run(stock(model_type), batch(16, 5, seed=3)).tolist()] * 2


@both_attentions
def test_threads_with_different_batches_and_processors(model_type):
    """Different batch sizes and the same one, with and without work on the host, all at once."""
    jobs = [
        (batch(23, 9), dict),
        (batch(16, 4, seed=1), dict),
        (batch(9), lambda: {"logits_processor": [Touch()]}),
        (batch(5, 5, 5), lambda: {"streamer": Recorder()}),
    ]
    expected = [run(stock(model_type), inputs, **make()).tolist() for inputs, make in jobs]
    got, model, errors = [[] for _ in jobs], fast(model_type), []

    def work(job):
        inputs, make = jobs[job]
        try:
            for _ in range(3):
                got[job].append(run(model, inputs, **make()).tolist())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(job,)) for job in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert got == [[one] * 3 for one in expected]


@both_attentions
def test_changes_between_calls_count(model_type):
    """Weights written in place, weights exchanged, another generation config: nothing of the last call is kept."""
    theirs, ours = tiny_model(model_type), optimize(tiny_model(model_type), CONFIG)
    run(ours, batch(23, 9))
    seen = []
    for change in range(4):
        for model in (theirs, ours):
            generator = torch.Generator().manual_seed(change)
            attention = model.model.layers[1].self_attn
            with torch.no_grad():
                if change == 0:
                    model.lm_head.weight += 0.1 * torch.randn(model.lm_head.weight.shape, generator=generator)
                if change == 1:
                    weight = attention.o_proj.weight
                    weight += 0.1 * torch.randn(weight.shape, generator=generator)
                if change == 2:
                    weight = torch.randn(model.lm_head.weight.shape, generator=generator) * 0.1
                    model.lm_head.weight = torch.nn.Parameter(weight)
            if change == 3:
                model.generation_config.repetition_penalty = 2.0
        seen.append(run(ours, batch(23, 9)).tolist())
        assert seen[-1] == run(theirs, batch(23, 9)).tolist(), change
    assert len({str(tokens) for tokens in seen}) == 4, "a change changed nothing"


@both_attentions
@pytest.mark.parametrize("where", ["model", "layer", "projection"])
def test_hooks_see_every_step(model_type, where):
    def part(model):
        layer = model.model.layers[1]
        return {"model": model, "layer": layer, "projection": layer.self_attn.o_proj}[where]

    counts = []
    for model in (stock(model_type), fast(model_type)):
        calls = []
        hook = part(model).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        try:
            tokens = run(model, batch(23, 9)).tolist()
        finally:
            hook.remove()
        counts.append((len(calls), tokens))
    assert counts[1] == counts[0]
    assert counts[1][0] == NEW


# --- what the loop leaves to stock


def loop_counts(model):
    return {name: number for name, number in report(model).counters.items() if "loop" in name}


@both_attentions
@pytest.mark.parametrize(
    ("options", "reason"),
    [(dict(num_beams=3), "beam"), (dict(prompt_lookup_num_tokens=3), "assist"), (dict(use_cache=False), "cache")],
    ids=["beams", "assisted", "no cache"],
)
def test_what_goes_to_the_stock_loop_is_counted(model_type, options, reason):
    model = fast(model_type)
    run(model, batch(23))
    if not loop_counts(model):
        pytest.skip("this configuration has no decode loop on a CPU")
    before = loop_counts(model)
    same(model_type, batch(23), **options)
    after = loop_counts(model)
    grown = {name for name, number in after.items() if number > before.get(name, 0)}
    assert len(grown) == 1
    (name,) = grown
    assert "stock" in name and reason in name, f"{name!r} does not say why"


# --- where the loop once differed from stock


@pytest.mark.parametrize("given", ["model", "positional"])
def test_stop_strings_of_a_config(given):
    theirs, ours, tokenizer = with_tokenizer()
    inputs = tokenizer(["import os"], return_tensors="pt")
    width = inputs["input_ids"].shape[1]
    stop = tokenizer.decode(run(theirs, inputs)[0, width + 2 : width + 4])
    got = []
    for model in (theirs, ours):
        own, config = model.generation_config, copy.deepcopy(model.generation_config)
        config.stop_strings, config.max_new_tokens, config.pad_token_id = [stop], NEW, 0
        try:
            if given == "model":
                model.generation_config = config
                got.append(model.generate(**inputs, tokenizer=tokenizer).tolist())
            else:
                got.append(model.generate(inputs["input_ids"], config, tokenizer=tokenizer).tolist())
        finally:
            model.generation_config = own
    assert got[1] == got[0]
    assert len(got[0][0]) < width + NEW


def test_criteria_get_no_scores_when_only_logits_are_kept():
    def make():
        return {"stopping_criteria": [Watch()]}

    *_, theirs, ours = twice("llama", batch(9), make, output_logits=True, return_dict_in_generate=True)
    assert_same_calls(ours["stopping_criteria"][0].calls, theirs["stopping_criteria"][0].calls)


@both_attentions
def test_a_cache_with_one_layer_reset(model_type):
    """Whatever the stock loop makes of it: to read one layer's pages where another's are gave tokens without sense."""
    model, reason = fast(model_type), "layers: stock loop (the layers of the cache were changed one by one)"
    cache = run(model, batch(23), return_dict_in_generate=True)[CACHE]
    cache.layers[1].reset()
    before = report(model).counters.get(reason, 0)
    with contextlib.suppress(RuntimeError):
        run(model, batch(40), **{CACHE: cache})
    assert report(model).counters[reason] == before + 1


@both_attentions
def test_a_cache_whose_layers_left_their_table(model_type):
    inputs, got = batch(23, 9), []
    for model in (stock(model_type), fast(model_type)):
        out = run(model, inputs, return_dict_in_generate=True)
        for layer in out[CACHE].layers:
            layer.batch_select_indices(torch.tensor([1, 0]))
        ids = out.sequences[[1, 0]]
        mask = torch.ones_like(ids)
        mask[:, :23] = inputs["attention_mask"][[1, 0]]
        got.append(run(model, {"input_ids": ids, "attention_mask": mask}, **{CACHE: out[CACHE]}).tolist())
    assert got[1] == got[0]


@pytest.mark.parametrize(("model_type", "option"), [("llama", "num_key_value_heads"), ("deepseek_v3", "kv_lora_rank")])
def test_a_cache_filled_by_another_model(model_type, option):
    other = optimize(tiny_model(model_type, **{option: {"llama": 1, "deepseek_v3": 16}[model_type]}), CONFIG)
    out = run(other, batch(9), return_dict_in_generate=True)
    held = out[CACHE].get_seq_length()
    with pytest.raises(ValueError, match="another model"):
        run(fast(model_type), {"input_ids": out.sequences}, **{CACHE: out[CACHE]})
    assert out[CACHE].get_seq_length() == held
    run(other, {"input_ids": out.sequences}, **{CACHE: out[CACHE]})


@both_attentions
def test_graphs_of_a_model_that_left_the_gpu(model_type):
    model = optimize(tiny_model(model_type), CONFIG)
    vars(model)["_accel_graphs"] = StepGraphs((1, 2), Counter())
    assert run(model, batch(9)).tolist() == run(stock(model_type), batch(9)).tolist()


def test_other_rotary_frequencies_are_another_model():
    """A graph reads them where they were when it was captured."""
    model = optimize(tiny_model("llama"), CONFIG)
    identity = read_model(model, families.find(model)).identity()
    assert read_model(model, families.find(model)).identity() == identity
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()
    changed = read_model(model, families.find(model)).identity()
    model.model.rotary_emb.attention_scaling = 2.0
    assert len({identity, changed, read_model(model, families.find(model)).identity()}) == 3


@pytest.mark.parametrize("name", ["loop", "out", "model"])
def test_names_of_our_own_are_not_arguments(name):
    """An argument that stock refuses is refused, whatever our own functions call theirs."""
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises((TypeError, ValueError)) as stock_error:
        tiny_model("llama").generate(ids, max_new_tokens=2, **{name: 1})
    with pytest.raises(stock_error.type) as error:
        optimize(tiny_model("llama")).generate(ids, max_new_tokens=2, **{name: 1})
    assert str(error.value) == str(stock_error.value)


def test_no_rows():
    """As stock: the same kind of error, and the model goes on."""
    empty, model = torch.zeros(0, 3, dtype=torch.long), optimize(tiny_model("llama"))
    with pytest.raises(Exception) as stock_error:
        tiny_model("llama").generate(empty, max_new_tokens=2)
    with pytest.raises(stock_error.type):
        model.generate(empty, max_new_tokens=2)
    assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2).shape == (1, 5)

"""A paged cache of FP8 entries: what is kept, and whole models on it, by every way in."""

import copy
import functools
import random

import pytest
import torch

from deepseek_accel import OptimizeConfig, PlanError, models, optimize, plan, report, restore
from deepseek_accel.cache import paged_cache
from deepseek_accel.cache.entries import DTYPES
from deepseek_accel.ops.fp8 import dequantize, quantize
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.passes.kv_cache import KVCache
from deepseek_accel.testing import picture, relative_error, tiny_model
from deepseek_accel.versions import cache_argument

CACHE, PAGE = cache_argument(), 16
MODELS = ("deepseek_v2", "deepseek_v3", "llama", "qwen2")
all_formats = pytest.mark.parametrize("dtype", DTYPES)
LOGITS = {"fp8_e4m3": 0.15, "fp8_e5m2": 0.25}
"""Largest `distance` of logits. Tiny random models react to rounding much more than trained ones."""

FLIPS = 5e-3
"""The same between two ways in: where sums in another order round a number to its other FP8 neighbour. Usually 1e-6."""


def distance(actual, expected):
    """Of all logits together: a token that rounding sends to another expert must not decide."""
    return ((actual - expected).norm() / expected.norm()).item()


@functools.cache
def stock(model_type):
    return tiny_model(model_type)


def config(dtype, **changes):
    options = {name: {} for name in PASSES} | {"kv_cache": {"page_size": PAGE, "dtype": dtype}, "allow_skips": True}
    return {name: value for name, value in (options | changes).items() if value is not None}


@functools.cache
def fast(model_type, dtype):
    return optimize(tiny_model(model_type), config(dtype))


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        row[max(lengths) - length :] = torch.randint(2, 128, (length,), generator=generator)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


# What is kept


def rounded(keys, values, kind, latent):
    """What FP8 pages hold of keys and values [B, heads, S, size], by definition."""
    keys = dequantize(*quantize(keys, kind), kind, keys.dtype)
    return keys, values if latent else dequantize(*quantize(values, kind), kind, values.dtype)


def shapes(model_type):
    return ((1, 32), (1, 8)) if model_type == "deepseek_v3" else ((2, 16), (2, 16))


@all_formats
@pytest.mark.parametrize("element", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_a_cache_keeps_the_rounded_entries(model_type, element, dtype):
    """Beside a cache of plain pages that is given the rounded numbers: the same bits after whatever is done to both."""
    ours, plain = (paged_cache(stock(model_type), PAGE, dtype=kind) for kind in (dtype, None))
    generator, choose = torch.Generator().manual_seed(0), random.Random(0)
    rows = 2

    def update(count):
        for layer in range(3):
            sizes = [(rows, heads, count, size) for heads, size in shapes(model_type)]
            new = [(torch.randn(size, generator=generator) * 5).to(element) for size in sizes]
            ours.update(*new, layer)
            plain.update(*rounded(*new, DTYPES[dtype], model_type == "deepseek_v3"), layer)

    def both(call):
        for cache in (ours, plain):
            call(cache)

    def same():
        for mine, other in zip(ours.layers, plain.layers, strict=True):
            for name in ("keys", "values"):
                held = getattr(mine, name)
                assert held.dtype == element and torch.equal(held, getattr(other, name))
        assert ours.pages_in_use == plain.pages_in_use and ours.length == plain.length
        assert ours.bytes_held() < plain.bytes_held()

    update(23)
    for _ in range(25):
        kind = choose.choice(("update", "update", "crop", "reorder", "repeat", "select", "copy"))
        if kind == "update":
            update(choose.choice((1, 1, 7, 20)))
        elif kind == "crop" and ours.length > 8:
            count = choose.randrange(1, 8)
            both(lambda cache, count=count: cache.crop(-count))
        elif kind == "reorder":
            beams = torch.tensor([choose.randrange(rows) for _ in range(rows)])
            both(lambda cache, beams=beams: cache.reorder_cache(beams))
        elif kind == "repeat" and rows < 4:
            both(lambda cache: cache.batch_repeat_interleave(2))
            rows *= 2
        elif kind == "select" and rows > 1:
            rows -= 1
            both(lambda cache, rows=rows: cache.batch_select_indices(torch.arange(rows)))
        elif kind == "copy":
            ours, plain = copy.deepcopy(ours), copy.deepcopy(plain)
        same()


def test_the_first_update_returns_what_it_was_given():
    """A prompt's own attention is over keys as computed; what comes later reads the pages."""
    cache = paged_cache(stock("llama"), PAGE, dtype="fp8_e4m3")
    new = [torch.randn(1, 2, 5, 16) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(cache.update(*new, 0), new, strict=True))
    assert not torch.equal(cache.layers[0].keys, new[0])
    more = [torch.randn(1, 2, 1, 16) for _ in range(2)]
    keys, _ = cache.update(*more, 0)
    assert torch.equal(keys, cache.layers[0].keys) and not torch.equal(keys[:, :, -1:], more[0])


def test_bytes():
    """DeepSeek's latents: 512 codes, 64 rotary numbers of 2 bytes, a scale of 4, in multiples of 16."""
    from deepseek_accel.cache.entries import Entries

    for kind in DTYPES.values():
        assert Entries(1, 512, 64, torch.bfloat16, kind, is_latent=True).row_bytes == 656
        assert Entries(8, 128, 128, torch.bfloat16, kind).row_bytes == 2112
    assert Entries(1, 512, 64, torch.bfloat16, is_latent=True).row_bytes == 1152
    model = fast("deepseek_v3", "fp8_e4m3")
    model.generate(**prompts(20), max_new_tokens=2, do_sample=False, pad_token_id=0)
    size = report(model).cache["bytes_per_token_and_layer"]
    assert size == 32 + 8 * 4 + 16 and report(model).cache["dtype"] == "fp8_e4m3"
    cache = paged_cache(model, PAGE, dtype="fp8_e4m3")
    model(**prompts(20), **{CACHE: cache})
    assert cache.bytes_held() == 2 * PAGE * size * len(cache.layers)


# Options


@pytest.mark.parametrize("wrong", ["fp8", "e4m3", "fp8_e4m3fn", torch.float8_e4m3fn, 8, "", torch.bfloat16], ids=str)
def test_another_dtype_is_refused(wrong):
    for make in (lambda: KVCache(dtype=wrong), lambda: paged_cache(stock("llama"), dtype=wrong)):
        with pytest.raises(PlanError, match=r"dtype must be None .*'fp8_e4m3', 'fp8_e5m2'"):
            make()


def test_it_is_lossy_and_asked_for_by_name():
    assert not KVCache().lossy and KVCache(dtype="fp8_e5m2").lossy
    (default,) = [p for p in OptimizeConfig.lossless().passes if p.name == "kv_cache"]
    assert default == KVCache() and default.dtype is None
    model = tiny_model("deepseek_v3")
    options = OptimizeConfig.of(config("fp8_e4m3"))
    assert OptimizeConfig.from_dict(options.to_dict()) == options
    (row,) = [row for row in plan(model, options).rows() if row["pass"] == "kv_cache"]
    assert row["effect"] == "lossy" and "fp8_e4m3: 80 bytes per token and layer instead of 160" in row["notes"][0]
    (row,) = [row for row in plan(model).rows() if row["pass"] == "kv_cache"]
    assert row["effect"] == "exact" and not row["notes"]


def test_restore():
    model = tiny_model("llama")
    before = picture(model)
    ids = prompts(20)
    expected = model.generate(**ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    optimize(model, config("fp8_e4m3"))
    model.generate(**ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert picture(restore(model)) == before
    assert torch.equal(model.generate(**ids, max_new_tokens=5, do_sample=False, pad_token_id=0), expected)


# Whole models


def teacher_forced(model, ids, cache, chunks):
    """Logits [B, T, vocabulary] of `ids`, given in `chunks`."""
    out, first = [], 0
    with torch.no_grad():
        for count in chunks:
            piece = ids[:, first : first + count]
            out.append(model(piece, **{CACHE: cache}).logits)
            first += count
    return torch.cat(out, 1)


@all_formats
@pytest.mark.parametrize("model_type", MODELS)
def test_logits(model_type, dtype):
    """Near stock's and not equal to them; every way in is the same up to the rounding of the sums before FP8's.

    The ways: stock's own loop and attention on FP8 pages, the seam alone, the fused step.
    """
    ids = prompts(40, 40)["input_ids"]
    chunks = (17, 8, *[1] * 15)
    exact = teacher_forced(stock(model_type), ids, paged_cache(stock(model_type), PAGE), chunks)
    results = {}
    for way in ("stock", "seam", "fused"):
        model = fast(model_type, dtype) if way == "fused" else tiny_model(model_type)
        if way == "seam":
            optimize(model, config(dtype, layers=None, cuda_graphs=None))
        results[way] = teacher_forced(model, ids, paged_cache(model, PAGE, dtype=dtype), chunks)
    for logits in results.values():
        assert 1e-4 < distance(logits[:, 17:], exact[:, 17:]) < LOGITS[dtype]
        assert relative_error(logits[:, :17], exact[:, :17]) < 1e-5, "the first piece reads no pages"
        assert distance(logits, results["stock"]) < FLIPS


@all_formats
@pytest.mark.parametrize("model_type", MODELS)
def test_generate(model_type, dtype):
    """Our loop, on left-padded rows: the logits of stock's loop on FP8 pages, up to rounding before FP8's."""
    ids = prompts(30, 19)
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    expected = stock(model_type).generate(
        **ids, **options, **{CACHE: paged_cache(stock(model_type), PAGE, dtype=dtype)}
    )
    model = fast(model_type, dtype)
    ours = model.generate(**ids, **options)
    assert getattr(ours, CACHE).fp8 == DTYPES[dtype]
    assert relative_error(ours.logits[0], expected.logits[0]) < 1e-5
    assert distance(ours.logits[1], expected.logits[1]) < FLIPS
    counters = report(model).counters
    assert counters["layers: fused step"] > 0 and not [name for name in counters if "stock loop" in name]
    assert torch.equal(model.generate(**ids, **options).sequences, ours.sequences)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_beams_and_samples(model_type):
    """Stock's loop for beams, by the fused step of single layers: rows are reordered, shared and repeated."""
    model, ids = fast(model_type, "fp8_e4m3"), prompts(21)
    options = dict(max_new_tokens=8, num_beams=3, num_return_sequences=2, do_sample=False, pad_token_id=0)
    ours = model.generate(**ids, **options)
    alone = tiny_model(model_type)
    cache = paged_cache(alone, PAGE, dtype="fp8_e4m3")
    expected = alone.generate(**ids, **options, **{CACHE: cache})
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_a_prompt_in_pieces(model_type, monkeypatch):
    """Our prefill cut in pieces reads earlier ones from the pages, and its own as computed."""
    from deepseek_accel.generation import decode, prefill

    model, ids = fast(model_type, "fp8_e4m3"), prompts(60, 41)
    options = dict(max_new_tokens=3, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    whole = model.generate(**ids, **options)
    monkeypatch.setattr(prefill, "MIN_TOKENS", 16)
    monkeypatch.setattr(decode, "prefill", functools.partial(prefill.prefill, activation_bytes=1))
    pieces = model.generate(**ids, **options)
    assert 1e-5 < distance(pieces.logits[0], whole.logits[0]) < LOGITS["fp8_e4m3"]
    plain = optimize(tiny_model(model_type), config(None))
    exact = plain.generate(**ids, **options)
    assert relative_error(exact.logits[0], whole.logits[0]) < 1e-4, "a prompt in one piece reads no pages"


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_tokens_taken_back(model_type):
    """After `crop` the cache goes on as if the tokens had never been there."""
    model = fast(model_type, "fp8_e5m2")
    ids, other = prompts(30)["input_ids"], prompts(9, seed=3)["input_ids"]
    cropped, fresh = (paged_cache(model, PAGE, dtype="fp8_e5m2") for _ in range(2))
    teacher_forced(model, torch.cat((ids, other), 1), cropped, (30, 5, 4))
    cropped.crop(-9)
    teacher_forced(model, ids, fresh, (30,))
    more = prompts(6, seed=5)["input_ids"]
    results = [teacher_forced(model, more, cache, (3, 1, 1, 1)) for cache in (cropped, fresh)]
    assert torch.equal(*results)


def test_a_cache_of_another_format_is_used_as_it_is():
    """A caller's plain cache on a model configured for FP8, and the other way round."""
    ids = prompts(25)
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    model = fast("deepseek_v3", "fp8_e4m3")
    plain = paged_cache(model, PAGE)
    assert torch.equal(
        model.generate(**ids, **options, **{CACHE: plain}), stock("deepseek_v3").generate(**ids, **options)
    )
    assert plain.fp8 is None and plain.layers[0].keys.dtype == torch.float32
    exact = optimize(tiny_model("deepseek_v3"), config(None))
    cache = paged_cache(exact, PAGE, dtype="fp8_e4m3")
    assert torch.equal(exact.generate(**ids, **options, **{CACHE: cache}), model.generate(**ids, **options))


@all_formats
@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_kept_prefixes(model_type, dtype):
    """A second call that begins with kept FP8 pages computes what a prompt in two pieces would."""
    kept = {"page_size": PAGE, "dtype": dtype, "reuse_prefix": True}
    model = optimize(tiny_model(model_type), config(dtype, kv_cache=kept))
    ids = prompts(50)["input_ids"]
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    first = model.generate(ids, **options)
    again = model.generate(ids, **options)
    assert report(model).counters["kv_cache: prompt tokens taken from kept pages"] == 48
    alone = tiny_model(model_type)
    cache = paged_cache(alone, PAGE, dtype=dtype)
    teacher_forced(alone, ids[:, :48], cache, (48,))
    (expected,) = teacher_forced(alone, ids[:, 48:], cache, (2,))[:, -1:]
    assert getattr(again, CACHE).layers[0].dtype == torch.float32
    assert 1e-5 < distance(again.logits[0], first.logits[0]) < LOGITS[dtype]
    # only the two new tokens differ: here they read themselves from the pages
    assert distance(again.logits[0], expected) < LOGITS[dtype] / 2


@functools.cache
def heldout_loss(dtype, count=10, length=1024):
    """Mean loss of the bundled model on the first tokens of documents, given 64 at a time so that pages are read."""
    model, tokenizer = models.load_tiny(dtype=torch.float32)
    tokenizer.model_max_length = 10**9  # the documents are cut here
    ids = [tokenizer(text, return_tensors="pt").input_ids[0] for text in models.heldout_documents()]
    ids = torch.stack([row[i : i + length] for row in ids for i in range(0, len(row) - length + 1, length)][:count])
    logits = teacher_forced(model, ids, paged_cache(model, dtype=dtype), [64] * (length // 64))
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.slow
@all_formats
def test_perplexity_on_held_out_text(dtype):
    """Ten contexts of 1,024 tokens; docs/kv_cache.md has the numbers of all 18 there are."""
    change = (heldout_loss(dtype) - heldout_loss(None)).exp() - 1
    assert heldout_loss(None).exp() < 8 and 0 < abs(change) < 0.005

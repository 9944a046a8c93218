"""Tokens that join what a cache holds, in graphs and without: the stock model's tokens, whatever rows and lengths."""

import pytest
import torch

from deepseek_accel import optimize, report
from deepseek_accel.cache import paged_cache
from deepseek_accel.generation.join_graphs import join_class
from deepseek_accel.ops.choice import why_not_triton
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.testing import tiny_model
from deepseek_accel.versions import cache_argument

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if reason := why_not_triton(torch.device("cuda", torch.cuda.current_device())):
    pytest.skip(reason, allow_module_level=True)

CACHE = cache_argument()
MODELS = ("deepseek_v2", "deepseek_v3", "llama", "qwen2")


def optimized(model_type, graphs=True, dtype=torch.float32, **options):
    passes = {name: {} for name in PASSES if graphs or name != "cuda_graphs"}
    passes |= {"kv_cache": {"page_size": 16}, "allow_skips": True}
    if graphs:
        passes["cuda_graphs"] = {"batch_sizes": (1, 2, 4, 8)}
    return optimize(tiny_model(model_type, **options).to("cuda", dtype), passes)


def prompt(rows, length, seed=0, pads=()):
    ids = torch.randint(2, 126, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad] = mask[row, :pad] = 0
    return ids.cuda(), mask.cuda()


def two_calls(model, ids, mask, first, new, cache=None):
    """The tokens and the first logits of a call that goes on from a call with the first `first` tokens."""
    options = dict(do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    given = {} if cache is None else {CACHE: cache}
    held = model.generate(ids[:, :first], attention_mask=mask[:, :first], max_new_tokens=1, **options, **given)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=new, **options, **{CACHE: held[CACHE]})
    return out.sequences, out.logits[0]


def counted(model, what):
    return sum(number for name, number in report(model).counters.items() if what in name)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("model_type", MODELS)
def test_tokens_are_stocks(model_type, graphs):
    """Every class, full and not, rows of the bucket and fewer, padding, beginnings of any length, twice."""
    stock, ours = tiny_model(model_type).cuda(), optimized(model_type, graphs)
    cases = [(1, 40, count, ()) for count in (1, 2, 3, 4, 5, 9, 17, 33, 64, 127)]
    cases += [(2, 17, 5, ()), (3, 16, 7, ()), (3, 33, 8, (0, 20, 32)), (8, 15, 30, tuple(range(8))), (5, 300, 2, ())]
    for turn in range(2):
        for seed, (rows, first, count, pads) in enumerate(cases):
            ids, mask = prompt(rows, first + count, seed + 100 * turn, pads)
            expected, logits = two_calls(stock, ids, mask, first, 6)
            got, our_logits = two_calls(ours, ids, mask, first, 6, paged_cache(ours, 16))
            assert torch.equal(got, expected), (rows, first, count)
            assert (our_logits - logits).abs().max() <= 1e-4 * logits.abs().max()
    if graphs:
        classes = {(1 << (rows - 1).bit_length(), join_class(count)) for rows, _, count, _ in cases}
        prompts = counted(ours, "prompts captured")
        assert prompts >= len(classes)
        assert counted(ours, "prompts replayed") >= len(cases)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_a_longer_context_than_the_table_holds(model_type):
    """Graphs are made anew with a larger table, and the old ones' memory may go."""
    stock = tiny_model(model_type, max_position_embeddings=64).cuda()
    ours = optimized(model_type, max_position_embeddings=64)
    for length in (40, 40, 40, 200, 200, 200, 40):
        ids, mask = prompt(1, length + 6, length)
        expected, _ = two_calls(stock, ids, mask, length, 4)
        assert torch.equal(two_calls(ours, ids, mask, length, 4, paged_cache(ours, 16))[0], expected)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_pages(model_type, dtype):
    """Graph and ops write and read the same bytes."""
    ours, eager = optimized(model_type), optimized(model_type, graphs=False)
    for seed in range(3):
        ids, mask = prompt(2, 60, seed)
        outs = [two_calls(model, ids, mask, 50, 5, paged_cache(model, 16, dtype=dtype))[0] for model in (ours, eager)]
        assert torch.equal(*outs)


def test_bf16_repeats_are_bit_equal():
    ours = optimized("deepseek_v3", dtype=torch.bfloat16)
    ids, mask = prompt(2, 60)
    logits = [two_calls(ours, ids, mask, 50, 1, paged_cache(ours, 16))[1] for _ in range(20)]
    assert all(torch.equal(each, logits[0]) for each in logits[1:])

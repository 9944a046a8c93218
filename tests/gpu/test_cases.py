"""The cases of `tests/cases` that need a GPU, on whole models; the kernels alone are in `test_attention_kernels.py`."""

import copy

import pytest
import torch

from deepseek_accel import Attention, KVCache, OptimizeConfig, optimize, report
from deepseek_accel.cache import paged_cache
from deepseek_accel.ops.choice import why_not_triton
from deepseek_accel.testing import assert_accurate, tiny_model
from deepseek_accel.versions import cache_argument

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if reason := why_not_triton(torch.device("cuda", torch.cuda.current_device())):
    pytest.skip(reason, allow_module_level=True)

CACHE = cache_argument()
MODELS = ("deepseek", "deepseek_v2", "deepseek_v3", "llama", "qwen2")
LENGTHS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 127, 128, 129, 257)
DENSE = dict(first_k_dense_replace=3)  # no router, so that rounding cannot choose another expert


def three(model_type, dtype):
    """(ours, stock, stock in fp64) on the GPU, with the same weights."""
    options = DENSE if model_type.startswith("deepseek") else {}
    stock = tiny_model(model_type, attn_implementation="sdpa", **options).to("cuda", dtype)
    exact = copy.deepcopy(stock).double()
    return copy.deepcopy(stock), stock, exact


def passes(page_size):
    return OptimizeConfig((Attention(), KVCache(page_size=page_size)))


def prompts(length, rows=2):
    """Two rows, the second half as long: (ids, mask, position ids)."""
    ids = torch.randint(2, 128, (rows, length), generator=torch.Generator().manual_seed(length)).cuda()
    mask = torch.ones_like(ids)
    mask[1:, : length // 2] = 0
    return ids, mask, (mask.cumsum(1) - 1).clamp_min(0)


@torch.no_grad()
def read(model, cache, length, queries):
    """Logits of `queries` tokens after a prefill, so that the keys number `length`; rows are permuted in between."""
    ids, mask, positions = prompts(length)
    kept = length - queries
    if kept > 0:
        options = dict(attention_mask=mask[:, :kept], position_ids=positions[:, :kept])
        model(ids[:, :kept], **options, **({CACHE: cache} if cache is not None else {"use_cache": False}))
    if cache is None:
        out = model(ids, attention_mask=mask, position_ids=positions, use_cache=False)
    else:
        options = dict(attention_mask=mask, position_ids=positions[:, max(kept, 0) :])
        out = model(ids[:, max(kept, 0) :], **options, **{CACHE: cache})
    return out.logits[:, -min(queries, length) :]


def scrambled(model, page_size):
    """A cache whose free pages lie in an order of their own, so that no row is contiguous."""
    cache = paged_cache(model, page_size)
    ids = torch.randint(2, 128, (2, 3 * page_size + 5)).cuda()
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    allocator = cache._pools.all[0].table.allocator
    cache.crop(-ids.shape[1])
    allocator.free = [allocator.free[i] for i in torch.randperm(len(allocator.free)).tolist()]
    return cache


@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("model_type", MODELS)
def test_K18_lengths_around_pages_and_tiles(model_type, queries, page_size):
    """A length that is no multiple of the page is read past its end; one below the smallest tile does not compile."""
    ours, stock, exact = three(model_type, torch.bfloat16)
    optimize(ours, passes(page_size))
    for length in LENGTHS:
        if length >= queries:
            expected = read(exact, None, length, queries)
            visible = slice(0, 1) if length == queries else slice(None)  # the second row begins with padding
            actual = read(ours, paged_cache(ours, page_size), length, queries)
            assert torch.isfinite(actual).all()
            plain = read(stock, None, length, queries)
            assert_accurate(
                actual[visible],
                plain[visible],
                expected[visible],
                floor=5e-3,  # logits of one position: stock may happen to be exact
                describe=lambda length=length: f"at {length} keys",
            )
    ran = report(ours).counters
    assert ran.get("attention: absorbed", 0) + ran.get("attention: paged", 0) > 0


@pytest.mark.parametrize("model_type", MODELS)
def test_K18_physical_order_keeps_the_bits(model_type):
    """Where a page lies must not matter: the same keys in other pages give the same bits."""
    ours, _, _ = three(model_type, torch.bfloat16)
    optimize(ours, passes(16))
    for length in (17, 33, 129):
        straight = read(ours, paged_cache(ours, 16), length, 1)
        assert torch.equal(read(ours, scrambled(ours, 16), length, 1), straight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model_type", MODELS)
def test_K03_no_key_at_all(model_type, dtype):
    """A row of padding only, and leading padding queries: finite, and the real row does not notice."""
    ours, _, _ = three(model_type, dtype)
    optimize(ours, passes(16))
    ids, mask, _ = prompts(23)
    for hidden in (23, 14):  # all of the second row, or its first 14 tokens
        mask = torch.ones_like(ids)
        mask[1, :hidden] = 0
        rows = []
        for count in (2, 1):
            cache = paged_cache(ours, 16)
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:count]
            grown = mask[:count]
            with torch.no_grad():
                parts = [ours(ids[:count], attention_mask=grown, position_ids=positions, **{CACHE: cache}).logits]
                for token in (40, 41):
                    grown = torch.cat([grown, grown[:, -1:]], 1)
                    positions = positions[:, -1:] + 1
                    new = torch.full((count, 1), token, device="cuda")
                    parts.append(ours(new, attention_mask=grown, position_ids=positions, **{CACHE: cache}).logits)
            rows.append(torch.cat(parts, 1))
        assert torch.isfinite(rows[0]).all()
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        assert (rows[0][:1] - rows[1]).abs().max() <= tolerance * rows[1].abs().max()

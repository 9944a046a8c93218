"""Attention of many queries over expanded keys, on a GPU. The contract is in `ops/prefill_attention.py`.

A program takes `BLOCK_ROWS` queries of one head and walks over their keys (flash attention,
https://arxiv.org/abs/2307.08691). The shared part of a key stays apart from each head's own, so that keys are never
copied together. Blocks of keys that every query of the program sees take no mask.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .combine import (
    LOG2_E,
    SHARED_BYTES,
    SMALLEST_SHARED_BYTES,
    Launch,
    capability_of,
    compile_case,
    padded,
)


@triton.jit
def _load(pointers, rows_present, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """A tile [rows, BLOCK]; rows that are not present, if MASKED, and columns from WIDTH on are 0."""
    if MASKED and BLOCK != WIDTH:
        return tl.load(pointers, mask=rows_present[:, None] & (column < WIDTH)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointers, mask=rows_present[:, None], other=0.0)
    elif BLOCK != WIDTH:
        return tl.load(pointers, mask=(column < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _walk(
    total, row_max, row_sum, query_own, query_shared, key, k_shared, value, rows, first, last, start, num_keys,
    key_stride, shared_stride, value_stride, scale_log2,
    N: tl.constexpr, R: tl.constexpr, V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_KEYS: tl.constexpr, STAGES: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the key blocks [first, last) to the running softmax. MASKED: some of their keys may be hidden."""
    column, value_column, shared_column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    offset = tl.arange(0, BLOCK_KEYS)
    for block in tl.range(first, last, num_stages=STAGES):
        begin = block * BLOCK_KEYS
        keys = begin + offset
        present = (keys >= start) & (keys < num_keys)
        own = key + begin.to(tl.int64) * key_stride + offset[:, None] * key_stride + column[None, :]
        tile = _load(own, present, column, N, BLOCK_N, MASKED)
        scores = tl.dot(query_own, tl.trans(tile), input_precision="ieee")
        if R:
            shared = k_shared + begin.to(tl.int64) * shared_stride + offset[:, None] * shared_stride
            tile = _load(shared + shared_column[None, :], present, shared_column, R, BLOCK_R, MASKED)
            scores = tl.dot(query_shared, tl.trans(tile), scores, input_precision="ieee")
        if MASKED:
            visible = present[None, :]
            if CAUSAL:
                visible = visible & (keys[None, :] <= rows[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        finite = new_max
        if MASKED:  # a row may have seen no key yet
            finite = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores * scale_log2 - finite[:, None])
        rescale = tl.exp2(row_max - finite)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        values = value + begin.to(tl.int64) * value_stride + offset[:, None] * value_stride + value_column[None, :]
        tile = _load(values, present, value_column, V, BLOCK_V, MASKED)
        total = tl.dot(weights.to(tile.dtype), tile, total * rescale[:, None], input_precision="ieee")
        row_max = new_max
    return total, row_max, row_sum


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def prefill_attention_kernel(
    query,  # [B, S, H, N + R]
    key,  # [B, T, G, N]
    k_shared,  # [B, T, R]; used if R
    value,  # [B, T, G, V]
    starts,  # [B] or None
    out,  # [B, S, H, V], contiguous
    lse,  # [B, H, S]
    scale_log2,
    num_queries,
    num_keys,
    query_stride_b, query_stride_s, query_stride_h, key_stride_b, key_stride_t, key_stride_g,
    shared_stride_b, shared_stride_t, value_stride_b, value_stride_t, value_stride_g,
    GROUP: tl.constexpr, N: tl.constexpr, R: tl.constexpr, V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, STAGES: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    # The longest rows of a causal triangle first, so that the short ones fill the processors at the end.
    row_block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    batch = tl.program_id(2).to(tl.int64)
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = rows < num_queries
    column, value_column, shared_column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_R)
    query_rows = query + batch * query_stride_b + head * query_stride_h + rows.to(tl.int64)[:, None] * query_stride_s
    query_own = _load(query_rows + column[None, :], live, column, N, BLOCK_N, True)
    query_shared = query_own
    if R:
        query_shared = _load(query_rows + N + shared_column[None, :], live, shared_column, R, BLOCK_R, True)
        k_shared += batch * shared_stride_b
    key += batch * key_stride_b + (head // GROUP) * key_stride_g
    value += batch * value_stride_b + (head // GROUP) * value_stride_g

    start = 0
    if starts is not None:
        start = tl.maximum(tl.load(starts + batch), 0)
    # Blocks [first, inner) may hold keys before the start, [outer, last) hidden ones at the end; the rest is all seen.
    end, seen = num_keys, num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, (row_block + 1) * BLOCK_ROWS)
        seen = row_block * BLOCK_ROWS + 1
    last = tl.cdiv(end, BLOCK_KEYS)
    outer = tl.minimum(tl.minimum(seen, num_keys) // BLOCK_KEYS, last)
    first = tl.minimum(start // BLOCK_KEYS, last)
    inner = tl.minimum(tl.cdiv(start, BLOCK_KEYS), last)
    outer = tl.maximum(outer, inner)

    row_max = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_ROWS,), tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_V), tl.float32)
    if starts is not None:
        total, row_max, row_sum = _walk(
            total, row_max, row_sum, query_own, query_shared, key, k_shared, value, rows, first, inner, start, num_keys,
            key_stride_t, shared_stride_t, value_stride_t, scale_log2,
            N, R, V, BLOCK_N, BLOCK_R, BLOCK_V, BLOCK_KEYS, 1, CAUSAL, True,
        )  # fmt: skip
    total, row_max, row_sum = _walk(
        total, row_max, row_sum, query_own, query_shared, key, k_shared, value, rows, inner, outer, start, num_keys,
        key_stride_t, shared_stride_t, value_stride_t, scale_log2,
        N, R, V, BLOCK_N, BLOCK_R, BLOCK_V, BLOCK_KEYS, STAGES, CAUSAL, False,
    )  # fmt: skip
    total, row_max, row_sum = _walk(
        total, row_max, row_sum, query_own, query_shared, key, k_shared, value, rows, outer, last, start, num_keys,
        key_stride_t, shared_stride_t, value_stride_t, scale_log2,
        N, R, V, BLOCK_N, BLOCK_R, BLOCK_V, BLOCK_KEYS, STAGES, CAUSAL, True,
    )  # fmt: skip

    # A row without a key has the sum 0; NaN must pass.
    total = total / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    natural = (row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))) * 0.6931471805599453
    tl.store(lse + (batch * heads + head) * num_queries + rows, natural, mask=live)
    out_rows = out + ((batch * num_queries + rows.to(tl.int64)) * heads + head)[:, None] * V
    stored = live[:, None] & (value_column < V)[None, :]
    tl.store(out_rows + value_column[None, :], total.to(out.dtype.element_ty), mask=stored)


class Options(NamedTuple):
    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int


@functools.cache
def options_for(
    capability: tuple[int, int], num_queries: int, rows: int, key_width: int, value_width: int, size: int
) -> Options:
    """The best tiles whose buffers fit the GPU's shared memory. Widths are padded ones, `size` bytes an element.

    rows: heads times batch. Measured on an H200, 16 heads of (192, 128), TFLOP/s of tiles (128, 64, 8, 3) and
    (128, 32, 8, 4): 1 x 1,024 70 and 119, where a program for each processor waits for its own loads; 8 x 1,024 286
    and 239; 1 x 8,192 471 and 360; 1 x 32,768 522 and 424.
    """
    alone = -(-num_queries // 128) * rows <= 132
    shared = SHARED_BYTES.get(capability, SMALLEST_SHARED_BYTES)
    few = padded(num_queries)
    if size > 2:
        choices = [(32, 16, 8, 1), (16, 16, 4, 1)]
    elif capability >= (9, 0):
        choices = [(128, 32, 8, 4) if alone else (128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2)]
    else:
        choices = [(128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2)]
    for choice in choices:
        tall, keys, _, stages = choice
        buffers = keys * (key_width + value_width) * stages + tall * key_width
        if tall <= max(few, choices[-1][0]) and (buffers + tall * keys) * size <= shared:
            return Options(*choice)
    return Options(16, 16, 4, 1)


def plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    k_shared: torch.Tensor | None,
    causal: bool,
    starts: torch.Tensor | None,
    options: Options | None = None,
    capability: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Launch]:
    """out and lse (not yet written) and the launch that writes them."""
    batch, num_queries, heads, width = query.shape
    num_keys, groups, nope = key.shape[1:]
    rope, value_dim = width - nope, value.shape[3]
    block_n, block_r, block_v = padded(nope), padded(rope), padded(value_dim)
    if options is None:
        where = capability or capability_of(query.device)
        key_width = block_n + (block_r if rope else 0)
        options = options_for(where, num_queries, heads * batch, key_width, block_v, query.element_size())
    out = query.new_empty(batch, num_queries, heads, value_dim)
    lse = torch.empty(batch, heads, num_queries, dtype=torch.float32, device=query.device)
    shared = key if k_shared is None else k_shared
    arguments = {
        "query": query,
        "key": key,
        "k_shared": shared,
        "value": value,
        "starts": starts,
        "out": out,
        "lse": lse,
        "scale_log2": scale * LOG2_E,
        "num_queries": num_queries,
        "num_keys": num_keys,
        "query_stride_b": query.stride(0),
        "query_stride_s": query.stride(1),
        "query_stride_h": query.stride(2),
        "key_stride_b": key.stride(0),
        "key_stride_t": key.stride(1),
        "key_stride_g": key.stride(2),
        "shared_stride_b": shared.stride(0),
        "shared_stride_t": shared.stride(1),
        "value_stride_b": value.stride(0),
        "value_stride_t": value.stride(1),
        "value_stride_g": value.stride(2),
        "GROUP": heads // groups,
        "N": nope,
        "R": rope,
        "V": value_dim,
        "BLOCK_N": block_n,
        "BLOCK_R": block_r,
        "BLOCK_V": block_v,
        "BLOCK_ROWS": options.block_rows,
        "BLOCK_KEYS": options.block_keys,
        "STAGES": options.num_stages,
        "CAUSAL": causal,
    }
    grid = (triton.cdiv(num_queries, options.block_rows), heads, batch)
    return out, lse, Launch(prefill_attention_kernel, grid, arguments, options.num_warps, options.num_stages)


def launch(*arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`plan` carried out: same arguments, returns (out, lse)."""
    out, lse, step = plan(*arguments, **options)
    step.run()
    return out, lse


def compile_cases() -> list[tuple[str, Any, dict, dict, dict]]:
    """V2-Lite and V3 (128 + 64, 128) with and without padding, a part before the queries, and LLM-7B (128, 128)."""
    cases = []
    variants = (  # name, heads, groups, rope, causal, starts, dtype
        ("mla", 16, 16, 64, True, False, torch.bfloat16),
        ("mla starts", 16, 16, 64, True, True, torch.bfloat16),
        ("mla part", 128, 128, 64, False, False, torch.bfloat16),
        ("gqa", 32, 8, 0, True, False, torch.float16),
        ("mla fp32", 16, 16, 64, True, True, torch.float32),
    )
    for name, heads, groups, rope, causal, with_starts, dtype in variants:
        meta = {"dtype": dtype, "device": "meta"}
        both = torch.empty(2, 1024, groups, 256, **meta)
        for capability in (80, 89, 90, 100):
            *_, step = plan(
                torch.empty(2, 1024, heads, 128 + rope, **meta),
                both[..., :128],
                both[..., 128:],
                0.1,
                torch.empty(2, 1024, rope, **meta) if rope else None,
                causal,
                torch.empty(2, dtype=torch.int32, device="meta") if with_starts else None,
                capability=divmod(capability, 10),
            )
            cases.append(compile_case(f"prefill_attention {name}", step, capability))
    return cases

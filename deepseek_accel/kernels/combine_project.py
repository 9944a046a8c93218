"""Merging the parts of split latent attention and projecting them into values, in one launch.

For few tokens a program merges one row for a block of values; for more, it merges a tile of tokens of one head and
leaves the product to the tensor cores. Either loads its block of the matrix first: with dependent launch, while the
attention before it still runs.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from . import launching
from .combine import Launch, active_parts, compile_case, merge_arguments, merged_row, padded

# Up to this many tokens a program per row pays: beyond, each reads its block of the matrix again for every token.
MAX_ROW_TOKENS = 8


@triton.jit(do_not_specialize=["num_splits", "num_queries", "least_blocks"])
def combine_project_kernel(
    parts, lse, lengths, starts, weight, out, num_splits, num_queries, least_blocks,
    weight_head_stride, weight_row_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`combine_kernel`, and the product of the merged row with its head's matrix weight [HEADS, VALUES, WIDTH].

    out [rows, VALUES].
    """
    launching.launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = row % HEADS
    column = tl.arange(0, BLOCK_WIDTH)
    value = tl.program_id(1) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    inside = (value < VALUES)[:, None] & (column < WIDTH)[None, :]
    places = head * weight_head_stride + value[:, None] * weight_row_stride + column[None, :]
    matrix = tl.load(weight + places, mask=inside, other=0.0)
    launching.wait(PDL)
    query = row // HEADS % num_queries
    batch = row // HEADS // num_queries
    active = active_parts(
        lengths, starts, batch, query, head, num_queries, num_splits, least_blocks, GROUP, BLOCK_ROWS, BLOCK_KEYS,
        CAUSAL,
    )  # fmt: skip
    merged = merged_row(parts, lse, row, num_splits, active, column, WIDTH, BLOCK_SPLITS, CHUNK)
    rounded = merged.to(out.dtype.element_ty).to(tl.float32)
    product = tl.sum(matrix.to(tl.float32) * rounded[None, :], 1)
    tl.store(out + row * VALUES + value, product.to(out.dtype.element_ty), mask=value < VALUES)


@triton.jit(do_not_specialize=["num_splits", "num_queries", "num_tokens", "least_blocks"])
def combine_project_tile_kernel(
    parts, lse, lengths, starts, weight, out, num_splits, num_queries, num_tokens, least_blocks,
    weight_head_stride, weight_row_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for BLOCK_TOKENS tokens of one head: out [tokens, HEADS, VALUES]."""
    launching.launch_dependents(PDL)
    head = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_WIDTH)
    value = tl.program_id(1) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    inside = (value < VALUES)[:, None] & (column < WIDTH)[None, :]
    places = head * weight_head_stride + value[:, None] * weight_row_stride + column[None, :]
    matrix = tl.load(weight + places, mask=inside, other=0.0)
    launching.wait(PDL)
    token = tl.program_id(2).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    exists = token < num_tokens
    # Tokens beyond the last one look up the last one's length and merge nothing.
    known = tl.minimum(token, num_tokens - 1)
    active = active_parts(
        lengths, starts, known // num_queries, known % num_queries, head, num_queries, num_splits, least_blocks, GROUP,
        BLOCK_ROWS, BLOCK_KEYS, CAUSAL,
    )  # fmt: skip
    active = tl.where(exists, active, 0)
    split = tl.arange(0, BLOCK_SPLITS)
    part = (token * HEADS + head) * num_splits
    exponent = tl.load(lse + part[:, None] + split[None, :], mask=split[None, :] < active[:, None], other=float("-inf"))
    largest = tl.max(exponent, 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(exponent - largest[:, None]), 1)
    merged = tl.zeros([BLOCK_TOKENS, BLOCK_WIDTH], tl.float32)
    for i in range(tl.max(active, 0)):
        scale = tl.exp2(tl.load(lse + part + i, mask=i < active, other=float("-inf")) - largest)
        filled = (i < active)[:, None] & (column < WIDTH)[None, :]
        rows = parts + (part + i)[:, None] * WIDTH
        merged += tl.load(rows + column[None, :], mask=filled, other=0.0) * scale[:, None]
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    product = tl.dot(merged.to(matrix.dtype), tl.trans(matrix), input_precision="ieee")
    target = out + (token * HEADS + head)[:, None] * VALUES + value[None, :]
    tl.store(target, product.to(out.dtype.element_ty), mask=exists[:, None] & (value < VALUES)[None, :])


def combine_project_launch(attention: dict[str, Any], weight: torch.Tensor, out: torch.Tensor) -> Launch:
    """parts [B*S*H, splits, C] and lse [B*S*H, splits], fp32, times weight [H, V, C], into out [B, S, H, V].

    attention: the arguments of the attention kernel that writes the parts. weight's last stride is one; out is
    contiguous.
    """
    num_rows, num_splits, width = attention["out"].shape
    heads, values, _ = weight.shape
    num_tokens = num_rows // heads
    block_width = padded(width)
    arguments = {
        **merge_arguments(attention, heads),
        "weight": weight,
        "out": out,
        "num_splits": num_splits,
        "weight_head_stride": weight.stride(0),
        "weight_row_stride": weight.stride(1),
        "HEADS": heads,
        "WIDTH": width,
        "VALUES": values,
        "BLOCK_SPLITS": triton.next_power_of_2(num_splits),
        "BLOCK_WIDTH": block_width,
    }
    if num_tokens <= MAX_ROW_TOKENS:
        block_values = min(padded(values), max(1, 16384 // block_width))
        arguments |= {"BLOCK_VALUES": block_values, "CHUNK": min(triton.next_power_of_2(num_splits), 16)}
        grid: tuple[int, ...] = (num_rows, triton.cdiv(values, block_values))
        return Launch(combine_project_kernel, grid, arguments, num_warps=8, num_stages=1)
    # The matrix waits in registers: 64 KB of it at most, since the merged rows take as many.
    block_values = min(padded(values), max(16, 32768 // (block_width * weight.element_size())))
    arguments |= {"BLOCK_VALUES": block_values, "BLOCK_TOKENS": 16, "num_tokens": num_tokens}
    grid = (heads, triton.cdiv(values, block_values), triton.cdiv(num_tokens, 16))
    return Launch(combine_project_tile_kernel, grid, arguments, num_warps=8, num_stages=1)


def compile_cases() -> list[tuple[str, Any, dict, dict, dict]]:
    """V2-Lite and V3, one token, and a batch of tokens."""
    from .mla_attention import plan

    cases = []
    for heads, tokens, num_splits, dtype in (
        (16, 1, 128, torch.bfloat16),
        (128, 1, 128, torch.bfloat16),
        (16, 32, 8, torch.bfloat16),
        (128, 16, 4, torch.bfloat16),
        (16, 9, 8, torch.float32),
    ):
        meta = {"dtype": dtype, "device": "meta"}
        index = {"dtype": torch.int32, "device": "meta"}
        for capability in (80, 89, 90, 100):
            for pdl in {False, capability >= 90}:
                _, launches = plan(
                    torch.empty(tokens, 1, heads, 512, **meta),
                    torch.empty(tokens, 1, heads, 64, **meta),
                    torch.empty(64, 64, 576, **meta),
                    torch.empty(tokens, 32, **index),
                    torch.empty(tokens, **index),
                    1024,
                    0.1,
                    512,
                    starts=torch.empty(tokens, **index),
                    w_uv=torch.empty(heads, 128, 512, **meta),
                    num_splits=num_splits,
                    capability=divmod(capability, 10),
                    pdl=pdl,
                )
                kind = str(dtype).removeprefix("torch.")
                name = f"combine_project H{heads} T{tokens} splits{num_splits} {kind}{' pdl' * pdl}"
                cases.append(compile_case(name, launches[-1], capability))
    return cases

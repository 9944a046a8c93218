"""Merging the parts of split latent attention and projecting them into values, in one launch.

A program merges some tokens of one head for a block of values. It loads its block of the matrix first: with dependent
launch, while the attention before it still runs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import choices, launching
from .combine import Launch, active_parts, compile_case, merge_arguments, padded

# Up to this many tokens a program multiplies its rows one by one; beyond, 16 together on the tensor cores.
MAX_ROW_TOKENS = 16


@triton.jit
def _read_ahead(lse, parts, first, num_splits, column, WIDTH: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
                CHUNK: tl.constexpr):  # fmt: skip
    """What a merge needs first, read before it is known which parts were written: that would cost a trip to memory.

    first [T]: the first part of each row. (exponents [T, BLOCK_SPLITS], those of a chunk, the chunk [T, CHUNK, WIDTH])
    """
    split = tl.arange(0, BLOCK_SPLITS)[None, :]
    part = tl.arange(0, CHUNK)[None, :]
    places = first[:, None] + part
    exponents = tl.load(lse + first[:, None] + split, mask=split < num_splits, other=float("-inf"))
    chunk_exponents = tl.load(lse + places, mask=part < num_splits, other=float("-inf"))
    chunk = tl.load(
        parts + places[:, :, None] * WIDTH + column[None, None, :],
        mask=(part < num_splits)[:, :, None] & (column < WIDTH)[None, None, :],
        other=0.0,
    )
    return exponents, chunk_exponents, chunk


@triton.jit
def _merge(
    lse, parts, first, active, exponents, chunk_exponents, chunk, column, WIDTH: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The first `active` [T] parts of each row merged: [T, WIDTH], fp32. What was read of other parts is not used."""
    split = tl.arange(0, BLOCK_SPLITS)[None, :]
    part = tl.arange(0, CHUNK)[None, :]
    exponents = tl.where(split < active[:, None], exponents, float("-inf"))
    largest = tl.max(exponents, 1)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp2(exponents - largest[:, None]), 1)
    written = part < active[:, None]
    weight = tl.exp2(tl.where(written, chunk_exponents, float("-inf")) - largest[:, None])
    merged = tl.sum(tl.where(written[:, :, None], chunk, 0.0) * weight[:, :, None], 1)
    if BLOCK_SPLITS > CHUNK:
        for begin in tl.range(CHUNK, tl.max(active, 0), CHUNK, num_stages=STAGES):
            places = first[:, None] + begin + part
            written = begin + part < active[:, None]
            weight = tl.exp2(tl.load(lse + places, mask=written, other=float("-inf")) - largest[:, None])
            more = tl.load(
                parts + places[:, :, None] * WIDTH + column[None, None, :],
                mask=written[:, :, None] & (column < WIDTH)[None, None, :],
                other=0.0,
            )
            merged += tl.sum(more * weight[:, :, None], 1)
    return merged / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["num_splits", "num_queries", "num_tokens", "least_blocks"])
def combine_project_kernel(
    parts, lse, lengths, starts, weight, out, num_splits, num_queries, num_tokens, least_blocks,
    weight_head_stride, weight_row_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, BLOCK_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUES: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`combine_kernel`, and the product of the merged rows with their head's matrix weight [HEADS, VALUES, WIDTH].

    A program has BLOCK_TOKENS tokens of one head, and BLOCK_VALUES of their values. out [tokens, HEADS, VALUES].
    """
    launching.launch_dependents(PDL)
    head = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_WIDTH)
    value = tl.program_id(1) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    inside = (value < VALUES)[:, None] & (column < WIDTH)[None, :]
    places = head * weight_head_stride + value[:, None] * weight_row_stride + column[None, :]
    matrix = tl.load(weight + places, mask=inside, other=0.0)
    row = tl.arange(0, BLOCK_TOKENS)
    token = tl.program_id(2).to(tl.int64) * BLOCK_TOKENS + row
    # Tokens beyond the last one read what the last one reads, and merge nothing.
    known = tl.minimum(token, num_tokens - 1)
    first = (known * HEADS + head) * num_splits
    launching.wait(PDL)
    exponents, chunk_exponents, chunk = _read_ahead(
        lse, parts, first, num_splits, column, WIDTH, BLOCK_SPLITS, CHUNK
    )  # fmt: skip
    active = active_parts(
        lengths, starts, known // num_queries, known % num_queries, head, num_queries, num_splits, least_blocks, GROUP,
        BLOCK_ROWS, BLOCK_KEYS, CAUSAL,
    )  # fmt: skip
    active = tl.where(token < num_tokens, active, 0)
    merged = _merge(
        lse, parts, first, active, exponents, chunk_exponents, chunk, column, WIDTH, BLOCK_SPLITS, CHUNK, STAGES
    )  # fmt: skip
    rounded = merged.to(out.dtype.element_ty)
    if BLOCK_TOKENS >= 16:
        product = tl.dot(rounded, tl.trans(matrix), input_precision="ieee")
        target = out + (token * HEADS + head)[:, None] * VALUES + value[None, :]
        exists = (token < num_tokens)[:, None] & (value < VALUES)[None, :]
        tl.store(target, product.to(out.dtype.element_ty), mask=exists)
    else:
        for i in tl.static_range(BLOCK_TOKENS):
            one = tl.sum(tl.where((row == i)[:, None], rounded.to(tl.float32), 0.0), 0)
            product = tl.sum(matrix.to(tl.float32) * one[None, :], 1)
            this = tl.program_id(2).to(tl.int64) * BLOCK_TOKENS + i
            target = out + (this * HEADS + head) * VALUES + value
            tl.store(target, product.to(out.dtype.element_ty), mask=value < tl.where(this < num_tokens, VALUES, 0))


class Tile(NamedTuple):
    """Tokens, values and parts that a program holds at once, and its warps."""

    block_tokens: int
    block_values: int
    chunk: int
    num_warps: int


@choices.by_device
def choose_tile(capability: tuple[int, int], tokens: int, heads: int, values: int, width: int, num_splits: int) -> Tile:
    """About one program per processor (64 to 256 programs), each of which reads few bytes.

    A program reads block_values rows of the matrix, and all parts of its tokens: more tokens save bytes of the first
    kind, more values those of the second. At most 16384 numbers of parts are in registers, and 64 KB of the matrix.
    """
    splits = triton.next_power_of_2(num_splits)
    if tokens > MAX_ROW_TOKENS:
        block_tokens, block_values = 16, 32
    elif heads > 32:
        block_tokens, block_values = 1, 64
    else:
        block_tokens, block_values = 2, 32
    block_values = min(padded(values), block_values)
    at_once = max(1, (16384 if block_tokens > 1 else 8192) // (block_tokens * padded(width)))
    num_warps = 16 if block_tokens >= 16 or block_values * padded(width) > 16384 else 8
    return Tile(block_tokens, block_values, min(splits, at_once), num_warps)


def combine_project_launch(
    attention: dict[str, Any], weight: torch.Tensor, out: torch.Tensor, tile: Tile | None = None
) -> Launch:
    """parts [B*S*H, splits, C] and lse [B*S*H, splits], fp32, times weight [H, V, C], into out [B, S, H, V].

    attention: the arguments of the attention kernel that writes the parts. weight's last stride is one; out is
    contiguous. tile: instead of `choose_tile`.
    """
    num_rows, num_splits, width = attention["out"].shape
    heads, values, _ = weight.shape
    num_tokens = num_rows // heads
    tile = tile or choose_tile(out.device, num_tokens, heads, values, width, num_splits)
    arguments = {
        **merge_arguments(attention, heads),
        "weight": weight,
        "out": out,
        "num_splits": num_splits,
        "num_tokens": num_tokens,
        "weight_head_stride": weight.stride(0),
        "weight_row_stride": weight.stride(1),
        "HEADS": heads,
        "WIDTH": width,
        "VALUES": values,
        "BLOCK_SPLITS": triton.next_power_of_2(num_splits),
        "CHUNK": tile.chunk,
        "BLOCK_TOKENS": tile.block_tokens,
        "BLOCK_WIDTH": padded(width),
        "BLOCK_VALUES": tile.block_values,
        # Chunks on their way once the first one is there: one of 64 KB, else two.
        "STAGES": 2 if tile.block_tokens * tile.chunk * padded(width) > 8192 else 3,
    }
    grid = (heads, triton.cdiv(values, tile.block_values), triton.cdiv(num_tokens, tile.block_tokens))
    return Launch(combine_project_kernel, grid, arguments, num_warps=tile.num_warps, num_stages=1)


def compile_cases() -> list[tuple[str, Any, dict, dict, dict]]:
    """V2-Lite and V3, one token, and a batch of tokens."""
    from .mla_attention import plan

    cases = []
    for heads, tokens, num_splits, dtype in (
        (16, 1, 128, torch.bfloat16),
        (128, 1, 128, torch.bfloat16),
        (16, 4, 32, torch.bfloat16),
        (16, 8, 16, torch.bfloat16),
        (16, 16, 8, torch.bfloat16),
        (16, 32, 4, torch.bfloat16),
        (128, 4, 16, torch.bfloat16),
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
                if capability == 90 and heads <= 32:
                    arguments = launches[0].arguments
                    merged = combine_project_launch(
                        arguments,
                        torch.empty(heads, 128, 512, **meta),
                        torch.empty(tokens, 1, heads, 128, **meta),
                        choose_tile("NVIDIA H200", tokens, heads, 128, 512, num_splits),
                    )
                    cases.append(compile_case(f"{name} H200", merged, capability))
    return cases

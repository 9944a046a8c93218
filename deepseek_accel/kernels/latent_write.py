"""Norm, rotate and store the latents of new tokens, and rotate their queries: one launch."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from . import launching

BLOCK_HEADS = 16


@triton.jit
def _rotate(x, out, cos, sin, pair, mask, HALF: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr):
    """Rotate the pairs at pointers x by (cos, sin) into out. `pair` broadcasts against both pointers."""
    if PAIRS_IN:
        first_in, second_in = 2 * pair, 2 * pair + 1
    else:
        first_in, second_in = pair, pair + HALF
    if PAIRS_OUT:
        first_out, second_out = 2 * pair, 2 * pair + 1
    else:
        first_out, second_out = pair, pair + HALF
    first = tl.load(x + first_in, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + second_in, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + first_out, (first * cos - second * sin).to(out.dtype.element_ty), mask=mask)
    tl.store(out + second_out, (second * cos + first * sin).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_queries"])
def latent_write_kernel(
    query,  # [B * S, H, N + R]
    compressed,  # [B * S, C + R]
    norm_weight,  # [C]
    cos,  # [B or 1, S, HALF]
    sin,
    storage,  # [tokens, C + R]
    slots,  # [B * S]; a negative one is not written
    q_rope,  # [B * S, H, R]
    num_queries,
    angle_row_stride,
    angle_query_stride,
    angle_stride,
    eps,
    H: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
):
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    used = pair < HALF
    angle = (token // num_queries) * angle_row_stride + (token % num_queries) * angle_query_stride + pair * angle_stride
    c = tl.load(cos + angle, mask=used, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=used, other=0.0).to(tl.float32)
    if part == 0:
        column = tl.arange(0, BLOCK_C)
        slot = tl.load(slots + token)
        entry, page = compressed + token * (C + 2 * HALF), storage + slot * (C + 2 * HALF)
        # an idle row has slot -1 and writes nothing
        stored = column < tl.where(slot >= 0, C, 0)
        value = tl.load(entry + column, mask=column < C, other=0.0)
        weight = tl.load(norm_weight + column, mask=column < C, other=0.0).to(tl.float32)
        wide = value.to(tl.float32)
        normal = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / C + eps)).to(value.dtype).to(tl.float32)
        tl.store(page + column, (weight * normal).to(storage.dtype.element_ty), mask=stored)
        _rotate(entry + C, page + C, c, s, pair, pair < tl.where(slot >= 0, HALF, 0), HALF, PAIRS_IN, PAIRS_OUT)
    else:
        head = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        rotated = (head < H)[:, None] & used[None]
        source = query + (token * H + head[:, None]) * (N + 2 * HALF) + N
        target = q_rope + (token * H + head[:, None]) * (2 * HALF)
        _rotate(source, target, c[None], s[None], pair[None], rotated, HALF, PAIRS_IN, PAIRS_OUT)


@functools.cache
def constants(heads: int, nope: int, rank: int, half: int, layout: str) -> tuple[Any, ...]:
    """The kernel's constexpr parameters, in order."""
    blocks = (triton.next_power_of_2(rank), triton.next_power_of_2(half), BLOCK_HEADS)
    return (heads, nope, rank, half, *blocks, layout != "halves", layout == "pairs")


def launch(
    query: torch.Tensor,
    compressed: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str,
    storage: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    batch, num_queries, heads, width = query.shape
    half, rank = cos.shape[-1], norm_weight.shape[0]
    q_rope = torch.empty(batch, num_queries, heads, 2 * half, dtype=query.dtype, device=query.device)
    if q_rope.numel() == 0:
        return q_rope
    assert cos.stride()[1:] == sin.stride()[1:]
    launching.launch(
        latent_write_kernel,
        (batch * num_queries, 1 + -(-heads // BLOCK_HEADS)),
        (
            query.contiguous(),
            compressed.contiguous(),
            norm_weight,
            cos,
            sin,
            storage,
            slots,
            q_rope,
            num_queries,
            cos.stride(0) if cos.shape[0] > 1 else 0,
            cos.stride(1),
            cos.stride(2),
            eps,
        ),
        constants(heads, width - 2 * half, rank, half, layout),
        num_warps=4,
    )
    return q_rope


def compile_cases() -> list[tuple[Any, ...]]:
    """(name, kernel, signature, constexprs, options) of the shapes of V2-Lite and V3 in bf16."""
    pointers = dict.fromkeys(("query", "compressed", "norm_weight"), "*bf16")
    cases = []
    for name, heads, layout, angle in (("v2-lite", 16, "pairs", "*fp32"), ("v3", 128, "pairs_to_halves", "*bf16")):
        fixed = dict(zip(latent_write_kernel.arg_names[13:], constants(heads, 128, 512, 32, layout), strict=True))
        signature = (
            pointers
            | {"cos": angle, "sin": angle, "storage": "*bf16", "slots": "*i64", "q_rope": "*bf16", "num_queries": "i32"}
            | {"angle_row_stride": "i32", "angle_query_stride": "i32", "angle_stride": "i32", "eps": "fp32"}
            | dict.fromkeys(fixed, "constexpr")
        )
        cases.append((f"latent_write-{name}", latent_write_kernel, signature, fixed, {"num_warps": 4, "num_stages": 3}))
    return cases

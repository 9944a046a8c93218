"""Norm, rotate and store the latents of new tokens; rotate and, for few tokens, absorb their queries: one launch."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from . import launching

# Up to this many tokens, absorbing is a product of a matrix with few vectors and reads w_uk once per token, from the
# L2 after the first; beyond, torch's batched matrix product reads it once for all.
MAX_ABSORBED_TOKENS = 8
BLOCK_COLUMNS = 128
BLOCK_NOPE = 64


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
    w_uk,  # [H, N, C] of any strides but unit last
    storage,  # [tokens, C + R]
    slots,  # [B * S]; a negative one is not written
    q_latent,  # [H, B * S, C]; written if ABSORB
    q_rope,  # [B * S, H, R]
    num_queries,
    angle_row_stride,
    angle_query_stride,
    angle_stride,
    uk_head_stride,
    uk_row_stride,
    eps,
    H: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    ABSORB: tl.constexpr,
):
    """Program (token, 0) writes the entry; program (token, 1 + head * blocks + block) does one block of one query."""
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
        BLOCKS: tl.constexpr = (C + BLOCK_COLS - 1) // BLOCK_COLS if ABSORB else 1
        head, block = (part - 1) // BLOCKS, (part - 1) % BLOCKS
        source = query + (token * H + head) * (N + 2 * HALF)
        rotated = pair < tl.where(block == 0, HALF, 0)
        _rotate(source + N, q_rope + (token * H + head) * (2 * HALF), c, s, pair, rotated, HALF, PAIRS_IN, PAIRS_OUT)
        if ABSORB:
            col = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
            total = tl.zeros([BLOCK_COLS], tl.float32)
            for start in range(0, N, BLOCK_N):
                row = start + tl.arange(0, BLOCK_N)
                x = tl.load(source + row, mask=row < N, other=0.0).to(tl.float32)
                offsets = head.to(tl.int64) * uk_head_stride + row[:, None] * uk_row_stride + col[None, :]
                inside = (row < N)[:, None] & (col < C)[None, :]
                total += tl.sum(tl.load(w_uk + offsets, mask=inside, other=0.0).to(tl.float32) * x[:, None], 0)
            target = q_latent + (head.to(tl.int64) * tl.num_programs(0) + token) * C + col
            tl.store(target, total.to(q_latent.dtype.element_ty), mask=col < C)


@functools.cache
def constants(heads: int, nope: int, rank: int, half: int, layout: str, absorb: bool) -> tuple[Any, ...]:
    """The kernel's constexpr parameters, in order."""
    blocks = (triton.next_power_of_2(rank), triton.next_power_of_2(half), BLOCK_NOPE, BLOCK_COLUMNS)
    return (heads, nope, rank, half, *blocks, layout != "halves", layout == "pairs", absorb)


def launch(
    query: torch.Tensor,
    compressed: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str,
    w_uk: torch.Tensor,
    storage: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(q_latent, q_rope); q_latent is None where the tokens are too many for this kernel to absorb."""
    batch, num_queries, heads, width = query.shape
    half, rank = cos.shape[-1], norm_weight.shape[0]
    nope, tokens = width - 2 * half, batch * num_queries
    absorb = tokens <= MAX_ABSORBED_TOKENS
    q_rope = query.new_empty(batch, num_queries, heads, 2 * half)
    q_latent = query.new_empty(heads, batch, num_queries, rank).permute(1, 2, 0, 3) if absorb else q_rope
    if q_rope.numel() == 0:
        return None, q_rope
    launching.launch(
        latent_write_kernel,
        (tokens, 1 + heads * (-(-rank // BLOCK_COLUMNS) if absorb else 1)),
        (
            query.contiguous(),
            compressed.contiguous(),
            norm_weight,
            cos,
            sin,
            w_uk,
            storage,
            slots,
            q_latent,
            q_rope,
            num_queries,
            cos.stride(0) if cos.shape[0] > 1 else 0,
            cos.stride(1),
            cos.stride(2),
            w_uk.stride(0),
            w_uk.stride(1),
            eps,
        ),
        constants(heads, nope, rank, half, layout, absorb),
        num_warps=4,
    )
    return q_latent if absorb else None, q_rope


def compile_cases() -> list[tuple[Any, ...]]:
    """(name, kernel, signature, constexprs, options) of the shapes of V2-Lite and V3 in bf16."""
    names = latent_write_kernel.arg_names
    types = dict.fromkeys(("query", "compressed", "norm_weight", "w_uk", "storage", "q_latent", "q_rope"), "*bf16")
    types |= {"slots": "*i64", "eps": "fp32"}
    cases = []
    for name, heads, layout, angle in (("v2-lite", 16, "pairs", "*fp32"), ("v3", 128, "pairs_to_halves", "*bf16")):
        for absorb in (True, False):
            values = constants(heads, 128, 512, 32, layout, absorb)
            fixed = dict(zip(names[-len(values) :], values, strict=True))
            signature = dict.fromkeys(names, "i32") | types | {"cos": angle, "sin": angle}
            signature |= dict.fromkeys(fixed, "constexpr")
            options = {"num_warps": 4, "num_stages": 3}
            cases.append((f"latent_write-{name}{'-absorb' * absorb}", latent_write_kernel, signature, fixed, options))
    return cases

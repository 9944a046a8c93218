"""Norm, rotate and store the latents of new tokens; rotate and, for few tokens, absorb their queries: one launch."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from . import fp8 as fp8_numbers
from . import launching
from .combine import aligned, padded, storage_pointer
from .entry_layout import EntryLayout, latent_layout

# Up to this many tokens w_uk is read at most four times, with dependent launch even before the query is there; beyond,
# torch's batched matrix product is as fast.
MAX_ABSORBED_TOKENS = 128


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


@triton.jit
def _write_entry(
    token, query, compressed, norm_weight, cos, sin, storage, address, slots, q_rope, angle, angle_stride, eps,
    H: tl.constexpr, N: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_HALF: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr,
    FP8: tl.constexpr, ROPE_AT: tl.constexpr, SCALE_AT: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The entry and the rotated queries of one token, whose cos and sin begin at `angle`."""
    column = tl.arange(0, BLOCK_C)
    pair = tl.arange(0, BLOCK_HALF)
    weight = tl.load(norm_weight + column, mask=column < C, other=0.0).to(tl.float32)
    launching.wait(PDL)
    storage = storage_pointer(storage, address)
    slot = tl.load(slots + token)
    entry, page = compressed + token * (C + 2 * HALF), storage + slot * WIDTH
    c = tl.load(cos + angle + pair * angle_stride, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle + pair * angle_stride, mask=pair < HALF, other=0.0).to(tl.float32)
    # an idle row has slot -1 and writes nothing
    stored = column < tl.where(slot >= 0, C, 0)
    value = tl.load(entry + column, mask=column < C, other=0.0)
    wide = value.to(tl.float32)
    normal = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / C + eps)).to(value.dtype).to(tl.float32)
    if FP8:
        latent = (weight * normal).to(value.dtype).to(tl.float32)
        scale = fp8_numbers.scale_of(latent, FP8)
        tl.store(page + column, fp8_numbers.encode(latent, scale, FP8), mask=stored)
        tl.store((page + SCALE_AT).to(tl.pointer_type(tl.float32)), scale, mask=slot >= 0)
        rope = (page + ROPE_AT).to(tl.pointer_type(value.dtype))
    else:
        tl.store(page + column, (weight * normal).to(storage.dtype.element_ty), mask=stored)
        rope = page + C
    _rotate(entry + C, rope, c, s, pair, pair < tl.where(slot >= 0, HALF, 0), HALF, PAIRS_IN, PAIRS_OUT)
    head = tl.arange(0, BLOCK_H)[:, None]
    source = query + (token * H + head) * (N + 2 * HALF) + N
    target = q_rope + (token * H + head) * (2 * HALF)
    rotated = (head < H) & (pair < HALF)[None, :]
    _rotate(source, target, c[None, :], s[None, :], pair[None, :], rotated, HALF, PAIRS_IN, PAIRS_OUT)


@triton.jit
def _absorb(
    block, head, token, num_tokens, query, w_uk, q_latent, uk_head_stride, uk_row_stride,
    H: tl.constexpr, N: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_COLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of columns of one head's absorbed queries [WIDTH wide, N of it absorbed], for a block of tokens."""
    column = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    row = tl.arange(0, BLOCK_N)
    inside = (row < N)[:, None] & (column < C)[None, :]
    places = head * uk_head_stride + row[:, None] * uk_row_stride + column[None, :]
    matrix = tl.load(w_uk + places, mask=inside, other=0.0)
    launching.wait(PDL)
    exists = (token < num_tokens)[:, None]
    source = query + ((token * H + head) * WIDTH)[:, None]
    x = tl.load(source + row[None, :], mask=exists & (row < N)[None, :], other=0.0)
    total = tl.dot(x, matrix, input_precision="ieee").to(q_latent.dtype.element_ty)
    place = (head * num_tokens + token[:, None]) * C + column[None, :]
    tl.store(q_latent + place, total, mask=exists & (column < C)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_queries"], do_not_specialize_on_alignment=["address"])
def latent_write_kernel(
    query,  # [B * S, H, N + R]
    compressed,  # [B * S, C + R]
    norm_weight,  # [C]
    cos,  # [B or 1, S, HALF]
    sin,
    w_uk,  # [H, N, C] of any strides but unit last
    storage,  # [tokens, WIDTH]
    address,
    slots,  # [B * S]; a negative one is not written
    q_latent,  # [H, B * S, C]; written if ABSORB
    q_rope,  # [B * S, H, R]
    num_tokens,
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
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    ABSORB: tl.constexpr,
    FP8: tl.constexpr,
    ROPE_AT: tl.constexpr,
    SCALE_AT: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first programs write an entry and rotate a token's queries each; the others, if ABSORB, absorb them.

    An absorbing program does BLOCK_COLS columns of one head for BLOCK_T tokens.
    """
    launching.launch_dependents(PDL)
    program = tl.program_id(0)
    if program < num_tokens:
        token = program.to(tl.int64)
        angle = (token // num_queries) * angle_row_stride + (token % num_queries) * angle_query_stride
        _write_entry(
            token, query, compressed, norm_weight, cos, sin, storage, address, slots, q_rope, angle, angle_stride, eps,
            H, N, C, HALF, BLOCK_H, BLOCK_C, BLOCK_HALF, PAIRS_IN, PAIRS_OUT, FP8, ROPE_AT, SCALE_AT, WIDTH, PDL,
        )  # fmt: skip
    elif ABSORB:
        BLOCKS: tl.constexpr = (C + BLOCK_COLS - 1) // BLOCK_COLS
        part = program - num_tokens
        head = (part // BLOCKS % H).to(tl.int64)
        tokens = (part // BLOCKS // H).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        _absorb(
            part % BLOCKS, head, tokens, num_tokens, query, w_uk, q_latent, uk_head_stride, uk_row_stride,
            H, N, C, N + 2 * HALF, BLOCK_N, BLOCK_COLS, PDL,
        )  # fmt: skip


@functools.cache
def constants(
    heads: int,
    nope: int,
    rank: int,
    half: int,
    layout: str,
    absorb: bool,
    num_tokens: int,
    fp8: str | None,
    element_size: int,
) -> tuple[Any, ...]:
    """The kernel's constexpr parameters, in order, without PDL."""
    block_n = padded(nope)
    block_tokens = 16 if num_tokens <= 32 else 32
    # as many columns as a thread can hold in few registers while it waits
    columns = min(padded(rank), max(16, 8192 // block_n))
    block_heads = triton.next_power_of_2(heads)
    blocks = (block_tokens, block_heads, triton.next_power_of_2(rank), triton.next_power_of_2(half), block_n, columns)
    pairs = (layout != "halves", layout == "pairs")
    return (heads, nope, rank, half, *blocks, *pairs, absorb, *fp8_constants(fp8, rank, 2 * half, element_size))


def fp8_constants(fp8: str | None, rank: int, rope: int, element_size: int) -> tuple[int, ...]:
    """FP8, ROPE_AT, SCALE_AT and WIDTH: how a latent entry is written."""
    layout = latent_layout(rank, rope, element_size) if fp8 else EntryLayout(0, 0, rank + rope)
    return (fp8_numbers.VARIANTS[fp8], *layout)


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
    address: torch.Tensor | None = None,
    pdl: bool | None = None,
    fp8: str | None = None,
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
    fixed = constants(heads, nope, rank, half, layout, absorb, tokens, fp8, compressed.element_size())
    block_tokens, columns = fixed[4], fixed[9]
    absorbing = -(-tokens // block_tokens) * heads * -(-rank // columns) if absorb else 0
    pdl = launching.uses_pdl(query.device) if pdl is None else pdl
    launching.launch(
        latent_write_kernel,
        (tokens + absorbing,),
        (
            query.contiguous(),
            compressed.contiguous(),
            norm_weight,
            cos,
            sin,
            w_uk,
            storage,
            address,
            slots,
            q_latent,
            q_rope,
            tokens,
            num_queries,
            cos.stride(0) if cos.shape[0] > 1 else 0,
            cos.stride(1),
            cos.stride(2),
            w_uk.stride(0),
            w_uk.stride(1),
            eps,
        ),
        (*fixed, pdl),
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return q_latent if absorb else None, q_rope


def compile_cases() -> list[tuple[Any, ...]]:
    """(name, kernel, signature, constexprs, options) of the shapes of V2-Lite and V3 in bf16, one token and many."""
    names = latent_write_kernel.arg_names
    types = dict.fromkeys(("query", "compressed", "norm_weight", "w_uk", "storage", "q_latent", "q_rope"), "*bf16")
    types |= {"slots": "*i64", "address": "*i64", "eps": "fp32"}
    cases = []
    for name, heads, layout, angle in (("v2-lite", 16, "pairs", "*fp32"), ("v3", 128, "pairs_to_halves", "*bf16")):
        for tokens, fp8 in ((1, None), (32, None), (128, None), (512, None), (32, "e4m3"), (512, "e5m2")):
            for pdl, only in ((False, {}), (True, {"capability": 90}), (True, {"capability": 100})):
                values = (*constants(heads, 128, 512, 32, layout, tokens <= MAX_ABSORBED_TOKENS, tokens, fp8, 2), pdl)
                fixed = dict(zip(names[-len(values) :], values, strict=True))
                signature = dict.fromkeys(names, "i32") | types | {"cos": angle, "sin": angle}
                signature |= ({"storage": "*u8"} if fp8 else {}) | dict.fromkeys(fixed, "constexpr")
                attrs = aligned(names, (*types, "cos", "sin", "uk_head_stride", "uk_row_stride"))
                options = {"num_warps": 4, "num_stages": 3, "attrs": attrs} | only
                case = f"latent_write-{name}-T{tokens}{'-pdl' * pdl}{f'-{fp8}' if fp8 else ''}"
                cases.append((case, latent_write_kernel, signature, fixed, options))
    return cases

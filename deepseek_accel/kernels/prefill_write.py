"""Norm, rotate and store a prompt's latents and rotate its queries: one launch. The contract is in
`ops/prefill_write.py`."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from . import fp8 as fp8_numbers
from . import launching
from .combine import aligned
from .latent_write import fp8_constants

MAX_HEADS = 64
"""Of one program: with V3's 128 heads the pairs would not stay in registers."""


@triton.jit
def _rotate_in_place(
    x, c, s, present, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr, PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs at pointers x [ROWS, 1] by (c, s) [BLOCK_HALF], in rows that are `present` [ROWS, 1].

    Neighbouring numbers are read and written as one: numbers of two bytes one by one took twice the time.
    """
    pair, number = tl.arange(0, BLOCK_HALF)[None, :], tl.arange(0, 2 * BLOCK_HALF)[None, :]
    inside, all_inside = present & (pair < HALF), present & (number < 2 * HALF)
    if PAIRS_IN:
        both = tl.load(x + number, mask=all_inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [ROWS, BLOCK_HALF, 2]))
    else:
        first = tl.load(x + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + pair + HALF, mask=inside, other=0.0).to(tl.float32)
    turned_first = (first * c[None, :] - second * s[None, :]).to(x.dtype.element_ty)
    turned_second = (second * c[None, :] + first * s[None, :]).to(x.dtype.element_ty)
    if PAIRS_IN != PAIRS_OUT:
        tl.debug_barrier()  # another thread may still have to read what this one writes
    if PAIRS_OUT:
        both = tl.reshape(tl.join(turned_first, turned_second), [ROWS, 2 * BLOCK_HALF])
        tl.store(x + number, both, mask=all_inside)
    else:
        tl.store(x + pair, turned_first, mask=inside)
        tl.store(x + pair + HALF, turned_second, mask=inside)
    return tl.reshape(turned_first, [ROWS * BLOCK_HALF]), tl.reshape(turned_second, [ROWS * BLOCK_HALF])


@triton.jit(do_not_specialize=["num_queries"])
def prefill_write_kernel(
    query,  # [B * S, H, N + R]
    compressed,  # [B * S, C + R]
    norm_weight,  # [C]
    cos,  # [B or 1, S, HALF]
    sin,
    storage,  # [tokens, WIDTH]
    slots,  # [B * S]; a negative one is not written
    num_queries,
    angle_row_stride,
    angle_query_stride,
    angle_stride,
    eps,
    H: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    FP8: tl.constexpr,
    ROPE_AT: tl.constexpr,
    SCALE_AT: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, 0) makes the token's entry, the others rotate BLOCK_H of its heads."""
    launching.launch_dependents(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    inside = pair < HALF
    angle = (token // num_queries) * angle_row_stride + (token % num_queries) * angle_query_stride
    launching.wait(PDL)
    c = tl.load(cos + angle + pair * angle_stride, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle + pair * angle_stride, mask=inside, other=0.0).to(tl.float32)
    if part == 0:
        column = tl.arange(0, BLOCK_C)
        scale = tl.load(norm_weight + column, mask=column < C, other=0.0).to(tl.float32)
        slot = tl.load(slots + token)
        entry, page = compressed + token * (C + 2 * HALF), storage + slot * WIDTH
        value = tl.load(entry + column, mask=column < C, other=0.0)
        wide = value.to(tl.float32)
        normal = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / C + eps)).to(value.dtype).to(tl.float32)
        latent = (scale * normal).to(value.dtype)
        tl.store(entry + column, latent, mask=column < C)
        held = column < tl.where(slot >= 0, C, 0)
        if FP8:
            wide = latent.to(tl.float32)
            row_scale = fp8_numbers.scale_of(wide, FP8)
            tl.store(page + column, fp8_numbers.encode(wide, row_scale, FP8), mask=held)
            tl.store((page + SCALE_AT).to(tl.pointer_type(tl.float32)), row_scale, mask=slot >= 0)
            rope = (page + ROPE_AT).to(tl.pointer_type(value.dtype))
        else:
            tl.store(page + column, latent, mask=held)
            rope = page + C
        key = entry + C + tl.zeros([1, 1], tl.int32)
        always = tl.full([1, 1], True, tl.int1)
        first, second = _rotate_in_place(key, c, s, always, HALF, 1, BLOCK_HALF, PAIRS_IN, PAIRS_OUT)
        stored = pair < tl.where(slot >= 0, HALF, 0)
        if PAIRS_OUT:
            tl.store(rope + 2 * pair, first, mask=stored)
            tl.store(rope + 2 * pair + 1, second, mask=stored)
        else:
            tl.store(rope + pair, first, mask=stored)
            tl.store(rope + pair + HALF, second, mask=stored)
    else:
        head = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        rows = query + ((token * H + head) * (N + 2 * HALF) + N)[:, None]
        _rotate_in_place(rows, c, s, (head < H)[:, None], HALF, BLOCK_H, BLOCK_HALF, PAIRS_IN, PAIRS_OUT)


@functools.cache
def constants(
    heads: int, nope: int, rank: int, half: int, layout: str, fp8: str | None, element_size: int
) -> tuple[Any, ...]:
    """The kernel's constexpr parameters, in order, without PDL."""
    blocks = [triton.next_power_of_2(size) for size in (heads, rank, half)]
    pairs = (layout != "halves", layout == "pairs")
    entry = fp8_constants(fp8, rank, 2 * half, element_size)
    return (heads, nope, rank, half, min(blocks[0], MAX_HEADS), *blocks[1:], *pairs, *entry)


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
    fp8: str | None = None,
) -> None:
    """`ops.prefill_write.prefill_write`."""
    batch, num_queries, heads, width = query.shape
    if batch * num_queries == 0:
        return
    half = cos.shape[-1]
    fixed = constants(heads, width - 2 * half, norm_weight.shape[0], half, layout, fp8, compressed.element_size())
    row_stride = cos.stride(0) if cos.shape[0] > 1 else 0
    pdl = launching.uses_pdl(query.device)
    launching.launch(
        prefill_write_kernel,
        (batch * num_queries, 1 + -(-heads // fixed[4])),
        (
            query,
            compressed,
            norm_weight,
            cos,
            sin,
            storage,
            slots,
            num_queries,
            row_stride,
            cos.stride(1),
            cos.stride(2),
            eps,
        ),
        (*fixed, pdl),
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


def compile_cases() -> list[tuple[Any, ...]]:
    """V2-Lite and V3 in bf16, with and without dependent launch."""
    names = prefill_write_kernel.arg_names
    types = dict.fromkeys(("query", "compressed", "norm_weight", "storage"), "*bf16")
    types |= {"slots": "*i64", "eps": "fp32"}
    cases = []
    for name, heads, layout, angle in (("v2-lite", 16, "pairs", "*fp32"), ("v3", 128, "pairs_to_halves", "*bf16")):
        variants: list[tuple[bool, Any, dict]] = [(True, None, {"capability": 90}), (True, None, {"capability": 100})]
        for pdl, fp8, only in [*variants, (False, None, {}), (False, "e4m3", {}), (False, "e5m2", {})]:
            values = (*constants(heads, 128, 512, 32, layout, fp8, 2), pdl)
            fixed = dict(zip(names[-len(values) :], values, strict=True))
            signature = dict.fromkeys(names, "i32") | types | {"cos": angle, "sin": angle}
            signature |= ({"storage": "*u8"} if fp8 else {}) | dict.fromkeys(fixed, "constexpr")
            attrs = aligned(names, (*types, "cos", "sin"))
            options = {"num_warps": 4, "num_stages": 3, "attrs": attrs} | only
            case = f"prefill_write-{name}{'-pdl' * pdl}{f'-{fp8}' if fp8 else ''}"
            cases.append((case, prefill_write_kernel, signature, fixed, options))
    return cases

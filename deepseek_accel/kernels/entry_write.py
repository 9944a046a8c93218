"""Rotate new queries and keys and store keys and values in their pages: one launch."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from . import fp8 as fp8_numbers
from . import launching
from .combine import aligned, storage_pointer
from .entry_layout import EntryLayout, grouped_layout


@triton.jit
def _rotated(x, cos, sin, angle_stride, used, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Both halves, fp32, of the rotated vectors [heads, 1] that x points to, and which of their numbers are used.

    cos and sin point to their angles.
    """
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    mask = used & (pair < HALF)
    c = tl.load(cos + pair * angle_stride, mask=pair < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + pair * angle_stride, mask=pair < HALF, other=0.0).to(tl.float32)
    first = tl.load(x + pair, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + pair, mask=mask, other=0.0).to(tl.float32)
    return first * c - second * s, second * c + first * s, pair, mask


@triton.jit
def _rotate(x, out, cos, sin, angle_stride, used, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Rotate the vectors [heads, 1] that x points to, if `used`, into out."""
    first, second, pair, mask = _rotated(x, cos, sin, angle_stride, used, HALF, BLOCK_HALF)
    tl.store(out + pair, first.to(out.dtype.element_ty), mask=mask)
    tl.store(out + HALF + pair, second.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_coded(
    x, out, scales, cos, sin, angle_stride, used, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, FP8: tl.constexpr
):
    """`_rotate`, then FP8 codes into out and one scale per vector into scales [heads, 1]."""
    first, second, pair, mask = _rotated(x, cos, sin, angle_stride, used, HALF, BLOCK_HALF)
    first = first.to(x.dtype.element_ty).to(tl.float32)
    second = second.to(x.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(
        fp8_numbers.scale_of(first, FP8), fp8_numbers.scale_of(second, FP8), propagate_nan=tl.PropagateNan.ALL
    )[:, None]
    tl.store(scales, scale, mask=used)
    tl.store(out + pair, fp8_numbers.encode(first, scale, FP8), mask=mask)
    tl.store(out + HALF + pair, fp8_numbers.encode(second, scale, FP8), mask=mask)


@triton.jit
def _copy(x, out, used, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    mask = used & (column < SIZE)
    tl.store(out + column, tl.load(x + column, mask=mask, other=0.0).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _copy_coded(x, out, scales, used, SIZE: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    mask = used & (column < SIZE)
    values = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
    scale = fp8_numbers.scale_of(values, FP8)[:, None]
    tl.store(scales, scale, mask=used)
    tl.store(out + column, fp8_numbers.encode(values, scale, FP8), mask=mask)


@triton.jit(do_not_specialize=["num_queries"], do_not_specialize_on_alignment=["address"])
def entry_write_kernel(
    query,  # [B * S, H, D], contiguous
    key,  # [B * S, G, D], contiguous
    value,  # [B * S, G, V], contiguous
    cos,  # [B or 1, S, HALF]
    sin,
    storage,  # [tokens, WIDTH]
    address,
    slots,  # [B * S]; a negative one is not written
    out,  # [B * S, H, D]
    num_queries,
    angle_row_stride,
    angle_query_stride,
    angle_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    HALF: tl.constexpr,
    V: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FP8: tl.constexpr,
    VALUES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (token, part): a block of query heads, then of keys, then of values."""
    launching.launch_dependents(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    QUERY_BLOCKS: tl.constexpr = (H + BLOCK_HEADS - 1) // BLOCK_HEADS
    KEY_BLOCKS: tl.constexpr = (G + BLOCK_HEADS - 1) // BLOCK_HEADS
    member = tl.arange(0, BLOCK_HEADS)[:, None]
    launching.wait(PDL)
    angle = (token // num_queries) * angle_row_stride + (token % num_queries) * angle_query_stride
    if part < QUERY_BLOCKS:
        head = part * BLOCK_HEADS + member
        place = (token * H + head) * (2 * HALF)
        _rotate(query + place, out + place, cos + angle, sin + angle, angle_stride, head < H, HALF, BLOCK_HALF)
    else:
        slot = tl.load(slots + token)
        entry = storage_pointer(storage, address) + slot * WIDTH
        head = ((part - QUERY_BLOCKS) % KEY_BLOCKS) * BLOCK_HEADS + member
        used = head < tl.where(slot >= 0, G, 0)  # an idle row writes nothing
        if FP8:
            scales = (entry + SCALES_AT).to(tl.pointer_type(tl.float32)) + head
        if part < QUERY_BLOCKS + KEY_BLOCKS:
            source = key + (token * G + head) * (2 * HALF)
            target = entry + head * (2 * HALF)
            if FP8:
                _rotate_coded(
                    source, target, scales, cos + angle, sin + angle, angle_stride, used, HALF, BLOCK_HALF, FP8
                )
            else:
                _rotate(source, target, cos + angle, sin + angle, angle_stride, used, HALF, BLOCK_HALF)
        else:
            source = value + (token * G + head) * V
            target = entry + VALUES_AT + head * V
            if FP8:
                _copy_coded(source, target, scales + G, used, V, BLOCK_V, FP8)
            else:
                _copy(source, target, used, V, BLOCK_V)


@functools.cache
def constants(
    heads: int, kv_heads: int, head_dim: int, value_dim: int, num_tokens: int, fp8: str | None
) -> tuple[int, ...]:
    """The kernel's constexpr parameters, in order, without PDL. Few tokens: more programs of fewer heads."""
    block_heads = min(triton.next_power_of_2(heads), 4 if num_tokens <= 8 else 16)
    half = head_dim // 2
    blocks = (block_heads, triton.next_power_of_2(half), triton.next_power_of_2(value_dim))
    plain = EntryLayout(kv_heads * head_dim, 0, kv_heads * (head_dim + value_dim))
    layout = grouped_layout(kv_heads, head_dim, value_dim) if fp8 else plain
    return (heads, kv_heads, half, value_dim, *blocks, fp8_numbers.VARIANTS[fp8], *layout)


def launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    storage: torch.Tensor,
    slots: torch.Tensor,
    address: torch.Tensor | None = None,
    fp8: str | None = None,
) -> torch.Tensor:
    """`ops.entry_write.entry_write`."""
    batch, num_queries, heads, head_dim = query.shape
    kv_heads, value_dim = value.shape[2:]
    num_tokens = batch * num_queries
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    fixed = constants(heads, kv_heads, head_dim, value_dim, num_tokens, fp8)
    block_heads = fixed[4]
    pdl = launching.uses_pdl(query.device)
    launching.launch(
        entry_write_kernel,
        (num_tokens, -(-heads // block_heads) + 2 * -(-kv_heads // block_heads)),
        (
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            cos,
            sin,
            storage,
            address,
            slots,
            out,
            num_queries,
            cos.stride(0) if cos.shape[0] > 1 else 0,
            cos.stride(1),
            cos.stride(2),
        ),
        (*fixed, pdl),
        num_warps=4 if block_heads > 4 else 1,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def compile_cases() -> list[tuple[Any, ...]]:
    """(name, kernel, signature, constexprs, options) of LLM-7B and of a model with fewer key heads, in bf16."""
    names = entry_write_kernel.arg_names
    types = dict.fromkeys(("query", "key", "value", "cos", "sin", "storage", "out"), "*bf16")
    types |= {"slots": "*i64", "address": "*i64"}
    cases = []
    for name, heads, kv_heads, num_tokens in (("llm-7b", 32, 32, 1), ("qwen-7b", 28, 4, 32)):
        variants: list[tuple[bool, Any, dict]] = [(True, None, {"capability": 90}), (True, None, {"capability": 100})]
        for pdl, fp8, only in [*variants, (False, None, {}), (False, "e4m3", {}), (False, "e5m2", {})]:
            values = (*constants(heads, kv_heads, 128, 128, num_tokens, fp8), pdl)
            fixed = dict(zip(names[-len(values) :], values, strict=True))
            signature = dict.fromkeys(names, "i32") | types | ({"storage": "*u8"} if fp8 else {})
            signature |= dict.fromkeys(fixed, "constexpr")
            options = {"num_warps": 1 if num_tokens == 1 else 4, "num_stages": 1, "attrs": aligned(names, types)} | only
            case = f"entry_write-{name}{'-pdl' * pdl}{f'-{fp8}' if fp8 else ''}"
            cases.append((case, entry_write_kernel, signature, fixed, options))
    return cases

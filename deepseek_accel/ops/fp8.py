"""FP8 cache entries: one byte per number and an fp32 scale per vector. Plain torch; kernels do the same.

A vector x has scale = max |x| / L, and codes x / scale rounded to the nearest FP8 number (ties to even), with L the
largest number of the format: 448 for e4m3 (3 bits of mantissa), 57344 for e5m2 (2 bits); OCP 8-bit floating point
specification, revision 1.0. The value is code x scale. A zero vector has scale 0. A vector with a NaN or an infinity
has scale NaN: it reads as NaN throughout. Scales below fp32's least normal number are that number.

Rows of bytes, laid out as `kernels/entry_layout.py` says. Letters: C latent rank, R rope, G key heads, D head dim, Dv
value dim.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST = {kind: torch.finfo(dtype).max for kind, dtype in CODES.items()}
LEAST_SCALE = torch.finfo(torch.float32).tiny


@functools.cache
def _layouts() -> Any:
    from ..kernels import entry_layout  # at first use: importing the package brings no kernels along

    return entry_layout


def latent_bytes(rank: int, rope: int, dtype: torch.dtype) -> int:
    """Of an entry [latent | rotary key of `dtype`]."""
    return _layouts().latent_layout(rank, rope, dtype.itemsize).width


def heads_bytes(kv_heads: int, key_dim: int, value_dim: int) -> int:
    """Of an entry [keys | values]."""
    return _layouts().grouped_layout(kv_heads, key_dim, value_dim).width


def quantize(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """values [..., N] as (uint8 codes [..., N], fp32 scales [..., 1])."""
    values = values.float()
    largest = values.abs().amax(-1, keepdim=True)
    # a product, since torch divides by a number in another way on a GPU
    scale = (largest * (1 / LARGEST[kind])).clamp(min=LEAST_SCALE)
    scale = torch.where(largest == 0, 0.0, scale).masked_fill(~largest.isfinite(), torch.nan)
    quotient = values / torch.where(scale == 0, 1.0, scale)
    most = LARGEST[kind]
    return quotient.clamp(-most, most).to(CODES[kind]).view(torch.uint8), scale


def dequantize(codes: Tensor, scales: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """codes [..., N] x fp32 scales (of a shape that broadcasts), rounded to `dtype` once."""
    numbers = codes.view(CODES[kind]).to(dtype)  # exact
    return numbers.mul_(scales)


def encode_latents(latent: Tensor, k_rope: Tensor, kind: str) -> Tensor:
    """latent [..., C] and k_rope [..., R] as entries [..., bytes]."""
    rank, rope = latent.shape[-1], k_rope.shape[-1]
    layout = _layouts().latent_layout(rank, rope, k_rope.element_size())
    rows = torch.zeros(*latent.shape[:-1], layout.width, dtype=torch.uint8, device=latent.device)
    codes, scale = quantize(latent, kind)
    rows[..., :rank] = codes
    _put(rows, layout.second, k_rope)
    _put(rows, layout.scales, scale)
    return rows


def decode_latents(
    rows: Tensor, kind: str, rank: int, rope: int, dtype: torch.dtype, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Entries [..., bytes] as latent and rotary key [..., C + R], in out_dtype. dtype: of the rotary key in there."""
    out_dtype = out_dtype or dtype
    layout = _layouts().latent_layout(rank, rope, dtype.itemsize)
    scale = _take(rows, layout.scales, 1, torch.float32)
    k_rope = _take(rows, layout.second, rope, dtype)
    return torch.cat((dequantize(rows[..., :rank], scale, kind, out_dtype), k_rope.to(out_dtype)), -1)


def encode_heads(keys: Tensor, values: Tensor, kind: str) -> Tensor:
    """keys [..., G, D] and values [..., G, Dv] as entries [..., bytes]."""
    (heads, key_dim), value_dim = keys.shape[-2:], values.shape[-1]
    layout = _layouts().grouped_layout(heads, key_dim, value_dim)
    rows = torch.zeros(*keys.shape[:-2], layout.width, dtype=torch.uint8, device=keys.device)
    (key_codes, key_scales), (value_codes, value_scales) = quantize(keys, kind), quantize(values, kind)
    rows[..., : heads * key_dim] = key_codes.flatten(-2)
    rows[..., layout.second :][..., : heads * value_dim] = value_codes.flatten(-2)
    _put(rows, layout.scales, torch.cat((key_scales, value_scales), -2).squeeze(-1))
    return rows


def decode_heads(
    rows: Tensor, kind: str, kv_heads: int, key_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Entries [..., bytes] as keys [..., G, D] and values [..., G, Dv] of `dtype`."""
    layout = _layouts().grouped_layout(kv_heads, key_dim, value_dim)
    key_scales, value_scales = _take(rows, layout.scales, 2 * kv_heads, torch.float32).unsqueeze(-1).chunk(2, -2)
    keys = rows[..., : kv_heads * key_dim].unflatten(-1, (kv_heads, key_dim))
    values = rows[..., layout.second :][..., : kv_heads * value_dim].unflatten(-1, (kv_heads, value_dim))
    return dequantize(keys, key_scales, kind, dtype), dequantize(values, value_scales, kind, dtype)


def _take(rows: Tensor, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    """A view of `count` numbers of `dtype` from byte `offset` of each row."""
    return rows[..., offset : offset + count * dtype.itemsize].view(dtype)


def _put(rows: Tensor, offset: int, numbers: Tensor) -> None:
    _take(rows, offset, numbers.shape[-1], numbers.dtype).copy_(numbers)

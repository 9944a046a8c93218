"""What a layer's pages hold per token: the numbers as they are, or FP8 codes with their scales.

The rest of the cache moves rows of `storage_dtype` and does not ask what is in them.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import PlanError
from ..ops.fp8 import decode_heads, decode_latents, encode_heads, encode_latents, heads_bytes, latent_bytes

DTYPES = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
"""What `dtype` may be in `KVCache` and `paged_cache`, besides None, and what ops call it."""


def check_dtype(dtype: Any) -> str | None:
    """The format's name as ops know it, or None for the model's own dtype. Raises PlanError on anything else."""
    if dtype is None:
        return None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        near = difflib.get_close_matches(str(dtype), DTYPES, 1, 0.4)
        raise PlanError(
            f"dtype must be None (the model's own) or one of {', '.join(map(repr, DTYPES))}, got {dtype!r}"
            + (f". Did you mean {near[0]!r}?" if near and near[0] != dtype else "")
        )
    return DTYPES[dtype]


def entry_bytes(fp8: str | None, is_latent: bool, sizes: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Bytes per token and layer. sizes: (heads, key size, value size); dtype: the model's."""
    return Entries(*sizes, dtype, fp8, is_latent).row_bytes


@dataclass(frozen=True)
class Entries:
    """How one layer's entries are stored."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    """Of the numbers that come and go: the model's."""
    fp8: str | None = None
    """"e4m3" or "e5m2", or None to store numbers as they are."""
    is_latent: bool = False
    """The key is a latent and the value a rotary key, which FP8 leaves as it is."""

    @property
    def storage_dtype(self) -> torch.dtype:
        return self.dtype if self.fp8 is None else torch.uint8

    @property
    def width(self) -> int:
        """Elements of `storage_dtype` per token."""
        if self.fp8 is None:
            return self.num_heads * (self.key_dim + self.value_dim)
        if self.is_latent:
            return latent_bytes(self.key_dim, self.value_dim, self.dtype)
        return heads_bytes(self.num_heads, self.key_dim, self.value_dim)

    @property
    def row_bytes(self) -> int:
        return self.width * self.storage_dtype.itemsize

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """keys [..., heads * key_dim] and values [..., heads * value_dim] as rows [..., width] of `storage_dtype`."""
        keys, values = keys.to(self.dtype), values.to(self.dtype)
        if self.fp8 is None:
            return torch.cat((keys, values), -1)
        if self.is_latent:
            return encode_latents(keys, values, self.fp8)
        heads = (self.num_heads, -1)
        return encode_heads(keys.unflatten(-1, heads), values.unflatten(-1, heads), self.fp8)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., width] as keys and values side by side [..., heads * (key_dim + value_dim)]: no copy if plain."""
        if self.fp8 is None:
            return rows
        if self.is_latent:
            return decode_latents(rows, self.fp8, self.key_dim, self.value_dim, self.dtype)
        keys, values = decode_heads(rows, self.fp8, self.num_heads, self.key_dim, self.value_dim, self.dtype)
        return torch.cat((keys.flatten(-2), values.flatten(-2)), -1)

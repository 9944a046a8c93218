"""Where the parts of an FP8 cache entry lie. Numbers only, so that ops can ask without Triton.

An FP8 entry is a row of bytes, each of its parts aligned to 16 of them:

    latent attention          codes of the latent (C) | rotary key (R, in the model's dtype) | scale (fp32)
    grouped-query attention   codes of the keys (G D) | codes of the values (G Dv) | scales of keys (G), of values (G)

A code is one byte, e4m3 or e5m2; the value is code x scale.
"""

import functools
from typing import NamedTuple

ALIGNMENT = 16


class EntryLayout(NamedTuple):
    """All in bytes from the beginning of the entry, where the first codes lie."""

    second: int
    """The rotary key, or the codes of the values."""
    scales: int
    width: int


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@functools.cache
def latent_layout(rank: int, rope: int, element_size: int) -> EntryLayout:
    """element_size: bytes of a number of the rotary key."""
    second = _aligned(rank)
    scales = second + _aligned(rope * element_size)
    return EntryLayout(second, scales, scales + ALIGNMENT)


@functools.cache
def grouped_layout(kv_heads: int, key_dim: int, value_dim: int) -> EntryLayout:
    second = _aligned(kv_heads * key_dim)
    scales = second + _aligned(kv_heads * value_dim)
    return EntryLayout(second, scales, scales + _aligned(2 * kv_heads * 4))

"""What a decoding step does to its new tokens before grouped-query attention: rotate, and store keys and values.

RoPE (https://arxiv.org/abs/2104.09864) in Llama's layout: pair i of a vector x of size D is (x[i], x[i + D/2]).
Letters: B batch, S queries, H query heads, G key heads, D head dim, Dv value dim, P page size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .choice import uses_triton
from .fp8 import encode_heads
from .latent_write import rotate, write_slots


def entry_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    storage: Tensor,
    slots: Tensor,
    *,
    address: Tensor | None = None,
    fp8: str | None = None,
) -> Tensor:
    """Write the keys and values of new tokens to their pages; the rotated query [B, S, H, D], in query's dtype.

    query [B, S, H, D]; key [B, S, G, D]; value [B, S, G, Dv]; cos and sin [1 or B, S, D or D / 2] of any strides (of D,
    the first half is read: the second repeats it); storage [num_pages, P, G * (D + Dv)], an entry as
    `ops/gqa_attention.py` reads it; slots [B * S] int64, physical token indices, negative for idle rows, which write
    nothing there; address and fp8: as in `ops/mla_attention.py`. The rotation runs in fp32.
    """
    if not uses_triton(query.device):
        return entry_write_reference(query, key, value, cos, sin, storage, slots, fp8)
    return _kernel_launch()(query, key, value, cos, sin, storage, slots, address, fp8)


@functools.cache
def _kernel_launch() -> Any:
    from ..kernels.entry_write import launch

    return launch


def entry_write_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    storage: Tensor,
    slots: Tensor,
    fp8: str | None = None,
) -> Tensor:
    """`entry_write` in plain torch."""
    half = query.shape[-1] // 2
    cos, sin = cos[..., :half].unsqueeze(2), sin[..., :half].unsqueeze(2)
    key = rotate(key, cos, sin, "halves")
    entries = encode_heads(key, value, fp8) if fp8 else torch.cat((key.flatten(2), value.flatten(2)), -1)
    write_slots(storage, slots, entries.flatten(0, 1))
    return rotate(query, cos, sin, "halves")


class Case(NamedTuple):
    batch: int
    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    shared_positions: bool = True
    whole_angles: bool = True
    """Whether cos and sin come with D columns, as transformers has them, or D / 2."""


CASES = [
    Case(1, 1, 8, 2, 32, 32),  # a decoding step of Llama
    Case(3, 1, 7, 1, 16, 16, shared_positions=False),  # heads do not fill a block; positions differ by row
    Case(2, 3, 4, 4, 24, 40, whole_angles=False),  # sizes that are no power of two, values wider than keys
    Case(5, 2, 6, 3, 16, 8, shared_positions=False, whole_angles=False),  # values narrower than half a block of keys
]


def case_inputs(case: Case, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0) -> tuple[Any, ...]:
    """Arguments of `entry_write`. The storage holds NaN, and the last token is idle if there are several."""
    generator = torch.Generator().manual_seed(seed)
    tokens, page_size = case.batch * case.queries, 16

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    rows = case.batch if not case.shared_positions else 1
    angle = torch.rand(rows, case.queries, case.head_dim // 2, generator=generator) * 6
    if case.whole_angles:
        angle = torch.cat((angle, angle), -1)
    num_pages, width = 2 + tokens // page_size, case.kv_heads * (case.head_dim + case.value_dim)
    slots = torch.randperm(num_pages * page_size, generator=generator)[:tokens]
    if tokens > 1:
        slots[-1] = -1
    return (
        draw(case.batch, case.queries, case.heads, case.head_dim),
        draw(case.batch, case.queries, case.kv_heads, case.head_dim),
        draw(case.batch, case.queries, case.kv_heads, case.value_dim),
        angle.cos().to(device),
        angle.sin().to(device),
        torch.full((num_pages, page_size, width), torch.nan, dtype=dtype, device=device),
        slots.to(device),
    )

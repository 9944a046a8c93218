"""What a prefill does to its new tokens before latent attention: norm and rotate in place, store in the page.

As `ops/latent_write.py`, whose letters and layouts these are, but nothing is absorbed: the prompt's keys are expanded.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .choice import uses_triton
from .fp8 import encode_latents
from .latent_write import Layout, rotate, write_slots
from .rms_norm import rms_norm


class Case(NamedTuple):
    batch: int
    queries: int
    heads: int
    nope: int
    rope: int
    rank: int
    layout: Layout
    shared_positions: bool = True


CASES = [
    Case(1, 5, 4, 16, 8, 32, "pairs"),  # DeepSeek-V2
    Case(2, 3, 5, 16, 8, 32, "pairs_to_halves"),  # what comes out lies where another pair still has to be read
    Case(3, 2, 4, 24, 12, 40, "halves", False),  # sizes that are no power of two; positions differ by row
    Case(2, 2, 70, 8, 4, 16, "pairs_to_halves"),  # more heads than a block, the last one hardly filled
    Case(0, 3, 2, 16, 8, 32, "pairs"),  # no tokens: a launch with an empty grid is an error
]


def prefill_write(
    query: Tensor,
    compressed: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    storage: Tensor,
    slots: Tensor,
    *,
    fp8: str | None = None,
) -> None:
    """Turn projected latents into entries and rotate queries, both in place, and write the entries to their pages.

    query [B, S, H, N + R], contiguous: the last R columns are rotated. compressed [B, S, C + R], contiguous, latent
    then rope key, as projected: the latent is normalised, the key rotated. norm_weight [C]; cos and sin [1 or B, S,
    R / 2] of any strides; storage [num_pages, P, C + R]; slots [B * S] int64, unit stride, physical token indices;
    a negative one is written nowhere. All but cos, sin and slots of one dtype. Rotation and norm in fp32.
    fp8: as in `ops/mla_attention.py`; compressed then still gets the entries as computed, not what the pages hold.
    Source: DeepseekV2Attention and DeepseekV3Attention of transformers 5.24.
    Raises ValueError if query or compressed is not contiguous.
    """
    if not (query.is_contiguous() and compressed.is_contiguous()):
        raise ValueError("query and compressed are changed in place and must be contiguous")
    write = _kernel_launch() if uses_triton(query.device) and query.dtype != torch.float64 else prefill_write_reference
    write(query, compressed, norm_weight, eps, cos, sin, layout, storage, slots, fp8)


@functools.cache
def _kernel_launch() -> Any:
    from ..kernels.prefill_write import launch

    return launch


def prefill_write_reference(
    query: Tensor,
    compressed: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    storage: Tensor,
    slots: Tensor,
    fp8: str | None = None,
) -> None:
    """`prefill_write` in plain torch."""
    rank, rope = norm_weight.shape[0], 2 * cos.shape[-1]
    compressed[..., :rank] = rms_norm(compressed[..., :rank], norm_weight, eps)
    compressed[..., rank:] = rotate(compressed[..., rank:], cos, sin, layout)
    query[..., -rope:] = rotate(query[..., -rope:], cos.unsqueeze(2), sin.unsqueeze(2), layout)
    entries = encode_latents(compressed[..., :rank], compressed[..., rank:], fp8) if fp8 else compressed
    write_slots(storage, slots, entries.flatten(0, 1))


def case_inputs(case: Case, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0) -> tuple[Any, ...]:
    """Arguments of `prefill_write`. The storage holds NaN, and the last token has no slot if there are several."""
    generator = torch.Generator().manual_seed(seed)
    tokens, page_size, width = case.batch * case.queries, 16, case.rank + case.rope

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    rows = 1 if case.shared_positions else case.batch
    angle = torch.rand(rows, case.queries, case.rope // 2, generator=generator) * 6
    num_pages = 2 + tokens // page_size
    slots = torch.randperm(num_pages * page_size, generator=generator)[:tokens]
    if tokens > 1:
        slots[-1] = -1
    # V2 hands out cos and sin interleaved: neither has a unit stride
    angles = torch.stack((angle.cos(), angle.sin()), -1).to(device)
    return (
        draw(case.batch, case.queries, case.heads, case.nope + case.rope),
        draw(case.batch, case.queries, width),
        draw(case.rank),
        1e-6,
        angles[..., 0],
        angles[..., 1],
        case.layout,
        torch.full((num_pages, page_size, width), torch.nan, dtype=dtype, device=device),
        slots.to(device),
    )

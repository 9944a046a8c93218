"""What a decoding step does to its new tokens before latent attention: norm, rotate, store in the page, absorb.

DeepSeek-V2 (arXiv 2405.04434, section 2.1.2 and 2.1.3). Letters: B batch, S queries, H heads, N nope, R rope, C latent
rank, P page size. Rotary pair i of a vector is (x[2i], x[2i+1]) or (x[i], x[i+R/2]); a layout says which, for what
comes in and for what goes out:

- "pairs": pairs in, pairs out (DeepSeek-V2)
- "pairs_to_halves": pairs in, halves out (DeepSeek-V3 with `rope_interleave`)
- "halves": halves in, halves out (DeepSeek-V3 without)
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .choice import uses_triton
from .fp8 import encode_latents
from .mla_attention import absorb_query
from .rms_norm import rms_norm

Layout = Literal["pairs", "pairs_to_halves", "halves"]


class Case(NamedTuple):
    batch: int
    queries: int
    heads: int
    nope: int
    rope: int
    rank: int
    layout: Layout
    shared_positions: bool


CASES = [
    Case(1, 1, 4, 16, 8, 32, "pairs", True),  # a decoding step of DeepSeek-V2: rotary size below one warp
    Case(2, 3, 5, 16, 8, 32, "pairs_to_halves", True),  # out layout differs from in; heads do not fill a block
    Case(3, 2, 4, 24, 12, 40, "halves", False),  # sizes that are no power of two; positions differ by row
    Case(2, 1, 3, 72, 16, 160, "pairs", False),  # several blocks of the latent and of the absorbed sum
    Case(6, 3, 2, 16, 8, 32, "pairs", False),  # more tokens than a block of 16; a row's tokens in two blocks
    Case(67, 2, 1, 16, 8, 32, "halves", True),  # more tokens than the kernel absorbs
]


def latent_write(
    query: Tensor,
    compressed: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    w_uk: Tensor,
    storage: Tensor,
    slots: Tensor,
    *,
    address: Tensor | None = None,
    fp8: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Write the entries of new tokens to their pages, and return their queries as latent attention takes them.

    query [B, S, H, N + R], the rope part last; compressed [B, S, C + R], latent then rope key, as projected;
    norm_weight [C]; cos and sin [1 or B, S, R / 2] of any strides; w_uk [H, N, C]; storage [num_pages, P, C + R];
    slots [B * S] int64 physical token indices, negative for idle rows, which write nothing there; address and
    fp8: as in `ops/mla_attention.py`. Returns the absorbed queries [B, S, H, C] and the rotated rope part [B, S, H, R],
    in query's dtype. Rotation, norm and sums run in fp32.
    """
    if not uses_triton(query.device):
        return latent_write_reference(query, compressed, norm_weight, eps, cos, sin, layout, w_uk, storage, slots, fp8)
    launch, where = _kernel_launch(), {"address": address, "fp8": fp8}
    q_latent, q_rope = launch(query, compressed, norm_weight, eps, cos, sin, layout, w_uk, storage, slots, **where)
    if q_latent is None:
        q_latent = absorb_query(query[..., : w_uk.shape[1]].transpose(1, 2), w_uk)
    return q_latent, q_rope


@functools.cache
def _kernel_launch() -> Any:
    from ..kernels.latent_write import launch

    return launch


def latent_write_reference(
    query: Tensor,
    compressed: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    w_uk: Tensor,
    storage: Tensor,
    slots: Tensor,
    fp8: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`latent_write` in plain torch."""
    rank, rope = norm_weight.shape[0], 2 * cos.shape[-1]
    latent, k_rope = compressed.split([rank, rope], -1)
    latent = rms_norm(latent, norm_weight, eps)
    k_rope = rotate(k_rope, cos, sin, layout)
    entries = (encode_latents(latent, k_rope, fp8) if fp8 else torch.cat((latent, k_rope), -1)).flatten(0, 1)
    write_slots(storage, slots, entries)
    q_latent = absorb_query(query[..., :-rope].transpose(1, 2), w_uk)
    return q_latent, rotate(query[..., -rope:], cos.unsqueeze(2), sin.unsqueeze(2), layout)


def write_slots(storage: Tensor, slots: Tensor, entries: Tensor) -> None:
    """entries [T, width] to slots [T] of storage [num_pages, P, width], but for those whose slot is negative."""
    used = slots >= 0
    storage.flatten(0, 1).index_copy_(0, slots[used], entries[used].to(storage.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotate the pairs of x [..., R] by the angles of cos and sin [..., R / 2]. The result has x's dtype."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    first, second = (wide[..., 0::2], wide[..., 1::2]) if layout != "halves" else wide.chunk(2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(turned, -1).flatten(-2) if layout == "pairs" else torch.cat(turned, -1)
    return out.to(x.dtype)

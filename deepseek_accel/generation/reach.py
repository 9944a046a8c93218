"""Which cached tokens the queries of a step see, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ..ops.choice import uses_triton
from ..ops.gqa_attention import paged_gqa_attention
from ..ops.key_mass import KeyScores
from ..ops.mla_attention import dense_latent_attention, project_values, projected_attention


class Held(Protocol):
    """The entries of one layer: `cache.paged.Pages`, or what a CUDA graph knows of them."""

    @property
    def storage(self) -> torch.Tensor:
        """[num_pages, page_size, width]; where `address` is given, only its dtype and page shape count."""

    @property
    def address(self) -> torch.Tensor | None:
        """[1] int64 on the device: where the storage is now, for graphs that outlive it."""

    @property
    def fp8(self) -> str | None:
        """ "e4m3" or "e5m2" if the storage holds FP8 entries (`ops/fp8.py`)."""

    @property
    def watches(self) -> bool:
        """Whether the cache wants to know what queries attend to; then there is `watch`, see `cache.evicting`."""

    def watch(self, query: torch.Tensor, keys: torch.Tensor, scale: float, causal: bool, mask: Any) -> None:
        """query [B, S, H, D], keys [B, G, T, D]."""

    def key_scores(self) -> KeyScores:
        """Where a step of one query leaves what it attended to."""

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (latents and rotary keys) [B, heads, T, size]."""


@dataclass(frozen=True)
class Reach:
    """What S queries per row see. The layers of a step share it."""

    block_table: torch.Tensor
    """[B, W] int32."""
    lengths: torch.Tensor
    """[B] int32: keys held, those of this step included."""
    max_length: int
    """No row has more keys. In a CUDA graph the most there will ever be."""
    causal: bool
    """Whether query s sees keys up to T - S + s only; with one query they are the same."""
    starts: torch.Tensor | None = None
    """[B] int32: the first key each row sees."""
    mask: torch.Tensor | None = None
    """[B, 1, S, T], bool or added to scores. On a GPU with `starts` of what it lets through."""
    num_splits: int | None = None
    """Into how many parts a row's keys are cut; None chooses by `max_length`."""
    watch: KeyScores | None = None
    """In a CUDA graph over a cache that evicts: where each key's score is."""

    @classmethod
    def of_pages(cls, pages: Any, num_queries: int, mask: torch.Tensor | None) -> Reach:
        """What the stock mask, or none, lets through over `pages`."""
        pool = pages.pool
        return cls(
            pool.block_table(),
            pool.lengths(pages.length),
            pages.length,
            mask is None and num_queries > 1,
            None if mask is None else pool.first_visible(mask),
            mask,
        )


def attend_latents(
    q_latent: torch.Tensor, q_rope: torch.Tensor, held: Held, reach: Reach, scale: float, w_uv: torch.Tensor
) -> torch.Tensor:
    """Absorbed attention of q_latent [B, S, H, C] and q_rope [B, S, H, R] over cached latents: [B, S, H, V]."""
    if not uses_triton(q_latent.device) or q_latent.dtype == torch.float64:
        latent, k_rope = held.gather()
        if held.watches:
            query, keys = torch.cat((q_latent, q_rope), -1), torch.cat((latent, k_rope), -1)
            held.watch(query, keys, scale, reach.causal, reach.mask)
        out = dense_latent_attention(q_latent, q_rope, latent, k_rope, scale, reach.mask, reach.causal)
        return project_values(out, w_uv)
    if held.watches and q_latent.shape[1] > 1:
        held.watch(torch.cat((q_latent, q_rope), -1), torch.cat(held.gather(), -1), scale, reach.causal, reach.mask)
    return projected_attention(
        q_latent,
        q_rope,
        held.storage,
        reach.block_table,
        reach.lengths,
        reach.max_length,
        scale,
        w_uv,
        causal=reach.causal,
        starts=reach.starts,
        mask=reach.mask,
        num_splits=reach.num_splits,
        address=held.address,
        fp8=held.fp8,
        watch=_watch(held, reach, q_latent.shape[1]),
    )


def attend_grouped(
    query: torch.Tensor, held: Held, reach: Reach, scale: float, num_kv_heads: int, value_dim: int
) -> torch.Tensor:
    """Grouped-query attention of query [B, S, H, D] over cached keys and values: [B, S, H, value_dim]."""
    if not uses_triton(query.device) or query.dtype == torch.float64:
        keys, values = held.gather()
        if held.watches:
            held.watch(query, keys, scale, reach.causal, reach.mask)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys,
            values,
            attn_mask=reach.mask,
            scale=scale,
            enable_gqa=query.shape[2] != num_kv_heads,
        )
        return out.transpose(1, 2)
    if held.watches and query.shape[1] > 1:
        held.watch(query, held.gather()[0], scale, reach.causal, reach.mask)
    return paged_gqa_attention(
        query,
        held.storage,
        reach.block_table,
        reach.lengths,
        reach.max_length,
        scale,
        num_kv_heads,
        value_dim,
        causal=reach.causal,
        starts=reach.starts,
        mask=reach.mask,
        num_splits=reach.num_splits,
        address=held.address,
        fp8=held.fp8,
        watch=_watch(held, reach, query.shape[1]),
    )


def _watch(held: Held, reach: Reach, num_queries: int) -> KeyScores | None:
    if reach.watch is not None or not held.watches or num_queries > 1:
        return reach.watch
    return held.key_scores()

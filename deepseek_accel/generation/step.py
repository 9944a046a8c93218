"""The straight line: what a layer, and a whole model, do to the new tokens of a step.

About eight launches a layer on a GPU with few tokens: norm and input projections; latent norm, rotation, page write and
absorb; attention; merge and value projection; output projection and residual; norm, router and selection; gate-up of
the experts; down, weighted sum and residual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..families.base import Family
from ..ops.choice import uses_triton
from ..ops.entry_write import entry_write
from ..ops.experts import mixture
from ..ops.latent_write import latent_write
from ..ops.projection import gated_project, project
from ..ops.rms_norm import rms_norm
from ..ops.router import norm_route
from .counting import tally
from .lines import Dense, GroupedAttention, LatentAttention, Layer, Mixture, Model
from .reach import Held, Reach, attend_grouped, attend_latents
from .segments import cuts


@dataclass(frozen=True)
class Place:
    """Where the new tokens of a step go, how they are rotated and what they see. The layers of a step share it."""

    shape: tuple[int, int]
    """(B, S)"""
    rotation: tuple[Any, torch.Tensor, torch.Tensor]
    """(layout, cos, sin) as the family's `rotation` gives them."""
    slots: torch.Tensor
    """[B * S] int64: where in the flat storage; negative: nowhere."""
    reach: Reach
    live: torch.Tensor | None = None
    """[1] int32: rows from here on are idle. None: none is."""
    counters: torch.Tensor | None = None
    """The router's, in a graph; see `ops.router.norm_route`."""


def layer_step(layer: Layer, x: torch.Tensor, held: Held, place: Place) -> torch.Tensor:
    """x [B * S, D] -> the layer's output, the same shape. The new tokens' entries are written."""
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        out = latent_attention(attention, layer.norm, x, held, place)
    else:
        out = grouped_attention(attention, layer.norm, x, held, place)
    weight, bias = attention.output
    (x,) = project(out.reshape(x.shape[0], -1), (weight,), (bias,), residual=x)
    mlp = layer.mlp
    if isinstance(mlp, Dense):
        (x,) = project(gated_project(x, mlp.gate, mlp.up, norm=layer.mlp_norm), (mlp.down,), residual=x)
        return x
    if isinstance(mlp, Mixture):
        normed, weights, indices = norm_route(
            x,
            *layer.mlp_norm,
            mlp.router,
            mlp.bias,
            live=place.live,
            counters=place.counters,
            drop=mlp.drop,
            **vars(mlp.rule),
        )
        return mixture(normed, indices, weights, mlp.gate_up, mlp.down, mlp.shared, x)
    normed = rms_norm(x, *layer.mlp_norm).view(*place.shape, -1)
    return x + mlp(normed).view(x.shape)


def latent_attention(
    attention: LatentAttention, norm: tuple[torch.Tensor, float], x: torch.Tensor, held: Held, place: Place
) -> torch.Tensor:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1), absorbed: [B, S, H, V]."""
    query, compressed = project(x, attention.inputs, attention.biases, norm=norm)
    if attention.query_up is not None:
        weight, bias = attention.query_up
        (query,) = project(query, (weight,), (bias,), norm=attention.query_norm)
    layout, cos, sin = place.rotation
    q_latent, q_rope = latent_write(
        query.view(*place.shape, -1, attention.head_dim),
        compressed.view(*place.shape, -1),
        *attention.latent_norm,
        cos,
        sin,
        layout,
        attention.w_uk,
        held.storage,
        place.slots,
        address=held.address,
        fp8=held.fp8,
    )
    return attend_latents(q_latent, q_rope, held, place.reach, attention.scale, attention.w_uv)


def grouped_attention(
    attention: GroupedAttention, norm: tuple[torch.Tensor, float], x: torch.Tensor, held: Held, place: Place
) -> torch.Tensor:
    """Grouped-query attention (arXiv 2305.13245): [B, S, H, head_dim]."""
    heads = (*place.shape, -1, attention.head_dim)
    query, key, value = (part.view(heads) for part in project(x, attention.inputs, attention.biases, norm=norm))
    _, cos, sin = place.rotation
    query = entry_write(query, key, value, cos, sin, held.storage, place.slots, address=held.address, fp8=held.fp8)
    return attend_grouped(query, held, place.reach, attention.scale, attention.num_kv_heads, attention.head_dim)


def head_step(model: Model, x: torch.Tensor) -> torch.Tensor:
    """x [T, D], what the last layer gives -> logits [T, vocabulary]."""
    weight, bias = model.head
    return project(x, (weight,), (bias,), norm=model.norm)[0]


class Stepper:
    """Runs a model's decoding steps one launch after the other, on a `PagedCache`."""

    def __init__(self, model: Model, family: Family, attention: Any) -> None:
        self.model, self.family, self.attention = model, family, attention
        self.between: Callable[[], None] | None = None
        """Called between some layers, while a recording in several graphs is made."""
        self._cuts = cuts(len(model.layers))

    @functools.cached_property
    def identity(self) -> tuple[Any, ...]:
        """See `Model.identity`."""
        return self.model.identity()

    @functools.cached_property
    def tally(self) -> dict[str, int]:
        """See `counting.tally`: worked out once, not in every step."""
        return tally(self.model)

    @property
    def num_heads(self) -> tuple[int, int]:
        """(query heads, heads of cached entries)."""
        attention = self.model.layers[0].attention
        heads = attention.output[0].shape[1]
        if isinstance(attention, LatentAttention):
            return heads // attention.w_uv.shape[1], 1
        return heads // attention.head_dim, attention.num_kv_heads

    def rotation(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Of positions [B, S], for hidden [B, S, D]."""
        return self.family.rotation(self.attention, self.model.rotary(hidden, positions))

    def step(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: Any, starts: list[int] | torch.Tensor | None
    ) -> torch.Tensor:
        """tokens [B], positions [B] int64 -> logits [B, vocabulary]. starts [B]: the first key each row sees."""
        appended = [held.append(len(tokens), 1) for held in cache.layers]
        first = None if starts is None else torch.as_tensor(starts, dtype=torch.int32, device=tokens.device)
        rotation = self.rotation(self.model.embedding[:1, None], positions.unsqueeze(1))
        alone = appended[0][0].is_alone
        places = [
            Place((len(tokens), 1), rotation, slots, self._reach(pages, 1, first))
            for pages, slots in (appended if alone else appended[:1])
        ]
        places = places if alone else places * len(appended)
        return self.run(tokens.unsqueeze(1), [pages for pages, _ in appended], places)

    def join(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        pages: list[Any],
        slots: torch.Tensor,
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [B, vocabulary] of the last of tokens [B, S], at positions [1 or B, S] int64, which meet the keys in
        the pages as a decoding step's token does.

        pages: of each layer, with room for the tokens at slots [B * S] int64. starts [B] int32: the first key each row
        sees.
        """
        batch, count = tokens.shape
        rotation = self.rotation(self.model.embedding[:1, None], positions.expand(batch, count))
        place = Place((batch, count), rotation, slots, self._reach(pages[0], count, starts))
        return self.run(tokens, pages, [place] * len(pages))

    def run(self, tokens: torch.Tensor, pages: Sequence[Held], places: Sequence[Place]) -> torch.Tensor:
        """tokens [B, S] through all layers, each with pages and place: logits [B, vocabulary] of each row's last."""
        x = self.layers(F.embedding(tokens.flatten(), self.model.embedding), pages, places)
        return head_step(self.model, x.view(*tokens.shape, -1)[:, -1].contiguous())

    def layers(self, x: torch.Tensor, pages: Sequence[Held], places: Sequence[Place]) -> torch.Tensor:
        """x [B * S, D], embedded tokens -> what the last layer gives, the same shape."""
        for number, (layer, held, place) in enumerate(zip(self.model.layers, pages, places, strict=True)):
            self.begin_layer(number)
            x = layer_step(layer, x, held, place)
        return x

    def begin_layer(self, number: int) -> None:
        """Whoever runs the layers calls this before each of them."""
        if self.between is not None and number in self._cuts:
            self.between()

    def _reach(self, pages: Any, num_queries: int, starts: torch.Tensor | None) -> Reach:
        device, keys = self.model.device, pages.length
        if starts is None or not pages.is_alone:  # else the keys of a row are in no order
            if uses_triton(device) and self.model.dtype != torch.float64:
                pool = pages.pool
                return Reach(pool.block_table(), pool.lengths(keys), keys, num_queries > 1, starts)
            if num_queries == 1 and starts is None:
                return Reach.of_pages(pages, 1, None)
        mask = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=device)
        if num_queries > 1:
            key, query = torch.arange(keys, device=device), torch.arange(num_queries, device=device)
            mask = (key <= keys - num_queries + query[:, None])[None, None]
        if starts is not None:
            mask = mask & (pages.positions(device) >= starts[:, None])[:, None, None]
        return Reach.of_pages(pages, num_queries, mask)

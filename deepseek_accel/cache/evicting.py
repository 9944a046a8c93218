"""A paged cache that forgets: each layer has its own block table, since each holds other tokens, and other many.

Room is made in two ways. One new token takes the place of a forgotten one once its layer's budget is full, so that
lengths stay what they are. Several are appended, and what is beyond the budgets goes after they have been attended
from: pages are given back. A few (up to LAZY) may be guesses that are about to be taken back: with those, forgetting
waits for the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..errors import CacheFullError, PlanError
from ..ops.key_mass import KeyScores, key_mass
from .eviction import DECAY, Policy
from .kept import OBSERVED, Kept
from .paged import PagedCache, PagedLayer, Pages, Place, Pools, Reader

LAZY = 32
"""Tokens."""


@dataclass(frozen=True)
class KeptPages(Pages):
    """Pages of a layer that has forgotten tokens."""

    kept: Kept
    eviction: Eviction
    MOST_WATCHED: ClassVar[int] = OBSERVED
    is_alone: ClassVar[bool] = True

    def positions(self, device: torch.device) -> torch.Tensor:
        return self.kept.positions[:, : self.length]

    def narrow(self, mask: Any) -> Any:
        """A mask [B, 1, S, tokens seen] or [B, tokens seen] over the tokens that are held.

        What no query sees before the first visible token is padding.
        """
        if mask is not None and not isinstance(mask, torch.Tensor):
            raise PlanError(f"a cache that evicts needs masks that are tensors, got {type(mask).__name__}; use sdpa")
        if mask is not None:
            self.kept.first = self.pool.first_visible(mask if mask.dim() == 4 else mask.bool()[:, None, None])
        if mask is None or (mask.shape[-1] == self.length == self.kept.seen and self.kept.in_order):
            return mask
        held = self.kept.positions[:, : self.length].long()
        if mask.dim() == 2:
            return mask.gather(1, held)
        rows = held.shape[0]
        index = held[:, None, None].expand(rows, mask.shape[1], mask.shape[2], -1)
        return mask.expand(rows, *mask.shape[1:]).gather(-1, index)

    @property
    def watches(self) -> bool:  # type: ignore[override]
        return self.kept.policy.scores is not None

    def key_scores(self) -> KeyScores:
        return KeyScores(self.kept.scores, DECAY, self.kept.policy.scores == "entropy")

    def settle(self, count: int) -> None:
        """After attention of a call of `count` tokens: the last layer makes all of them forget."""
        if self.kept is self.eviction.layers[-1] and count > LAZY:
            self.eviction.settle()

    def watch(
        self, query: torch.Tensor, keys: torch.Tensor, scale: float, causal: bool, mask: torch.Tensor | None = None,
        rows: slice = slice(None),
    ) -> None:  # fmt: skip
        """Score tokens by the attention of the last queries. query [b, S, H, D]; keys [b, G, held, D] of `rows`."""
        if self.watches and query.shape[1]:
            query = query[:, -OBSERVED:]
            mask = self._visible(rows, query.shape[1]) if mask is None else mask[:, :1, -OBSERVED:]
            entropy = self.kept.policy.scores == "entropy"
            found = key_mass(query, keys, scale, causal=causal, mask=mask, entropy=entropy)
            self.kept.watch(*found, query.shape[1], rows)

    def watch_rows(self, query: torch.Tensor, scale: float, rows: slice) -> None:
        """`watch` of the last queries [b, S, H, D] of `rows` over what these rows' pages hold."""
        pages = self.storage[self.pool.block_table()[rows].long()]
        entries = self.format.decode(pages.flatten(1, 2)[:, : self.length])
        if self.format.is_latent:
            keys = entries[:, None]
        else:
            heads, size = self.num_heads, self.num_heads * self.format.key_dim
            keys = entries[..., :size].unflatten(-1, (heads, -1)).transpose(1, 2)
        self.watch(query, keys, scale, query.shape[1] > 1, None, rows)

    def index_of_first(self) -> torch.Tensor | None:
        """[B] int32: each row's first entry that is no padding. Entries of calls of several tokens are in order."""
        return self.kept.index_of_first()

    def _visible(self, rows: slice, num_queries: int) -> torch.Tensor | None:
        """A mask that hides padding, for `key_mass`."""
        first = self.kept.first
        if not isinstance(first, torch.Tensor):
            return None
        visible = self.kept.positions[rows, : self.length] >= first[rows, None]
        return visible[:, None, None].expand(-1, 1, num_queries, -1)


class Eviction:
    """What the layers of one cache decide together."""

    def __init__(self, policy: Policy, num_layers: int, held: dict[int, int]) -> None:
        self.policy, self.recording = policy, False
        self.layers = [Kept(layer, policy, held) for layer in range(num_layers)]

    def settle(self, coming: int = 0) -> None:
        """Divide the budget if more is held than it allows; forget the excess.

        coming: tokens per layer that are about to be taken in. What they look at is not known: where only they are too
        many, layers get equal budgets.
        """
        if self.recording or not self.layers[0].held:
            return
        held, most = sum(kept.held for kept in self.layers), self.policy.budget * len(self.layers)
        undecided = any(kept.budget is None for kept in self.layers)
        profiles = [kept.profile for kept in self.layers if kept.profile is not None]
        if held > most and len(profiles) == len(self.layers):
            self._divide(torch.stack([profile.cpu() for profile in profiles]))
        elif undecided and held + coming * len(self.layers) > most:
            self._divide(None)
        for kept in self.layers:
            kept.shrink()

    def budgets(self) -> list[int]:
        self.settle(coming=1)
        if any(kept.budget is None for kept in self.layers):
            self._divide(None)
        return [kept.budget or 0 for kept in self.layers]

    def _divide(self, profiles: torch.Tensor | None) -> None:
        pool = self.layers[0].pool
        assert pool is not None
        budgets = self.policy.divide(profiles, pool.page_size, len(self.layers))
        for kept, budget in zip(self.layers, budgets, strict=True):
            kept.budget, kept.profile = budget, None


class EvictingLayer(PagedLayer):
    """One layer of an `EvictingCache`. `length` counts the tokens seen; `kept.held` of them are there."""

    is_croppable = True

    def __init__(self, layer: int, pools: Pools, eviction: Eviction, reader: Reader) -> None:
        self._eviction, self.kept = eviction, eviction.layers[layer]
        super().__init__(layer, pools, None, reader)

    @property
    def length(self) -> int:
        """Tokens seen per row."""
        return self.kept.seen

    @length.setter
    def length(self, tokens: int) -> None:
        if tokens < self.kept.seen:
            self.kept.crop(tokens)

    def __repr__(self) -> str:
        return f"EvictingLayer(seen={self.length}, held={self.kept.held}, budget={self.kept.budget})"

    def _place(self, device: torch.device) -> Place:
        return Place(device, None, self._layer)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.kept.begin(self.pool)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._reader.reads_pages():
            raise RuntimeError(
                "a cache that evicts met an attention that does not know which tokens are held: the model was "
                "restored, or the cache unpickled. Nothing was changed; make a new cache."
            )
        return super().update(key_states, value_states, *args, **kwargs)

    def append(self, rows: int, count: int) -> tuple[Pages, torch.Tensor]:
        self._extend(rows, count)
        return self._pages(), self._slots

    def _extend(self, rows: int, count: int) -> None:
        self.pool.check_rows(rows)
        kept = self.kept
        if self._layer == 0:
            self._eviction.settle(coming=1 if count == 1 else 0)
        self._check_room(count)
        if self._replaces(kept, count):
            self._slots = kept.replace()
        else:
            if count > 1:
                kept.sort()
            self._slots = kept.append(count)

    def _replaces(self, kept: Kept, count: int) -> bool:
        """Whether the next `count` tokens take the place of others in that layer."""
        return count == 1 and kept.is_full and not self.record_past

    def _check_room(self, count: int) -> None:
        """Raise CacheFullError if any layer that is still to come could not take `count` tokens."""
        if self._pools.max_pages is None:
            return
        for other in self._eviction.layers[self._layer :]:
            if other.pool is not None and other.pool.num_rows and other.seen == self.kept.seen:
                # a token in another's place may need copies of all pages that rows share
                replaces = self._replaces(other, count)
                other.pool.check(*((0, other.held) if replaces else (other.held, other.held + count)), False)

    def _write(self, keys: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> None:
        flat = self.pool.storages[self._layer].flatten(0, 1)
        keys, values = keys.transpose(1, 2).flatten(2), values.transpose(1, 2).flatten(2)
        flat.index_copy_(0, self._slots, self.format.encode(keys, values).flatten(0, 1))

    def _pages(self, fresh: tuple[torch.Tensor, torch.Tensor] | None = None) -> KeptPages:
        storage = self.pool.storages[self._layer]
        return KeptPages(self.pool, storage, self.kept.held, self.format, fresh, self.kept, self._eviction)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0  # attention narrows the mask to what is held

    def activate_past_recording(self) -> None:
        """Forget nothing until the next `crop`."""
        self.record_past = self._eviction.recording = True

    def _check_crop(self, length: int) -> None:
        if self.is_initialized and (reason := self.kept.why_not_crop(length)) is not None:
            raise RuntimeError(
                f"{reason}. Call `cache.activate_past_recording()` before the tokens that may be taken back, or take "
                f"back fewer."
            )

    def _shorten(self, length: int) -> None:
        self.length = length

    def _close(self) -> None:
        self.kept.pool = None
        self.kept.clear()
        super()._close()

    def _select(self, rows: Sequence[int]) -> None:
        super()._select(rows)
        if self.is_initialized:
            self.kept.select(rows)


class EvictingCache(PagedCache):
    """A `PagedCache` that holds no more than a policy's budget; make one with `paged_cache(model, eviction=...)`."""

    policy: Policy

    def __init__(self, pools: Pools, readers: Sequence[Any], policy: Policy) -> None:
        self.policy = policy
        self._eviction = Eviction(policy, len(readers), pools.lengths)
        super().__init__(pools, [None] * len(readers), readers)

    def _layer(self, number: int, window: int | None, reader: Reader) -> PagedLayer:
        return EvictingLayer(number, self._pools, self._eviction, reader)

    def settle(self) -> None:
        """Forget what is beyond the budgets now, and not at the next call."""
        self._eviction.settle()

    @property
    def kept(self) -> list[Kept]:
        """What each layer holds."""
        return self._eviction.layers

    def budgets(self) -> list[int]:
        """Tokens each layer may hold per row. If that was not decided yet, it is now. ValueError if nothing is held."""
        if not self.length:
            raise ValueError("a cache that holds nothing has not divided its budget among layers yet")
        return self._eviction.budgets()

    def reserve(self, stop: int, ahead: int = 0) -> int:
        """Pages for the tokens before `stop`, as far as budgets let them come on top of others, and for `ahead` more if
        they are to be had; says up to which token."""
        try:
            self._reserve(stop + ahead)
            return stop + ahead
        except CacheFullError:
            self._reserve(stop)
            return stop

    def most_at_once(self, rows: int, most: int) -> int:
        """How many tokens per row, up to `most`, a call may bring: what `max_pages` leaves beside what is held, but a
        page at least."""
        if self._pools.max_pages is None:
            return most
        room = self._pools.max_pages // rows * self.page_size - max(self.tokens_held)
        return max(self.page_size, min(most, room))

    def _reserve(self, stop: int) -> None:
        for kept, budget in zip(self.kept, self.budgets(), strict=True):
            assert kept.pool is not None
            kept.pool.extend(0, max(kept.held, min(budget, kept.held + stop - kept.seen)))

    def begin_padding(self, starts: torch.Tensor) -> None:
        """The first starts [B] int32 tokens of each row are padding. For a cache that holds nothing, once opened."""
        for kept in self._eviction.layers:
            kept.first = starts

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self._eviction.recording:
            self._eviction.recording = False
            self._eviction.settle()
            self._eviction.recording = True

    def _select(self, rows: Sequence[int]) -> None:
        super()._select(rows)
        for kept in self._eviction.layers:
            if kept.pool is not None:
                kept.select(rows)

    @property
    def tokens_held(self) -> list[int]:
        """Of each row, by layer."""
        return [kept.held for kept in self._eviction.layers]

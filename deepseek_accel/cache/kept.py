"""What one layer of an evicting cache still holds: which tokens, what they scored, and how to make room.

Entries are stored as they were written, keys rotated by their true positions: forgetting moves no position. Attention
over a set of keys does not depend on their order, so a new token may take the place of a forgotten one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..ops.claim import survivors, victim
from .eviction import DECAY, Policy, reach_profile
from .pages import PagePool

OBSERVED = 64
"""How many of the last queries of a call are watched: the end of a prompt says what its continuation will look at."""


class Kept:
    """Every row of a layer holds equally many tokens; which ones, each row decides for itself."""

    def __init__(self, layer: int, policy: Policy, held: dict[int, int]) -> None:
        self.layer, self.policy, self._held = layer, policy, held
        self.pool: PagePool | None = None
        self.clear()

    def clear(self) -> None:
        self.held, self.seen = 0, 0
        self.budget: int | None = None
        """Tokens this layer may hold; None until the cache is too full for the first time."""
        self.positions = torch.empty(0, 0, dtype=torch.int32)
        """[B, room]: where in its sequence each held entry's token stands."""
        self.scores = torch.empty(0, 0)
        """[B, room] fp32: what each has scored since it came."""
        self.first: torch.Tensor | int = 0
        """[B] int32: how many of a row's first tokens are padding, 0 for none in any row."""
        self.profile: torch.Tensor | None = None
        """[bins]: attention by distance, of the last call of several tokens."""
        self.in_order = True
        """Whether entries lie in the order of their positions."""

    @property
    def held(self) -> int:
        """Entries per row; the first so many of `positions` and `scores` count."""
        return self._held[self.layer]

    @held.setter
    def held(self, tokens: int) -> None:
        self._held[self.layer] = tokens

    @property
    def is_full(self) -> bool:
        return self.budget is not None and self.held >= self.budget

    def begin(self, pool: PagePool) -> None:
        self.pool = pool
        self._room(0)

    def append(self, count: int) -> torch.Tensor:
        """Take the next `count` tokens in, behind what is held. Their slots [B * count] in the flat storage."""
        assert self.pool is not None
        start, stop = self.held, self.held + count
        self.pool.extend(start, stop)
        with torch.inference_mode(False), torch.no_grad():
            self._room(stop)
            tokens = torch.arange(self.seen, self.seen + count, dtype=torch.int32, device=self.pool.device)
            self.positions[:, start:stop] = tokens
            self.scores[:, start:stop] = 0
        self.held, self.seen = stop, self.seen + count
        if count > 1:
            self.profile = None
        return self.pool.slots(start, stop)

    def replace(self) -> torch.Tensor:
        """Take the next token in, in place of the one that each row can spare best. Its slots [B]."""
        assert self.pool is not None
        self.pool.extend(0, self.held)  # no other row's page may be written
        with torch.inference_mode(False), torch.no_grad():
            positions, scores = self.positions[:, : self.held], self.scores[:, : self.held]
            index = victim(scores, positions, self.first, self.policy.sinks, self._newest(self.seen + 1))
            positions.scatter_(1, index[:, None], self.seen)
            scores.scatter_(1, index[:, None], 0.0)
        self.seen, self.in_order = self.seen + 1, False
        return self._slots(index[:, None])

    def follow(self, steps: int, positions: torch.Tensor, scores: torch.Tensor) -> None:
        """`append` or `replace` has happened `steps` times elsewhere, which left positions and scores [B, more]."""
        assert self.budget is not None
        held = max(self.held, min(self.budget, self.held + steps))
        with torch.inference_mode(False), torch.no_grad():
            self._room(held)
            self.positions[:, :held] = positions[:, :held]
            self.scores[:, :held] = scores[:, :held]
        self.in_order = self.in_order and self.held + steps <= held
        self.held, self.seen = held, self.seen + steps

    def shrink(self) -> None:
        """Forget what is beyond the budget, and give its pages back."""
        if self.budget is not None and self.held > self.budget:
            positions, scores = self.positions[:, : self.held], self.scores[:, : self.held]
            newest = self._newest(self.seen)
            self.keep(survivors(scores, positions, self.first, self.policy.sinks, newest, self.budget))

    def sort(self) -> None:
        """Bring entries into the order of their positions."""
        if not self.in_order:
            self.keep(self.positions[:, : self.held].argsort(1))

    @torch.no_grad()
    def keep(self, indices: torch.Tensor) -> None:
        """Hold the entries `indices` [B, count] int64 only, in this order."""
        assert self.pool is not None
        count, pool = indices.shape[1], self.pool
        with torch.inference_mode(False):
            indices = indices.clone()
            flat = pool.storages[self.layer].flatten(0, 1)
            entries = flat.index_select(0, self._slots(indices))
            pool.extend(0, count)
            flat = pool.storages[self.layer].flatten(0, 1)
            flat.index_copy_(0, pool.slots(0, count), entries)
            self.positions[:, :count] = self.positions.gather(1, indices)
            self.scores[:, :count] = self.scores.gather(1, indices)
        self.held, self.in_order = count, True
        pool.trim(count)

    def watch(self, mass: torch.Tensor, score: torch.Tensor, queries: int, rows: slice = slice(None)) -> None:
        """Add what the last `queries` tokens of `rows` attended to, as `ops.key_mass` gives it [b, held]."""
        with torch.inference_mode(False), torch.no_grad():
            scores = self.scores[rows, : self.held]
            scores.mul_(DECAY**queries).add_(score)
            if queries > 1:
                assert self.pool is not None
                size = self.pool.page_size
                ages = self.seen - 1 - self.positions[rows, : self.held]
                found = reach_profile(mass, ages, size, -(-self.seen // size))
                self.profile = found if self.profile is None else self.profile + found

    def why_not_crop(self, length: int) -> str | None:
        """Why the tokens from `length` on cannot be taken back, or None."""
        if length >= self.seen or self.held == 0 or length == 0:
            return None
        removed = (self.positions[:, : self.held] >= length).sum(1)
        if bool((removed == self.seen - length).all()):
            return None
        return f"layer {self.layer} has forgotten some of the {self.seen - length} tokens that were to be taken back"

    def crop(self, length: int) -> None:
        """Take back the tokens from `length` on, all of which must be held."""
        if length <= 0:
            held, self.pool = self.pool, None
            self.clear()
            if held is not None:
                self.begin(held)
        elif length < self.seen:
            order = self.positions[:, : self.held].argsort(1)
            count = max(0, self.held - (self.seen - length))
            self.seen = length
            self.keep(order[:, :count])

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of the old row rows[i]."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.positions.device)
        self.positions, self.scores = self.positions[index], self.scores[index]
        if isinstance(self.first, torch.Tensor):
            self.first = self.first[index]

    def index_of_first(self) -> torch.Tensor | None:
        """[B] int32: how many entries are padding, which come first if entries are `in_order`; None for none at all."""
        if not isinstance(self.first, torch.Tensor):
            return None
        return (self.positions[:, : self.held] < self.first[:, None]).sum(1, dtype=torch.int32)

    def _newest(self, seen: int) -> int:
        """The position from which on tokens stay."""
        budget = self.policy.budget if self.budget is None else self.budget
        return seen - self.policy.protected(budget)

    def _slots(self, indices: torch.Tensor) -> torch.Tensor:
        """[B * n] int64: where in the flat storage the entries `indices` [B, n] lie."""
        assert self.pool is not None
        size = self.pool.page_size
        pages = self.pool.block_table().long().gather(1, indices // size)
        return (pages * size + indices % size).flatten()

    def _room(self, tokens: int) -> None:
        assert self.pool is not None
        rows, device = self.pool.num_rows, self.pool.device
        have = self.positions.shape[1]
        if self.positions.shape[0] == rows and tokens <= have and self.positions.device == device:
            return
        room = max(tokens, have + have // 2, 64)

        def grown(old: Any) -> torch.Tensor:
            new = torch.zeros(rows, room, dtype=old.dtype, device=device)
            if self.held:
                new[:, : self.held] = old[:, : self.held]
            return new

        self.positions, self.scores = grown(self.positions), grown(self.scores)

"""Rows of one paged cache that hold different numbers of tokens while a call runs.

The pages know one length for all rows. During a speculative call every row has its own: the block table and the slots
are per row anyway, and the attention takes a length per row. The cache's own length stays what it was when the call
began, so that nothing in reach of the rows is given back; `commit` at the end says what stands.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..ops.choice import uses_triton
from .reach import Reach
from .step import Place, Stepper

AHEAD = 64
"""Tokens per row for which pages are taken at once."""


class RaggedRows:
    """Adds tokens to rows of a cache and runs them through a model, each row at its own end.

    lengths: tokens that each row holds; the caller moves them, forwards when tokens stand, and never below what the
    cache held at first. shifts [B] int64: cache index minus position id, by row. starts: first key each row sees.
    """

    def __init__(
        self, stepper: Stepper, cache: Any, shifts: torch.Tensor, starts: list[int] | None = None
    ) -> None:
        self.stepper, self.cache = stepper, cache
        device = stepper.model.device
        self.lengths = [cache.length] * len(shifts)
        self.shifts = shifts.to(device)
        self._unshifted = not bool(self.shifts.any())
        self._starts = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
        self._reserved = cache.length
        self._kernels = uses_triton(device) and stepper.model.dtype != torch.float64

    def reserve(self, stop: int) -> None:
        """Make the tokens before `stop` writable in every row. Raises CacheFullError, having changed nothing."""
        if stop <= self._reserved:
            return
        first, self._reserved = self._reserved, self.cache.reserve(stop, AHEAD)
        if not self._kernels and len(self.lengths) > 1:
            # dense attention multiplies what a shorter row has not written by 0, and 0 * NaN is not 0
            slots = self.cache.pool.slots(first, self._reserved)
            for storage in self.cache.pool.storages.values():
                storage.flatten(0, 1).index_fill_(0, slots, 0)

    def run(
        self, given: torch.Tensor, counts: list[int], stepper: Stepper | None = None, sees: int | None = None
    ) -> torch.Tensor:
        """given [B, S] tokens, or [B, S, D] embedded ones: hidden states [B, S, D] after the last layer.

        The last counts[r] of the columns of row r are its new tokens; what lies before them is computed and ignored.
        Their entries are written behind the row's own. stepper: what runs instead of the rows' own. sees: how many
        keys at most a token sees, itself included.
        Raises CacheFullError before anything is written.
        """
        batch, size = given.shape[:2]
        longest = max(length + count for length, count in zip(self.lengths, counts, strict=True))
        self.reserve(longest)
        place = self._place(batch, size, counts, longest, sees)
        stepper = self.stepper if stepper is None else stepper
        model = stepper.model
        x = F.embedding(given.flatten(), model.embedding) if given.dim() == 2 else given.flatten(0, 1)
        return stepper.layers(x, self.cache.pages(longest), place).view(batch, size, -1)

    def _place(self, batch: int, size: int, counts: list[int], longest: int, sees: int | None) -> Place:
        device, pool = self.stepper.model.device, self.cache.pool
        page_size, pages = pool.page_size, pool.table.rows
        index, slots, ends = [], [], []
        for r, (held, count) in enumerate(zip(self.lengths, counts, strict=True)):
            # what fills a row up repeats its first new token, and in a row without one its last key
            places = [held - (count == 0)] * (size - count) + list(range(held, held + count))
            index += places
            new = [pages[r][place // page_size] * page_size + place % page_size for place in places[size - count :]]
            slots += [-1] * (size - count) + new
            ends.append(held + count)
        at, slot = torch.tensor([index, slots]).to(device)
        at = at.view(batch, size)
        positions = at if self._unshifted else (at - self.shifts[:, None]).clamp_min(0)
        rotation = self.stepper.rotation(self.stepper.model.embedding[:1, None], positions)
        starts, lengths = self._starts, torch.tensor(ends, dtype=torch.int32).to(device)
        if sees is not None:
            window = (lengths - sees).clamp_min(0)
            starts = window if starts is None else torch.maximum(starts, window)
        table = pool.block_table()
        if self._kernels or (size == 1 and starts is None and len(set(ends)) == 1 and 0 not in counts):
            return Place((batch, size), rotation, slot, Reach(table, lengths, longest, size > 1, starts))
        mask = (torch.arange(longest, device=device) <= at[..., None])[:, None]
        if starts is not None:
            mask = mask & (torch.arange(longest, device=device) >= starts[:, None, None, None])
        return Place((batch, size), rotation, slot, Reach(table, lengths, longest, False, starts, mask))

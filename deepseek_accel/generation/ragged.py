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
        table, page_size = pool.block_table(), pool.page_size
        held, fresh = torch.tensor([self.lengths, counts], device=device)[..., None]
        column = torch.arange(size, device=device) - (size - fresh)
        # what fills a row up repeats its first new token, and in a row without one its last key
        index = held + column.clamp_min(0) - (fresh == 0).long()
        at = table.gather(1, (index // page_size).clamp_max(table.shape[1] - 1)).long() * page_size + index % page_size
        slots = torch.where(column >= 0, at, -1).flatten()
        rotation = self.stepper.rotation(self.stepper.model.embedding[:1, None], (index - self.shifts[:, None]).clamp_min(0))
        starts, lengths = self._starts, (held + fresh).view(-1).int()
        if sees is not None:
            window = (lengths - sees).clamp_min(0)
            starts = window if starts is None else torch.maximum(starts, window)
        mask = None
        if not self._kernels and (size > 1 or batch > 1 or starts is not None):
            key = torch.arange(longest, device=device)
            mask = (key <= index[..., None])[:, None]
            if starts is not None:
                mask = mask & (key >= starts[:, None, None, None])
        reach = Reach(table, lengths, longest, size > 1, starts, mask)
        if self._kernels:
            reach = Reach(table, lengths, longest, size > 1, starts)
        return Place((batch, size), rotation, slots, reach)

"""Rows of one paged cache that hold different numbers of tokens while a call runs.

The pages know one length for all rows. During a speculative call every row has its own: the block table and the slots
are per row anyway, and the attention takes a length per row. The cache's own length stays what it was when the call
began, so that nothing in reach of the rows is given back; `commit` at the end says what stands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..cache.entries import Entries
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

    def __init__(self, stepper: Stepper, cache: Any, shifts: torch.Tensor, starts: list[int] | None = None) -> None:
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
        self,
        given: torch.Tensor,
        counts: list[int],
        rows: list[int],
        stepper: Stepper | None = None,
        sees: int | None = None,
    ) -> torch.Tensor:
        """given [R, S] tokens, or [R, S, D] embedded ones, of these rows: hidden states [R, S, D] after the last layer.

        The last counts[i] of the columns, at least one, are new tokens of row rows[i]; what lies before them is
        computed and ignored. Their entries are written behind the row's own. stepper: what runs instead of the rows'
        own. sees: how many keys at most a token sees, itself included.
        Raises CacheFullError before anything is written.
        """
        size = given.shape[1]
        longest = max(self.lengths[r] + count for r, count in zip(rows, counts, strict=True))
        self.reserve(longest)
        stepper = self.stepper if stepper is None else stepper
        table = self.cache.pool.block_table()
        pages = self.cache.pages(longest)
        if len(rows) < len(self.lengths):
            table = table[torch.tensor(rows, device=table.device)]
            pages = [SomeRows(held.storage, held.format, table, longest) for held in pages]
        place = self._place(size, counts, rows, longest, table, sees)
        x = F.embedding(given.flatten(), stepper.model.embedding) if given.dim() == 2 else given.flatten(0, 1)
        return stepper.layers(x, pages, place).view(len(rows), size, -1)

    def grow(self, rows: list[int], counts: list[int]) -> None:
        """So many more tokens of these rows stand."""
        for r, count in zip(rows, counts, strict=True):
            self.lengths[r] += count

    def _place(
        self, size: int, counts: list[int], rows: list[int], longest: int, table: torch.Tensor, sees: int | None
    ) -> Place:
        device, pool = self.stepper.model.device, self.cache.pool
        page_size, pages = pool.page_size, pool.table.rows
        index, slots, ends = [], [], []
        for r, count in zip(rows, counts, strict=True):
            held = self.lengths[r]
            places = [held] * (size - count) + list(range(held, held + count))  # filled up with the first new token
            index += places
            new = [pages[r][place // page_size] * page_size + place % page_size for place in places[size - count :]]
            slots += [-1] * (size - count) + new
            ends.append(held + count)
        which = slice(None) if len(rows) == len(self.lengths) else torch.tensor(rows, device=device)
        at, slot = torch.tensor([index, slots]).to(device)
        at = at.view(len(rows), size)
        positions = at if self._unshifted else (at - self.shifts[which, None]).clamp_min(0)
        rotation = self.stepper.rotation(self.stepper.model.embedding[:1, None], positions)
        starts, lengths = self._starts, torch.tensor(ends, dtype=torch.int32).to(device)
        starts = None if starts is None else starts[which]
        if sees is not None:
            window = (lengths - sees).clamp_min(0)
            starts = window if starts is None else torch.maximum(starts, window)
        if self._kernels or (size == 1 and starts is None and len(set(ends)) == 1):
            return Place((len(rows), size), rotation, slot, Reach(table, lengths, longest, size > 1, starts))
        key = torch.arange(longest, device=device)
        mask = (key <= at[..., None])[:, None]
        if starts is not None:
            mask = mask & (key >= starts[:, None, None, None])
        return Place((len(rows), size), rotation, slot, Reach(table, lengths, longest, False, starts, mask))


class SomeRows(NamedTuple):
    """A layer's pages, of some rows."""

    storage: torch.Tensor
    format: Entries
    table: torch.Tensor
    length: int

    @property
    def fp8(self) -> str | None:
        return self.format.fp8

    @property
    def address(self) -> None:
        return None

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, heads, T, size], as `Pages.gather`."""
        heads, key_dim, value_dim = self.format.num_heads, self.format.key_dim, self.format.value_dim
        entries = self.format.decode(self.storage[self.table.long()].flatten(1, 2)[:, : self.length])
        keys, values = entries.split([heads * key_dim, heads * value_dim], -1)
        return keys.unflatten(-1, (heads, key_dim)).transpose(1, 2), values.unflatten(-1, (heads, -1)).transpose(1, 2)

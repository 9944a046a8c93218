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
from ..ops.key_mass import KeyScores
from .loop_steps import AHEAD
from .ragged_graphs import RaggedGraphs
from .reach import Reach
from .step import Place, Stepper, head_step


class RaggedRows:
    """Adds tokens to rows of a cache and runs them through a model, each row at its own end.

    lengths: tokens that each row holds; the caller moves them, forwards when tokens stand, and never below what the
    cache held at first. shifts [B] int64: cache index minus position id, by row. starts: first key each row sees.
    """

    def __init__(self, stepper: Stepper, cache: Any, shifts: torch.Tensor, starts: list[int] | None = None) -> None:
        self.stepper, self.cache = stepper, cache
        device = stepper.model.device
        self.lengths = [cache.length] * len(shifts)
        self.shifts = shifts
        self._shift: list[int] = shifts.tolist()
        self._starts = starts or [0] * len(shifts)
        self._reserved = cache.length
        self.cheap: tuple[Stepper, int | None] = stepper, None
        """What runs cheaply on the same rows, and how many keys a token of it sees."""
        self.graphs: dict[bool, RaggedGraphs] = {}
        """That hold the runs, cheap or not, if any do."""
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
        self, given: torch.Tensor, counts: list[int], rows: list[int], *, every: bool = False, cheap: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """given [R, S] tokens, or [R, S, D] embedded ones, of these rows: hidden states [R, S, D] after the last layer,
        and the logits [R, S or 1, vocabulary] of `every` one, or the last of each row.

        The last counts[i] of the columns, at least one, are new tokens of row rows[i]; what lies before them is
        computed and ignored. Their entries are written behind the row's own. cheap: run `self.cheap` instead.
        What is returned stands until the next run. Raises CacheFullError before anything is written.
        """
        size = given.shape[1]
        longest = max(self.lengths[r] + count for r, count in zip(rows, counts, strict=True))
        self.reserve(longest)
        stepper, sees = self.cheap if cheap else (self.stepper, None)
        index, slots, ends = self._places(size, counts, rows)
        pages = self.cache.pages(longest)
        graphs = self.graphs.get(cheap)
        if graphs is not None:
            positions = [[max(0, i - self._shift[r]) for i in row] for r, row in zip(rows, index, strict=True)]
            firsts = [self._starts[r] for r in rows]
            if sees is not None:
                firsts = [max(first, end - sees) for first, end in zip(firsts, ends, strict=True)]
            found = graphs.run(given, positions, slots, ends, firsts, rows, pages, every)
            if found is not None:
                return found
        table = self.cache.pool.block_table()
        if len(rows) < len(self.lengths):
            table = table[torch.tensor(rows, device=table.device)]
            pages = [SomeRows(held.storage, held.format, table, longest) for held in pages]
        place = self._place(index, slots, ends, rows, table, sees)
        model = stepper.model
        x = F.embedding(given.flatten(), model.embedding) if given.dim() == 2 else given.flatten(0, 1)
        x = stepper.layers(x, pages, [place] * len(pages))
        hidden = x.view(len(rows), size, -1)
        logits = head_step(model, x if every else hidden[:, -1].contiguous())
        return hidden, logits.view(len(rows), -1, logits.shape[-1])

    def grow(self, rows: list[int], counts: list[int]) -> None:
        """So many more tokens of these rows stand."""
        for r, count in zip(rows, counts, strict=True):
            self.lengths[r] += count

    def _places(
        self, size: int, counts: list[int], rows: list[int]
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Cache indices and slots of each row's columns, and how many keys it has then."""
        page_size, pages = self.cache.page_size, self.cache.pool.table.rows
        index, slots, ends = [], [], []
        for r, count in zip(rows, counts, strict=True):
            held = self.lengths[r]
            new = range(held, held + count)
            index.append([held] * (size - count) + list(new))  # filled up with the first new token
            at = [pages[r][i // page_size] * page_size + i % page_size for i in new]
            slots.append([-1] * (size - count) + at)
            ends.append(held + count)
        return index, slots, ends

    def _place(
        self, index: list[list[int]], slots: list[list[int]], ends: list[int], rows: list[int], table: torch.Tensor,
        sees: int | None,
    ) -> Place:  # fmt: skip
        device, longest, size = self.stepper.model.device, max(ends), len(index[0])
        at, slot = torch.tensor([index, slots]).to(device)
        positions = at
        if any(self._shift):
            positions = (at - torch.tensor([self._shift[r] for r in rows], device=device)[:, None]).clamp_min(0)
        rotation = self.stepper.rotation(self.stepper.model.embedding[:1, None], positions)
        firsts = [self._starts[r] for r in rows]
        if sees is not None:
            firsts = [max(first, end - sees) for first, end in zip(firsts, ends, strict=True)]
        starts = torch.tensor(firsts, dtype=torch.int32).to(device) if any(firsts) else None
        lengths, shape = torch.tensor(ends, dtype=torch.int32).to(device), (len(rows), size)
        if self._kernels or (size == 1 and starts is None and len(set(ends)) == 1):
            return Place(shape, rotation, slot.view(-1), Reach(table, lengths, longest, size > 1, starts))
        key = torch.arange(longest, device=device)
        mask = (key <= at[..., None])[:, None]
        if starts is not None:
            mask = mask & (key >= starts[:, None, None, None])
        return Place(shape, rotation, slot.view(-1), Reach(table, lengths, longest, False, starts, mask))


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

    @property
    def watches(self) -> bool:
        return False

    def watch(self, query: torch.Tensor, keys: torch.Tensor, scale: float, causal: bool, mask: Any) -> None:
        """Nothing: the cache keeps all tokens."""

    def key_scores(self) -> KeyScores:
        raise NotImplementedError("the cache keeps all tokens")

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [R, heads, T, size], as `Pages.gather`."""
        heads, key_dim, value_dim = self.format.num_heads, self.format.key_dim, self.format.value_dim
        entries = self.format.decode(self.storage[self.table.long()].flatten(1, 2)[:, : self.length])
        keys, values = entries.split([heads * key_dim, heads * value_dim], -1)
        return keys.unflatten(-1, (heads, key_dim)).transpose(1, 2), values.unflatten(-1, (heads, -1)).transpose(1, 2)

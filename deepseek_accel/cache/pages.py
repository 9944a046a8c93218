"""Which pages hold which part of every sequence, and the memory of those pages.

A page holds `page_size` consecutive tokens of one sequence, for every layer that shares the table. The host decides
(`PageTable`), the device holds (`PagePool`). Fixed-size pages cannot fragment: any free page fits any need.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CacheFullError, PlanError
from .allocator import PageAllocator


class PageTable:
    """Page ids of every row, with reference counts: rows that share a history share its pages until one writes.

    page_size: tokens per page, a power of two >= 16. max_pages: most pages in use at once, or None for no limit.
    allocator: where the pages come from, if others hold pages of it too; its `max_pages` then counts.
    """

    def __init__(self, page_size: int, max_pages: int | None = None, allocator: PageAllocator | None = None) -> None:
        check_page_options(page_size, max_pages)
        self.page_size, self.is_alone = page_size, allocator is None
        self.allocator = PageAllocator(max_pages) if allocator is None else allocator
        self.rows: list[list[int]] = []
        self.dropped = 0
        """Leading pages given back because no later token can see them; the same number for every row."""
        self.version = 0
        """Changes with every change of `rows`."""

    @property
    def max_pages(self) -> int | None:
        return self.allocator.max_pages

    @property
    def pages_in_use(self) -> int:
        """Pages that the rows hold."""
        return self.allocator.in_use if self.is_alone else len({page for row in self.rows for page in row})

    @property
    def high_water(self) -> int:
        """One more than the largest page id ever handed out: what the memory must hold."""
        return self.allocator.high_water

    def high_water_after(self, start: int, stop: int) -> int:
        """What `high_water` will be after `extend(start, stop)`."""
        return self.allocator.high_water_after(self.missing(start, stop))

    def references(self, page: int) -> int:
        return self.allocator.references[page]

    def start(self, num_rows: int) -> None:
        """Begin `num_rows` empty rows. Everything held before is given back."""
        self.trim(0)
        self.dropped = 0
        self.rows[:] = [[] for _ in range(num_rows)]
        self.version += 1

    def missing(self, start: int, stop: int) -> int:
        """Pages that `extend(start, stop)` would take from the free list."""
        wanted = self._pages_for(stop)
        fresh = sum(max(0, wanted - len(row)) for row in self.rows)
        return fresh + self._copies(start, stop)

    def check(self, start: int, stop: int) -> None:
        """Raise CacheFullError if `extend(start, stop)` would need more pages than allowed. Changes nothing."""
        if self.max_pages is None:
            return
        missing, used = self.missing(start, stop), self.allocator.in_use
        if used + missing > self.max_pages:
            own = self.pages_in_use
            others = f"; other caches of this model hold {used - own:,}" if used > own else ""
            raise CacheFullError(
                f"{len(self.rows)} sequences of {stop:,} tokens need {own + missing:,} pages of "
                f"{self.page_size} tokens, and max_pages is {self.max_pages:,}{others}. Raise max_pages, leave it None "
                "so that the pool grows, or pass fewer or shorter sequences. The cache is unchanged."
            )

    def extend(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Give every row pages for the tokens before `stop`, and sole ownership of those that hold [start, stop).

        Returns (source, copy) page pairs whose contents the caller must copy before writing.
        Raises CacheFullError before anything changes.
        """
        self.check(start, stop)
        wanted, copies = self._pages_for(stop), []
        shared = self._copies(start, stop)
        for row in self.rows:
            for i in self._written(row, start, stop) if shared else ():
                page = row[i]
                if self.allocator.references[page] > 1:
                    row[i] = self.allocator.take()
                    self.allocator.references[page] -= 1
                    copies.append((page, row[i]))
            if len(row) < wanted:
                row += [self.allocator.take() for _ in range(wanted - len(row))]
                self.version += 1
        self.version += bool(copies)
        return copies

    def trim(self, length: int) -> None:
        """Give back every page that holds only tokens from `length` on."""
        keep = self._pages_for(length)
        for row in self.rows:
            self.allocator.release(row[keep:])
            if len(row) > keep:
                del row[keep:]
                self.version += 1

    def drop_before(self, position: int) -> None:
        """Give back every page that holds only tokens before `position`."""
        count = max(0, position) // self.page_size - self.dropped
        if count <= 0:
            return
        for row in self.rows:
            self.allocator.release(row[:count])
            del row[:count]
        self.dropped += count
        self.version += 1

    def select(self, indices: Sequence[int]) -> None:
        """Row i becomes a copy of the old row `indices[i]`; no page moves."""
        rows = [list(self.rows[i]) for i in indices]
        for row in rows:
            self.allocator.hold(row)
        for row in self.rows:
            self.allocator.release(row)
        self.rows[:] = rows
        self.version += 1

    def _pages_for(self, length: int) -> int:
        return max(0, -(-length // self.page_size) - self.dropped)

    def _written(self, row: list[int], start: int, stop: int) -> range:
        first = max(0, start // self.page_size - self.dropped)
        return range(first, min(len(row), self._pages_for(stop)) if stop > start else first)

    def _copies(self, start: int, stop: int) -> int:
        """How many rows need a page of their own before they write [start, stop): all that share one, but its last."""
        held = Counter(row[i] for row in self.rows for i in self._written(row, start, stop))
        return sum(count - (self.allocator.references[page] == count) for page, count in held.items())


def check_page_options(page_size: Any, max_pages: Any) -> None:
    """Raise PlanError unless the two are usable."""
    whole = isinstance(page_size, int) and not isinstance(page_size, bool)
    if not whole or page_size < 16 or page_size & (page_size - 1):
        raise PlanError(f"page_size must be a power of two of at least 16 tokens, got {page_size!r}")
    if max_pages is not None and (not isinstance(max_pages, int) or isinstance(max_pages, bool) or max_pages < 1):
        raise PlanError(f"max_pages must be a positive integer or None, got {max_pages!r}")


@dataclass
class _Derived:
    """What follows from a table, for its current version. Layers of one step share it."""

    version: int = -1
    block_table: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int32))
    first_page: int | None = None
    slots: tuple[tuple[int, int], torch.Tensor] | None = None
    lengths: tuple[int, torch.Tensor] | None = None
    starts: tuple[torch.Tensor, torch.Tensor] | None = None


class PagePool:
    """The pages of all layers that share one table, on one device.

    Each layer has its own storage [num_pages, page_size, width]; a page id means the same tokens in every storage.
    window: how many tokens a query sees, itself included, or None for all of them.
    """

    GROWTH = 1.5

    def __init__(
        self,
        table: PageTable,
        num_rows: int,
        device: torch.device,
        window: int | None,
        reserve_tokens: int,
        counters: Counter[str],
    ) -> None:
        self.table, self.device, self.window, self.counters = table, device, window, counters
        self.reserve_tokens = reserve_tokens
        self.storages: dict[int, torch.Tensor] = {}
        self._prepared: tuple[int, int] | None = None
        self._derived = _Derived()
        table.start(num_rows)

    @property
    def num_rows(self) -> int:
        return len(self.table.rows)

    @property
    def page_size(self) -> int:
        return self.table.page_size

    @property
    def offset(self) -> int:
        """Position of the first token still held."""
        return self.table.dropped * self.page_size

    def add_layer(self, layer: int, width: int, dtype: torch.dtype) -> None:
        """Make room for the tokens of `layer`, `width` elements of `dtype` each."""
        pages = max(self.table.high_water, self._reserved_pages())
        # outside of inference mode, so that pages filled in it can be written outside of it; entering costs 0.1 ms
        inside = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if inside else contextlib.nullcontext():
            self.storages[layer] = torch.empty(pages, self.page_size, width, dtype=dtype, device=self.device)

    def bytes_held(self) -> int:
        """Bytes of the pages in use."""
        per_page = sum(s.stride(0) * s.element_size() for s in self.storages.values())
        return per_page * self.table.pages_in_use

    def bytes_reserved(self) -> int:
        return sum(s.numel() * s.element_size() for s in self.storages.values())

    def offset_at(self, start: int, keep: bool) -> int:
        """The `offset` that a step starting at token `start` will see."""
        if self.window is None or keep:
            return self.offset
        return max(self.offset, (max(0, start - self.window + 1) // self.page_size) * self.page_size)

    def drop_unseen(self, start: int, keep: bool) -> None:
        """Give back the pages that no token from `start` on can see, unless a rollback may need them (`keep`)."""
        if self.window is not None and not keep:
            self.drop_before(start - self.window + 1)

    def check_rows(self, rows: int) -> None:
        if rows != self.num_rows:
            raise ValueError(
                f"this cache holds {self.num_rows} sequences, the new keys are of {rows}. "
                "Use a new cache, or call `cache.reset()` first."
            )

    def check(self, start: int, stop: int, keep: bool) -> None:
        """Raise CacheFullError if a step over [start, stop) would not fit after its drop. Changes nothing."""
        if self._prepared == (start, stop):
            return
        table, first = self.table, self.offset_at(start, keep)
        if first != self.offset:  # a page leaves the window: once in page_size steps
            table = copy.deepcopy(table)
            table.drop_before(first)
        table.check(start, stop)

    def extend(self, start: int, stop: int) -> None:
        """Make tokens [start, stop) writable in every layer. The other layers' calls in the same step cost nothing."""
        if self._prepared == (start, stop):
            return
        # memory first: were it to run out after the table has changed, the rows would point at pages never written
        self._grow(self.table.high_water_after(start, stop))
        for source, target in self.table.extend(start, stop):
            for storage in self.storages.values():
                storage[target].copy_(storage[source])
        self._prepared = (start, stop)
        self.counters["kv_cache: most pages in use"] = max(
            self.counters["kv_cache: most pages in use"], self.table.allocator.in_use
        )

    def trim(self, length: int) -> None:
        self.table.trim(length)
        self._prepared = None

    def drop_before(self, position: int) -> None:
        self.table.drop_before(position)

    def select(self, indices: Sequence[int]) -> None:
        self.table.select(indices)
        self._prepared = None

    def split(self, layer: int) -> PagePool:
        """Move the storage of `layer` to a pool of its own with the same rows, and return that pool."""
        pool = copy.copy(self)
        pool.table, pool.storages, pool._prepared = copy.deepcopy(self.table), {layer: self.storages.pop(layer)}, None
        pool._derived = _Derived()
        return pool

    def block_table(self) -> torch.Tensor:
        """[B, W] int32 page ids on the device; entries past a row's last page repeat page 0 and are never read."""
        if self._derived.version != self.table.version:
            rows = self.table.rows
            width = max((len(row) for row in rows), default=0)
            padded = [row + [0] * (width - len(row)) for row in rows]
            block_table = torch.tensor(padded, dtype=torch.int32).reshape(self.num_rows, width).to(self.device)
            single = rows[0] if len(rows) == 1 else []
            consecutive = bool(single) and single == list(range(single[0], single[0] + len(single)))
            self._derived = _Derived(self.table.version, block_table, single[0] if consecutive else None)
        return self._derived.block_table

    def run(self, start: int, stop: int) -> slice | None:
        """The physical token range of [start, stop) if there is one row and its pages are consecutive, else None."""
        self.block_table()
        if (first_page := self._derived.first_page) is None:
            return None
        base = first_page * self.page_size - self.offset
        return slice(base + start, base + stop)

    def slots(self, start: int, stop: int) -> torch.Tensor:
        """[B * (stop - start)] int64 physical token indices, row by row."""
        table, known = self.block_table(), self._derived.slots
        if known is None or known[0] != (start, stop):
            position = torch.arange(start - self.offset, stop - self.offset, device=self.device)
            pages = table[:, position // self.page_size].long()
            known = ((start, stop), (pages * self.page_size + position % self.page_size).flatten())
            self._derived.slots = known
        return known[1]

    def lengths(self, length: int) -> torch.Tensor:
        """[B] int32, all `length`."""
        if (known := self._derived.lengths) is None or known[0] != length:
            known = (length, torch.full((self.num_rows,), length, dtype=torch.int32, device=self.device))
            self._derived.lengths = known
        return known[1]

    def first_visible(self, mask: torch.Tensor) -> torch.Tensor:
        """[B] int32: the first key any query of the row sees under `mask` [B, 1, S, T] (bool, or added to scores)."""
        if (known := self._derived.starts) is None or known[0] is not mask:
            visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            starts = visible[:, 0].any(1).to(torch.uint8).argmax(-1).to(torch.int32)
            known = (mask, starts.expand(self.num_rows).contiguous())
            self._derived.starts = known
        return known[1]

    def _reserved_pages(self) -> int:
        pages = self.num_rows * -(-self.reserve_tokens // self.page_size)
        return pages if self.table.max_pages is None else min(pages, self.table.max_pages)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _grow(self, need: int) -> None:
        for layer, storage in self.storages.items():
            if need > len(storage):
                capacity = max(need, int(len(storage) * self.GROWTH))
                if self.table.max_pages is not None:
                    capacity = max(need, min(capacity, self.table.max_pages))
                grown = torch.empty(capacity, *storage.shape[1:], dtype=storage.dtype, device=storage.device)
                grown[: len(storage)].copy_(storage)
                self.storages[layer] = grown  # one layer at a time, so the peak is one storage above the total

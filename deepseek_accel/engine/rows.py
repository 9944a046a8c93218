"""The engine's rows on one pool of pages: who holds which page, what is kept for later requests, and the memory.

Every row has its own pages and its own length. To the parts of `generation/` that run tokens this is both a cache and
its pool: they ask for page size, storages, rows and block table.

All work of the engine is on one stream. So a page that is given back may be handed out at once: what was launched
before and still writes to it comes first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from ..cache.allocator import PageAllocator
from ..cache.entries import Entries
from ..cache.paged import Pages
from ..cache.prefix import KeptPages, chain
from ..generation.upload import upload

FIRST_PAGES = 64
"""So many pages are made at first, or `max_pages`. On a GPU more, since memory that pages grew out of is of little use
to others: `FIRST_TOKENS` for every row, in no more than one part in `FIRST_SHARE` of the memory that is free."""
FIRST_TOKENS = 1024
FIRST_SHARE = 20
GROWTH = 1.5
EVICT_AT_ONCE = 32
"""Kept pages that go together when pages are needed: looking for them takes as long as there are kept ones."""


class OutOfPages(Exception):
    """There are not enough pages, and no kept ones that could go. Nothing has changed."""


class Rows:
    """num_rows rows. entries: what the pages of each layer hold per token. max_pages: most pages in use at once, or
    None to grow until memory ends. keeps: whether full pages stay for later requests. kept_bytes: how much of them;
    None for as much as there are pages."""

    policy = None
    length = 0

    def __init__(
        self, num_rows: int, device: torch.device, page_size: int, entries: Sequence[Entries], max_pages: int | None,
        *, keeps: bool, kept_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.device, self.page_size, self.entries, self.max_pages = device, page_size, list(entries), max_pages
        self.keeps = keeps
        self._most_kept = None if kept_bytes is None else kept_bytes // max(1, self.page_bytes)
        self.allocator = PageAllocator(max_pages)
        self.kept = KeptPages(self.allocator)
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.version = 0
        """Changes with every change of `rows`, and when storages move."""
        self.most_in_use = 0
        """Pages, at any one time."""
        self.evicted = 0
        """Kept pages that had to go."""
        self._memory_end: int | None = None
        self.root = b""
        """What the keys of prefixes begin with: the model's state."""
        self._table: tuple[int, torch.Tensor] = (-1, torch.empty(0, 0, dtype=torch.int32))
        self._first = self._first_pages()
        self.storages = {i: self._make(self._first, each) for i, each in enumerate(self.entries)}

    def _first_pages(self) -> int:
        pages = FIRST_PAGES
        if self.device.type == "cuda":
            share = torch.cuda.mem_get_info(self.device)[0] // FIRST_SHARE // self.page_bytes
            pages = max(pages, min(share, len(self.rows) * self.pages_for(FIRST_TOKENS)))
        return pages if self.max_pages is None else min(pages, self.max_pages)

    @property
    def page_bytes(self) -> int:
        """Of one page in all layers."""
        return sum(each.row_bytes for each in self.entries) * self.page_size

    def _make(self, pages: int, entries: Entries) -> torch.Tensor:
        # finite from the first on: on a CPU what is hidden is multiplied by 0, and 0 * NaN is not 0
        shape = (pages, self.page_size, entries.width)
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=entries.storage_dtype, device=self.device)

    # As a cache and its pool

    @property
    def pool(self) -> Rows:
        return self

    @property
    def table(self) -> Rows:
        return self

    @property
    def fp8(self) -> str | None:
        return self.entries[0].fp8

    def pages(self, length: int) -> list[Any]:
        """Each layer's pages of all rows, of which none holds more than `length` tokens."""
        pool: Any = self
        return [Pages(pool, self.storages[i], length, each, None) for i, each in enumerate(self.entries)]

    def block_table(self) -> torch.Tensor:
        """[rows, W] int32 on the device. Past its last page a row repeats its first one, so that nobody else's entries
        are in reach of it."""
        if self._table[0] != self.version:
            width = max((len(row) for row in self.rows), default=0)
            padded = [row + [row[0] if row else 0] * (width - len(row)) for row in self.rows]
            host = torch.tensor(padded, dtype=torch.int32).reshape(len(self.rows), width)
            self._table = (self.version, upload(host, self.device))
        return self._table[1]

    # Numbers

    @property
    def pages_in_use(self) -> int:
        """Held by rows or kept."""
        return self.allocator.in_use

    @property
    def pages_of_rows(self) -> int:
        return len({page for row in self.rows for page in row})

    @property
    def most_pages(self) -> int | None:
        """The limit that counts now, if there is one: `max_pages`, or what there was memory for."""
        return min((n for n in (self.max_pages, self._memory_end) if n is not None), default=None)

    @property
    def capacity(self) -> int:
        """Pages that there is memory for."""
        return min(len(storage) for storage in self.storages.values())

    def bytes_reserved(self) -> int:
        return sum(s.numel() * s.element_size() for s in self.storages.values())

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    # What rows hold

    def extend(self, row: int, tokens: int) -> None:
        """Give the row pages for so many tokens in all. Raises OutOfPages."""
        held = self.rows[row]
        missing = self.pages_for(tokens) - len(held)
        if missing <= 0:
            return
        self.make_room(missing)
        self._grow(self.allocator.high_water_after(missing))
        new = [self.allocator.take() for _ in range(missing)]
        if self.device.type == "cpu":  # as in `_make`; kernels do not read what was not written
            for storage in self.storages.values():
                storage[new] = 0
        held += new
        self.version += 1
        self.most_in_use = max(self.most_in_use, self.allocator.in_use)

    def make_room(self, count: int) -> None:
        """See to it that `count` more pages may be taken. Raises OutOfPages."""
        most = self.most_pages
        if most is None or (over := self.allocator.in_use + count - most) <= 0:
            return
        gone = self.kept.evict_unused(max(over, EVICT_AT_ONCE)) or self.kept.evict_unused(over)
        self.evicted += gone
        if not gone:
            raise OutOfPages()

    def give_back(self, row: int) -> None:
        self.allocator.release(self.rows[row])
        self.rows[row] = []
        self.version += 1

    def _grow(self, need: int) -> None:
        """Memory for `need` pages; raises OutOfPages if there is none, and the pages there are are all from then on."""
        capacity = self.capacity
        if need <= capacity:
            return
        wanted = max(need, int(capacity * GROWTH))
        if self.max_pages is not None:
            wanted = max(need, min(wanted, self.max_pages))
        for size in dict.fromkeys((wanted, need)):
            try:
                self._grow_to(size)
                return
            except torch.OutOfMemoryError:
                continue
        self._memory_end = self.capacity
        raise OutOfPages()

    def _grow_to(self, pages: int) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for layer, storage in self.storages.items():  # one at a time: the peak is one storage above the total
                if len(storage) < pages:
                    grown = storage.new_empty(pages, *storage.shape[1:])
                    grown[: len(storage)].copy_(storage)
                    grown[len(storage) :].zero_()
                    self.storages[layer] = grown

    def settle(self) -> None:
        """If no row holds pages, and there is memory for many more than may be kept: what is kept moves to memory of
        its size. Without a limit on what is kept all stays. If this raises the caller must drop these rows."""
        most = self._most_kept
        if most is None or any(self.rows) or self.capacity <= GROWTH * max(self._first, most):
            return
        order = torch.tensor(self.kept.renumber(), dtype=torch.int64, device=self.device)
        size = max(self._first, len(order))
        with torch.inference_mode(False), torch.no_grad():
            for layer, storage in self.storages.items():
                settled = self._make(size, self.entries[layer])
                torch.index_select(storage, 0, order, out=settled[: len(order)])
                self.storages[layer] = settled
        self._memory_end = None
        self.version += 1

    # What is kept

    def begin(self, state: bytes) -> None:
        """Requests from now on are of a model in this state. Prefixes of another one are forgotten."""
        root = hashlib.sha256(b"%d tokens, " % self.page_size + state).digest()
        if root != self.root:
            self.kept.clear()
            self.root = root
        self._memory_end = None

    def keys(self, tokens: Sequence[int], known: Sequence[bytes] = ()) -> list[bytes]:
        """Of the full pages of `tokens`; known: those of its first pages."""
        first = len(known) * self.page_size
        rest = torch.tensor(tokens[first : len(tokens) // self.page_size * self.page_size], dtype=torch.int64)
        root = known[-1] if known else self.root
        return [*known, *chain(root, rest.numpy().tobytes(), 8 * self.page_size)]

    def count_kept(self, keys: Sequence[bytes]) -> int:
        """How many pages, from the first on, are kept."""
        return self.kept.count(keys)

    def take_kept(self, row: int, keys: Sequence[bytes]) -> None:
        """The empty row begins with the kept pages of `keys`."""
        assert not self.rows[row]
        pages = self.kept.take(keys)
        self.allocator.hold(pages)
        self.rows[row] = pages
        self.version += 1

    def keep(self, row: int, keys: Sequence[bytes]) -> None:
        """Keep the first pages of the row, whose entries are complete, under these keys."""
        if not self.keeps:
            return
        pairs = zip(keys, self.rows[row], strict=False)
        self.kept.add({key: page for key, page in pairs if key not in self.kept})
        self.kept.touch(keys)
        if self._most_kept is not None:
            self.evicted += self.kept.evict_to(self._most_kept)

    def evict(self, count: int | None = None) -> int:
        """Forget `count` kept pages, or all; says how many went. Those that rows hold stay with them."""
        gone = self.kept.evict_to(0 if count is None else max(0, len(self.kept) - count))
        self.evicted += gone
        return gone

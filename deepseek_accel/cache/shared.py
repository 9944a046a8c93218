"""Pages that the caches of several `generate` calls and the kept prefixes hold together.

Every cache has a table of its own, a `SharedPool`, over one allocator. What two caches share is never written: a page
is kept only when it is full, and who writes to a page that others hold takes a copy first.

Storages that must grow move. A cache in another thread may be writing to the old ones at that moment, so it goes on
with them: it holds the only references to the pages it writes, and brings them along when it needs pages beyond the
end. On a GPU all calls use one stream (`SharedPages.enter`), which puts their work in order.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import torch

from .allocator import PageAllocator
from .pages import PagePool, PageTable
from .prefix import KeptPages


class Guest:
    """Stands for a call that uses the pages, see `SharedPages.enter`."""


class SharedPages:
    """The pages of one model on one device: ids, memory, and which ones are kept.

    page_size: tokens per page. max_pages: most pages in use at once, kept ones included; those go first. budget_bytes:
    how much may be kept.
    """

    def __init__(
        self,
        device: torch.device,
        page_size: int,
        max_pages: int | None,
        budget_bytes: int,
        counters: Counter[str],
    ) -> None:
        self.device, self.page_size, self.budget_bytes, self.counters = device, page_size, budget_bytes, counters
        self.allocator = PageAllocator(max_pages)
        self.kept = KeptPages(self.allocator)
        self.lock = threading.Lock()
        self.storages: dict[int, torch.Tensor] = {}
        """The newest of each layer [num_pages, page_size, width]. What is kept lies in these."""
        self.sizes: list[tuple[int, int, int]] = []
        """(heads, key size, value size) of an entry, by layer, once something is kept."""
        self.dtype: torch.dtype | None = None
        """Of the model's keys and values then; pages of FP8 do not tell."""
        self._live = 0
        self._given_back: deque[list[list[int]]] = deque()
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @property
    def page_bytes(self) -> int:
        """Of one page in all layers."""
        return sum(s[:1].numel() * s.element_size() for s in list(self.storages.values()))

    def kept_bytes(self) -> int:
        return len(self.kept) * self.page_bytes

    def bytes_reserved(self) -> int:
        return sum(s.numel() * s.element_size() for s in list(self.storages.values()))

    def num_caches(self) -> int:
        """Caches that are alive."""
        with self.lock:
            self.collect()
            return self._live

    def pages_in_use(self) -> int:
        with self.lock:
            self.collect()
            return self.allocator.in_use

    def enter(self) -> Guest | None:
        """Let a call in that will take pages and make a cache; until its guest dies it counts as a cache that is alive.

        None while a cache of another stream is alive: work on the current stream would not come after its work.
        """
        with self.lock:
            self.collect()
            if self._stream is not None:
                stream = torch.cuda.current_stream(self.device)
                if stream != self._stream:
                    if self._live:
                        return None
                    stream.wait_stream(self._stream)
                    for storage in self.storages.values():
                        storage.record_stream(stream)  # replaced on this stream, it must not be reused on the old one
                    self._stream = stream
            self._live += 1
        guest = Guest()
        weakref.finalize(guest, self._given_back.append, []).atexit = False
        return guest

    def serves(self) -> bool:
        """Whether the current stream is the one that these pages are used on."""
        return self._stream is None or torch.cuda.current_stream(self.device) == self._stream

    def pool(self, num_rows: int, reserve_tokens: int) -> SharedPool:
        """A table of `num_rows` empty rows for a new cache."""
        table = PageTable(self.page_size, allocator=self.allocator)
        pool = SharedPool(self, table, num_rows, reserve_tokens)
        # A dying cache may not wait for the lock: it dies wherever Python's collector happens to run.
        weakref.finalize(pool, self._given_back.append, table.rows).atexit = False
        with self.lock:
            self._live += 1
        return pool

    def take(self, rows: Sequence[Sequence[bytes]]) -> list[list[int]]:
        """The kept pages that every row begins with, equally many of each, held once more for the caller."""
        with self.lock:
            self.collect()
            count = min((self.kept.count(keys) for keys in rows), default=0)
            pages = [self.kept.take(keys[:count]) for keys in rows]
            for row in pages:
                self.allocator.hold(row)
            return pages

    def give_back(self, rows: Iterable[list[int]]) -> None:
        with self.lock:
            for row in rows:
                self.allocator.release(row)

    def keep(
        self, pool: SharedPool, rows: Sequence[Sequence[bytes]], sizes: list[tuple[int, int, int]], dtype: torch.dtype
    ) -> None:
        """Keep the first pages of each of pool's rows under the keys given for it; their entries are complete."""
        with self.lock:
            self.collect()
            new = {
                key: page
                for keys, pages in zip(rows, pool.table.rows, strict=True)
                for key, page in zip(keys, pages, strict=False)
                if key not in self.kept
            }
            if not pool.publish(list(new.values())):
                return
            self.sizes, self.dtype = sizes, dtype
            self.kept.add(new)
            for keys in rows:
                self.kept.touch(keys)
            self._evicted(self.kept.evict_to(self.budget_bytes // max(1, self.page_bytes)))

    def make_room(self, count: int) -> None:
        """Forget kept pages that nobody else holds if `max_pages` needs them for `count` more. The lock is held."""
        limit = self.allocator.max_pages
        if limit is not None and (over := self.allocator.in_use + count - limit) > 0:
            self._evicted(self.kept.evict_unused(over))

    def settle(self) -> None:
        """Between calls the memory is no more than may be kept: if it is, what is kept moves to memory of its size."""
        with self.lock:
            self.collect()
            if self._live or self.bytes_reserved() <= self.budget_bytes:
                return
            order = torch.tensor(self.kept.renumber(), dtype=torch.int64, device=self.device)
            try:
                with torch.inference_mode(False), torch.no_grad():
                    for layer, storage in self.storages.items():
                        self.storages[layer] = storage[order]
            except BaseException as error:
                # some layers have moved and some have not: nothing of it can be kept
                self._evicted(self.kept.evict_to(0))
                self.storages.clear()
                if not isinstance(error, torch.OutOfMemoryError):
                    raise

    def grown(self, layer: int, need: int, like: torch.Tensor) -> torch.Tensor:
        """The newest storage of `layer`, with room for `need` pages like those of `like`. The lock is held."""
        newest = self.storages.get(layer)
        if newest is not None and not _alike(newest, like):
            self.kept.clear()  # entries of another kind, as a change of dtype inside the model makes them
            newest = None
        held = 0 if newest is None else len(newest)
        if newest is None or need > held:
            capacity = max(need, int(held * PagePool.GROWTH))
            if self.allocator.max_pages is not None:
                capacity = max(need, min(capacity, self.allocator.max_pages))
            with torch.inference_mode(False), torch.no_grad():
                grown = like.new_empty(capacity, *like.shape[1:])
                if newest is not None:
                    grown[:held].copy_(newest)
            newest = self.storages[layer] = grown
        return newest

    def collect(self) -> None:
        """Take back what caches that died have held."""
        while self._given_back:
            for row in self._given_back.popleft():
                self.allocator.release(row)
            self._live -= 1

    def _evicted(self, count: int) -> None:
        if count:
            self.counters["kv_cache: kept pages evicted"] += count


class SharedPool(PagePool):
    """One cache's rows on shared pages."""

    def __init__(self, shared: SharedPages, table: PageTable, num_rows: int, reserve_tokens: int) -> None:
        self.shared = shared
        super().__init__(table, num_rows, shared.device, None, reserve_tokens, shared.counters)

    def begin_with(self, rows: Sequence[list[int]]) -> None:
        """Let each of the empty rows begin with pages that are held for it."""
        for row, pages in zip(self.table.rows, rows, strict=True):
            row += pages
        self.table.version += 1

    def add_layer(self, layer: int, width: int, dtype: torch.dtype) -> None:
        like = torch.empty(0, self.page_size, width, dtype=dtype, device=self.device)
        with self.shared.lock:
            need = self.table.high_water_after(0, self.reserve_tokens)
            if (limit := self.table.max_pages) is not None:
                need = min(need, max(limit, self.table.high_water))
            self.storages[layer] = self.shared.grown(layer, need, like)

    def check(self, start: int, stop: int, keep: bool) -> None:
        if self._prepared != (start, stop):
            with self.shared.lock:
                self._make_room(start, stop)
                super().check(start, stop, keep)

    def extend(self, start: int, stop: int) -> None:
        if self._prepared == (start, stop):
            return
        if not self.table.missing(start, stop):
            # storages move with a change of the table only: by that a CUDA graph knows that it must look
            self._prepared = (start, stop)
        else:
            with self.shared.lock:
                self._make_room(start, stop)
                self.table.check(start, stop)
                super().extend(start, stop)

    def _make_room(self, start: int, stop: int) -> None:
        """Take back what dead caches held, and what is kept if `max_pages` leaves too little. The lock is held."""
        self.shared.collect()
        if self.table.max_pages is not None:
            self.shared.make_room(self.table.missing(start, stop))

    def trim(self, length: int) -> None:
        with self.shared.lock:
            super().trim(length)

    def select(self, indices: Sequence[int]) -> None:
        with self.shared.lock:
            super().select(indices)

    def publish(self, pages: list[int]) -> bool:
        """Make sure that the newest storages hold the entries of `pages`; False if these are of another kind now.

        The lock is held.
        """
        newest = self.shared.storages
        if self.storages.keys() != newest.keys() or not all(_alike(s, newest[i]) for i, s in self.storages.items()):
            return False
        for layer, storage in self.storages.items():
            if storage is not newest[layer]:
                _bring(pages, storage, newest[layer])
        return True

    def _grow(self, need: int) -> None:
        own: list[int] | None = None
        for layer, storage in self.storages.items():
            if need <= len(storage):
                continue
            was_newest = storage is self.shared.storages.get(layer)
            grown = self.shared.grown(layer, need, storage)
            if not was_newest:
                own = sorted({page for row in self.table.rows for page in row}) if own is None else own
                _bring(own, storage, grown)
            self.storages[layer] = grown

    def split(self, layer: int) -> PagePool:
        alone = self._alone({layer: self.storages[layer]})
        del self.storages[layer]
        return alone

    def _alone(self, storages: dict[int, torch.Tensor]) -> PagePool:
        """A copy of the rows, with pages of its own."""
        table = PageTable(self.page_size, self.table.max_pages)
        pool = PagePool(table, self.num_rows, self.device, None, self.reserve_tokens, self.counters)
        with self.shared.lock:
            rows = [list(row) for row in self.table.rows]
        pages = sorted({page for row in rows for page in row})
        number = {page: table.allocator.take() for page in pages}
        for row, held in zip(table.rows, rows, strict=True):
            row += [number[page] for page in held]
            table.allocator.hold(row)
        table.allocator.release(number.values())
        order = torch.tensor(pages, dtype=torch.int64, device=self.device)
        with torch.inference_mode(False), torch.no_grad():
            pool.storages = {layer: storage[order] for layer, storage in storages.items()}
        return pool

    def __reduce__(self) -> tuple[Callable[[PagePool], PagePool], tuple[PagePool]]:
        return _itself, (self._alone(self.storages),)  # a copied or pickled cache shares nothing


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two storages hold entries of the same kind."""
    return one.dtype == other.dtype and one.shape[1:] == other.shape[1:]


def _itself(pool: PagePool) -> PagePool:
    return pool


@torch.no_grad()
def _bring(pages: list[int], source: torch.Tensor, target: torch.Tensor) -> None:
    with torch.inference_mode(False):
        order = torch.tensor(pages, dtype=torch.int64, device=source.device)
        target[order] = source[order]

"""Which full pages are kept after the call that filled them, under keys made of everything that led to their entries.

    key of page i = SHA-256(key of page i - 1, token ids of page i as int64)

and before page 0 stands a key of the model's state. So a key names the whole sequence up to the end of its page.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .. import families
from .allocator import PageAllocator


def chain(root: bytes, tokens: bytes, page_bytes: int) -> Iterator[bytes]:
    """The keys of the full pages of `tokens`, token ids as int64 in memory order; page_bytes: of one page of ids."""
    key = root
    for begin in range(0, len(tokens) - page_bytes + 1, page_bytes):
        key = hashlib.sha256(key + tokens[begin : begin + page_bytes]).digest()
        yield key


class KeptPages:
    """Pages by key, each held once; the one whose last use is longest ago goes first.

    Uses go from the end of a sequence to its beginning, so what goes first is always an end: nothing is kept that
    cannot be reached.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._pages: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on without a gap, are kept."""
        return next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))

    def take(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of `keys`, all of which are kept."""
        self.touch(keys)
        return [self._pages[key] for key in keys]

    def touch(self, keys: Sequence[bytes]) -> None:
        """These have been used now."""
        for key in reversed(keys):
            if key in self._pages:
                self._pages.move_to_end(key)

    def add(self, pages: Mapping[bytes, int]) -> None:
        """Hold these pages, none of whose keys is kept yet."""
        self._allocator.hold(pages.values())
        self._pages.update(pages)

    def evict_to(self, count: int) -> int:
        """Keep `count` pages at most; says how many went."""
        gone = max(0, len(self._pages) - count)
        for _ in range(gone):
            self._allocator.release((self._pages.popitem(last=False)[1],))
        return gone

    def evict_unused(self, count: int) -> int:
        """Make `count` pages free, if as many are held by nobody else; says how many went, `count` or none."""
        references = self._allocator.references
        unused = [key for key, page in self._pages.items() if references[page] == 1]
        if len(unused) < count:
            return 0
        self._allocator.release(self._pages.pop(key) for key in unused[:count])
        return count

    def clear(self) -> None:
        self.evict_to(0)

    def renumber(self) -> list[int]:
        """Give the kept pages, which must be all that are in use, the first ids; returns their old ones in order."""
        old = sorted(set(self._pages.values()))
        number = {page: i for i, page in enumerate(old)}
        self._pages = OrderedDict((key, number[page]) for key, page in self._pages.items())
        self._allocator.free.clear()  # first: others count pages in use meanwhile, as references less free ones
        self._allocator.references[:] = [1] * len(old)
        return old


def forget_prefixes(model: Any) -> None:
    """Give back every page that `generate` of an optimized model keeps for later calls (`KVCache(reuse_prefix=True)`).

    To be called after weights were written in a way that is not seen by itself, see docs/kv_cache.md. A model that
    keeps nothing is left as it is. Raises UnsupportedModelError on anything that is no model of a known family.
    """
    inner = families.unwrap(model)
    families.find(inner)
    if (prefixes := vars(inner).get("_accel_prefixes")) is not None:
        prefixes.forget()

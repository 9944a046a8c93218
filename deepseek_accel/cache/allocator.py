"""Page ids and how often each is held."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class PageAllocator:
    """Hands out page ids. One table holds them, or several tables and what is kept between calls.

    max_pages: most pages in use at once, or None for no limit; whoever takes pages checks first.
    """

    max_pages: int | None = None
    references: list[int] = field(default_factory=list)
    """How often each page is held, by id; 0 means free."""
    free: list[int] = field(default_factory=list)
    """A heap: the lowest id first keeps the pool dense and rows contiguous."""

    @property
    def in_use(self) -> int:
        return len(self.references) - len(self.free)

    @property
    def high_water(self) -> int:
        """One more than the largest page id ever handed out: what the memory must hold."""
        return len(self.references)

    def high_water_after(self, count: int) -> int:
        """What `high_water` will be after `count` pages more are taken."""
        return self.high_water + max(0, count - len(self.free))

    def take(self) -> int:
        """A page that nobody else holds."""
        if self.free:
            page = heapq.heappop(self.free)
        else:
            page = len(self.references)
            self.references.append(0)
        self.references[page] = 1
        return page

    def hold(self, pages: Iterable[int]) -> None:
        """Hold pages that are in use once more."""
        for page in pages:
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Give up one reference to each page; what nobody holds is free."""
        for page in pages:
            self.references[page] -= 1
            if self.references[page] == 0:
                heapq.heappush(self.free, page)

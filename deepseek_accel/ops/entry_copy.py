"""Entries made elsewhere, to their pages: what the graph of a prompt does, which cannot know where pages will be."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from .choice import uses_triton
from .latent_write import write_slots

# (T, width, page size); the last token has no slot if there are several
CASES = [
    (1, 8, 16),  # one token
    (40, 80, 16),  # several pages, a width that is no power of two
    (3, 2050, 16),  # wider than a block
    (0, 8, 16),  # no tokens: a launch with an empty grid is an error
]


def entry_copy(entries: Tensor, storage: Tensor, slots: Tensor, *, address: Tensor | None = None) -> None:
    """entries [T, width], contiguous, to slots [T] int64 of storage [num_pages, P, width], of one dtype.

    A negative slot is written nowhere. address: as in `ops/mla_attention.py`.
    """
    if uses_triton(entries.device):
        _kernel_launch()(entries, storage, slots, address)
    else:
        write_slots(storage, slots, entries)


@functools.cache
def _kernel_launch() -> Any:
    from ..kernels.entry_copy import launch

    return launch

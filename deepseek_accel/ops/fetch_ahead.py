"""Weights into the L2 cache before they are needed, while the memory has nothing else to do."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .choice import uses_triton

SHARE_OF_L2 = 0.6
"""Of the cache; the rest is for what the kernels in between read and write."""
MOST_ROWS = 8
"""With more rows, keys take the memory's time and the cache."""
MOST_WEIGHTS = 4


@functools.cache
def room_ahead(device: torch.device) -> int:
    """Bytes that may be fetched ahead on `device`; 0 where it has no instruction for that."""
    if not uses_triton(device) or torch.cuda.get_device_capability(device) < (9, 0):
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size * SHARE_OF_L2)


def fetch_ahead(weights: Sequence[Tensor], room: int) -> None:
    """Ask for up to `room` bytes of contiguous `weights`, at most MOST_WEIGHTS, in order of their use.

    Changes nothing but time. On the current stream; does nothing for a tensor of less than a piece (4,096 bytes).
    """
    from ..kernels.fetch_ahead import launch

    launch(weights, room)

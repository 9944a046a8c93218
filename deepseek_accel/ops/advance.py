"""The start of a decoding step in a CUDA graph: one more token per row, its slot and its position, on the device.

Letters: B rows (the graph's batch size), W pages a block table has room for, P page size.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .choice import uses_triton


def advance(
    lengths: Tensor,
    live: Tensor,
    block_table: Tensor,
    page_size: int,
    first_position: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> None:
    """Make room for one token per live row, in place.

    lengths [B] int32: tokens each row holds; live [1] int32: rows from it on are idle; block_table [B, W] int32, its
    last stride one; first_position [B] int32: the token whose position id is 0 (how many pads a row has on the left).
    Written, for a live row of length n: slots [B] int64, the physical index of its token n; positions [B] int64,
    max(n - first_position, 0); lengths, n + 1. For an idle row: slot -1, position 0, length as it was; its row of the
    table is not read. The page of token n must be in the table: n // page_size < W.
    """
    step = _kernel_launch() if uses_triton(lengths.device) else advance_reference
    step(lengths, live, block_table, page_size, first_position, slots, positions)


@functools.cache
def _kernel_launch() -> Any:
    from ..kernels.advance import launch

    return launch


def advance_reference(
    lengths: Tensor,
    live: Tensor,
    block_table: Tensor,
    page_size: int,
    first_position: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> None:
    """`advance` in plain torch."""
    rows = torch.arange(len(lengths), device=lengths.device)
    is_live = rows < live
    held = lengths.where(is_live, 0).long()
    pages = block_table.gather(1, (held // page_size)[:, None])[:, 0].long()
    slots.copy_((pages * page_size + held % page_size).where(is_live, -1))
    positions.copy_((held - first_position).clamp(min=0).where(is_live, 0))
    lengths += is_live


class Case(NamedTuple):
    lengths: tuple[int, ...]  # of live and idle rows
    live: int
    first: tuple[int, ...]
    page_size: int


CASES = [
    Case((5,), 1, (0,), 16),  # one row in the midst of a page
    Case((15, 16, 17, 0), 4, (0, 0, 0, 0), 16),  # last of a page, first of the next, an empty row
    Case((64, 0, 7, 0), 1, (3, 0, 0, 0), 64),  # idle rows, one with a stale length; left padding
    Case((40, 33, 20), 3, (40, 35, 7), 16),  # the first token that is no pad, and a row that has none yet
    Case((3, 9, 2, 4, 8), 0, (0, 0, 0, 0, 0), 16),  # all idle; rows that are no power of two
    Case((2048, 8191), 2, (0, 0), 2048),  # a slot beyond 32 bits (page ids are large)
]


def case_inputs(case: Case, device: str | torch.device = "cpu") -> tuple[Any, ...]:
    """Arguments of `advance`. slots and positions hold poison, and so do table entries that must not be followed."""
    rows, pages = len(case.lengths), max(case.lengths) // case.page_size + 2
    generator = torch.Generator().manual_seed(rows)
    table = torch.full((rows, pages), -7, dtype=torch.int32)
    for row, length in enumerate(case.lengths[: case.live]):
        table[row, length // case.page_size] = torch.randint(2_000_000, 2_100_000, (), generator=generator)
    return (
        torch.tensor(case.lengths, dtype=torch.int32, device=device),
        torch.tensor([case.live], dtype=torch.int32, device=device),
        table.to(device),
        case.page_size,
        torch.tensor(case.first, dtype=torch.int32, device=device),
        torch.full((rows,), -99, dtype=torch.int64, device=device),
        torch.full((rows,), -99, dtype=torch.int64, device=device),
    )

"""Room for one more token per row in a cache that evicts: which held token each row gives up for it.

Letters: L layers, B rows, R entries a row has room for, W pages a block table has room for.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .choice import uses_triton

PADDING = -1.0
"""The score of a padding token, below that of any other."""


def ranks(scores: Tensor, positions: Tensor, first: Tensor | int, sinks: int, newest: int) -> Tensor:
    """What tokens are kept by, [B, R] fp32: +inf for those that must stay, PADDING for padding, else the score.

    scores [B, R] fp32, NaN counts as 0; positions [B, R]: where in its sequence each token stands; first [B] or an
    int: the position of each row's first token that is no padding, from which `sinks` tokens stay, as do those from
    position `newest` on.
    """
    if isinstance(first, Tensor):
        first = first[:, None]
    stays = (positions < first + sinks) | (positions >= newest)
    ranked = scores.nan_to_num(nan=0.0).masked_fill(stays, float("inf"))
    return ranked.masked_fill(positions < first, PADDING)


def victim(scores: Tensor, positions: Tensor, first: Tensor | int, sinks: int, newest: int) -> Tensor:
    """[B] int64: the index of the token that goes: the lowest of `ranks`, of equals the one of the lowest position."""
    ranked = ranks(scores, positions, first, sinks, newest)
    lowest = ranked.amin(1, keepdim=True)
    return positions.masked_fill(ranked != lowest, torch.iinfo(positions.dtype).max).argmin(1)


def survivors(scores: Tensor, positions: Tensor, first: Tensor | int, sinks: int, newest: int, count: int) -> Tensor:
    """[B, count] int64: indices of the tokens that stay, in the order of their positions.

    The same as taking `victim` away until `count` are left.
    """
    by_age = positions.argsort(1, descending=True)
    ranked = ranks(scores, positions, first, sinks, newest).gather(1, by_age)
    chosen = by_age.gather(1, ranked.argsort(dim=1, descending=True, stable=True)[:, :count])
    return chosen.gather(1, positions.gather(1, chosen).argsort(1))


def claim(
    scores: Tensor,
    positions: Tensor,
    held: Tensor,
    seen: Tensor,
    limits: Tensor,
    protected: Tensor,
    live: Tensor,
    block_tables: Tensor,
    page_size: int,
    sinks: int,
    first_positions: Tensor,
    slots: Tensor,
    rotary: Tensor,
) -> None:
    """Find a place for the next token of every live row in every layer, in place: the start of a step in a CUDA graph.

    scores [L, B, R] fp32 and positions [L, B, R] int32 of what is held; held, seen [L, B] int32: entries, and tokens
    that the row has had; limits [L] int32: entries a layer may hold; protected [L] int32: so many of the newest tokens
    stay, the new one included; live [1] int32; block_tables [L, B, W] int32; first_positions [B] int32: tokens seen
    minus position id. Without padding. Where held is below the limit the token is appended, else it replaces `victim`.
    Written, for rows below `live`: slots [L, B] int64, the physical index of the token; rotary [B] int64, its position
    id; its score 0 and its position; held and seen. For idle rows: slot -1 and position id 0.
    """
    arguments = (scores, positions, held, seen, limits, protected, live, block_tables, page_size, sinks)
    step = _kernel_launch() if uses_triton(scores.device) else claim_reference
    step(*arguments, first_positions, slots, rotary)


@functools.cache
def _kernel_launch() -> Any:
    from ..kernels.claim import launch

    return launch


def claim_reference(
    scores: Tensor,
    positions: Tensor,
    held: Tensor,
    seen: Tensor,
    limits: Tensor,
    protected: Tensor,
    live: Tensor,
    block_tables: Tensor,
    page_size: int,
    sinks: int,
    first_positions: Tensor,
    slots: Tensor,
    rotary: Tensor,
) -> None:
    """`claim` row by row."""
    slots.fill_(-1)
    rotary.zero_()
    for layer in range(scores.shape[0]):
        for row in range(int(live)):
            count, new = int(held[layer, row]), int(seen[layer, row])
            index = count
            if count >= int(limits[layer]):
                newest = new + 1 - int(protected[layer])
                own = scores[layer, row : row + 1, :count], positions[layer, row : row + 1, :count]
                index = int(victim(*own, 0, sinks, newest))
            else:
                held[layer, row] += 1
            scores[layer, row, index], positions[layer, row, index] = 0.0, new
            page = int(block_tables[layer, row, index // page_size])
            slots[layer, row] = page * page_size + index % page_size
            seen[layer, row] += 1
            rotary[row] = new - first_positions[row]


class VictimCase(NamedTuple):
    scores: tuple[tuple[float, ...], ...]
    positions: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    sinks: int
    newest: int


VICTIM_CASES = [
    VictimCase(((3.0, 1.0, 2.0, 0.0),), ((0, 1, 2, 3),), (0,), 1, 3),  # the lowest is the newest, which stays
    VictimCase(((0.0, 0.0, 0.0, 0.0),), ((8, 5, 0, 7),), (0,), 1, 8),  # equal scores, positions out of order
    VictimCase(((5.0, 1.0, 1.0, 9.0), (5.0, 1.0, 1.0, 9.0)), ((0, 1, 2, 3), (0, 1, 2, 3)), (0, 2), 1, 3),  # padding
    VictimCase(((float("nan"), 0.5, 0.25),), ((1, 2, 3),), (0,), 0, 9),  # NaN is no reason to stay
]


def victim_inputs(case: VictimCase, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Arguments of `victim`."""
    return (
        torch.tensor(case.scores, device=device),
        torch.tensor(case.positions, dtype=torch.int32, device=device),
        torch.tensor(case.first, dtype=torch.int32, device=device),
        case.sinks,
        case.newest,
    )


class Case(NamedTuple):
    held: tuple[tuple[int, ...], ...]
    """By layer and row."""
    limits: tuple[int, ...]
    protected: tuple[int, ...]
    live: int
    room: int
    sinks: int = 2
    page_size: int = 16


CASES = [
    Case(((5,),), (16,), (4,), 1, 32),  # one row, appended
    Case(((16, 16), (7, 7)), (16, 20), (4, 4), 2, 32),  # one layer is full, the other is not
    Case(((40, 40, 0), (33, 33, 0)), (40, 33), (8, 30), 2, 64),  # an idle row; hardly anything may go
    Case(((10, 10),), (10,), (8,), 2, 32, 2),  # a window: exactly one may go
    Case(((2500,),), (2500,), (100,), 1, 2560),  # more than a block of entries, equal scores far apart
    Case(((9, 9),), (9,), (1,), 0, 16),  # all idle
]


def case_inputs(case: Case, device: str | torch.device = "cpu") -> tuple[Any, ...]:
    """Arguments of `claim`. What is not held is poison."""
    layers, rows = len(case.held), len(case.held[0])
    generator = torch.Generator().manual_seed(case.room)
    held = torch.tensor(case.held, dtype=torch.int32)
    scores = torch.randint(0, 4, (layers, rows, case.room), generator=generator).float()  # many are equal
    positions = torch.full((layers, rows, case.room), 7, dtype=torch.int32)
    seen = (held.amax(0) + 11).expand_as(held).contiguous()  # all layers have seen the same tokens
    for layer in range(layers):
        for row in range(rows):
            count = case.held[layer][row]
            newest = torch.arange(count // 2, dtype=torch.int32) + int(seen[layer, row]) - count // 2
            tokens = torch.cat((torch.arange(count - count // 2, dtype=torch.int32), newest))
            positions[layer, row, :count] = tokens[torch.randperm(count, generator=generator)]
            scores[layer, row, count:] = -1
    pages = case.room // case.page_size
    tables = torch.randint(2_000_000, 2_100_000, (layers, rows, pages), generator=generator, dtype=torch.int32)
    scores[0, 0, 0] = float("nan")
    return tuple(
        value.to(device) if isinstance(value, Tensor) else value
        for value in (
            scores,
            positions,
            held,
            seen,
            torch.tensor(case.limits, dtype=torch.int32),
            torch.tensor(case.protected, dtype=torch.int32),
            torch.tensor([case.live], dtype=torch.int32),
            tables,
            case.page_size,
            case.sinks,
            torch.arange(rows, dtype=torch.int32),
            torch.full((layers, rows), -99, dtype=torch.int64),
            torch.full((rows,), -99, dtype=torch.int64),
        )
    )

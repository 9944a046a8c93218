"""Which held token each row gives up for a new one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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


class Case(NamedTuple):
    scores: tuple[tuple[float, ...], ...]
    positions: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    sinks: int
    newest: int


CASES = [
    Case(((3.0, 1.0, 2.0, 0.0),), ((0, 1, 2, 3),), (0,), 1, 3),  # the lowest is the newest, which stays
    Case(((0.0, 0.0, 0.0, 0.0),), ((8, 5, 0, 7),), (0,), 1, 8),  # equal scores, positions out of order
    Case(((5.0, 1.0, 1.0, 9.0), (5.0, 1.0, 1.0, 9.0)), ((0, 1, 2, 3), (0, 1, 2, 3)), (0, 2), 1, 3),  # padding first
    Case(((float("nan"), 0.5, 0.25),), ((1, 2, 3),), (0,), 0, 9),  # NaN is no reason to stay
]


def case_inputs(case: Case, device: str | torch.device = "cpu") -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Arguments of `victim`."""
    return (
        torch.tensor(case.scores, device=device),
        torch.tensor(case.positions, dtype=torch.int32, device=device),
        torch.tensor(case.first, dtype=torch.int32, device=device),
        case.sinks,
        case.newest,
    )

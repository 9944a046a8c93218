"""Which of a token's chosen experts are worth reading: those whose loss is missed, as calibration predicts it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

BATCH_TOKENS = 128
"""A batch-wide budget holds for steps of at most so many tokens; with more, nearly every expert is read anyway."""

# (T, E, K, min_experts, relative, budget)
CASES = [
    (1, 16, 4, 1, False, 0.0),  # one token: it alone is a step, and the tally counts its experts
    (5, 16, 4, 2, False, 0.0),  # min_experts above one: the second best by score, which is not the second slot
    (5, 6, 6, 6, False, 0.0),  # min_experts = K: nothing can be dropped
    (5, 6, 3, 1, True, 0.0),  # relative to the token's largest weight, which need not be in the first slot
    (33, 16, 4, 1, False, 2.0),  # a budget: an expert needed a little by many tokens is read, by one token it is not
    (2, 64, 6, 2, True, 1.0),  # a budget on relative weights; more experts than pairs
]


class Drop(NamedTuple):
    """The rule of one layer. A pair of token x and chosen expert e with routing weight w has the score

        2 ln w + offset[e] + slope . x            (what leaving it out costs, as ln of a multiple of the threshold)
        2 ln w + offset[e] - 2 ln max w           (`relative`: max over the token's chosen experts)

    and is dropped where that is negative. The `min_experts` best of each token stay. NaN stays.
    """

    slope: torch.Tensor
    """[D] fp32."""
    offset: torch.Tensor
    """[E] fp32; +inf keeps everything."""
    relative: bool
    min_experts: int
    budget: float
    """0: each token by itself. Else, in steps of up to BATCH_TOKENS tokens, an expert is dropped for all of them if
    the sum over its pairs of exp(score) is below `budget`, and for none otherwise; longer steps drop nothing."""
    tally: torch.Tensor
    """[4] int64, counted on the device: pairs kept, tokens, and of steps up to BATCH_TOKENS tokens: distinct experts
    summed over steps, steps."""

    def settles(self, num_tokens: int) -> bool:
        """Whether the budget decides in a step of so many tokens."""
        return self.budget > 0 and num_tokens <= BATCH_TOKENS

    def counts_experts(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens counts its distinct experts."""
        return 0 < num_tokens <= BATCH_TOKENS

    def feeling(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """[T]: slope . x of hidden [T, D] in fp32, or None where it is not used."""
        return None if self.relative else torch.mv(hidden.float(), self.slope)


def scores_reference(
    weights: torch.Tensor, indices: torch.Tensor, feeling: torch.Tensor | None, drop: Drop
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [T, K] fp32, and whether a pair is among the `min_experts` of its token; of equals the earlier slot is."""
    logs = weights.float().log()
    token = -2 * logs.amax(-1) if drop.relative else feeling
    assert token is not None
    score = 2 * logs + drop.offset[indices] + token[:, None]
    ranked = score.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    best = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : drop.min_experts]
    return score, torch.zeros_like(score, dtype=torch.bool).scatter_(1, best, True)


def keep_reference(
    weights: torch.Tensor,
    indices: torch.Tensor,
    feeling: torch.Tensor | None,
    drop: Drop,
    live: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition: [T, K] bool, which pairs are kept, idle ones not. Arguments as those of `drop_experts`."""
    score, safe = scores_reference(weights, indices, feeling, drop)
    idle = torch.zeros(len(indices), dtype=torch.bool, device=indices.device)
    if live is not None:
        idle = torch.arange(len(indices), device=indices.device) >= live
    if drop.budget == 0:
        keep = ~(score < 0) | safe
    elif not drop.settles(len(indices)):
        keep = torch.ones_like(safe)
    else:
        loss = score.exp().masked_fill(safe, float("inf")).masked_fill(idle[:, None], 0.0)
        total = torch.zeros_like(drop.offset).scatter_add_(0, indices.flatten(), loss.flatten())
        keep = ~(total < drop.budget)[indices]
    return keep & ~idle[:, None]


def count_kept(keep: torch.Tensor, indices: torch.Tensor, drop: Drop, live: torch.Tensor | None) -> None:
    """Add one step of pairs to the tally, without waiting for the device."""
    tokens: Any = len(keep) if live is None else live[0].clamp(max=len(keep))
    tally = drop.tally
    tally[0] += keep.sum()
    tally[1] += tokens
    if drop.counts_experts(len(keep)):
        ordered = indices.masked_fill(~keep, -1).flatten().sort().values
        first = torch.ones_like(ordered, dtype=torch.bool)
        first[1:] = ordered[1:] != ordered[:-1]
        tally[2] += (first & (ordered >= 0)).sum()
        tally[3] += tokens > 0


def drop_experts(
    weights: torch.Tensor,
    indices: torch.Tensor,
    feeling: torch.Tensor | None,
    drop: Drop,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """weights and indices [T, K] of `route`, dropped pairs with weight 0 and index -1; in torch, differentiable.

    feeling [T]: of `Drop.feeling`. live: as in `ops.router.norm_route`; idle tokens keep nothing. Kept weights stay as
    they are: on the bundled model raising them to the old sum costs more than dropping (docs/adaptive_topk.md). What
    was kept is added to `drop.tally`. On a GPU the router's kernels do this in their own launch.
    """
    with torch.no_grad():
        keep = keep_reference(weights, indices, feeling, drop, live)
        count_kept(keep, indices, drop, live)
    return weights.masked_fill(~keep, 0.0), indices.masked_fill(~keep, -1)

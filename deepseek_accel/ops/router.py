"""Which experts each token uses, and with what weights: the DeepSeek V2 and V3 routers after their logits."""

from typing import Literal

import torch

from .choice import uses_triton

Scoring = Literal["sigmoid", "softmax"]
GroupScore = Literal["top2", "max"]

# (T, E, K, num_groups, topk_groups, scoring, group_score, normalize, scale)
CASES = [
    (0, 16, 4, 4, 2, "sigmoid", "top2", True, 2.5),  # no tokens: a launch with an empty grid is an error
    (1, 16, 1, 4, 2, "sigmoid", "top2", True, 2.5),  # K = 1, normalised: every weight is the scale
    (33, 16, 4, 4, 2, "sigmoid", "top2", True, 2.5),  # V3: the best group by its two best, not by its best
    (33, 16, 4, 4, 2, "sigmoid", "top2", False, 2.5),  # the scale applies without normalisation too (E05)
    (33, 16, 16, 1, 1, "sigmoid", "top2", True, 1.0),  # K = E: every id exactly once
    (33, 64, 6, 1, 1, "softmax", None, False, 1.0),  # V2-Lite: no groups, weights do not sum to 1
    (33, 160, 6, 8, 3, "softmax", "max", False, 16.0),  # V2: neither E nor the group size 20 is a power of two
    (33, 6, 2, 3, 2, "sigmoid", "top2", True, 1.0),  # groups of two in three groups: padding in both dims of the tile
    (9, 256, 8, 8, 4, "sigmoid", "top2", True, 2.5),  # V3 itself
    (9, 16, 8, 8, 4, "softmax", "max", True, 1.0),  # K equals the experts of the chosen groups: all of them
]


def _check(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    scoring: str,
    group_score: str | None,
) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits must be [T, E], they have shape {tuple(logits.shape)}")
    num_experts = logits.shape[1]
    if scoring not in ("sigmoid", "softmax"):
        raise ValueError(f"scoring must be 'sigmoid' or 'softmax', not {scoring!r}")
    if group_score not in ("top2", "max", None):
        raise ValueError(f"group_score must be 'top2', 'max' or None, not {group_score!r}")
    if bias is not None and bias.shape != (num_experts,):
        raise ValueError(f"bias must have shape ({num_experts},), it has {tuple(bias.shape)}")
    allowed = num_experts
    if group_score is not None:
        if num_groups < 1 or num_experts % num_groups or not 1 <= topk_groups <= num_groups:
            raise ValueError(f"{num_experts} experts, {num_groups} groups and {topk_groups} chosen groups do not fit")
        size = num_experts // num_groups
        if group_score == "top2" and size < 2:
            raise ValueError("group_score 'top2' needs groups of two or more experts")
        allowed = topk_groups * size
    if not 1 <= top_k <= allowed:
        raise ValueError(f"top_k must be 1 to {allowed}, the experts that may be chosen; it is {top_k}")


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest of the last dim, in order; of equals the lower first, which torch.topk leaves open."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def route_reference(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    num_groups: int = 1,
    topk_groups: int = 1,
    scoring: Scoring = "sigmoid",
    group_score: GroupScore | None = "top2",
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in fp32; arguments and result as those of `route`."""
    logits = logits.float()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias.float()
    if group_score is not None and topk_groups < num_groups:
        grouped = choice.unflatten(-1, (num_groups, -1))  # [T, groups, experts of a group]
        best = grouped.amax(-1) if group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, _best(best, topk_groups), False)
        choice = grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1)
    indices = _best(choice, top_k)
    weights = scores.gather(1, indices)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, indices


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    num_groups: int = 1,
    topk_groups: int = 1,
    scoring: Scoring = "sigmoid",
    group_score: GroupScore | None = "top2",
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` of E experts for each of T tokens.

    logits [T, E], bias [E] or None. Returns weights [T, K] in fp32 and indices [T, K] in int64, best choice first; of
    equal scores the lower id first. Everything is computed in fp32.

    scores  = softmax over E (V2) or sigmoid (V3) of the logits
    choice  = scores + bias; the bias is for choosing only
    groups  : with `group_score`, E splits into num_groups runs of ids; a group's score is the sum of its two best
              choices ("top2", V3) or its best ("max", V2's group_limited_greedy), and only experts of the best
              topk_groups groups may be chosen, however negative their scores. None: no groups.
    weights = scores at the chosen ids, divided by (their sum + 1e-20) if `normalize`, times `scale`

    Source: DeepseekV2TopkRouter and DeepseekV3TopkRouter of transformers 5.24. V2 fills other groups with 0, which
    chooses the same because a softmax is positive; where it underflows to 0, ids of chosen groups are taken here.
    The Triton kernel has no backward: where a gradient is wanted, torch is used.
    Raises ValueError if the numbers do not fit together.
    """
    _check(logits, bias, top_k, num_groups, topk_groups, scoring, group_score)
    if uses_triton(logits.device) and not (torch.is_grad_enabled() and logits.requires_grad):
        from ..kernels import router as kernel

        choose = kernel.launch
    else:
        choose = route_reference
    return choose(
        logits,
        bias,
        top_k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        scoring=scoring,
        group_score=group_score,
        normalize=normalize,
        scale=scale,
    )

"""Which experts each token uses, and with what weights: the DeepSeek V2 and V3 routers, from logits or norm on."""

from typing import Any, Literal

import torch
import torch.nn.functional as F

from .adaptive_topk import Drop, drop_experts
from .choice import uses_triton
from .rms_norm import rms_norm, rms_norm_reference

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

ONE_LAUNCH_TOKENS = 128
"""`norm_route` never is one launch for more tokens."""

_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


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


def norm_route_reference(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    num_groups: int = 1,
    topk_groups: int = 1,
    scoring: Scoring = "sigmoid",
    group_score: GroupScore | None = "top2",
    normalize: bool,
    scale: float,
    live: torch.Tensor | None = None,
    drop: Drop | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The definition, step by step; arguments and result as those of `norm_route`."""
    normed = rms_norm_reference(x, norm_weight, eps)
    weights, indices = route_reference(
        F.linear(normed.float(), gate_weight.float()),
        bias,
        top_k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        scoring=scoring,
        group_score=group_score,
        normalize=normalize,
        scale=scale,
    )
    if drop is not None:
        return normed, *drop_experts(weights, indices, drop.feeling(normed), drop, live)
    return normed, *_without_idle(weights, indices, live)


def _without_idle(
    weights: torch.Tensor, indices: torch.Tensor, live: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if live is None:
        return weights, indices
    idle = (torch.arange(len(indices), device=indices.device) >= live)[:, None]
    return weights.masked_fill(idle, 0.0), indices.masked_fill(idle, -1)


def one_launch_tokens(num_products: int, itemsize: int) -> int:
    """Up to so many tokens are one launch; `num_products` = E * D. It computes each logit as a dot product.

    Measured on an H200, us, one launch against norm, logits and selection: V2-Lite (2^17) 6.3 of 8.2 at 128 tokens; V3
    (2^21) with a bf16 gate 6.9 of 7.7 at one and 9.7 of 8.0 at four, with an fp32 gate 13.8 of 17.4 at eight.
    """
    return ONE_LAUNCH_TOKENS if num_products <= 1 << 19 else 2 if itemsize == 2 else 8


def cublas_is_faster(num_tokens: int, gate_weight: torch.Tensor) -> bool:
    """Whether logits take cuBLAS in fp32 rather than tensor cores: for a middling number of tokens of a large router.

    V3 on an H200, us, cuBLAS against tensor cores: with a bf16 gate 41 and 52 at 128 tokens, 80 and 24 at 512; with an
    fp32 gate 34 and 149 at 128, 82 and 54 at 512.
    """
    first = 65 if gate_weight.itemsize == 2 else 9
    return gate_weight.numel() > 1 << 19 and first <= num_tokens < 512


def make_counters(device: torch.device) -> torch.Tensor:
    """What `norm_route` counts its programs in, on a GPU: zeros, which it leaves as zeros."""
    return torch.zeros(ONE_LAUNCH_TOKENS, dtype=torch.int32, device=device)


def _counters_of_stream(device: torch.device) -> torch.Tensor:
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return make_counters(device)  # a graph may run on any stream: it gets its own
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _counters:
        _counters[key] = make_counters(device)
    return _counters[key]


def norm_route(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    num_groups: int = 1,
    topk_groups: int = 1,
    scoring: Scoring = "sigmoid",
    group_score: GroupScore | None = "top2",
    normalize: bool,
    scale: float,
    live: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    drop: Drop | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMS norm of T tokens, their logits, and `route` of these: for few tokens on a GPU in one launch, else in three.

    x [T, D] and norm_weight [D] of one dtype; gate_weight [E, D] of any floating dtype; the rest as in `route`.
    live: int32 [1] on x's device or None; tokens from live[0] on are idle. They get weights 0 and indices -1.
    counters: of `make_counters`, for a GPU; two calls that may run at the same time need different ones. None: one
    per device and stream, or in a graph capture new ones, which cost a memory-set node: a captured step should bring
    its own, made before the capture, one for each graph.
    Returns normed [T, D], as by `rms_norm`, also of idle tokens, weights [T, K] fp32 and indices [T, K] int64.

    The logits are the fp32 product of the normed tokens, rounded to x's dtype, and gate_weight.
    Source: DeepseekV2Moe, DeepseekV3MoE and their routers of transformers 5.24.
    The kernel has no backward: where a gradient is wanted, torch is used.
    Raises ValueError if shapes, dtypes or numbers do not fit together.
    """
    if x.dim() != 2 or gate_weight.dim() != 2 or gate_weight.shape[1] != x.shape[1]:
        raise ValueError(f"x must be [T, D] and gate_weight [E, D], not {tuple(x.shape)}, {tuple(gate_weight.shape)}")
    if norm_weight.shape != x.shape[1:] or norm_weight.dtype != x.dtype:
        raise ValueError(f"norm_weight must be [{x.shape[1]}] of {x.dtype}")
    if live is not None and (live.shape != (1,) or live.dtype != torch.int32):
        raise ValueError("live must be one int32")
    _check(x.new_empty(0, len(gate_weight)), bias, top_k, num_groups, topk_groups, scoring, group_score)
    tensors = (x, norm_weight, gate_weight)
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    rule: dict[str, Any] = {
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "scoring": scoring,
        "group_score": group_score,
        "normalize": normalize,
        "scale": scale,
    }
    computed = uses_triton(x.device) and x.dtype != torch.float64 and not wants_gradient
    most = one_launch_tokens(gate_weight.numel(), gate_weight.itemsize)
    if computed and 0 < len(x) <= most and x.stride(1) == 1:
        from ..kernels import router as kernel

        counters = _counters_of_stream(x.device) if counters is None else counters
        weight, gate_weight = norm_weight.contiguous(), gate_weight.contiguous()
        return kernel.launch_norm_route(
            x, weight, eps, gate_weight, bias, top_k, **rule, live=live, counters=counters, drop=drop
        )
    normed = rms_norm(x, norm_weight, eps)
    return normed, *route_normed(normed, gate_weight, bias, top_k, **rule, live=live, drop=drop)


def route_normed(
    normed: torch.Tensor,
    gate_weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    live: torch.Tensor | None = None,
    drop: Drop | None = None,
    **rule: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm_route` of tokens that are normalised already: weights [T, K] and indices [T, K].

    As exact as an fp32 product: of 16-bit numbers the tensor cores' products are, and an fp32 weight is three of them.
    """
    wants_gradient = torch.is_grad_enabled() and (normed.requires_grad or gate_weight.requires_grad)
    if uses_triton(normed.device) and normed.dtype != torch.float64 and not wants_gradient and len(normed):
        from ..kernels import router as kernel
        from ..kernels import router_logits

        if router_logits.takes(normed.dtype, gate_weight.dtype) and not cublas_is_faster(len(normed), gate_weight):
            logits = router_logits.launch(normed, gate_weight.contiguous())
        else:
            logits = F.linear(normed.float(), gate_weight.float())
        feeling = None if drop is None else drop.feeling(normed)
        return kernel.launch(logits, bias, top_k, **rule, live=live, drop=drop, feeling=feeling)
    weights, indices = route(F.linear(normed.float(), gate_weight.float()), bias, top_k, **rule)
    if drop is not None:
        return drop_experts(weights, indices, drop.feeling(normed), drop, live)
    return _without_idle(weights, indices, live)

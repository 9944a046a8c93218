"""Codes that keep a layer's output rather than its weight: clipped ranges and rounding with feedback.

Everything here sees the inputs x [T, K] of a weight through H = x^T x / T alone: an error D [N, K] of the weight costs
trace(D H D^T), the squared error of the output per token. All take a batch of E weights.

    clipped ranges   AWQ, arXiv 2306.00978, section 3.2: each group's range is shrunk as far as that lowers the cost
    feedback         GPTQ, arXiv 2210.17323: the error of a rounded column is made up for in the columns after it.
                     Columns are taken by falling H[k, k]; groups stay where they are, so that no order is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.int4 import LEVELS, num_groups, scale_up

CLIPS = tuple(1 - 0.04 * i for i in range(13))
"""Fractions of a group's range that are tried; the first is the whole range."""
DAMPING = 0.01
"""Added to the diagonal of H, in units of its mean."""
COLUMNS = 128
"""How many columns are rounded before the rest of the weight hears of their errors."""


def group_range(weight: Tensor, dtype: torch.dtype, clip: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """One group [..., g] in fp32 -> its scale (a value of `dtype`) and zero, fp32 [...], as `ops.int4` rounds them.

    clip: the fraction of the range that is kept, [...].
    """
    low, high = weight.amin(-1).clamp(max=0.0) * clip, weight.amax(-1).clamp(min=0.0) * clip
    spread = high - low
    scales = scale_up(torch.where(spread == 0, 1.0, spread / LEVELS), dtype).float()
    return scales, (low / -scales).round_().clamp_(0, LEVELS)


def snap(weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The nearest codes, fp32. Shapes broadcast."""
    return (weight / scale).add_(zero).round_().clamp_(0, LEVELS)


def clipped_ranges(
    weight: Tensor,
    hessian: Tensor,
    trusted: Tensor,
    group_size: int,
    dtype: torch.dtype,
    clips: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """weight [E, N, K], hessian [E, K, K], trusted [E] bool -> scales and zeros [E, N, G], fp32.

    Each range is cut to the one of `clips` (all of `CLIPS` if None) with the least cost within its group; not where
    not trusted.
    """
    groups = []
    for start in range(0, weight.shape[-1], group_size):
        part = weight[..., start : start + group_size]
        local = hessian[:, start : start + group_size, start : start + group_size]
        best = torch.ones_like(part[..., 0])
        least = torch.full_like(best, float("inf"))
        for clip in CLIPS if clips is None else clips:
            scale, zero = (x[..., None] for x in group_range(part, dtype, clip))
            error = (snap(part, scale, zero) - zero) * scale - part
            found = ((error @ local) * error).sum(-1)
            better = (found < least) & trusted[:, None]
            least = torch.where(better, found, least)
            best = torch.where(better, clip, best)
        groups.append(group_range(part, dtype, best))
    return torch.stack([g[0] for g in groups], -1), torch.stack([g[1] for g in groups], -1)


def per_column(groups: Tensor, size: int, group_size: int) -> Tensor:
    """[..., G] -> [..., K]"""
    return groups.repeat_interleave(group_size, -1)[..., :size]


def inverse_factor(hessian: Tensor) -> Tensor:
    """[E, K, K] -> upper U with U^T U = (H + damping)^-1; the damping grows until H + damping has one."""
    size = hessian.shape[-1]
    mean = hessian.diagonal(dim1=-2, dim2=-1).mean(-1)
    mean = torch.where(mean > 0, mean, 1.0)[:, None, None]
    eye = torch.eye(size, device=hessian.device)
    damping = DAMPING
    while True:
        lower, failed = torch.linalg.cholesky_ex(hessian + damping * mean * eye)
        if not bool(failed.any()):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not bool(failed.any()):
                return upper
        damping *= 10


def feed_back(weight: Tensor, hessian: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """weight [E, N, K] fp32, hessian [E, K, K], scales and zeros [E, N, G] -> codes [E, N, K], fp32."""
    size = weight.shape[-1]
    order = hessian.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
    across = order[:, None, :].expand_as(weight)
    weight = weight.gather(-1, across)
    scale = per_column(scales, size, group_size).gather(-1, across)
    zero = per_column(zeros, size, group_size).gather(-1, across)
    hessian = hessian.gather(-1, order[:, None, :].expand_as(hessian)).gather(-2, order[..., None].expand_as(hessian))
    factor = inverse_factor(hessian)
    codes = torch.empty_like(weight)
    for start in range(0, size, COLUMNS):
        end = min(start + COLUMNS, size)
        errors = torch.empty_like(weight[..., start:end])
        for k in range(start, end):
            column, s, z = weight[..., k], scale[..., k], zero[..., k]
            codes[..., k] = snap(column, s, z)
            errors[..., k - start] = (column - (codes[..., k] - z) * s) / factor[:, k, k, None]
            if k + 1 < end:
                weight[..., k + 1 : end] -= errors[..., k - start, None] * factor[:, None, k, k + 1 : end]
        if end < size:
            weight[..., end:] -= errors @ factor[:, start:end, end:]
    return torch.empty_like(codes).scatter_(-1, across, codes)


def round_for(
    weight: Tensor, hessian: Tensor, trusted: Tensor, group_size: int, dtype: torch.dtype, feedback: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """weight [E, N, K] fp32, hessian [E, K, K], trusted [E] -> uint8 codes, fp32 scales, uint8 zeros.

    Weights that are not trusted, having met too few tokens for their H to mean anything, are rounded to nearest.
    dtype: scales are values of it. Raises ValueError where a weight or H is not finite.
    """
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("the weight holds a NaN or an infinity")
    if not bool(torch.isfinite(hessian).all()):
        raise ValueError("its inputs, or their squares in fp32, hold a NaN or an infinity")
    scales, zeros = clipped_ranges(weight, hessian, trusted, group_size, dtype)
    size = weight.shape[-1]
    codes = snap(weight, per_column(scales, size, group_size), per_column(zeros, size, group_size))
    if feedback and bool(trusted.any()):
        codes[trusted] = feed_back(weight[trusted], hessian[trusted], scales[trusted], zeros[trusted], group_size)
    assert scales.shape[-1] == num_groups(size, group_size)
    return codes.to(torch.uint8), scales, zeros.to(torch.uint8)


def scaled_values(weight: Tensor, hessian: Tensor, group_size: int, dtype: torch.dtype, columns: Tensor) -> Tensor:
    """What weight [E, N, K] becomes when weight * columns is rounded, clipped but without feedback, and divided again.

    hessian [E, K, K] of the inputs as they are, columns [E, K] or [1, K].
    """
    scaled = weight * columns[:, None]
    hessian = hessian / columns[:, None] / columns[..., None]
    known = torch.ones(len(weight), dtype=torch.bool, device=weight.device)
    scales, zeros = (
        per_column(groups, weight.shape[-1], group_size)
        for groups in clipped_ranges(scaled, hessian, known, group_size, dtype, CLIPS[::3])
    )
    return (snap(scaled, scales, zeros) - zeros).mul_(scales).div_(columns[:, None])


def nearest(weight: Tensor, group_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """weight [N, K] rounded to nearest -> uint8 codes [N, K], fp32 scales [N, G] of `dtype`'s values, uint8 zeros.

    What `ops.int4.round_to_nearest` gives where `dtype` is the weight's. Raises ValueError if it is not finite.
    """
    value = weight.float()
    if not bool(torch.isfinite(value).all()):
        raise ValueError("the weight holds a NaN or an infinity")
    ranges = [group_range(part, dtype) for part in value.split(group_size, -1)]
    scales, zeros = (torch.stack([r[i] for r in ranges], -1) for i in (0, 1))
    size = weight.shape[-1]
    codes = snap(value, per_column(scales, size, group_size), per_column(zeros, size, group_size))
    return codes.to(torch.uint8), scales, zeros.to(torch.uint8)

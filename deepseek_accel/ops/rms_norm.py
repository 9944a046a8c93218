"""Root mean square norm, as Hugging Face's DeepSeek models define it."""

import functools
from typing import Any

import torch
import torch.nn.functional as F

from .choice import uses_triton

# (leading shape, D)
CASES = [
    ((1,), 1),  # one element: the mean of squares divides by D, not by the padded tile
    ((5,), 64),  # rows that share a norm would mix
    ((2, 3), 24),  # two leading dims, D neither a power of two nor a multiple of 16
    ((2, 3, 2), 33),  # three leading dims, odd D: rows are not 16-byte aligned
    ((0,), 16),  # no rows: a launch with an empty grid is an error
    ((2,), 1536),  # V3's query rank, padded to 2,048: the padding must not count in the mean
]


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition, step by step: normalise in fp32, round to x's dtype, then multiply by the weight."""
    wide = x.to(torch.float32)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)


@functools.cache
def _kernel_launch() -> Any:
    from ..kernels.rms_norm import launch

    return launch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dim, times weight.

    x [..., D] of any floating dtype, rows of any stride; weight [D]. The result [..., D] has the dtype to which those
    of x and weight promote. Normalises in fp32 and rounds to x's dtype before the weight is applied. Equal to
    DeepseekV2RMSNorm and DeepseekV3RMSNorm of transformers 5.24 bit for bit on CPU, within rounding of the mean on GPU.
    The Triton kernel has no backward: where a gradient is wanted, torch is used.
    Raises ValueError if weight is not [D].
    """
    size = x.shape[-1]
    if weight.shape != (size,):
        raise ValueError(f"weight must have shape ({size},), it has {tuple(weight.shape)}")
    differentiable = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if uses_triton(x.device) and not differentiable and x.dtype != torch.float64:
        return _kernel_launch()(x, weight, eps)[0]
    if x.dtype == weight.dtype == torch.float32:
        return F.rms_norm(x, (size,), weight, eps)
    return weight * F.rms_norm(x.float(), (size,), None, eps).to(x.dtype)

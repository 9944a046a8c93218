"""How AutoAWQ's "gemm" checkpoints hold a weight of N outputs and K inputs in G groups: everything lies transposed.

    qweight int32 [K, N / 8]    qzeros int32 [G, N / 8]    scales fp16 [G, N]    value = (code - zero) * scale

Nibble p of a word, bits 4 p to 4 p + 3, is output ORDER[p] of the word's eight.
"""

from __future__ import annotations

import torch
from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SUFFIXES = ("qweight", "qzeros", "scales")


def why_not_stored(num_outputs: int, num_inputs: int, group_size: int) -> str | None:
    """Why the layout cannot hold such a weight, or None."""
    if num_inputs % group_size:
        return f"its {num_inputs} inputs do not divide into groups of {group_size}"
    if num_outputs % 8:
        return f"its {num_outputs} outputs do not divide into words of 8"
    return None


def to_words(values: Tensor) -> Tensor:
    """uint8 [R, N] of 0 to 15 -> int32 [R, N / 8]"""
    eights = values.unflatten(-1, (-1, 8))
    halves = [eights[..., ORDER[p]] | (eights[..., ORDER[p + 1]] << 4) for p in (0, 2, 4, 6)]  # bytes, low first
    return torch.stack(halves, -1).contiguous().view(torch.int32).squeeze(-1)


def from_words(words: Tensor) -> Tensor:
    """int32 [R, N / 8] -> uint8 [R, N]"""
    octets = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    nibbles = torch.stack((octets & 15, octets >> 4), -1).flatten(-2)  # [R, N / 8, 8] by place
    places = [ORDER.index(k) for k in range(8)]
    return nibbles[..., places].flatten(-2)


def to_awq(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    """codes [N, K], scales and zeros [N, G] -> the three tensors. Raises ValueError for a scale beyond fp16."""
    half = scales.T.contiguous().to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise ValueError(f"a scale of {float(scales.max())} is beyond fp16, in which this layout holds scales")
    return {"qweight": to_words(codes.T.contiguous()), "qzeros": to_words(zeros.T.contiguous()), "scales": half}


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three tensors -> codes [N, K], scales and zeros [N, G]. Raises ValueError if a scale is not finite."""
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("a scale is a NaN or an infinity")
    return (from_words(qweight).T.contiguous(), scales.T.contiguous(), from_words(qzeros).T.contiguous())

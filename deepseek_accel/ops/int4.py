"""Weights of four bits: codes 0 to 15 with a scale and a zero per group of neighbouring inputs.

    value[n, k] = (code[n, k] - zero[n, g]) * scale[n, g],   g = k // group_size

The last group is short where the group size does not divide the number of inputs (10,944 = 85 x 128 + 64).

Packed, 32 neighbouring codes of a row are four int32, the 16 bytes that a thread reads: the code of input 4 p + w lies
in bits 4 p to 4 p + 3 of word w. So the inputs that belong to place p of the four words are neighbours too, and two
words give two neighbouring 16-bit numbers with one mask. Rows are padded to 32 inputs. Scale and zero lie side by side,
both as numbers of the model's dtype.

Letters: N outputs, K inputs, G groups = ceil(K / group_size), E experts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LEAST_GROUP = 32
LEVELS = 15
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_no_group_size(group_size: Any) -> str | None:
    """Why weights cannot be grouped so, or None."""
    if type(group_size) is not int or group_size < LEAST_GROUP or group_size % LEAST_GROUP:
        return f"group_size must be a multiple of {LEAST_GROUP}, got {group_size!r}"
    return None


def _check_group_size(group_size: Any) -> None:
    if reason := why_no_group_size(group_size):
        raise ValueError(reason)


def num_groups(size: int, group_size: int) -> int:
    return -(-size // group_size)


def _in_groups(values: Tensor, group_size: int, fill: float = 0.0) -> Tensor:
    """values [..., K] -> [..., G, group_size], the last group filled up."""
    size = values.shape[-1]
    missing = num_groups(size, group_size) * group_size - size
    if missing:
        values = torch.nn.functional.pad(values, (0, missing), value=fill)
    return values.unflatten(-1, (-1, group_size))


def scale_up(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 scales in `dtype`, rounded up, so that 15 steps still span the group; never 0. In fp16 they may be
    subnormal: its normal numbers end at 6e-5, where groups of small weights begin."""
    rounded = scale.to(dtype)
    bits = rounded.view(torch.int32 if dtype == torch.float32 else torch.int16)
    higher = (bits + 1).view(dtype)
    rounded = torch.where(rounded.float() < scale, higher, rounded)
    return rounded.clamp(min=2.0**-24 if dtype == torch.float16 else torch.finfo(dtype).tiny)


def round_to_nearest(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight [..., N, K] -> uint8 codes [..., N, K], scales [..., N, G] of its dtype, uint8 zeros [..., N, G].

    A group's range is from its least to its largest value, 0 included, so that 0 is exact; every value is off by half
    a scale at most. A group of zeros has scale 1. Raises ValueError for a NaN or an infinity, for a dtype other than
    fp32, bf16 and fp16, and for a group size that is no multiple of 32.
    """
    _check_group_size(group_size)
    if weight.dtype not in DTYPES:
        raise ValueError(f"weight must be fp32, bf16 or fp16, it is {weight.dtype}")
    groups = _in_groups(weight, group_size).float()
    low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
    spread = high - low
    if not bool(torch.isfinite(spread).all()):
        raise ValueError("weight holds a NaN, an infinity, or a range beyond fp32")
    scales = torch.where(spread == 0, 1.0, spread / LEVELS)
    scales = scale_up(scales, weight.dtype)
    zeros = (low / -scales.float()).round_().clamp_(0, LEVELS)
    codes = (groups / scales.float().unsqueeze(-1)).add_(zeros.unsqueeze(-1)).round_().clamp_(0, LEVELS)
    codes = codes.flatten(-2)[..., : weight.shape[-1]].to(torch.uint8)
    return codes, scales, zeros.to(torch.uint8)


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """A packed weight [..., N, K], as the kernels read it. Made by `pack`."""

    words: Tensor
    """int32 [..., N, 4 ceil(K / 32)], contiguous."""
    groups: Tensor
    """[..., N, G, 2] of the model's dtype, contiguous: scale and zero."""
    size: int
    """K."""
    group_size: int
    native: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)
    """What torch's own operation on a CPU reads, by expert: made by `ops.int4_linear` where it is first used."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.words.shape[:-1], self.size)

    @property
    def dtype(self) -> torch.dtype:
        """Of the model: what activations must have, and what `dequantize` gives."""
        return self.groups.dtype

    @property
    def device(self) -> torch.device:
        return self.words.device

    def element_size(self) -> int:
        """Bytes of a number of `dtype`, as of an unpacked weight."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """With what a CPU has made of them for itself."""
        own = sum(t.nbytes for form in tuple(self.native.values()) for t in form)
        return self.words.nbytes + self.groups.nbytes + own

    @property
    def scales(self) -> Tensor:
        """[..., N, G]"""
        return self.groups[..., 0]

    @property
    def zeros(self) -> Tensor:
        """uint8 [..., N, G]"""
        return self.groups[..., 1].to(torch.uint8)

    def codes(self) -> Tensor:
        """uint8 [..., N, K], what was packed."""
        octets = self.words.view(torch.uint8).unflatten(-1, (-1, 4, 4)).transpose(-1, -2)  # [..., N, chunk, byte, word]
        codes = torch.stack((octets & 15, octets >> 4), -2)  # [..., N, chunk, byte, half, word]
        return codes.flatten(-4)[..., : self.size]

    def __getitem__(self, expert: Any) -> Int4Weight:
        """One expert of [E, N, K], or rows of [N, K]."""
        return dataclasses.replace(self, words=self.words[expert], groups=self.groups[expert])

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.words, self.groups

    def to(self, device: Any) -> Int4Weight:
        return dataclasses.replace(self, words=self.words.to(device), groups=self.groups.to(device))


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Int4Weight:
    """uint8 codes [..., N, K] in 0 to 15, scales [..., N, G], uint8 zeros [..., N, G] -> the packed weight.

    Raises ValueError if shapes or dtypes do not fit, a scale is not finite, or a code or zero is above 15.
    """
    _check_group_size(group_size)
    expected = (*codes.shape[:-1], num_groups(codes.shape[-1], group_size))
    if codes.dim() < 2 or scales.shape != expected or zeros.shape != expected:
        raise ValueError(
            f"codes {tuple(codes.shape)} in groups of {group_size} need scales and zeros {expected}, not "
            f"{tuple(scales.shape)} and {tuple(zeros.shape)}"
        )
    if codes.dtype != torch.uint8 or zeros.dtype != torch.uint8 or scales.dtype not in DTYPES:
        raise ValueError(f"codes, zeros and scales are {codes.dtype}, {zeros.dtype} and {scales.dtype}")
    for name, values in (("code", codes), ("zero", zeros)):
        if values.numel() and int(values.amax()) > LEVELS:
            raise ValueError(f"a {name} is above {LEVELS}")
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("a scale is not finite")
    size = codes.shape[-1]
    missing = -size % LEAST_GROUP
    whole = torch.nn.functional.pad(codes, (0, missing)) if missing else codes
    chunks = whole.unflatten(-1, (-1, 8, 4))  # [..., N, chunk, place, word]
    octets = chunks[..., 0::2, :] | (chunks[..., 1::2, :] << 4)  # low places first
    words = octets.transpose(-1, -2).contiguous().view(torch.int32).squeeze(-1).flatten(-2)
    groups = torch.stack((scales, zeros.to(scales.dtype)), -1).contiguous()
    return Int4Weight(words, groups, size, group_size)


def dequantize(weight: Int4Weight, dtype: torch.dtype | None = None) -> Tensor:
    """The values [..., N, K] in `dtype` (the model's by default), rounded once."""
    dtype = dtype or weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    codes = _in_groups(weight.codes(), weight.group_size).to(wide)
    scale, zero = weight.groups.to(wide).unsqueeze(-2).unbind(-1)
    return codes.sub_(zero).mul_(scale).flatten(-2)[..., : weight.size].to(dtype)


def quantize(weight: Tensor, group_size: int) -> Int4Weight:
    """`weight` [..., N, K] rounded to nearest and packed."""
    return pack(*round_to_nearest(weight, group_size), group_size)

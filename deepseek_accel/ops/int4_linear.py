"""Linear layers whose weights are packed in four bits: `ops.int4.Int4Weight` in place of a tensor.

On a GPU few tokens go through tensor cores with weights straight from registers (`kernels/int4_mma.py`), where those
can read the weights; one token is a dot product per row (`kernels/int4_dots.py`), but for the gate and up of an MLP,
several weights of one input and very long rows, which go there too. More tokens have weights unpacked tile by tile
(`kernels/int4_tiles.py`), many the whole weight unpacked once, for cuBLAS. On a CPU few tokens take torch's own
four-bit product where it fits (`takes_native`). Elsewhere, and where a gradient of the input is wanted, the weight is
unpacked for torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .choice import uses_triton
from .int4 import Int4Weight, dequantize
from .rms_norm import rms_norm

MMA_TOKENS = 32
"""Up to so many tokens, weights go from registers to tensor cores (`kernels/int4_mma.py`), where that fits. H200, bf16,
11,008 x 4,096, us, and unpacked through shared memory: 8 tokens 13.1 and 52.3, 32 tokens 37 and 103. Gate and up of
4,096 x 11,008: 8 tokens 20.2 and 52.3, 32 tokens 57 and 74, one token 18.6 and, by dot products, 22.6."""
MMA_SIZE = 16384
"""One token goes there too from so many inputs on. H200, us, and by dot products: 18,432 x 7,168 26.3 and 39.2, 18,944
x 3,584 17.1 and 22.2, 4,096 x 4,096 6.0 and 5.7. Between, 11,008 x 4,096 takes 11.2 and 13.7 alone, but a token of
LLM-7B took 2.38 ms with it there, and 2.28 by dot products and otherwise earlier kernels: probably since dot products
ask for their rows while the kernel before computes."""
TILE_TOKENS = 128
"""Up to so many tokens, weights are unpacked tile by tile. H200, bf16, 4,096 x 11,008, us, with an earlier form of the
tiles: 32 tokens 30 and 58 unpacked first, 128 tokens 52 and 59; 4,096 tokens 509 unpacked first, 482 a bf16 product."""

NATIVE_TOKENS = 16
NATIVE_GROUPS = (32, 64, 128, 256)

# (T, K, N, group_size)
CASES = [
    (0, 64, 8, 32),  # no tokens: a launch with an empty grid is an error
    (1, 64, 24, 32),  # one token, two groups
    (1, 100, 33, 64),  # K no multiple of a chunk, nor of the group: padding must not count; N odd
    (3, 192, 40, 128),  # a short last group, as V2-Lite's 10,944 has; several tokens
    (2, 1056, 16, 32),  # several blocks of words, the last one hardly filled
    (2, 128, 32, 64),  # what torch's own product on a CPU takes, in bf16
    (20, 96, 48, 96),  # a group that is no power of two
]


def check_input(x: Tensor, weight: Int4Weight) -> None:
    """Raise ValueError unless x [.., K] fits the weight: size, dtype, device."""
    if x.shape[-1] != weight.size or x.dtype != weight.dtype:
        raise ValueError(
            f"x must be [.., {weight.size}] of {weight.dtype}, it is {tuple(x.shape)} of {x.dtype}: the weight was "
            "packed for that dtype"
        )
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}, the packed weight on {weight.device}: packed weights do not move")


def unpack(weight: Int4Weight) -> Tensor:
    """`dequantize(weight)`, in one launch on a GPU: the same bits."""
    if not uses_triton(weight.device):
        return dequantize(weight)
    from ..kernels import int4 as kernel

    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    kernel.launch_dequantize(weight.words, weight.groups, out, weight.group_size)
    return out


def takes_kernels(x: Tensor, *others: Tensor | None) -> bool:
    """Whether this call runs our kernels: on a GPU, where no gradient is wanted. x [T, K]."""
    if not uses_triton(x.device) or torch.compiler.is_compiling():
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *others)))


def takes_mma(*weights: Int4Weight) -> bool:
    """Whether `kernels/int4_mma.py` reads these weights: of 16-bit models, groups of a multiple of 128 inputs, rows of
    a multiple of 32."""
    return all(w.dtype.itemsize == 2 and w.group_size % 128 == 0 and w.size % 32 == 0 for w in weights)


def takes_native(tokens: int, weight: Int4Weight) -> bool:
    """Whether torch's own four-bit product on a CPU is the faster one, for weights [.., N, K] and so many tokens.

    Two cores of an EPYC, one thread, torch 2.13, N = 2,816, K = 2,048, groups of 128, us: one token 567, a plain bf16
    product 1,078, unpacking first 36,893; 16 tokens 2,703 and 2,220. In fp32 and fp16 it takes 22 ms and more.
    """
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and tokens <= NATIVE_TOKENS
        and weight.group_size in NATIVE_GROUPS
        and weight.size % weight.group_size == 0
        and weight.shape[-2] % 16 == 0
        and hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
        and not torch.compiler.is_compiling()
    )


def native_linear(x: Tensor, weight: Int4Weight, expert: int | None = None) -> Tensor:
    """x [T, K] times weight [N, K], or one expert's of [E, N, K], where `takes_native`. No gradient."""
    form = weight.native.get(expert or 0)
    if form is None:
        part = weight if expert is None else weight[expert]
        codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(part.codes().int(), 2)
        scales = part.scales.float()
        # there the value is (code - 8) * scale + offset
        offsets = (8.0 - part.groups[..., 1].float()) * scales
        form = (codes, torch.stack((scales, offsets), -1).transpose(0, 1).contiguous().to(weight.dtype))
        weight.native[expert or 0] = form
    out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), form[0], weight.group_size, form[1])
    return out


def int4_linear_reference(
    x: Tensor, weight: Int4Weight, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """The definition: x [.., K] times the values, plus bias and residual. In x's dtype; fp64 too."""
    out = F.linear(x, dequantize(weight, x.dtype), bias)
    return out if residual is None else out + residual


def int4_linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x [T, K] weight^T + bias + residual -> [T, N], in x's dtype.

    weight [N, K] packed for x's dtype; bias [N] or None; residual [T, N] or None. Sums accumulate in fp32 and, but for
    many tokens, are rounded once. Differentiable with respect to x, bias and residual, through torch.
    Raises ValueError if shapes, dtypes or devices do not fit together.
    """
    check_input(x, weight)
    if len(x) == 0:
        return x.new_empty(0, weight.shape[0])
    if not takes_kernels(x, bias, residual):
        if takes_native(len(x), weight) and not (torch.is_grad_enabled() and x.requires_grad):
            out = native_linear(x, weight)
            out = out if bias is None else out + bias
            return out if residual is None else out + residual
        out = F.linear(x, unpack(weight), bias)
        return out if residual is None else out + residual
    if x.stride(1) != 1:
        x = x.contiguous()
    packed = (weight.words, weight.groups)
    if (len(x) > 1 or weight.size >= MMA_SIZE) and len(x) <= MMA_TOKENS and takes_mma(weight):
        from ..kernels import int4_mma as mma

        return mma.launch_dense(x, packed, None, weight.group_size, bias, residual)
    if len(x) == 1:
        from ..kernels import int4_dots as dots

        return dots.launch(x, packed, None, weight.group_size, bias=bias, residual=residual)
    if len(x) <= TILE_TOKENS:
        from ..kernels import int4_tiles as tiles

        return tiles.launch_dense(x, packed, None, weight.group_size, bias, residual)
    if bias is None and residual is not None:
        return torch.addmm(residual, x, unpack(weight).t())
    out = F.linear(x, unpack(weight), bias)
    return out if residual is None else out.add_(residual)


def int4_project(x: Tensor, weights: tuple[Int4Weight, ...], biases: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """`int4_linear` of x [T, K] by each weight [N_i, K] with its bias: [T, N_i] of each, few tokens in one launch."""
    for weight in weights:
        check_input(x, weight)
    alike = len({weight.group_size for weight in weights}) == 1 and takes_mma(*weights)
    if 1 < len(weights) <= 3 and 0 < len(x) <= MMA_TOKENS and alike and takes_kernels(x, *biases):
        from ..kernels import int4_mma as mma

        packed = tuple((weight.words, weight.groups) for weight in weights)
        return mma.launch_several(x if x.stride(1) == 1 else x.contiguous(), packed, weights[0].group_size, biases)
    return tuple(int4_linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def int4_gated_reference(x: Tensor, gate: Int4Weight, up: Int4Weight) -> Tensor:
    """The definition: silu(x gate^T) * (x up^T)."""
    return F.silu(int4_linear_reference(x, gate)) * int4_linear_reference(x, up)


def int4_gated(x: Tensor, gate: Int4Weight, up: Int4Weight, norm: tuple[Tensor, float] | None = None) -> Tensor:
    """silu(h gate^T) * (h up^T) -> [T, I], with h = rms_norm(x), or x without a norm; x [T, K], gate and up [I, K].

    As `int4_linear`. Raises ValueError if shapes, dtypes or devices do not fit together.
    """
    check_input(x, gate)
    check_input(x, up)
    if gate.shape != up.shape:
        raise ValueError(f"gate {gate.shape} and up {up.shape} must have one shape")
    if len(x) == 0:
        return x.new_empty(0, gate.shape[0])
    if gate.group_size != up.group_size:
        normed = x if norm is None else rms_norm(x, *norm)
        return F.silu(int4_linear(normed, gate)) * int4_linear(normed, up)
    kernels = takes_kernels(x, None if norm is None else norm[0])
    first, second = (gate.words, gate.groups), (up.words, up.groups)
    on_mma = len(x) <= MMA_TOKENS and takes_mma(gate)
    if kernels and len(x) == 1 and not on_mma:
        from ..kernels import int4_dots as dots

        return dots.launch(x, first, second, gate.group_size, norm)
    normed = x if norm is None else rms_norm(x, *norm)
    if not kernels:
        return F.silu(int4_linear(normed, gate)) * int4_linear(normed, up)
    if normed.stride(1) != 1:
        normed = normed.contiguous()
    if on_mma:
        from ..kernels import int4_mma as mma

        return mma.launch_dense(normed, first, second, gate.group_size)
    if len(x) <= TILE_TOKENS:
        from ..kernels import int4_tiles as tiles

        return tiles.launch_dense(normed, first, second, gate.group_size)
    from ..kernels import projection

    gates = F.linear(normed, unpack(gate))
    return projection.launch_silu_mul(gates, F.linear(normed, unpack(up)))

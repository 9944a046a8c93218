"""Linear layers of a decode step: the norm before them, several weights that share an input, the residual after."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F

from .choice import uses_triton
from .int4 import Int4Weight
from .int4_linear import int4_gated, int4_linear, int4_project
from .rms_norm import rms_norm, rms_norm_reference

Norm: TypeAlias = tuple[torch.Tensor, float]
"""The weight [D] and the epsilon of a root mean square norm."""

DOT_TOKENS = ((16 << 20, 8), (32 << 20, 4))
"""(bytes of all weights, tokens): up to these, dot products keep up with the memory; larger weights for two tokens.

H200, bf16, us, dot products against norm, cuBLAS and sum. T = 2: 4.9 and 14.2 (q and kv_a of V2-Lite, 15 MB), 97 and
106 (its head). T = 4: 7.2 and 14.1, 13.6 and 19.4 (V3, 30 MB), but 17.5 and 17.9 (45 MB), 58 and 55 (180 MB), 152 and
106 (head). T = 8: 12.2 and 14.2, 7.0 and 7.6 (o of V2-Lite, 8 MB)."""

MAX_WEIGHTS = 3

# (T, D, sizes N_i, which have a bias, norm, residual)
CASES = [
    (0, 32, (8,), (), False, False),  # no tokens: a launch with an empty grid is an error
    (1, 64, (48, 20), (), True, False),  # MLA's q and kv_a: a program must not cross from one weight into the next
    (2, 64, (24, 8, 8), (0, 1, 2), True, False),  # Qwen2's q, k, v with biases
    (3, 64, (24, 8), (1,), True, False),  # only the second has a bias; three tokens fill a tile of four
    (4, 64, (33,), (), False, True),  # o and the residual; N odd: the last program has rows of no weight
    (1, 33, (7, 5), (0,), True, False),  # D odd: rows are not 16-byte aligned, and padding must not count in the mean
    (1, 2056, (5,), (0,), True, True),  # more than one tile of D, the last one hardly filled; bias and residual
    (3, 4096, (3, 3, 3), (), True, False),  # D of several full tiles, N smaller than a tile
]

# (T, D, I, norm)
GATED_CASES = [
    (0, 32, 8, False),  # no tokens
    (1, 64, 40, True),  # I is not a multiple of the tile
    (3, 2056, 7, False),  # several tiles of D, three tokens in a tile of four
    (4, 33, 5, True),  # D odd
]


Weight: TypeAlias = torch.Tensor | Int4Weight
"""[N, D], or the same packed in four bits."""


def _check(x: torch.Tensor, weights: Sequence[Weight], norm: Norm | None) -> None:
    if x.dim() != 2:
        raise ValueError(f"x must be [T, D], it has shape {tuple(x.shape)}")
    if not 1 <= len(weights) <= MAX_WEIGHTS:
        raise ValueError(f"there must be 1 to {MAX_WEIGHTS} weights, not {len(weights)}")
    size = x.shape[1]
    for weight in weights:
        if len(weight.shape) != 2 or weight.shape[1] != size or weight.dtype != x.dtype:
            raise ValueError(
                f"a weight must be [N, {size}] of {x.dtype}, it is {tuple(weight.shape)} of {weight.dtype}"
            )
    if norm is not None and (norm[0].shape != (size,) or norm[0].dtype != x.dtype):
        raise ValueError(f"norm must have a weight [{size}] of {x.dtype}, it is {tuple(norm[0].shape)}")


Form: TypeAlias = Literal["torch", "dots", "matmul"]


def _form(x: torch.Tensor, weights: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> Form:
    """How it is computed: by torch, wherever a gradient is wanted; on a GPU by `kernels.projection` in one launch, or
    as the norm, cuBLAS's products and what follows them."""
    tensors = (x, *weights, *others)
    if x.dtype == torch.float64 or not uses_triton(x.device):
        return "torch"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "torch"
    if len(x) == 0 or x.stride(1) != 1 or not all(tensor.is_contiguous() for tensor in tensors[1:]):
        return "matmul"
    return choose_form(len(x), sum(weight.numel() for weight in weights) * x.element_size())


def choose_form(num_tokens: int, num_bytes: int) -> Form:
    """The faster one for `num_tokens`, not 0, and weights of `num_bytes` in all."""
    most = next((tokens for limit, tokens in DOT_TOKENS if num_bytes <= limit), 2)
    return "dots" if num_tokens <= most else "matmul"


def project_reference(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, ...] | None = None,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The definition, step by step as stock models take it; arguments and result as those of `project`."""
    normed = x if norm is None else rms_norm_reference(x, *norm)
    outs = tuple(F.linear(normed, w, b) for w, b in zip(weights, biases or (None,) * len(weights), strict=True))
    return outs if residual is None else (residual + outs[0],)


def project(
    x: torch.Tensor,
    weights: tuple[Weight, ...],
    biases: tuple[torch.Tensor | None, ...] | None = None,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """y_i = rms_norm(x) W_i^T + b_i for each of one to three weights, and + residual for one weight.

    x [T, D]; weights [N_i, D], each where the model has it; biases one per weight, [N_i] or None, or None for no bias
    at all; norm (weight [D], eps) or None; residual [T, N], only with one weight. All of one dtype. Returns a tuple
    of [T, N_i], contiguous, in that dtype.

    Few tokens on a GPU (`choose_form`) are one launch, which computes in fp32 and rounds once, at the end.
    Elsewhere the norm, each product and the sum are rounded one by one, as by stock models. Weights that are packed in
    four bits are multiplied as `ops.int4_linear.int4_project` says, or with a residual as `int4_linear`.
    Source: the linear layers of transformers 5.24 (DeepseekV3Attention, LlamaAttention, Qwen2Attention).
    The kernel has no backward: where a gradient is wanted, torch is used.
    Raises ValueError if shapes or dtypes do not fit together.
    """
    _check(x, weights, norm)
    if biases is None:
        biases = (None,) * len(weights)
    if len(biases) != len(weights) or any(
        b is not None and (tuple(b.shape) != tuple(w.shape[:1]) or b.dtype != x.dtype)
        for w, b in zip(weights, biases, strict=True)
    ):
        raise ValueError(f"biases must be one per weight, [N] of {x.dtype} or None")
    if residual is not None:
        if len(weights) > 1:
            raise ValueError("a residual needs exactly one weight")
        if residual.shape != (len(x), weights[0].shape[0]) or residual.dtype != x.dtype:
            raise ValueError(f"residual must be [{len(x)}, {weights[0].shape[0]}] of {x.dtype}")
    plain = tuple(weight for weight in weights if isinstance(weight, torch.Tensor))
    packed = tuple(weight for weight in weights if isinstance(weight, Int4Weight))
    if packed:
        normed = x if norm is None else rms_norm(x, *norm)
        if not plain and residual is None:
            return int4_project(normed, packed, biases)
        return tuple(_times(normed, w, b, residual) for w, b in zip(weights, biases, strict=True))

    others = [tensor for tensor in (*biases, residual, None if norm is None else norm[0]) if tensor is not None]
    form = _form(x, plain, others)
    if form == "dots":
        from ..kernels import projection as dots

        return dots.launch(x, plain, biases, norm, residual)
    normed = x if norm is None else rms_norm(x, *norm)
    return tuple(_times(normed, w, b, residual) for w, b in zip(plain, biases, strict=True))


def _times(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    if isinstance(weight, Int4Weight):
        return int4_linear(x, weight, bias, residual)
    out = F.linear(x, weight, bias)
    return out if residual is None else out + residual


def gated_project_reference(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *, norm: Norm | None = None
) -> torch.Tensor:
    """The definition; arguments and result as those of `gated_project`."""
    normed = x if norm is None else rms_norm_reference(x, *norm)
    return F.silu(F.linear(normed, gate)) * F.linear(normed, up)


def gated_project(x: torch.Tensor, gate: Weight, up: Weight, *, norm: Norm | None = None) -> torch.Tensor:
    """silu(h gate^T) * (h up^T) with h = rms_norm(x), or x without a norm: the first half of a gated MLP.

    x [T, D]; gate and up [I, D]; norm (weight [D], eps) or None; all of one dtype. Returns [T, I] in that dtype.
    Launches and rounding as in `project`; with more tokens on a GPU the two products are rounded and one launch does
    the rest. Packed in four bits: `ops.int4_linear.int4_gated`; if only one of them is, each by itself.
    Source: DeepseekV3MLP and LlamaMLP of transformers 5.24, with silu and without biases.
    The kernels have no backward: where a gradient is wanted, torch is used.
    Raises ValueError if shapes or dtypes do not fit together.
    """
    _check(x, (gate, up), norm)
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have one shape, they have {tuple(gate.shape)} and {tuple(up.shape)}")
    if isinstance(gate, Int4Weight) and isinstance(up, Int4Weight):
        return int4_gated(x, gate, up, norm)
    if isinstance(gate, Int4Weight) or isinstance(up, Int4Weight):
        normed = x if norm is None else rms_norm(x, *norm)
        return F.silu(_times(normed, gate)) * _times(normed, up)
    form = _form(x, (gate, up), () if norm is None else norm[:1])
    if form == "dots":
        from ..kernels import projection as dots

        return dots.launch_gated(x, gate, up, norm)
    normed = x if norm is None else rms_norm(x, *norm)
    if form == "matmul":
        from ..kernels import projection as dots

        return dots.launch_silu_mul(F.linear(normed, gate), F.linear(normed, up))
    return F.silu(F.linear(normed, gate)) * F.linear(normed, up)

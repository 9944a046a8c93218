"""Routed and shared experts whose weights are packed in four bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .experts import mixture as plain_mixture
from .int4 import Int4Weight, dequantize
from .int4_linear import check_input, int4_gated, int4_linear, takes_kernels, unpack

Shared = tuple[Int4Weight, Int4Weight, Int4Weight]

UNPACK_ROWS = 256
"""From so many rows of an expert on, all experts are unpacked once and run as 16-bit ones. Not yet measured."""
UNPACK_BYTES = 2 << 30
"""But only where the unpacked weights of a layer take no more."""

# (T, E, K, D, I, group_size)
CASES = [
    (0, 4, 2, 64, 32, 32),  # no tokens
    (1, 16, 4, 64, 32, 32),  # one row per expert, most experts idle
    (3, 4, 4, 96, 64, 64),  # K = E, D = 96 is a group and a half
    (5, 3, 1, 40, 33, 32),  # sizes that are no multiples of a chunk
    (40, 4, 2, 64, 32, 32),  # many rows per expert: a run of an expert ends inside a tile
]


def _check(hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Int4Weight, down: Int4Weight) -> None:
    num_experts, size, intermediate = down.shape
    if hidden.dim() != 2 or gate_up.shape != (num_experts, 2 * intermediate, size):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, gate_up {gate_up.shape} and down {down.shape} do not fit: they must be "
            "[T, D], [E, 2I, D] and [E, D, I]"
        )
    check_input(hidden, gate_up)
    if down.dtype != hidden.dtype or down.group_size != gate_up.group_size:
        raise ValueError("gate_up and down must have one dtype and one group size")
    if indices.dim() != 2 or indices.shape != weights.shape or indices.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"indices {tuple(indices.shape)} and weights {tuple(weights.shape)} must both be [T, K] with T = "
            f"{hidden.shape[0]}"
        )


def int4_experts_reference(
    hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Int4Weight, down: Int4Weight
) -> Tensor:
    """The definition, expert by expert, those that were chosen unpacked one at a time. In hidden's dtype; fp64 too."""
    num_experts = down.shape[0]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    outputs = torch.zeros(*indices.shape, hidden.shape[1], dtype=wide, device=hidden.device)  # [T, K, D]
    for expert in indices.unique().tolist():
        if not 0 <= expert < num_experts:
            continue
        token, slot = torch.where(indices == expert)
        gate, up = F.linear(hidden[token], dequantize(gate_up[expert], hidden.dtype)).chunk(2, dim=-1)
        output = F.linear(F.silu(gate) * up, dequantize(down[expert], hidden.dtype))
        outputs[token, slot] = output.to(wide) * weights[token, slot, None].to(wide)
    total = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
    for output in outputs.unbind(1):
        total = total + output
    return total.to(hidden.dtype)


def int4_experts(hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Int4Weight, down: Int4Weight) -> Tensor:
    """`ops.experts.fused_experts` with packed weights gate_up [E, 2I, D] and down [E, D, I], in one group size.

    The same contract: dropped experts contribute nothing and are not read, sums run in order and in fp32, rows do not
    influence each other. Differentiable with respect to hidden and weights, through torch.
    Raises ValueError if shapes, dtypes or devices do not fit together.
    """
    _check(hidden, indices, weights, gate_up, down)
    if len(hidden) == 0:
        return torch.empty_like(hidden)
    if takes_kernels(hidden, weights):
        return _launch(hidden, indices, weights, gate_up, down, None, None)
    return int4_experts_reference(hidden, indices, weights, gate_up, down)


def int4_mixture(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Int4Weight,
    down: Int4Weight,
    shared: Shared | None,
    residual: Tensor,
) -> Tensor:
    """residual + shared experts + `int4_experts`, where no gradient is wanted; as `ops.experts.mixture`.

    shared: gate [J, D], up [J, D] and down [D, J], packed. They run in the launches of the routed ones where J is a
    multiple of I and I one of the group size.
    """
    if takes_kernels(hidden) and len(hidden):
        _check(hidden, indices, weights, gate_up, down)
        if shared is None or _rides(shared, down):
            return _launch(hidden, indices, weights, gate_up, down, shared, residual)
    out = residual + int4_experts(hidden, indices, weights, gate_up, down)
    if shared is None:
        return out
    gate, up, shared_down = shared
    return int4_linear(int4_gated(hidden, gate, up), shared_down, residual=out)


def _rides(shared: Shared, down: Int4Weight) -> bool:
    intermediate = down.shape[2]
    same = all(weight.group_size == down.group_size for weight in shared)
    return same and shared[0].shape[0] % intermediate == 0 and intermediate % down.group_size == 0


def _launch(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Int4Weight,
    down: Int4Weight,
    shared: Shared | None,
    residual: Tensor | None,
) -> Tensor:
    num_experts, size, intermediate = down.shape
    num_tokens, top_k = indices.shape
    values = gate_up.shape[0] * gate_up.shape[1] * gate_up.shape[2] * 3 // 2
    if num_tokens * top_k >= UNPACK_ROWS * num_experts and values * hidden.element_size() <= UNPACK_BYTES:
        whole = None if shared is None else tuple(unpack(weight) for weight in shared)
        if residual is None:
            residual = torch.zeros_like(hidden)
        return plain_mixture(hidden, indices, weights, unpack(gate_up), unpack(down), whole, residual)  # type: ignore[arg-type]
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    out = torch.empty(num_tokens, size, dtype=hidden.dtype, device=hidden.device)
    from ..kernels import int4_pairs, int4_tiles

    launch = int4_pairs.launch if num_tokens == 1 else int4_tiles.launch_experts
    launch(
        hidden,
        indices.contiguous(),
        weights.contiguous(),
        (gate_up.words, gate_up.groups),
        (down.words, down.groups),
        out,
        None if shared is None else tuple((weight.words, weight.groups) for weight in shared),  # type: ignore[arg-type]
        residual,
        intermediate,
        down.group_size,
    )
    return out

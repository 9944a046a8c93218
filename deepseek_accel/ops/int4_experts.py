"""Routed and shared experts whose weights are packed in four bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .experts import Shared, Weight, fused_experts
from .experts import mixture as plain_mixture
from .int4 import Int4Weight, dequantize
from .int4_linear import check_input, native_linear, takes_kernels, takes_mma, takes_native, unpack
from .projection import gated_project, project

PAIR_TOKENS = 4
"""Up to so many tokens, where `takes_mma`, pairs of token and expert run each for itself. H200, with shared experts,
us, and sorted: V2-Lite, 2 tokens 31 and 44, 4 tokens 55 and 59; V3, 4 tokens 273 and 325."""
MMA_ROWS = 12
"""Up to so many rows of an expert, where `takes_mma`, weights go from registers to tensor cores. H200, V2-Lite with
shared experts (other models were not timed near the limit), us, and unpacked through shared memory: 32 tokens (3 rows)
124 and 193, 64 tokens 148 and 205, 128 tokens (12 rows) 217 and 242, 256 tokens 365 and 279."""
UNPACK_ROWS = 256
"""From so many rows of an expert on, all experts are unpacked once and run as 16-bit ones. H200, V2-Lite, us: 96 rows
487 in tiles and 788 unpacked first, 192 rows 933 and 1,088. Beyond, tiles grow with the rows; unpacking, 375, does
not."""
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


def _expert_linear(x: Tensor, weight: Int4Weight, expert: int, native: bool) -> Tensor:
    if native and takes_native(len(x), weight):
        return native_linear(x, weight, expert)
    return F.linear(x, dequantize(weight[expert], x.dtype))


def int4_experts_reference(
    hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Int4Weight, down: Int4Weight, native: bool = False
) -> Tensor:
    """The definition, expert by expert, those that were chosen unpacked one at a time. In hidden's dtype; fp64 too.

    native: with torch's own four-bit product on a CPU where that fits; no gradient then.
    """
    num_experts = down.shape[0]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    outputs = torch.zeros(*indices.shape, hidden.shape[1], dtype=wide, device=hidden.device)  # [T, K, D]
    for expert in indices.unique().tolist():
        if not 0 <= expert < num_experts:
            continue
        token, slot = torch.where(indices == expert)
        gate, up = _expert_linear(hidden[token], gate_up, expert, native).chunk(2, dim=-1)
        output = _expert_linear(F.silu(gate) * up, down, expert, native)
        outputs[token, slot] = output.to(wide) * weights[token, slot, None].to(wide)
    total = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
    for output in outputs.unbind(1):
        total = total + output
    return total.to(hidden.dtype)


def int4_experts(hidden: Tensor, indices: Tensor, weights: Tensor, gate_up: Int4Weight, down: Int4Weight) -> Tensor:
    """`ops.experts.fused_experts` with packed weights gate_up [E, 2I, D] and down [E, D, I], in one group size.

    The same contract: dropped experts contribute nothing and are not read, sums run in fp32 in a fixed order, rows do
    not influence each other. Differentiable with respect to hidden and weights, through torch.
    Raises ValueError if shapes, dtypes or devices do not fit together.
    """
    _check(hidden, indices, weights, gate_up, down)
    if len(hidden) == 0:
        return torch.empty_like(hidden)
    if takes_kernels(hidden, weights):
        return _launch(hidden, indices, weights, gate_up, down, None, None)
    native = not (torch.is_grad_enabled() and (hidden.requires_grad or weights.requires_grad))
    return int4_experts_reference(hidden, indices, weights, gate_up, down, native)


def int4_mixture(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Weight,
    down: Weight,
    shared: Shared | None,
    residual: Tensor,
) -> Tensor:
    """residual + shared experts + routed experts, some of whose weights are packed; else as `ops.experts.mixture`.

    Where all are packed in one group size, J is a multiple of I and I one of the group size, shared experts run in the
    launches of the routed ones.
    """
    if isinstance(gate_up, Int4Weight) and isinstance(down, Int4Weight):
        if takes_kernels(hidden) and len(hidden) and (packed := _riding(shared, down)) is not None:
            _check(hidden, indices, weights, gate_up, down)
            return _launch(hidden, indices, weights, gate_up, down, packed or None, residual)
        out = residual + int4_experts(hidden, indices, weights, gate_up, down)
    elif isinstance(gate_up, Int4Weight) or isinstance(down, Int4Weight):
        raise ValueError("either both of an expert's weights are packed, or none is")
    else:
        out = residual + fused_experts(hidden, indices, weights, gate_up, down)
    if shared is None:
        return out
    gate, up, shared_down = shared
    return project(gated_project(hidden, gate, up), (shared_down,), residual=out)[0]


def _riding(shared: Shared | None, down: Int4Weight) -> tuple[Int4Weight, ...] | None:
    """The shared experts where they can run as routed ones do, () if there are none, None where they cannot."""
    if shared is None:
        return ()
    packed = tuple(weight for weight in shared if isinstance(weight, Int4Weight))
    intermediate, group_size = down.shape[2], down.group_size
    fits = shared[0].shape[0] % intermediate == 0 and intermediate % group_size == 0
    return packed if fits and len(packed) == 3 and all(w.group_size == group_size for w in packed) else None


def _launch(
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Int4Weight,
    down: Int4Weight,
    shared: tuple[Int4Weight, ...] | None,
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
    arguments: Any = (
        hidden,
        indices.contiguous(),
        weights.contiguous(),
        (gate_up.words, gate_up.groups),
        (down.words, down.groups),
        out,
        None if shared is None else tuple((weight.words, weight.groups) for weight in shared),
        residual,
        intermediate,
        down.group_size,
    )
    rows = num_tokens * top_k / num_experts
    if num_tokens <= PAIR_TOKENS and takes_mma(gate_up, down):
        from ..kernels import int4_mma_pairs

        int4_mma_pairs.launch(*arguments)
    elif num_tokens == 1:
        from ..kernels import int4_pairs

        int4_pairs.launch(*arguments)
    elif rows <= MMA_ROWS and takes_mma(gate_up, down):
        from ..kernels import int4_mma

        int4_mma.launch_experts(*arguments)
    else:
        from ..kernels import int4_tiles

        int4_tiles.launch_experts(*arguments)
    return out

"""Routed and shared experts: by pair for one token, by tile for many, by TMA for thousands. The host never waits.

The contract is that of `ops.experts.mixture`. Address arithmetic is in int64: pairs x sizes and expert x sizes pass
2^31 for V3.
"""

from typing import Any

import torch

from . import experts_pairs, experts_tiles, experts_tma


def launch(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.experts.mixture`, also without shared experts or a residual. Shared sizes are multiples of I."""
    num_tokens, size = hidden.shape
    if gate_up.stride(-1) != 1 or down.stride(-1) != 1:
        raise ValueError("gate_up and down must have unit last stride")
    out = torch.empty(num_tokens, size, dtype=hidden.dtype, device=hidden.device)
    if out.numel() == 0:
        return out
    if hidden.stride(-1) != 1:
        hidden = hidden.contiguous()
    # H200, V2-Lite, two tokens: tiles 67.9 us; pairs 67.8, but with other blocks than they have now, so near a tie
    way: Any = experts_pairs if num_tokens == 1 else experts_tiles
    if experts_tma.takes(hidden, indices.shape[1], gate_up, down):
        way = experts_tma
    way.launch(hidden, indices.contiguous(), weights.contiguous(), gate_up, down, out, shared, residual)
    return out

"""Run a step's routed experts together instead of one by one, and pick them in one launch.

The blocks, their gates and their experts stay the model's own modules; only the `forward` of gate and experts changes.
Router arithmetic stays in fp32, on the weights the model has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..families.base import Family, RouterRule
from ..journal import forward_slot
from ..ops.choice import why_not_triton
from ..ops.experts import fused_experts
from ..ops.router import route
from ..plan import Context, Edit, Note, Skip
from .base import Pass, needs_gradients


def gate_forward(
    gate: Any, hidden_states: torch.Tensor, rule: RouterRule, counters: Counter[str]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden_states [..., D] -> router logits [T, E], weights [T, K], expert ids [T, K], as the stock gate returns."""
    if needs_gradients(gate, hidden_states):
        counters["experts: stock router (gradients)"] += 1
        return type(gate).forward(gate, hidden_states)
    counters["experts: fused router"] += 1
    hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
    logits = F.linear(hidden_states.float(), gate.weight.float())
    bias = getattr(gate, "e_score_correction_bias", None)
    return logits, *route(logits, None if bias is None else bias.float(), **asdict(rule))


def experts_forward(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    counters: Counter[str],
) -> torch.Tensor:
    """hidden_states [T, D], top_k_index [T, K], top_k_weights [T, K] -> [T, D]."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if needs_gradients(experts, hidden_states, top_k_weights):
        reason = "gradients"
    elif hidden_states.dtype != gate_up.dtype:
        reason = "mixed dtypes"
    else:
        counters["experts: fused"] += 1
        return fused_experts(hidden_states, top_k_index, top_k_weights, gate_up, down)
    counters[f"experts: stock ({reason})"] += 1
    return type(experts).forward(experts, hidden_states, top_k_index, top_k_weights)


def why_not_fused(experts: Any) -> str | None:
    """Why these experts do not compute `down(silu(gate) * up)` on two 3-D tensors, or None if they do."""
    from transformers.integrations import moe

    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name, None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 3 or not weight.is_floating_point():
            return f"its {name} is not a 3-D floating-point tensor"
    if type(experts)._apply_gate is not moe._default_apply_gate:
        return "it has a gate function of its own"
    if type(experts.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return f"its activation is {experts.act_fn}, not SiLU"
    if getattr(experts, "is_transposed", False) or getattr(experts, "has_bias", False):
        return "its weights are transposed or have a bias"
    if not getattr(experts, "is_concatenated", True):
        return "its gate and up rows are interleaved"
    return None


@dataclass(frozen=True)
class FusedExperts(Pass):
    """Routed experts in a few launches on a GPU, in one grouped pass on a CPU, and the router in one."""

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        blocks = family.moe(model)
        if not blocks:
            yield Skip(family.model_type, "this model has no routed experts")
            return
        applied = False
        for where, block in blocks:
            if (why := why_not_fused(block.experts)) is not None:
                yield Skip(f"{where}.experts", why)
                continue
            applied = True
            gate, experts = block.gate, block.experts
            rule = family.router(gate)
            yield Edit(
                gate,
                forward_slot(gate),
                partial(partial, gate_forward, gate, rule=rule, counters=context.counters),
                f"{where}.gate",
            )
            yield Edit(
                experts,
                forward_slot(experts),
                partial(partial, experts_forward, experts, counters=context.counters),
                f"{where}.experts",
            )
        if applied:
            why = why_not_triton(next(model.parameters()).device)
            yield Note(f"implementation: {'Triton kernels' if why is None else f'grouped torch ({why})'}")


PASS = FusedExperts

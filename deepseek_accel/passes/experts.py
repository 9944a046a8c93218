"""Run a step's routed experts together instead of one by one, and pick them in one launch.

The blocks, their gates and their experts stay the model's own modules; only the `forward` of gate and experts changes.
Router arithmetic stays in fp32, on the weights the model has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import AccelError
from ..families.base import Family
from ..generation.lines import packed_weight, why_stock_experts
from ..journal import forward_slot
from ..ops.choice import why_not_triton
from ..ops.experts import fused_experts
from ..ops.int4_experts import int4_experts
from ..ops.router import route
from ..plan import Context, Edit, Note, Skip
from ..watch import count, is_silu, needs_gradients, why_foreign
from .base import Pass

MOVED = "To move or convert a model with packed weights, `restore(model)`, move it, `optimize` it again."


def gate_forward(
    gate: Any, hidden_states: torch.Tensor, family: Family, counters: Counter[str]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden_states [..., D] -> router logits [T, E], weights [T, K], expert ids [T, K], as the stock gate returns."""
    if torch.compiler.is_compiling() or needs_gradients(gate, hidden_states):
        count(counters, "experts: stock router (gradients)")
        return type(gate).forward(gate, hidden_states)
    count(counters, "experts: fused router")
    return choose_experts(gate, hidden_states.view(-1, hidden_states.shape[-1]), family)


def choose_experts(gate: Any, hidden: torch.Tensor, family: Family) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden [T, D] -> logits [T, E], weights [T, K], expert ids [T, K], in fp32 throughout."""
    logits = F.linear(hidden.float(), gate.weight.float())
    bias = getattr(gate, "e_score_correction_bias", None)
    return logits, *route(logits, None if bias is None else bias.float(), **vars(family.router(gate)))


def experts_forward(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    implementation: str | None,
    counters: Counter[str],
    drops: bool = False,
) -> torch.Tensor:
    """hidden_states [T, D], top_k_index [T, K], top_k_weights [T, K] -> [T, D]. drops: of weight 0 means dropped."""
    gate_up, down = packed_weight(experts, "gate_up_proj"), packed_weight(experts, "down_proj")
    if gate_up is not None and down is not None:
        count(counters, "experts: fused")
        if drops:
            top_k_index = top_k_index.masked_fill(top_k_weights == 0, -1)
        inputs = hidden_states
        if torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(gate_up.dtype)
        try:
            out = int4_experts(inputs, top_k_index, top_k_weights, gate_up, down)
        except ValueError as error:
            raise AccelError(f"{error}. {MOVED}") from error
        return out.to(hidden_states.dtype)
    reason = why_stock_experts(experts, implementation, hidden_states, top_k_weights)
    if reason is None:
        count(counters, "experts: fused")
        if drops:
            top_k_index = top_k_index.masked_fill(top_k_weights == 0, -1)
        return fused_experts(hidden_states, top_k_index, top_k_weights, experts.gate_up_proj, experts.down_proj)
    count(counters, f"experts: stock ({reason})")
    return type(experts).forward(experts, hidden_states, top_k_index, top_k_weights)


def why_not_routed(gate: Any, family: Family) -> str | None:
    """Why this router does not choose as `ops.router.route` does, or None if it does."""
    if (reason := why_foreign(gate)) is not None:
        return reason
    rule = family.router(gate)
    if rule.group_score is not None and rule.top_k > rule.topk_groups * (gate.num_experts // rule.num_groups):
        return f"it chooses {rule.top_k} experts from groups that hold fewer"
    return None


def why_not_fused(experts: Any) -> str | None:
    """Why these experts do not compute `down(silu(gate) * up)` on two 3-D tensors, or None if they do."""
    from transformers.integrations import moe

    if (reason := why_foreign(experts)) is not None:
        return reason
    for name in ("gate_up_proj", "down_proj"):
        weight: Any = getattr(experts, name, None)
        if type(weight) not in (nn.Parameter, torch.Tensor) or weight.dim() != 3 or not weight.is_floating_point():
            return f"its {name} is not a plain 3-D floating-point tensor"
    if type(experts)._apply_gate is not moe._default_apply_gate:
        return "it has a gate function of its own"
    if not is_silu(experts.act_fn):
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
        adaptive = next((p for p in context.passes if p.name == "adaptive_topk"), None)
        for where, block in blocks:
            gate, experts = block.gate, block.experts
            drops = adaptive is not None and adaptive.why_not(model, family, gate) is None
            if (why := why_not_routed(gate, family)) is not None:
                yield Skip(f"{where}.gate", why)
            elif not drops:  # else that pass writes the gate's forward
                choose = partial(partial, gate_forward, gate, family=family, counters=context.counters)
                yield Edit(gate, forward_slot(gate), choose, f"{where}.gate")
            if (why := why_not_fused(experts)) is not None:
                yield Skip(f"{where}.experts", why)
                continue
            applied = True
            compute = partial(
                partial,
                experts_forward,
                experts,
                implementation=experts.config._experts_implementation,
                counters=context.counters,
                drops=drops,
            )
            yield Edit(experts, forward_slot(experts), compute, f"{where}.experts")
        if applied:
            why = why_not_triton(next(model.parameters()).device)
            yield Note(f"implementation: {'Triton kernels' if why is None else f'grouped torch ({why})'}")


PASS = FusedExperts

"""Leave out chosen experts that the loss does not feel: fewer weights to read in a step.

The routers choose as before; of what they chose, the experts whose loss calibration predicts to be small get no weight.
The gates stay the model's own modules; their `forward` changes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import PlanError
from ..families.base import Family
from ..gating.sensitivity import GateSensitivity, fingerprint, is_placeholder, temper_of
from ..journal import forward_slot
from ..ops.adaptive_topk import Drop, drop_experts
from ..ops.router import route
from ..plan import Context, Edit, Note, Skip
from ..watch import count, needs_gradients
from .base import Pass
from .experts import why_not_routed

METHODS = ("gradient", "threshold")


class Dropping:
    """The rule of one layer, with its tensors wherever the layer is."""

    def __init__(self, drop: Drop) -> None:
        self._drop = drop

    def on(self, device: torch.device) -> Drop:
        """The rule on a device; it stays there until it is wanted on another."""
        if self._drop.offset.device != device:
            with torch.inference_mode(False), torch.no_grad():
                moved = {name: getattr(self._drop, name).to(device) for name in ("slope", "offset", "tally")}
            self._drop = self._drop._replace(**moved)
        return self._drop

    def tally(self) -> list[int]:
        """Pairs kept, tokens, distinct experts, steps of these. Waits for the device."""
        return [int(value) for value in self._drop.tally.tolist()]

    def restart(self) -> None:
        """Count from 0 again, in the same place: graphs go on counting there."""
        self._drop.tally.zero_()


def droppings(model: Any, family: Family) -> Iterator[Dropping]:
    """The rules of an optimized model's layers, in their order."""
    for _, block in family.moe(model):
        forward = vars(block.gate).get(forward_slot(block.gate))
        if isinstance(forward, partial) and forward.func is gate_forward:
            yield forward.keywords["dropping"]


def gate_forward(
    gate: Any, hidden_states: torch.Tensor, family: Family, dropping: Dropping, fused: bool, counters: Counter[str]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden_states [..., D] -> router logits [T, E], weights [T, K], expert ids [T, K], as the stock gate returns.

    What is dropped has weight 0 and keeps its id, so that transformers' own experts run on it. fused: choose by
    `ops.router` where no gradient is wanted.
    """
    hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
    count(counters, "adaptive_topk: routers")
    if not fused or torch.compiler.is_compiling() or needs_gradients(gate, hidden_states):
        logits, weights, indices = type(gate).forward(gate, hidden_states)
    else:
        count(counters, "experts: fused router")
        logits = F.linear(hidden.float(), gate.weight.float())
        bias = getattr(gate, "e_score_correction_bias", None)
        weights, indices = route(logits, None if bias is None else bias.float(), **vars(family.router(gate)))
    drop = dropping.on(hidden.device)
    kept, _ = drop_experts(weights, indices, drop.feeling(hidden.detach()), drop)
    return logits, kept, indices


@dataclass(frozen=True)
class AdaptiveTopK(Pass):
    """Keep only those chosen experts of a token whose absence the loss would feel.

    target: mean experts a token keeps, as a fraction of the K the router chooses; one threshold for all layers, solved
        on the calibration's tokens. 1 keeps all.
    method: "gradient", what calibration predicts the loss of; or "threshold", the weight relative to the token's
        largest. That one needs no calibration: without `sensitivity` it drops weights below (1 - target) of the
        largest, and how many those are depends on the model.
    sensitivity: what `calibrate_gates` gave, or the file it was saved to.
    min_experts: each token keeps at least so many.
    batch_budget: None: each token by itself. A number: in steps of up to 128 tokens an expert is left out for all
        tokens or for none; it is if together they lose less than `batch_budget` times the threshold. Longer steps
        keep all.
    """

    effect: ClassVar[str] = "lossy"

    target: float = 0.75
    method: str = "gradient"
    sensitivity: Any = None
    min_experts: int = 1
    batch_budget: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.target, bool) or not isinstance(self.target, (int, float)) or not 0 < self.target <= 1:
            raise PlanError(f"target must be above 0 and at most 1, got {self.target!r}")
        if self.method not in METHODS:
            raise PlanError(f"method must be one of {', '.join(METHODS)}; got {self.method!r}")
        if type(self.min_experts) is not int or self.min_experts < 1:
            raise PlanError(f"min_experts must be a positive integer, got {self.min_experts!r}")
        if self.sensitivity is not None and not isinstance(self.sensitivity, (GateSensitivity, str, os.PathLike)):
            raise PlanError(f"sensitivity must be a GateSensitivity or its file, got {type(self.sensitivity).__name__}")
        budget = self.batch_budget
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0):
            raise PlanError(f"batch_budget must be a positive number or None, got {budget!r}")

    def _sensitivity(self) -> GateSensitivity | None:
        known = self.sensitivity
        return known if known is None or isinstance(known, GateSensitivity) else GateSensitivity.load(known)

    def why_not(self, model: nn.Module, family: Family, gate: Any) -> str | None:
        """Why this router chooses as before, or None if experts are dropped."""
        if self.method == "gradient" and self.sensitivity is None:
            return 'method "gradient" needs a sensitivity: that of `calibrate_gates(model, data)`, or its file'
        return why_not_routed(gate, family)

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        blocks = family.moe(model)
        if not blocks:
            yield Skip(family.model_type, "this model has no routed experts")
            return
        reasons = [self.why_not(model, family, block.gate) for _, block in blocks]
        yield from (Skip(f"{where}.gate", why) for (where, _), why in zip(blocks, reasons, strict=True) if why)
        if all(reasons):
            return
        sensitivity = self._sensitivity()
        top_k = family.router(blocks[0][1].gate).top_k
        if self.min_experts > top_k:
            raise PlanError(f"min_experts is {self.min_experts}, and the model chooses {top_k}")
        if sensitivity is not None:
            check_made_for(sensitivity, model, family, [block.gate for _, block in blocks], top_k)
        threshold = self._threshold(sensitivity)
        names = {id(module): name for name, module in model.named_modules()}
        mixed = next((p for p in context.passes if p.name == "mixed_precision"), None)
        for number, ((where, block), why) in enumerate(zip(blocks, reasons, strict=True)):
            if why is None:
                stretch = None if mixed is None else mixed.stretch(f"{names[id(block.gate)]}.weight")
                build = partial(self._build, block.gate, family, sensitivity, number, threshold, stretch, context)
                yield Edit(block.gate, forward_slot(block.gate), build, f"{where}.gate")
        if sensitivity is None:
            yield Note(f"drops weights below {1 - self.target:.3g} of a token's largest; report() says how many stay")
        else:
            kept = sensitivity.kept(threshold, self.method, self.min_experts, temper_of(self.target))
            each = ", ".join(f"{value:.2f}" for value in kept.tolist())
            yield Note(f"mean experts of {top_k} on the calibration's tokens: {kept.mean():.3f}; by layer {each}")

    def _threshold(self, sensitivity: GateSensitivity | None) -> float:
        """The score below which a pair is dropped."""
        if self.target == 1:
            return float("-inf")
        if sensitivity is None:
            return float(2 * torch.tensor(1 - self.target, dtype=torch.float64).log())
        return sensitivity.threshold(self.target, self.method, self.min_experts, temper_of(self.target))

    def _build(
        self,
        gate: Any,
        family: Family,
        sensitivity: GateSensitivity | None,
        number: int,
        threshold: float,
        stretch: torch.Tensor | None,
        context: Context,
    ) -> Any:
        # an offloaded gate is on "meta" between its calls; then these wait on the host
        device = torch.device("cpu") if gate.weight.is_meta else gate.weight.device
        num_experts, size = gate.weight.shape
        with torch.inference_mode(False):  # the tally is written to outside it, too
            slope, offset = torch.zeros(size), torch.zeros(num_experts)
            if sensitivity is not None:
                slope, offset = sensitivity.rule(number, self.method, temper_of(self.target))
            if stretch is not None:  # an AWQ calibration's scales are in the norm: what the router reads is divided
                slope = slope * stretch.to(slope.device)
            drop = Drop(
                slope.to(device, copy=True),
                (offset - threshold).to(device),
                self.method == "threshold",
                self.min_experts,
                float(self.batch_budget or 0.0),
                torch.zeros(4, dtype=torch.int64, device=device),
            )
        fused = context.has("experts")
        return partial(
            gate_forward, gate, family=family, dropping=Dropping(drop), fused=fused, counters=context.counters
        )

    def gating(self, model: Any, family: Family) -> dict[str, Any]:
        """Mean experts a token kept in each layer, and distinct experts a step read; None where nothing ran."""
        per_token: list[float | None] = []
        per_step: list[float | None] = []
        for dropping in droppings(model, family):
            pairs, tokens, distinct, steps = dropping.tally()
            per_token.append(pairs / tokens if tokens else None)
            per_step.append(distinct / steps if steps else None)
        if not per_token:
            return {}
        ran = [value for value in per_token if value is not None]
        return {
            "experts_per_token": sum(ran) / len(ran) if ran else None,
            "experts_per_token_by_layer": per_token,
            "experts_read_per_step_by_layer": per_step,
        }


def check_made_for(
    sensitivity: GateSensitivity, model: nn.Module, family: Family, gates: list[Any], top_k: int
) -> None:
    """Raise PlanError unless the sensitivity was measured on this model."""
    shape = (len(gates), top_k, *gates[0].weight.shape)
    theirs = (sensitivity.num_layers, sensitivity.top_k, sensitivity.offset.shape[1], sensitivity.slope.shape[1])
    if shape != theirs:
        raise PlanError(
            "the sensitivity was made for another model: layers, chosen experts, experts and hidden size are "
            f"{theirs}, the model has {shape}. Calibrate this model."
        )
    if is_placeholder(gates[0]):
        return
    if fingerprint(model, family) != sensitivity.fingerprint:
        raise PlanError(
            "the sensitivity was made for other weights of this shape: its fingerprint differs. Calibrate this model."
        )


PASS = AdaptiveTopK

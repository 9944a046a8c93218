"""What of a model AWQ calibrates: the gated MLPs of its layers, dense, shared and routed, by the names of weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import PlanError
from ..families.base import Family
from ..watch import is_silu, why_foreign

TARGETS = ("experts", "mlp")
"""What can be calibrated. "experts": routed and shared experts. "mlp": dense MLPs."""


@dataclass(frozen=True)
class GatedMLP:
    """`down(silu(gate x) * up x)`: three nn.Linear, or a layer's routed experts as two 3-D tensors."""

    module: Any
    where: str
    """Qualified name of the module."""
    routed: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the weights that read the block's input."""
        names = ("gate_up_proj",) if self.routed else ("gate_proj.weight", "up_proj.weight")
        return tuple(f"{self.where}.{name}" for name in names)

    @property
    def down(self) -> str:
        return f"{self.where}.{'down_proj' if self.routed else 'down_proj.weight'}"

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.inputs, self.down)


@dataclass(frozen=True)
class Block:
    """The second half of one decoder layer."""

    index: int
    layer: Any
    where: str
    mlps: tuple[GatedMLP, ...]
    """Those to calibrate."""
    norm: str
    """Name of the weight of the norm before them."""
    others: tuple[str, ...]
    """Names of further weights that read the norm's output: the router, and MLPs that are not calibrated."""


def owner_of(model: nn.Module, name: str) -> tuple[Any, str]:
    """(module, attribute) of the parameter with this qualified name."""
    where, _, attribute = name.rpartition(".")
    return model.get_submodule(where), attribute


def parameter(model: nn.Module, name: str) -> Tensor:
    """The parameter with this qualified name."""
    owner, attribute = owner_of(model, name)
    value: Tensor = getattr(owner, attribute)
    return value


def is_named(name: str, patterns: Collection[str | re.Pattern[str]]) -> bool:
    """Whether a pattern matches the whole of a module's name, of one around it, or of the last parts of either.

    "layers.1" and "model.layers.1" name layer 1 and all in it, not layer 10; "gate" not gate_proj. Patterns may be
    regular expressions.
    """
    words = name.split(".")
    ends = range(1, len(words) + 1)
    runs = {".".join(words[begin:end]) for end in ends for begin in range(end)}
    return any(re.fullmatch(pattern, run) for pattern in patterns for run in runs)


def why_not_gated(module: Any, routed: bool) -> str | None:
    """Why a module does not compute `down(silu(gate x) * up x)` on plain floating-point weights, or None."""
    if (reason := why_foreign(module)) is not None:
        return reason
    if not is_silu(module.act_fn):
        return f"its activation is {module.act_fn}, not SiLU"
    for name in ("gate_up_proj", "down_proj") if routed else ("gate_proj", "up_proj", "down_proj"):
        part: Any = getattr(module, name, None)
        if not routed and (type(part) is not nn.Linear or part.bias is not None):
            return f"its {name} is not a plain nn.Linear without bias"
        weight = part if routed else part.weight
        if type(weight) is not nn.Parameter or weight.dim() != 2 + routed or not weight.is_floating_point():
            return f"its {name} is not a plain floating-point weight"
    if not routed:
        return None
    from transformers.integrations import moe

    if type(module)._apply_gate is not moe._default_apply_gate:
        return "it has a gate function of its own"
    if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True):
        return "its weights are transposed or interleaved"
    return None


def _mlps(layer: Any, where: str) -> Iterator[tuple[str, GatedMLP]]:
    """(target, MLP) of one layer."""
    mlp = layer.mlp
    if not (hasattr(mlp, "experts") and hasattr(mlp, "gate")):
        yield "mlp", GatedMLP(mlp, f"{where}.mlp", False)
        return
    yield "experts", GatedMLP(mlp.experts, f"{where}.mlp.experts", True)
    if getattr(mlp, "shared_experts", None) is not None:
        yield "experts", GatedMLP(mlp.shared_experts, f"{where}.mlp.shared_experts", False)


def check_request(targets: Collection[str], skip: Collection[str]) -> None:
    """Raises PlanError unless targets are some of `TARGETS`, and skip a list of regular expressions."""
    if isinstance(targets, str) or not targets or any(target not in TARGETS for target in targets):
        raise PlanError(f"targets must be some of {TARGETS}, got {targets!r}")
    if isinstance(skip, str):
        raise PlanError(f"skip must be a list of names, got the one string {skip!r}")
    for pattern in skip:
        try:
            re.compile(pattern)
        except re.error as error:
            raise PlanError(f"skip holds {pattern!r}, which is no regular expression: {error}") from error


def find_blocks(model: nn.Module, family: Family, targets: Collection[str], skip: Collection[str]) -> list[Block]:
    """The blocks to calibrate, in layer order. Raises PlanError where one cannot be, or where there is none."""
    check_request(targets, skip)
    names = {id(module): name for name, module in model.named_modules()}
    blocks = []
    for index, layer in enumerate(family.layers(model)):
        where = names[id(layer)]
        found = list(_mlps(layer, where))
        chosen = [m for target, m in found if target in targets and not is_named(m.where, skip)]
        for mlp in chosen:
            if (why := why_not_gated(mlp.module, mlp.routed)) is not None:
                raise PlanError(f"{mlp.where} cannot be calibrated: {why}. Name it in `skip` to leave it out.")
        if not chosen:
            continue
        others = [name for _, m in found if m not in chosen for name in m.inputs]
        if hasattr(layer.mlp, "gate"):
            others.append(f"{where}.mlp.gate.weight")
        norm = f"{where}.post_attention_layernorm.weight"
        blocks.append(Block(index, layer, where, tuple(chosen), norm, tuple(others)))
    if not blocks:
        raise PlanError(f"nothing to calibrate: targets={tuple(targets)} and skip={tuple(skip)} leave no layer")
    return blocks

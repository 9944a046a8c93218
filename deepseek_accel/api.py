"""optimize, plan, restore, report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from . import families
from .config import OptimizeConfig
from .errors import PlanError
from .journal import Journal
from .passes.base import Pass
from .passes.mixed_precision import packed_bytes
from .plan import Context, Edit, Plan, Step
from .report import Report
from .versions import check_transformers

Model = TypeVar("Model", bound=nn.Module)
Config = OptimizeConfig | Iterable[Pass] | Mapping[str, Any] | None

_SLOT = "_deepseek_accel"


@dataclass
class Optimized:
    """What an optimized model carries: enough to undo and to report. Survives deepcopy and pickle with the model."""

    config: OptimizeConfig
    journal: Journal
    rows: list[dict[str, Any]]
    counters: Counter[str]
    parameter_bytes: int


def _state(model: Any) -> Optimized | None:
    return getattr(families.unwrap(model), "__dict__", {}).get(_SLOT)


def _parameter_bytes(model: nn.Module) -> int:
    """Packed weights included; originals that wait on the host are not."""
    return sum(p.numel() * p.element_size() for p in model.parameters()) + packed_bytes(model)


def _check_same(state: Optimized, options: OptimizeConfig) -> None:
    if (state.config.ordered(), state.config.allow_skips) != (options.ordered(), options.allow_skips):
        raise PlanError(
            "the model is already optimized with another config; call `restore(model)` first, then `optimize` again"
        )


def plan(model: nn.Module, config: Config = None) -> Plan:
    """What `optimize(model, config)` would do. Touches nothing, and needs no weights (a model on "meta" will do).

    Raises UnsupportedModelError or PlanError exactly when `optimize` would.
    """
    check_transformers()
    options = OptimizeConfig.of(config)
    inner = families.unwrap(model)
    family = families.find(inner)
    if (state := _state(inner)) is not None:
        _check_same(state, options)
        return Plan(family.model_type)  # nothing left to do
    if any(name in vars(module) for module in inner.modules() for name in (_SLOT, "_accel_attention")):
        raise PlanError(
            f"a part of this {type(inner).__name__}, or a model it is a part of, is already optimized. "
            "Call `restore` on that one first."
        )
    context = Context(options.passes, Counter())
    result = Plan(family.model_type, context=context)
    for p in options.ordered():
        step = result.steps[p.name] = Step("lossy" if p.lossy else p.effect)
        for item in p.plan(inner, family, context):
            step.add(item)
    result.check(options.allow_skips)
    return result


def optimize(model: Model, config: Config = None) -> Model:
    """Make `model` fast in place and return it. `restore(model)` undoes it exactly.

    model: a loaded transformers model of a known family, bare or wrapped by PEFT.
    config: an OptimizeConfig, a sequence of passes, a mapping of pass names to options, or None for every pass that
        keeps the model's numbers up to rounding.

    Calling it again with the same config changes nothing; with another config it raises PlanError.
    On any error the model is left exactly as it was.
    """
    inner = families.unwrap(model)
    options = OptimizeConfig.of(config)
    if (state := _state(inner)) is not None:
        _check_same(state, options)
        return model
    intended = plan(inner, options)  # what is wrong is said before anything is measured
    prepared = tuple(p.prepared(inner) for p in options.passes)
    if any(new is not p for new, p in zip(prepared, options.passes, strict=True)):
        intended = plan(inner, OptimizeConfig(prepared, options.allow_skips))
    journal = Journal()
    state = Optimized(options, journal, intended.rows("applied"), intended.context.counters, _parameter_bytes(inner))
    try:
        # Our own slot is the first, so that an undo that fails on its way, for want of memory, leaves it for another.
        for edit in [Edit(inner, _SLOT, lambda: state, "model"), *intended.edits()]:
            journal.set(edit.owner, edit.name, edit.build(), edit.original)
    except BaseException:
        journal.undo()
        raise
    journal.settle()
    return model


def restore(model: Model) -> Model:
    """Put every object `optimize` replaced back: the same objects, not equal ones. A model that is not optimized stays.

    Raises RestoreError, having changed nothing, if something else replaced one of our objects in the meantime.
    """
    if (state := _state(model)) is not None:
        state.journal.undo()
    else:
        families.check_is_module(model)
    return model


def counters(model: nn.Module) -> Counter[str]:
    """The counts of `report`, live: what an optimized model goes on adding to. Empty for any other model."""
    state = _state(model)
    return Counter() if state is None else state.counters


def report(model: nn.Module) -> Report:
    """What `optimize` did to `model`, what it skipped and why, and what has run since."""
    inner = families.unwrap(model)
    family = families.find(inner)
    state = _state(inner)
    size = _parameter_bytes(inner)
    if state is None:
        return Report(family.model_type, optimized=False, parameter_bytes_before=size, parameter_bytes=size)
    cache: dict[str, Any] = {}
    gating: dict[str, Any] = {}
    for p in state.config.ordered():
        cache |= p.describe(inner, family)
        gating |= p.gating(inner, family)
    return Report(
        family.model_type,
        optimized=True,
        passes=state.rows,
        parameter_bytes_before=state.parameter_bytes,
        parameter_bytes=size,
        cache=cache,
        gating=gating,
        counters=dict(state.counters),
    )

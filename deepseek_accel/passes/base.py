"""A pass: its options are its fields, its work is the list of edits it plans. It never writes to the model itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from ..families.base import Family
from ..journal import forward_slot
from ..plan import Context, Edit, Note, Skip


def needs_gradients(module: nn.Module, *inputs: torch.Tensor) -> bool:
    """Whether autograd will want this call's gradients, for which our kernels have no backward."""
    return torch.is_grad_enabled() and (
        any(x.requires_grad for x in inputs) or any(p.requires_grad for p in module.parameters())
    )


def count(counters: Counter[str], what: str) -> None:
    """Count one call. Not while torch.compile traces: it would compile anew for every value of the counter."""
    if not torch.compiler.is_compiling():
        counters[what] += 1


def why_foreign(module: Any) -> str | None:
    """Why this module's forward is not the one of transformers, so that we must not stand in for it, or None."""
    if not type(module).__module__.startswith(("transformers.", "torch.nn.")):
        return f"its class {type(module).__module__}.{type(module).__name__} is not of transformers"
    if not type(module).forward.__module__.startswith(("transformers.", "torch.nn.")):
        return f"the forward of its class was replaced by {type(module).forward.__module__}"
    forward = vars(module).get(forward_slot(module))
    if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
        return "its forward was replaced"
    return None


def has_listeners(module: nn.Module) -> bool:
    """Whether someone hooked this module. transformers leaves its own recording hooks in place once they were used."""
    hooks = module._forward_hooks
    if not hooks and not _global_forward_hooks:
        return False
    return bool(_global_forward_hooks) or any(
        getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks.values()
    )


def is_silu(activation: Any) -> bool:
    """Whether an activation module is SiLU and nothing else: not replaced, hooked or wrapped."""
    return (
        type(activation).__name__ in ("SiLU", "SiLUActivation")
        and why_foreign(activation) is None
        and not is_called(activation)
    )


def is_called(module: nn.Module) -> bool:
    """Whether torch's or accelerate's hooks watch this module, so that its work must not be done without calling it."""
    watched = module._forward_pre_hooks or _global_forward_pre_hooks or "_hf_hook" in vars(module)
    return bool(watched) or has_listeners(module)


@dataclass(frozen=True)
class Pass:
    """Base of all passes. A subclass lives in the file named like its config key and is that file's `PASS`."""

    effect: ClassVar[str] = "rounding"
    """"exact", "rounding" or "lossy": what the default options do to the model's numbers."""

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    @property
    def lossy(self) -> bool:
        """Whether these options change the model's numbers by more than rounding."""
        return self.effect == "lossy"

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        """What this pass would write to `model`. Reads, never writes."""
        raise NotImplementedError

    def describe(self, model: Any, family: Family) -> dict[str, Any]:
        """Facts for the `cache` part of the report, or nothing."""
        return {}

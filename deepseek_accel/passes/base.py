"""A pass: its options are its fields, its work is the list of edits it plans. It never writes to the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..families.base import Family
from ..plan import Context, Edit, Note, Skip


def needs_gradients(module: nn.Module, *inputs: torch.Tensor) -> bool:
    """Whether autograd will want this call's gradients, for which our kernels have no backward."""
    return torch.is_grad_enabled() and (
        any(x.requires_grad for x in inputs) or any(p.requires_grad for p in module.parameters())
    )


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

"""A pass: its options are its fields, its work is the list of edits it plans. It never writes to the model itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..families.base import Family
from ..plan import Context, Edit, Note, Skip


@dataclass(frozen=True)
class Pass:
    """Base of all passes. A subclass lives in the file named like its config key and is that file's `PASS`."""

    effect: ClassVar[str] = "rounding"
    """"exact", "rounding" or "lossy": what the default options do to the model's numbers."""

    @property
    def name(self) -> str:
        return type(self).__module__.rpartition(".")[2]

    def options(self) -> dict[str, Any]:
        """The fields as `OptimizeConfig.from_dict` reads them."""
        return dataclasses.asdict(self)

    @property
    def lossy(self) -> bool:
        """Whether these options change the model's numbers by more than rounding."""
        return self.effect == "lossy"

    def prepared(self, model: nn.Module) -> Pass:
        """This pass with what must be measured on the model before anything is written to it; itself if nothing."""
        return self

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        """What this pass would write to `model`. Reads, never writes."""
        raise NotImplementedError

    def describe(self, model: Any, family: Family) -> dict[str, Any]:
        """Facts for the `cache` part of the report, or nothing."""
        return {}

    def gating(self, model: Any, family: Family) -> dict[str, Any]:
        """Facts for the `gating` part of the report, or nothing."""
        return {}

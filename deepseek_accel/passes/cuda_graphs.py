"""Replay whole decoding steps as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import PlanError
from ..families.base import Family
from ..generation.graphs import StepGraphs
from ..ops.choice import why_not_triton
from ..plan import Context, Edit, Note, Skip
from .base import Pass


@dataclass(frozen=True)
class CUDAGraphs(Pass):
    """One graph per batch bucket for the whole step of `generate`; a batch runs in the smallest bucket that holds it.

    batch_sizes: the buckets. A larger batch runs without graphs. Graphs are captured at a bucket's first use.
    """

    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)

    def __post_init__(self) -> None:
        sizes: Any = self.batch_sizes
        if isinstance(sizes, (str, int)) or not all(type(size) is int and size > 0 for size in sizes) or not len(sizes):
            raise PlanError(f"batch_sizes must be positive integers, at least one; got {sizes!r}")
        object.__setattr__(self, "batch_sizes", tuple(sorted(set(sizes))))

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        device = next(model.parameters()).device
        if (why := why_not_triton(device)) is not None:
            yield Skip(str(device), why)
        elif not all(context.has(name) for name in ("attention", "layers", "kv_cache")):
            yield Skip("generate", "graphs need the attention, layers and kv_cache passes")
        elif not hasattr(model, "_prepare_cache_for_generation"):
            yield Skip(type(model).__name__, "it does not generate")
        elif family.extra_cache:
            yield Skip(family.model_type, f"its cache also holds {family.extra_cache}")
        elif len({p.device for p in model.parameters()}) > 1:
            yield Skip(type(model).__name__, "its weights lie on several devices")
        else:
            graphs = StepGraphs(self.batch_sizes, context.counters)
            yield Edit(model, "_accel_graphs", lambda: graphs, "generate")
            yield Note(f"captured at first use, for batches of {', '.join(map(str, self.batch_sizes))}")

    def describe(self, model: Any, family: Family) -> dict[str, Any]:
        graphs = vars(model).get("_accel_graphs")
        return {} if graphs is None else {"graphs": graphs.num_graphs, "graph_bytes": graphs.bytes_held()}


PASS = CUDAGraphs

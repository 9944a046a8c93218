"""What the layers of straight lines ran, under the names that single layers count."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .lines import LatentAttention, Mixture, Model, is_packed

if TYPE_CHECKING:
    from .step import Stepper

EXPANDED = "attention: expanded (prefill)"


def reads_pages(model: Model) -> str:
    """What counts attention that reads the pages."""
    return "attention: absorbed" if isinstance(model.layers[0].attention, LatentAttention) else "attention: paged"


def tally(model: Model) -> dict[str, int]:
    """Of the counters that every run of the layers adds to: how much each run adds."""
    layers = model.layers
    mixtures = sum(isinstance(layer.mlp, Mixture) for layer in layers)
    return {
        "experts: fused router": mixtures,
        "experts: fused": mixtures,
        "adaptive_topk: routers": sum(isinstance(x.mlp, Mixture) and x.mlp.drop is not None for x in layers),
        "mixed_precision: packed layers": sum(is_packed(layer) for layer in layers),
    }


def count_layers(counters: Counter[str], stepper: Stepper, times: int, step: str, attention: str) -> None:
    """The layers have run `times` times, as `step`, with this kind of `attention`."""
    layers = len(stepper.model.layers)
    for what, each in ((step, layers), (attention, layers), *stepper.tally.items()):
        if times * each:
            counters[what] += times * each

"""Fuse what a decoder layer does between its matrix products. So far: each RMSNorm is one launch, not seven."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..families.base import Family
from ..journal import forward_slot
from ..ops.choice import why_not_triton
from ..ops.rms_norm import rms_norm
from ..plan import Context, Edit, Note, Skip
from .base import Pass
from .experts import needs_gradients


def norm_forward(norm: Any, hidden_states: torch.Tensor, counters: Counter[str]) -> torch.Tensor:
    """hidden_states [..., D] -> the same shape, normalised in fp32 and scaled by the norm's weight."""
    if needs_gradients(norm, hidden_states):
        counters["layers: stock norm (gradients)"] += 1
        return type(norm).forward(norm, hidden_states)
    counters["layers: fused norm"] += 1
    return rms_norm(hidden_states, norm.weight, norm.variance_epsilon)


@dataclass(frozen=True)
class FusedLayers(Pass):
    """Fused RMSNorm."""

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        for where, norm in family.norms(model):
            build = partial(partial, norm_forward, norm, counters=context.counters)
            yield Edit(norm, forward_slot(norm), build, where)
        why = why_not_triton(next(model.parameters()).device)
        yield Note(f"norms: {'one Triton kernel' if why is None else f'one torch call ({why})'}")


PASS = FusedLayers

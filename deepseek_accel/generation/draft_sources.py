"""Where the draft of a call comes from, by what `Speculative(draft=...)` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..families.base import Family
from .drafts import Draft, ModelDraft, NGram, SelfDraft
from .lines import Watched, read_model
from .mtp import CONTEXT, MTP, MTPDraft
from .step import Stepper

Begin = Callable[[Any], Draft]
"""The running loop -> a draft, when the first guess is wanted."""


class NGramSource:
    """The rows' own text."""

    num_states = 0

    def begin(self, call: Any, input_ids: torch.Tensor, starts: list[int] | None) -> Begin:
        return lambda loop: NGram(starts or [0] * len(input_ids))


class ModelSource:
    """Another optimized model."""

    num_states = 0

    def __init__(self, model: Any, family: Family) -> None:
        self.model, self.family = model, family

    def begin(self, call: Any, input_ids: torch.Tensor, starts: list[int] | None) -> Begin:
        """Raises Watched where the draft cannot be read."""
        from ..cache.paged import paged_cache

        try:
            line = read_model(self.model, self.family)
        except Watched as reason:
            raise Watched(f"the draft model: {reason}") from None
        if line.device != call.stepper.model.device:
            raise Watched("the draft model is on another device")
        stepper = Stepper(line, self.family, self.family.attentions(self.model)[0])
        page_size = call.speculation.page_size

        def start(loop: Any) -> Draft:
            graphs = call.lease(self.model)
            return ModelDraft(stepper, paged_cache(self.model, page_size), input_ids, starts, graphs)

        return start


class SelfSource:
    """The target with half of its experts."""

    num_states = 0

    def begin(self, call: Any, input_ids: torch.Tensor, starts: list[int] | None) -> Begin:
        return lambda loop: SelfDraft(loop.ragged)


class MTPSource:
    """The target's own layer for more tokens."""

    num_states = CONTEXT
    """Of the prompt's tokens, that it wants to know."""

    def __init__(self, mtp: MTP) -> None:
        self.mtp = mtp

    def begin(self, call: Any, input_ids: torch.Tensor, starts: list[int] | None) -> Begin:
        like = call.stepper.model.embedding
        if self.mtp.mix.dtype != like.dtype:
            raise Watched("the model's dtype has changed since the MTP layer was read")
        self.mtp = self.mtp.to(like)

        def start(loop: Any) -> Draft:
            first, states = call.kept_hidden.pop()
            graphs = loop.ragged.graphs.get(False)
            leased = None if graphs is None else graphs.graphs
            return MTPDraft(self.mtp, call.stepper, loop.cache, loop.ragged.shifts, starts, first, states, leased)

        return start

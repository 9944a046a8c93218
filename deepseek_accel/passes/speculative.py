"""Let `generate` guess several tokens and check them in one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import nn

from .. import families
from ..errors import PlanError
from ..families.base import Family
from ..generation.draft_sources import ModelSource, MTPSource, NGramSource, SelfSource
from ..generation.latency import MOST_DRAFTS
from ..generation.mtp import find_mtp, read_mtp
from ..generation.speculate import Speculation
from ..plan import Context, Edit, Note, Skip
from .base import Pass

DRAFTS = ("ngram", "mtp", "self")


@dataclass(frozen=True)
class Speculative(Pass):
    """Guess the next tokens cheaply and check all of them in one run of the model; the text stays the model's own.

    draft: "ngram" (what followed the same tokens earlier in the text), "mtp" (the multi-token-prediction layer of the
    checkpoint), "self" (the model with half of its experts), or another model with the same tokens, optimized itself.
    num_draft_tokens: how many to guess at a time, 1 to 8, or "auto": as many as pay by measured costs, also none.
    """

    effect: ClassVar[str] = "rounding"
    draft: Any = field(default="ngram", repr=False)
    num_draft_tokens: int | str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.draft, str):
            if self.draft not in DRAFTS:
                raise PlanError(f"unknown draft {self.draft!r}; known: {', '.join(DRAFTS)}, or a model")
        elif not isinstance(self.draft, nn.Module):
            raise PlanError(f"draft must be one of {', '.join(DRAFTS)}, or a model; got {type(self.draft).__name__}")
        number: Any = self.num_draft_tokens
        whole = isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= MOST_DRAFTS
        if number != "auto" and not whole:
            raise PlanError(f'num_draft_tokens must be "auto" or 1 to {MOST_DRAFTS}, got {number!r}')

    def options(self) -> dict[str, Any]:
        shown = self.draft if isinstance(self.draft, str) else f"a {type(self.draft).__name__}"
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"draft": shown}

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        needed = ["attention", *(["experts"] if family.moe(model) else []), "layers", "kv_cache"]
        if missing := [name for name in needed if not context.has(name)]:
            yield Skip("generate", f"its loop needs the {', '.join(missing)} pass{'es' * (len(missing) > 1)} too")
            return
        if not hasattr(model, "_prepare_cache_for_generation"):
            yield Skip(type(model).__name__, "it does not generate")
            return
        if family.extra_cache:
            yield Skip(family.model_type, f"its cache also holds {family.extra_cache}")
            return
        if any(family.sliding_window(attention) is not None for attention in family.attentions(model)):
            yield Skip(family.model_type, "layers with a sliding window")
            return
        kv_cache = next(p for p in context.passes if p.name == "kv_cache")
        if getattr(kv_cache, "eviction", None) is not None:
            raise PlanError(
                "speculative decoding takes tokens back, and eviction may by then have dropped others for them. "
                "Leave out Speculative, or KVCache's eviction."
            )
        source = self._source(model, family)
        build = partial(self._build, source, context.counters, kv_cache.page_size)
        yield Edit(model, "_accel_speculation", build, "generate")
        named = self.draft if isinstance(self.draft, str) else type(self.draft).__name__
        yield Note(f"drafts: {named}, {self.num_draft_tokens} tokens")

    def _build(self, source: Any, counters: Any, page_size: int) -> Speculation:
        return Speculation(source(), self.num_draft_tokens, counters, page_size)

    def _source(self, model: Any, family: Family) -> Any:
        """What makes the draft's source. Raises PlanError where the model and the draft do not fit."""
        if self.draft == "ngram":
            return NGramSource
        if self.draft == "self":
            if not family.moe(model):
                raise PlanError(f'draft="self" runs fewer experts, and {family.model_type} has none')
            return SelfSource
        if self.draft == "mtp":
            if family.model_type != "deepseek_v3":
                raise PlanError(f'draft="mtp" is a layer of DeepSeek-V3 checkpoints, not of {family.model_type}')
            find_mtp(model)
            return lambda: MTPSource(read_mtp(model, family))
        return partial(ModelSource, self.draft, check_draft(model, self.draft))

    def describe(self, model: Any, family: Family) -> dict[str, Any]:
        speculation = vars(model).get("_accel_speculation")
        return {} if speculation is None else {f"speculative_{k}": v for k, v in speculation.facts().items()}


def check_draft(model: Any, draft: Any) -> Family:
    """The family of a draft model. Raises PlanError unless it can guess `model`'s tokens."""
    family = families.find(draft)
    if "_deepseek_accel" not in vars(draft):
        raise PlanError(f"the draft {type(draft).__name__} is not optimized; pass `draft=optimize(draft)`")
    sizes = [m.config.get_text_config(decoder=True).vocab_size for m in (model, draft)]
    if sizes[0] != sizes[1]:
        raise PlanError(f"the draft has {sizes[1]:,} tokens and the model {sizes[0]:,}; they must have the same ones")
    devices = [next(m.parameters()).device for m in (model, draft)]
    if devices[0] != devices[1]:
        raise PlanError(f"the draft is on {devices[1]} and the model on {devices[0]}; move one of them")
    if draft is model:
        raise PlanError('the draft is the model itself; draft="self" runs it with fewer experts')
    return family


PASS = Speculative

"""An optimized model as an engine needs it: read as a straight line, with rows of pages that fit it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import families
from ..errors import AccelError
from ..families.base import Family
from ..generation.decode import Loop
from ..generation.fingerprint import Fingerprint
from ..generation.lines import LENGTH_DEPENDENT_ROPE, Watched, read_model
from ..generation.prefill import entry_sizes
from ..generation.step import Stepper

NEEDED = "the engine needs a model optimized with the attention, kv_cache and layers passes"


class Applied(NamedTuple):
    """What `optimize` left on a model."""

    family: Family
    counters: Counter[str]
    page_size: int
    max_pages: int | None
    fp8: str | None
    prefix_bytes: int | None
    """How much may be kept, if `KVCache` says it."""


def applied_to(model: Any) -> Applied:
    """Raises AccelError if the model is not optimized as the engine needs it."""
    from ..cache.entries import check_dtype

    generate, cache = (vars(model).get(name) for name in ("generate", "_prepare_cache_for_generation"))
    loop = generate.args[1] if isinstance(generate, partial) and len(generate.args) == 2 else None
    if not isinstance(loop, Loop) or not isinstance(cache, partial) or "page_size" not in cache.keywords:
        raise AccelError(f"{NEEDED}: call optimize(model) first, and see report(model) for what was skipped")
    if cache.keywords.get("eviction") is not None:
        raise AccelError("the engine keeps all tokens of a request: optimize without KVCache(eviction=...)")
    options, prefixes = cache.keywords, vars(model).get("_accel_prefixes")
    return Applied(
        loop.family, loop.counters, options["page_size"], options["max_pages"], check_dtype(options["dtype"]),
        None if prefixes is None else prefixes.budget_bytes,
    )  # fmt: skip


def read(model: Any, applied: Applied) -> Stepper:
    """The model as it is now. Raises AccelError with the reason if a module must be called, or is elsewhere."""
    try:
        if applied_to(model).counters is not applied.counters:
            raise Watched("it was optimized anew; make another Engine")
        if model.training:
            raise Watched("it is in training mode; call model.eval()")
        if model.device.type == "meta":
            raise Watched("its weights are offloaded")
        parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            raise Watched(f"its {parameters['rope_type']} rotary embeddings depend on how long the longest prompt is")
        line = read_model(model, applied.family)
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            raise Watched("its weights lie on several devices")
    except Watched as reason:
        raise AccelError(f"the engine cannot run this model as it is: {reason}") from None
    return Stepper(line, applied.family, applied.family.attentions(model)[0])


def sizes(stepper: Stepper) -> list[tuple[int, int, int]]:
    """(heads, key size, value size) of what pages hold for a token, by layer."""
    return [entry_sizes(layer.attention) for layer in stepper.model.layers]


class States:
    """Tells states of a model apart, so that pages computed in one are not used in another."""

    def __init__(self) -> None:
        self._latest: Fingerprint | None = None
        self._number = 0

    def now(self, model: Any) -> bytes | None:
        """Differs after every change that can be seen; None if that cannot be told."""
        try:
            seen = Fingerprint(model, self._latest)
        except ValueError:
            self._latest = None
            return None
        known = self._latest
        if known is None or not seen.has_tensors_of(known) or seen.state != known.state:
            self._number += 1
        self._latest = seen
        return b"state %d" % self._number


def unwrapped(model: Any) -> Any:
    """The causal language model inside wrappers. Raises UnsupportedModelError if there is none we know."""
    inner: Any = families.unwrap(model)
    families.find(inner)
    return inner


def device_scope(device: torch.device) -> Any:
    """Makes `device` the current one, if it is a GPU."""
    from contextlib import nullcontext

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

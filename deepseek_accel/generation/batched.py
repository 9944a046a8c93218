"""`model.generate_batch` of an optimized model: through the engine, which is loaded when it is called first."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from ..watch import count
from .decode import Loop


def generate_batch(model: Any, loop: Loop, /, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of `model.generate_batch`, with its arguments and its outputs."""
    if reason := why_stock(model, args, kwargs):
        count(loop.counters, f"engine: stock generate_batch ({reason})")
        return type(model).generate_batch(model, inputs, *args, **kwargs)
    # by name: the engine is built on this package, not the other way round, and nobody else needs it loaded
    batch = import_module(f"{__package__.partition('.')[0]}.engine.batch")
    count(loop.counters, "engine: generate_batch calls")
    return batch.generate_batch(model, inputs, *args, **kwargs)


def why_stock(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a call is left to transformers, or None."""
    if len(args) > 1:
        return "positional arguments beyond the generation config"
    if kwargs.get("continuous_batching_config") is not None or kwargs.get("persistent_manager"):
        return "a manager of transformers' own is wanted"
    cache = vars(model).get("_prepare_cache_for_generation")
    if isinstance(cache, partial) and cache.keywords.get("eviction") is not None:
        return "a cache that evicts"
    return None

"""Batched generation in process: many requests share the steps and the pages of one optimized model."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine
    from .observer import Observer, StepFacts
    from .requests import Request, Result, Times

__all__ = ["Engine", "Observer", "Request", "Result", "StepFacts", "Times"]

_HOME = {"Engine": "engine", "Observer": "observer", "StepFacts": "observer"}


def __getattr__(name: str) -> Any:
    # what runs steps pulls in transformers' generation package, which those who only watch need not load
    if name in __all__:
        from importlib import import_module

        return getattr(import_module(f".{_HOME.get(name, 'requests')}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

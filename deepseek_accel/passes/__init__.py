"""The passes, in the order they are applied. Name = file name = config key."""

import importlib

from .base import Pass

PASSES = (
    "mixed_precision",
    "attention",
    "experts",
    "adaptive_topk",
    "layers",
    "kv_cache",
    "speculative",
    "cuda_graphs",
)
ASKED_FOR = ("speculative",)
"""Passes that keep the model's numbers and are still applied only where the config names them."""
DEFAULTS = tuple(name for name in PASSES if name not in ASKED_FOR)


def load(name: str) -> type[Pass]:
    pass_class: type[Pass] = importlib.import_module(f"{__name__}.{name}").PASS
    return pass_class

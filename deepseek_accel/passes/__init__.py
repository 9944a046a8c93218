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
    "cuda_graphs",
)


def load(name: str) -> type[Pass]:
    pass_class: type[Pass] = importlib.import_module(f"{__name__}.{name}").PASS
    return pass_class

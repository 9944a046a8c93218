"""Paged key-value caches, usable with or without `optimize`."""

from typing import TYPE_CHECKING, Any

from .eviction import Entropy, Policy, TopAttention, Window
from .pages import PagePool, PageTable
from .prefix import forget_prefixes

if TYPE_CHECKING:
    from .paged import PagedCache, PagedLayer, Pages, paged_cache

__all__ = [
    "Entropy",
    "PagePool",
    "PageTable",
    "PagedCache",
    "PagedLayer",
    "Pages",
    "Policy",
    "TopAttention",
    "Window",
    "forget_prefixes",
    "paged_cache",
]


def __getattr__(name: str) -> Any:
    # transformers' cache classes pull in its generation package, which `import deepseek_accel` must not load
    if name in __all__:
        from . import paged

        return getattr(paged, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

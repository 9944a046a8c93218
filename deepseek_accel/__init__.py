"""Make a loaded Hugging Face DeepSeek model fast in place, and undo it exactly."""

from .api import optimize, plan, report, restore
from .config import OptimizeConfig
from .errors import (
    AccelError,
    CacheFullError,
    CheckpointError,
    PlanError,
    RestoreError,
    UnsupportedModelError,
)
from .passes.attention import Attention
from .passes.cuda_graphs import CUDAGraphs
from .passes.experts import FusedExperts
from .passes.kv_cache import KVCache
from .passes.layers import FusedLayers
from .passes.speculative import Speculative

__version__ = "0.1.0"

__all__ = [
    "AccelError",
    "Attention",
    "CUDAGraphs",
    "CacheFullError",
    "CheckpointError",
    "FusedExperts",
    "FusedLayers",
    "KVCache",
    "OptimizeConfig",
    "PlanError",
    "RestoreError",
    "Speculative",
    "UnsupportedModelError",
    "optimize",
    "plan",
    "report",
    "restore",
]

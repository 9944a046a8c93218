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
from .gating.calibrate import calibrate_gates
from .gating.sensitivity import GateSensitivity
from .models.deepseek import register
from .passes.adaptive_topk import AdaptiveTopK
from .passes.attention import Attention
from .passes.cuda_graphs import CUDAGraphs
from .passes.experts import FusedExperts
from .passes.kv_cache import KVCache
from .passes.layers import FusedLayers

register()
del register

__version__ = "0.1.0"

__all__ = [
    "AccelError",
    "AdaptiveTopK",
    "Attention",
    "CUDAGraphs",
    "CacheFullError",
    "CheckpointError",
    "FusedExperts",
    "FusedLayers",
    "GateSensitivity",
    "KVCache",
    "OptimizeConfig",
    "PlanError",
    "RestoreError",
    "UnsupportedModelError",
    "calibrate_gates",
    "optimize",
    "plan",
    "report",
    "restore",
]

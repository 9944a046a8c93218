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
from .loading import load_quantized
from .models.deepseek import register
from .passes.attention import Attention
from .passes.cuda_graphs import CUDAGraphs
from .passes.experts import FusedExperts
from .passes.kv_cache import KVCache
from .passes.layers import FusedLayers
from .passes.mixed_precision import MixedPrecision
from .quantization.awq import calibrate_awq
from .quantization.calibration import AwqCalibration

register()
del register

__version__ = "0.1.0"

__all__ = [
    "AccelError",
    "Attention",
    "AwqCalibration",
    "CUDAGraphs",
    "CacheFullError",
    "CheckpointError",
    "FusedExperts",
    "FusedLayers",
    "KVCache",
    "MixedPrecision",
    "OptimizeConfig",
    "PlanError",
    "RestoreError",
    "UnsupportedModelError",
    "calibrate_awq",
    "load_quantized",
    "optimize",
    "plan",
    "report",
    "restore",
]

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
from .loading import load_quantized
from .models.deepseek import register
from .passes.adaptive_topk import AdaptiveTopK
from .passes.attention import Attention
from .passes.cuda_graphs import CUDAGraphs
from .passes.experts import FusedExperts
from .passes.kv_cache import KVCache
from .passes.layers import FusedLayers
from .passes.mixed_precision import MixedPrecision
from .passes.speculative import Speculative
from .quantization.awq import calibrate_awq
from .quantization.calibration import AwqCalibration

register()
del register

__version__ = "0.1.0"

__all__ = [
    "AccelError",
    "AdaptiveTopK",
    "Attention",
    "AwqCalibration",
    "CUDAGraphs",
    "CacheFullError",
    "CheckpointError",
    "FusedExperts",
    "FusedLayers",
    "GateSensitivity",
    "KVCache",
    "MixedPrecision",
    "OptimizeConfig",
    "PlanError",
    "RestoreError",
    "Speculative",
    "UnsupportedModelError",
    "calibrate_awq",
    "calibrate_gates",
    "load_quantized",
    "optimize",
    "plan",
    "report",
    "restore",
]

"""DeepSeek-MoE-16B (arXiv 2401.06066), which transformers has no class for: `model_type: deepseek`.

`import deepseek_accel` makes it known to AutoConfig, AutoTokenizer and AutoModelForCausalLM, without importing
transformers: what is registered waits for the transformers modules that keep the lists.
"""

from .registration import register

__all__ = ["register"]

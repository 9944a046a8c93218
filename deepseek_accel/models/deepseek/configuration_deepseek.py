"""The config of DeepSeek-MoE-16B, with the fields of its published config.json."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from .registration import register_models


@strict
class DeepseekConfig(PreTrainedConfig):
    """Defaults are those of DeepSeek-MoE-16B.

    first_k_dense_replace: the first layers, which have a dense MLP of intermediate_size; after them every
    moe_layer_freq-th layer has experts of moe_intermediate_size. n_routed_experts=None: no layer has.
    norm_topk_prob: divide the weights of the chosen experts by their sum.
    aux_loss_alpha, seq_aux: read and written, not used (docs/models.md).
    """

    model_type = "deepseek"
    attribute_map = {"num_experts": "n_routed_experts"}  # noqa: RUF012 (a constant of transformers, not a field)
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    vocab_size: int = 102400
    hidden_size: int = 2048
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    n_routed_experts: int | None = 64
    n_shared_experts: int | None = 2
    num_experts_per_tok: int | None = 6
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    aux_loss_alpha: float = 0.001
    seq_aux: bool = True
    output_router_logits: bool = False
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001
    pretraining_tp: int | None = 1
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: int | float | None = 0.0
    mlp_bias: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)
        register_models()

    def is_mixture(self, layer_idx: int) -> bool:
        """Whether this layer has routed experts."""
        return (
            self.n_routed_experts is not None
            and layer_idx >= self.first_k_dense_replace
            and layer_idx % self.moe_layer_freq == 0
        )

    def validate_architecture(self) -> None:
        """Raise ValueError on numbers that do not fit together. transformers calls it on every new config."""
        if self.num_attention_heads % (self.num_key_value_heads or self.num_attention_heads):
            raise ValueError(
                f"{self.num_key_value_heads} key-value heads do not divide {self.num_attention_heads} heads"
            )
        if self.scoring_func != "softmax":
            raise ValueError(f"scoring_func must be 'softmax', as in arXiv 2401.06066, not {self.scoring_func!r}")
        if self.moe_layer_freq < 1:
            raise ValueError(f"moe_layer_freq must be at least 1, not {self.moe_layer_freq}")
        if self.n_routed_experts is None:
            return
        if not 1 <= (self.num_experts_per_tok or 0) <= self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok must be between 1 and n_routed_experts={self.n_routed_experts}, "
                f"not {self.num_experts_per_tok}"
            )

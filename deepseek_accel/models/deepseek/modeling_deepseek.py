"""DeepSeekMoE (arXiv 2401.06066, section 3) as a transformers model.

What it shares with other models is theirs: attention, rotary embedding and norms are Llama's, the MLP, the experts as
two 3-D tensors and the forward of the whole model are DeepSeek-V2's. Ours are router, mixture, and what goes where.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Experts,
    DeepseekV2ForCausalLM,
    DeepseekV2MLP,
    DeepseekV2Model,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils.output_capturing import OutputRecorder

from .. import require_tensors
from . import checkpoint
from .configuration_deepseek import DeepseekConfig


class DeepseekRouter(nn.Module):
    """The gate: s = softmax(e u) over all experts, the K largest are chosen and weigh what they are (eq. 9 to 11)."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        assert config.n_routed_experts is not None and config.num_experts_per_tok is not None
        self.top_k, self.num_experts = config.num_experts_per_tok, config.n_routed_experts
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden_states [..., D] -> logits [T, E], weights [T, K], expert ids [T, K]; fp32 whatever the model is."""
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = F.linear(hidden.float(), self.weight.float())
        weights, indices = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights, indices


class DeepseekExperts(DeepseekV2Experts):
    """The routed experts: gate_up_proj [E, 2I, D] and down_proj [E, D, I]."""


class DeepseekMoE(nn.Module):
    """Routed experts, and shared ones that every token passes through, as one MLP of their joint width (eq. 9)."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.config = config
        self.experts, self.gate = DeepseekExperts(config), DeepseekRouter(config)
        if config.n_shared_experts:
            width = config.moe_intermediate_size * config.n_shared_experts
            self.shared_experts = DeepseekV2MLP(config, intermediate_size=width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [B, S, D] -> [B, S, D]."""
        _, weights, indices = self.gate(hidden_states)
        routed = self.experts(hidden_states.view(-1, hidden_states.shape[-1]), indices, weights)
        routed = routed.view(hidden_states.shape)
        return routed + self.shared_experts(hidden_states) if self.config.n_shared_experts else routed


class DeepseekDecoderLayer(LlamaDecoderLayer):
    """Llama's layer, the MLP of which is dense or a mixture."""

    def __init__(self, config: DeepseekConfig, layer_idx: int) -> None:
        GradientCheckpointingLayer.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = LlamaAttention(config=config, layer_idx=layer_idx)
        self.mlp = DeepseekMoE(config) if config.is_mixture(layer_idx) else DeepseekV2MLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DeepseekPreTrainedModel(PreTrainedModel):
    config: DeepseekConfig
    config_class = DeepseekConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DeepseekDecoderLayer"]  # noqa: RUF012 (constants that transformers reads)
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = None  # V2 widens its gates, and would save them so; ours compute in fp32 anyway
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": DeepseekDecoderLayer,
        "attentions": LlamaAttention,
        "router_logits": OutputRecorder(DeepseekRouter, index=0),
    }

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for a decorator in this file; it is on the experts' base class

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DeepseekRouter):  # V2's method knows the experts
            initialization.normal_(module.weight, mean=0.0, std=self.config.initializer_range)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but CheckpointError where tensors are missing or do not fit.

        A local directory is checked before anything is loaded. transformers by itself would draw missing tensors at
        random and say so on the terminal only.
        """
        _check_directory(cls, pretrained_model_name_or_path, kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        require_tensors(pretrained_model_name_or_path, cls, info)
        return (model, info) if wants_info else model


def _check_directory(cls: Any, directory: Any, options: dict[str, Any]) -> None:
    """Check a checkpoint in the layout as published; options under which it is read otherwise are left alone."""
    other_layout = ("state_dict", "gguf_file", "variant", "quantization_config", "key_mapping", "subfolder")
    if directory is None or not Path(directory).is_dir() or any(options.get(name) for name in other_layout):
        return
    config = options.get("config")
    if not isinstance(config, DeepseekConfig):
        config = DeepseekConfig.from_pretrained(directory if config is None else config)
    if getattr(config, "quantization_config", None) is None and not options.get("ignore_mismatched_sizes"):
        with torch.device("meta"):
            checkpoint.check(Path(directory), cls(copy.deepcopy(config)))


class DeepseekModel(DeepseekPreTrainedModel, DeepseekV2Model):
    """The decoder, without a head."""

    def __init__(self, config: DeepseekConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([DeepseekDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


class DeepseekForCausalLM(DeepseekPreTrainedModel, DeepseekV2ForCausalLM):
    """The decoder and its language modelling head."""

    def __init__(self, config: DeepseekConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.model = DeepseekModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

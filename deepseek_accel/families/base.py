"""What a pass may ask about a model. The answers are module lists; an empty list means "this model has none"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn


@dataclass(frozen=True)
class RouterRule:
    """How a router turns logits into experts; the arguments of `ops.router.route`."""

    top_k: int
    scoring: Literal["sigmoid", "softmax"]
    group_score: Literal["top2", "max"] | None
    num_groups: int
    topk_groups: int
    normalize: bool
    scale: float


@dataclass(frozen=True)
class Family:
    """One architecture of Hugging Face transformers."""

    model_type: str
    attention: Literal["mla", "gqa"]
    """"mla": the cache holds latents that `expand_kv` expands. "gqa": the cache holds keys and values."""
    extra_cache: str = ""
    """What the cache holds besides keys and values, if anything. Our pages cannot hold it."""

    @property
    def modeling_module(self) -> str:
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"

    def decoder(self, model: nn.Module) -> nn.Module:
        """The module that holds the layers, below any head."""
        return getattr(model, getattr(model, "base_model_prefix", "model"), model)

    def layers(self, model: nn.Module) -> list[nn.Module]:
        decoder: Any = self.decoder(model)
        return list(decoder.layers[: decoder.config.num_hidden_layers])

    def attentions(self, model: nn.Module) -> list[Any]:
        """Attention modules, in layer order. Each has `layer_idx` and `config`."""
        return [layer.self_attn for layer in self.layers(model)]

    def why_no_attention(self) -> str | None:
        """Why our attention cannot stand in for the installed transformers' own, or None if it can."""
        return None

    def moe(self, model: nn.Module) -> list[tuple[str, Any]]:
        """(name, block) of every mixture block: `.gate` returns (logits, weights, indices), `.experts` computes."""
        return [
            (f"layers.{i}.mlp", layer.mlp)
            for i, layer in enumerate(self.layers(model))
            if hasattr(layer.mlp, "experts") and hasattr(layer.mlp, "gate")
        ]

    def norms(self, model: nn.Module) -> list[tuple[str, Any]]:
        """(name, module) of every RMSNorm: fp32 inside, weight applied in the input's dtype."""
        return [
            (name, module)
            for name, module in self.decoder(model).named_modules()
            if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
        ]

    def router(self, gate: Any) -> RouterRule:
        """The selection rule of one router, read from the router itself."""
        raise NotImplementedError(f"{self.model_type} has no router")

    def rotation(self, attention: Any, position_embeddings: Any) -> tuple[Any, Any, Any]:
        """(layout, cos, sin) as the ops take them that write entries, of what the decoder hands its layers."""
        if self.attention == "mla":
            raise NotImplementedError(f"{self.model_type} does not say how it rotates")
        cos, sin = position_embeddings  # each [B, S, D], the D / 2 angles twice
        return "halves", cos, sin

    def sliding_window(self, attention: Any) -> int | None:
        """The window of one attention layer in tokens, or None if it sees every key."""
        return None

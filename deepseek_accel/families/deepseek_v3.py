"""DeepSeek-V3 and R1 (arXiv 2412.19437): latent attention, sigmoid router, its bias for selection only."""

from typing import Any

from .base import Family, RouterRule


class DeepseekV3(Family):
    def router(self, gate: Any) -> RouterRule:
        return RouterRule(
            top_k=gate.top_k,
            scoring="sigmoid",
            group_score="top2",
            num_groups=gate.num_group,
            topk_groups=gate.topk_group,
            normalize=gate.norm_topk_prob,
            scale=gate.routed_scaling_factor,
        )

    def rotation(self, attention: Any, position_embeddings: Any) -> tuple[Any, Any, Any]:
        cos, sin = position_embeddings  # each [B, S, R], the R / 2 angles twice
        half = cos.shape[-1] // 2
        layout = "pairs_to_halves" if attention.config.rope_interleave else "halves"
        return layout, cos[..., :half], sin[..., :half]


FAMILY = DeepseekV3("deepseek_v3", attention="mla")

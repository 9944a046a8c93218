"""DeepSeek-MoE-16B (arXiv 2401.06066): multi-head attention, softmax router. Its class is ours, in models/deepseek."""

from typing import Any

from .base import Family, RouterRule


class Deepseek(Family):
    @property
    def modeling_module(self) -> str:
        return "deepseek_accel.models.deepseek.modeling_deepseek"

    def router(self, gate: Any) -> RouterRule:
        return RouterRule(
            top_k=gate.top_k,
            scoring="softmax",
            group_score=None,
            num_groups=1,
            topk_groups=1,
            normalize=gate.norm_topk_prob,
            scale=1.0,
        )


FAMILY = Deepseek("deepseek", attention="gqa")

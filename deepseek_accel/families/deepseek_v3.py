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


FAMILY = DeepseekV3("deepseek_v3", attention="mla")

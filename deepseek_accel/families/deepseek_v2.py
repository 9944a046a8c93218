"""DeepSeek-V2, V2-Lite, Coder-V2 (arXiv 2405.04434): latent attention, softmax router without normalisation."""

from typing import Any

from .base import Family, RouterRule


class DeepseekV2(Family):
    def router(self, gate: Any) -> RouterRule:
        grouped = gate.topk_method == "group_limited_greedy"
        return RouterRule(
            top_k=gate.top_k,
            scoring="softmax",
            group_score="max" if grouped else None,
            num_groups=gate.num_group if grouped else 1,
            topk_groups=gate.topk_group if grouped else 1,
            normalize=False,  # transformers ignores `norm_topk_prob` for V2, and no published V2 checkpoint sets it
            scale=gate.routed_scaling_factor,
        )


FAMILY = DeepseekV2("deepseek_v2", attention="mla")

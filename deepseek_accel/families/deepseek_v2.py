"""DeepSeek-V2, V2-Lite, Coder-V2 (arXiv 2405.04434): latent attention, softmax router without normalisation."""

from typing import Any

import torch

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

    def rotation(self, attention: Any, position_embeddings: Any) -> tuple[Any, Any, Any]:
        angles = torch.view_as_real(position_embeddings)  # e^(i angle) per pair: [B, S, R / 2]
        return "pairs", angles[..., 0], angles[..., 1]


FAMILY = DeepseekV2("deepseek_v2", attention="mla")

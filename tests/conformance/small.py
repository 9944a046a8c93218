"""Small configs of our own, for a tree that has transformers' test mixins but not its per-model test files."""

from __future__ import annotations

import unittest
from typing import Any

from plugin import model_classes

COMMON = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = COMMON | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | {"norm_topk_prob": True},
    "llama": COMMON,
    "qwen2": COMMON | {"use_sliding_window": False},
}


class Tester:
    """What the mixins ask of a `model_tester`."""

    batch_size, seq_length, is_training, num_labels = 3, 7, True, 3

    def __init__(self, config_class: Any, options: dict[str, Any]) -> None:
        self.config_class, self.options = config_class, options
        vars(self).update(options)

    def get_config(self) -> Any:
        return self.config_class(**self.options)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        import torch
        from tests.test_modeling_common import ids_tensor, torch_device

        shape = (self.batch_size, self.seq_length)
        mask = torch.tril(torch.ones(shape, dtype=torch.long, device=torch_device))
        return self.get_config(), {"input_ids": ids_tensor(shape, COMMON["vocab_size"]), "attention_mask": mask}


def model_test(family: str) -> type[unittest.TestCase]:
    """The `ModelTest` class of one family."""
    from tests.test_modeling_common import GenerationTesterMixin, ModelTesterMixin

    classes = model_classes(family)
    causal = next(c for c in classes if c.__name__.endswith("ForCausalLM"))

    class ModelTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
        all_model_classes = tuple(sorted(classes, key=lambda c: c.__name__))
        test_all_params_have_gradient = "n_routed_experts" not in CONFIGS[family]

        if family == "deepseek_v2":
            test_model_rope_scaling_frequencies = None  # its RoPE is complex; transformers replaces this test too

        def setUp(self) -> None:
            self.model_tester = Tester(causal.config_class, CONFIGS[family])

    ModelTest.__name__ = ModelTest.__qualname__ = causal.__name__.replace("ForCausalLM", "ModelTest")
    return ModelTest

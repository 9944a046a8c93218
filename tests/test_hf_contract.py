"""What the design relies on in transformers and accelerate. An upgrade that breaks one fails by the fact's name."""

import copy
import functools
import inspect

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deepseek_accel.passes.attention import register_interface
from deepseek_accel.testing import relative_error, tiny_model
from deepseek_accel.versions import cache_argument, crop_takes_length

IDS = torch.randint(2, 128, (1, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    return tiny_model("deepseek_v3")


def test_1_the_cache_stores_latents_and_its_argument_has_the_expected_name(model):
    cache = DynamicCache(config=model.config)
    model(IDS, **{cache_argument(): cache})
    assert cache.layers[0].keys.shape == (1, 1, 9, 32) and cache.layers[0].values.shape == (1, 1, 9, 8)
    assert cache_argument() in inspect.signature(type(model.model.layers[0].self_attn).forward).parameters


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_2_and_3_what_update_returns_reaches_the_attention_function_untouched(family):
    model = tiny_model(family)
    token, seen = object(), []

    class Pass(DynamicCache):
        def update(self, keys, values, layer_idx, *args, **kwargs):
            return token, token

    def attend(module, query, key, value, mask, **kwargs):
        seen.append((key, value))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], module.v_head_dim), None

    ALL_ATTENTION_FUNCTIONS.register("contract_probe", attend)
    for layer in model.model.layers:
        layer.self_attn.expand_kv = lambda *states: states
        layer.self_attn.config = copy.copy(model.config)
        layer.self_attn.config._attn_implementation_internal = "contract_probe"
    model(IDS, **{cache_argument(): Pass()})
    assert seen == [(token, token)] * 3


def test_5_no_mask_means_causal_from_the_first_key_and_masks_are_bool_or_additive(model):
    masks = {}
    for implementation in ("sdpa", "eager"):
        probe = tiny_model("deepseek_v3", attn_implementation=implementation)
        padded = torch.ones_like(IDS)
        padded[0, 0] = 0
        probe.model.layers[0].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, name=implementation: masks.__setitem__(name, kwargs["attention_mask"]),
            with_kwargs=True,
        )
        probe(IDS, attention_mask=padded)
        assert masks[implementation].shape == (1, 1, 9, 9)
    assert masks["sdpa"].dtype == torch.bool and masks["eager"].is_floating_point()


def test_8_the_attention_registry_cannot_forget(model):
    register_interface()
    register_interface()
    assert "deepseek_accel" in ALL_ATTENTION_FUNCTIONS


def test_9_generate_may_switch_the_experts_implementation(model):
    assert hasattr(model, "set_experts_implementation")
    experts = model.model.layers[1].mlp.experts
    assert {"gate_up_proj", "down_proj"} <= set(dict(experts.named_parameters()))


def test_10_the_gate_can_be_overridden(model):
    from transformers.integrations import moe

    assert type(model.model.layers[1].mlp.experts)._apply_gate is moe._default_apply_gate


def test_12_crop_takes_a_negative_number(model):
    cache = DynamicCache(config=model.config)
    model(IDS, **{cache_argument(): cache})
    cache.crop(-4)
    assert cache.get_seq_length() == 5
    if crop_takes_length():
        cache.crop(3)
        assert cache.get_seq_length() == 3
    else:
        with pytest.raises(ValueError):
            cache.crop(3)


def test_14_recorded_outputs_follow_the_class_not_the_instance(model):
    gate = model.model.layers[1].mlp.gate
    gate.forward = functools.partial(type(gate).forward, gate)
    out = model.model(IDS, output_hidden_states=True, output_router_logits=True)
    assert len(out.hidden_states) == 4
    if "router_logits" in type(model)._can_record_outputs:  # from 5.17 on
        assert len(out.router_logits) == 2


def test_15_accelerate_keeps_the_forward_it_found(model):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    gate = model.model.layers[1].mlp.gate
    ours = gate.forward = functools.partial(type(gate).forward, gate)
    add_hook_to_module(gate, ModelHook())
    assert vars(gate)["_old_forward"] is ours
    remove_hook_from_module(gate)
    assert vars(gate)["forward"] is ours


def test_16_router_weight_and_bias_stay_fp32(tmp_path):
    from transformers import AutoModelForCausalLM

    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    gate = loaded.model.layers[1].mlp.gate
    assert gate.e_score_correction_bias.dtype == torch.float32
    assert loaded.model.layers[1].mlp.experts.down_proj.dtype == torch.bfloat16


def test_17_a_partial_follows_its_module_through_copies(model):
    norm = model.model.norm
    norm.forward = functools.partial(type(norm).forward, norm)
    clone = copy.deepcopy(model)
    assert clone.model.norm.forward.args[0] is clone.model.norm


def test_rope_scaling_is_in_the_softmax_scale():
    """YaRN: the scale is d^-0.5 (0.1 m ln 40 + 1)^2 with m = mscale_all_dim. A formula, not what a release does."""
    for family, factor in (("deepseek_v2", 1.589626), ("deepseek_v3", 1.873854)):
        scale = tiny_model(family).model.layers[0].self_attn.scaling
        assert relative_error(torch.tensor(scale), torch.tensor(24**-0.5 * factor)) < 1e-6

"""What people do to a model around `optimize`: each of these once gave a wrong result or an unhelpful error."""

import pytest
import torch
import torch.nn.functional as F
from interpreter import interpret
from torch import nn

from deepseek_accel import PlanError, UnsupportedModelError, optimize, plan, report
from deepseek_accel.cache import paged_cache
from deepseek_accel.ops.mla_attention import CASES, case_inputs, latent_attention_reference
from deepseek_accel.testing import relative_error, tiny_model
from deepseek_accel.versions import cache_argument

IDS = torch.randint(2, 128, (1, 20), generator=torch.Generator().manual_seed(3))


def decode(model, make_cache=None, steps=6):
    """Logits of a prefill and of `steps` single tokens, on a paged cache unless told otherwise."""
    from transformers import DynamicCache

    cache = make_cache() if make_cache else DynamicCache(config=model.config)
    with torch.no_grad():
        out = [model(IDS[:, :-steps], **{cache_argument(): cache}, use_cache=True).logits[:, -1]]
        for i in range(IDS.shape[1] - steps, IDS.shape[1]):
            out.append(model(IDS[:, i : i + 1], **{cache_argument(): cache}, use_cache=True).logits[:, -1])
    return torch.stack(out)


def check(model, change=lambda model: None, *, before=lambda model: None, expect_step=True):
    """The optimized model, after `change`, decodes as the stock one does after the same change."""
    before(model)
    change(model)
    expected = decode(model)
    optimize(model)
    change(model)
    assert relative_error(decode(model, lambda: paged_cache(model)), expected) < 1e-4
    assert (report(model).counters.get("layers: fused step", 0) > 0) == expect_step


def test_projection_biases_reach_the_fused_step():
    def add_bias(model):
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias = nn.Parameter(torch.randn(layer.self_attn.q_proj.out_features))

    check(tiny_model("deepseek_v3", q_lora_rank=None), before=add_bias)


def test_router_options_may_change_afterwards():
    def one_expert(model):
        for layer in model.model.layers[1:]:
            layer.mlp.gate.top_k, layer.mlp.gate.routed_scaling_factor = 1, 0.5

    check(tiny_model("deepseek_v3"), one_expert)


def test_correction_bias_may_be_a_parameter():
    def trainable(model):
        for layer in model.model.layers[1:]:
            gate = layer.mlp.gate
            bias = gate._buffers.pop("e_score_correction_bias", None)
            if bias is not None:
                gate.e_score_correction_bias = nn.Parameter(bias * 5, requires_grad=False)

    check(tiny_model("deepseek_v3"), before=trainable)


def test_weights_stored_transposed():
    def transpose(model):
        for layer in model.model.layers:
            weight = layer.self_attn.kv_b_proj.weight
            weight.data = weight.data.t().contiguous().t()

    check(tiny_model("deepseek_v2"), before=transpose, expect_step=False)


@pytest.mark.parametrize("part", ["self_attn", "mlp", "input_layernorm"])
def test_a_forward_replaced_on_the_class_is_called(part, monkeypatch):
    model = tiny_model("deepseek_v3")
    kind = type(getattr(model.model.layers[1], part))
    stock, calls = kind.forward, []

    def patched(self, *args, **kwargs):
        calls.append(1)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", patched)
    decode(model)
    expected = len(calls)
    optimize(model)
    calls.clear()
    decode(model, lambda: paged_cache(model))
    assert len(calls) == expected


def test_quantized_weights_in_disguise_are_left_alone():
    class Packed(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function not in (F.linear, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__):
                raise AssertionError(f"{function} of a packed weight")
            plain = [a.as_subclass(torch.Tensor) if isinstance(a, Packed) else a for a in args]
            return function(*plain, **(kwargs or {}))

    model = tiny_model("deepseek_v2")
    expected = decode(model)
    optimize(model)
    for layer in model.model.layers:
        weight = layer.self_attn.kv_b_proj.weight.detach()
        del layer.self_attn.kv_b_proj._parameters["weight"]
        layer.self_attn.kv_b_proj._parameters["weight"] = weight.as_subclass(Packed)
    assert relative_error(decode(model, lambda: paged_cache(model)), expected) < 1e-4


def test_a_cache_filled_in_inference_mode_goes_on_outside_of_it():
    model = optimize(tiny_model("deepseek_v3"))
    expected = model.generate(IDS, max_new_tokens=5, do_sample=False)
    cache = paged_cache(model)
    with torch.inference_mode():
        model(IDS[:, :-1], **{cache_argument(): cache})
    assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False, **{cache_argument(): cache}), expected)


def test_running_out_of_memory_in_a_copy_changes_nothing(monkeypatch):
    model = optimize(tiny_model("deepseek_v3"))
    cache = paged_cache(model, page_size=16)
    with torch.no_grad():
        model(IDS, **{cache_argument(): cache})
        cache.batch_repeat_interleave(3)
        token = torch.tensor([[5], [6], [7]])
        real = torch.empty

        def full(*shape, **kwargs):
            if len(shape) == 3:
                raise torch.OutOfMemoryError("no memory")
            return real(*shape, **kwargs)

        monkeypatch.setattr(torch, "empty", full)
        with pytest.raises(torch.OutOfMemoryError):
            model(token, **{cache_argument(): cache})
        monkeypatch.undo()
        retried = model(token, **{cache_argument(): cache}).logits
        for row in range(3):
            whole = torch.cat((IDS, token[row : row + 1]), 1)
            assert relative_error(retried[row, -1], model(whole).logits[0, -1]) < 1e-4


def test_a_cache_of_another_model_is_refused():
    cache = paged_cache(optimize(tiny_model("deepseek_v3")))
    with torch.no_grad():
        tiny_model("deepseek_v3")(IDS[:, :4])
        optimize(model := tiny_model("deepseek_v3"))
        model(IDS[:, :4], **{cache_argument(): cache})
        other = optimize(tiny_model("deepseek_v3", kv_lora_rank=40))
        with pytest.raises(ValueError, match="another model"):
            other(IDS[:, 4:5], **{cache_argument(): cache})


def test_lost_gradients_are_announced():
    model = tiny_model("llama")
    cache = paged_cache(model)
    model(IDS[:, :4], **{cache_argument(): cache})
    with pytest.warns(UserWarning, match="not autograd graphs"):
        model(IDS[:, 4:8], **{cache_argument(): cache})


def test_wrappers_are_named():
    with pytest.raises(UnsupportedModelError, match=r"optimize\(model.module\)"):
        optimize(nn.DataParallel(tiny_model("llama")))


def test_plan_of_an_optimized_model():
    model = optimize(tiny_model("llama"))
    assert not list(plan(model).edits()) and "nothing to do" in repr(plan(model))
    with pytest.raises(PlanError, match="already optimized"):
        plan(model, {"kv_cache": {}})


def broadcast_mask_error() -> float:
    from deepseek_accel.kernels.mla_attention import launch

    case = next(c for c in CASES if c.mask == "bool" and len(c.lengths) > 1)
    inputs = case_inputs(case, torch.float32)
    inputs["mask"] = inputs["mask"][-1:]
    expected = latent_attention_reference(**inputs)
    return (launch(**inputs) - expected).abs().max().item()


def test_one_mask_for_all_rows():
    assert interpret(broadcast_mask_error) < 1e-5


@pytest.mark.parametrize("part", ["mlp", "mlp.shared_experts", "mlp.gate", "mlp.experts", "self_attn"])
def test_accelerate_hooks_inside_a_layer_are_called(part):
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Count(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Count.calls += 1
            return args, kwargs

    model = tiny_model("deepseek_v3")
    for layer in model.model.layers[1:]:
        add_hook_to_module(layer.get_submodule(part), Count())
    decode(model)
    expected = Count.calls
    Count.calls = 0
    optimize(model)
    decode(model, lambda: paged_cache(model))
    assert Count.calls == expected


@pytest.mark.parametrize("order", ["head first", "decoder first"])
def test_a_model_and_its_decoder_are_not_optimized_twice(order):
    model = tiny_model("llama")
    first, second = (model, model.model) if order == "head first" else (model.model, model)
    optimize(first)
    with pytest.raises(PlanError, match="already optimized"):
        optimize(second)
    expected = decode(tiny_model("llama"))
    assert relative_error(decode(model), expected) < 1e-4


def test_a_forward_replaced_on_linear_is_called(monkeypatch):
    model = tiny_model("deepseek_v2")
    stock = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: stock(self, x) * 1.5)
    expected = decode(model)
    optimize(model)
    assert relative_error(decode(model, lambda: paged_cache(model)), expected) < 1e-4


def _replace_activations(model, change):
    for layer in model.model.layers[1:]:
        change(layer.mlp.experts, layer.mlp.shared_experts)


@pytest.mark.parametrize(
    "change",
    [
        lambda experts, shared: setattr(experts, "act_fn", nn.GELU()),
        lambda experts, shared: setattr(shared, "act_fn", nn.GELU()),
        lambda experts, shared: setattr(experts.act_fn, "forward", torch.tanh),
        lambda experts, shared: setattr(shared.act_fn, "forward", torch.tanh),
        lambda experts, shared: setattr(experts, "_apply_gate", lambda x: x.chunk(2, -1)[1]),
    ],
    ids=["experts", "shared", "experts forward", "shared forward", "gate"],
)
def test_activations_may_be_replaced(change):
    check(tiny_model("deepseek_v3"), lambda model: _replace_activations(model, change))


def test_shared_experts_may_be_another_module():
    def identity(model):
        for layer in model.model.layers[1:]:
            layer.mlp.shared_experts = nn.Identity()

    check(tiny_model("deepseek_v2"), identity)


def test_the_fast_path_is_back_once_hooks_are_gone():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules

    model = optimize(tiny_model("deepseek_v3"))
    expected = decode(model, lambda: paged_cache(model))
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    remove_hook_from_submodules(model)
    before = report(model).counters["layers: fused step"]
    assert torch.equal(decode(model, lambda: paged_cache(model)), expected)
    assert report(model).counters["layers: fused step"] == before * 2


def test_running_out_of_memory_at_first_leaves_no_rows_behind(monkeypatch):
    model = optimize(tiny_model("llama"))
    cache = paged_cache(model)
    real = torch.empty

    def full(*shape, **kwargs):
        if len(shape) == 3:
            raise torch.OutOfMemoryError("no memory")
        return real(*shape, **kwargs)

    monkeypatch.setattr(torch, "empty", full)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        model(IDS.expand(4, -1), **{cache_argument(): cache})
    monkeypatch.undo()
    with torch.no_grad():
        got = model(IDS.expand(2, -1), **{cache_argument(): cache}).logits
        assert relative_error(got, model(IDS.expand(2, -1)).logits) < 1e-4

"""Class moe-weight: normalisation, scaling, precision."""

import copy
import itertools

import pytest
import torch
from fixtures import assert_same, count, feed, tokens, whole
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from deepseek_accel import optimize, restore
from deepseek_accel.testing import assert_accurate, relative_error, tiny_model


def by_formula(block, x, norm, scale):
    """A V3 or V2 block's output in fp64, one expert at a time."""
    gate, experts = block.gate, block.experts
    flat = x.double().flatten(0, 1)
    logits = flat @ gate.weight.double().T
    v3 = hasattr(gate, "e_score_correction_bias")
    scores = logits.sigmoid() if v3 else logits.softmax(-1)
    choice = scores + gate.e_score_correction_bias.double() if v3 else scores
    grouped = choice.unflatten(1, (4, 4))
    best = grouped.topk(2, -1).values.sum(-1) if v3 else grouped.amax(-1)
    outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, best.topk(2, -1).indices, False)
    indices = grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(1).topk(4, -1).indices
    weights = scores.gather(1, indices)
    weights = (weights / weights.sum(-1, keepdim=True) if norm else weights) * scale
    out = torch.zeros_like(flat)
    for token, slot in itertools.product(range(len(flat)), range(4)):
        expert = indices[token, slot]
        gate_half, up = (experts.gate_up_proj[expert].double() @ flat[token]).chunk(2)
        value = experts.down_proj[expert].double() @ (torch.nn.functional.silu(gate_half) * up)
        out[token] += weights[token, slot] * value
    return out.view(x.shape) + block.shared_experts(x).double()  # the shared expert: not scaled, not normalised


@torch.no_grad()
@pytest.mark.parametrize(
    ("model_type", "norm", "scale"),
    [("deepseek_v3", norm, scale) for norm in (False, True) for scale in (1.0, 2.5)]
    + [("deepseek_v2", False, scale) for scale in (1.0, 16.0)],
)
def test_E05_norm_and_scale_are_independent(model_type, norm, scale):
    """routed_scaling_factor skipped when norm_topk_prob is false, applied twice, or applied to the shared expert."""
    options = dict(routed_scaling_factor=scale, norm_topk_prob=norm)
    if model_type == "deepseek_v2":
        options["norm_topk_prob"] = True  # ignored by the native V2, so it must be ignored here
    stock = tiny_model(model_type, **options)
    model = optimize(copy.deepcopy(stock))
    x = torch.randn(1, 12, 64, generator=torch.Generator().manual_seed(0))
    block, ours = stock.model.layers[1].mlp, model.model.layers[1].mlp
    for length in (12, 1):  # the path for one token is another one
        expected = by_formula(block, x[:, :length], norm, scale)
        assert_same(ours(x[:, :length]).double(), expected, 1e-5)
    expected = by_formula(block, x, norm, scale)
    assert relative_error(by_formula(block, x, not norm, scale), expected) > 0.1
    assert relative_error(by_formula(block, x, norm, scale * 2.5), expected) > 0.2
    ids = tokens(20)
    assert_same(whole(model, ids), whole(stock, ids))
    assert_same(feed(model, ids, 12), whole(stock, ids))
    assert count(model, "experts: fused") > 0 and count(model, "experts: stock") == 0


@torch.no_grad()
def test_E07_near_ties_are_decided_in_fp32():
    """A correction bias rounded to bf16 makes nearby scores tie, and other experts are chosen."""
    bias = 8 + 0.01 * torch.arange(16)
    assert len(bias.bfloat16()[12:].unique()) < 4 and len(bias.bfloat16().unique()) == 3
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model("deepseek_v3")
        for layer in model.model.layers[1:]:
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.e_score_correction_bias.copy_(bias)
        for layer in model.model.layers[1:]:  # the weight in the model's dtype, the bias in fp32, as a checkpoint loads
            layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.to(dtype)
        optimize(model)
        gate = model.model.layers[1].mlp.gate
        x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        _, weights, indices = gate(x)
        assert weights.dtype == torch.float32
        assert indices.sort(-1).values.tolist() == [[12, 13, 14, 15]] * 5
        assert_same(weights, torch.full((5, 4), 2.5 / 4), 1e-6)


def dtypes(model):
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


@torch.no_grad()
@pytest.mark.parametrize("how", ["from_pretrained", "to"])
def test_E07_bf16_models_keep_their_dtypes_and_their_accuracy(how, tmp_path):
    """optimize casts router weights, so that numbers or saved files differ from the unpatched bf16 model's."""
    exact = tiny_model("deepseek_v3")
    if how == "from_pretrained":
        exact.save_pretrained(tmp_path / "fp32")
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16).eval()
        assert stock.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    else:
        stock = copy.deepcopy(exact).to(torch.bfloat16)
        assert stock.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.bfloat16
    before = dtypes(stock)
    model = optimize(copy.deepcopy(stock))
    assert dtypes(model) == before

    reference = copy.deepcopy(stock).double()  # the very weights of the bf16 model, computed exactly
    reference.set_experts_implementation("eager")
    ids = tokens(32)
    expected = whole(reference, ids)
    assert_accurate(whole(model, ids), whole(stock, ids), expected)
    assert_accurate(feed(model, ids, 23), feed(stock, ids, 23), expected)
    for seed in range(3):
        x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        for ours, theirs in zip(model.model.layers[1:], stock.model.layers[1:], strict=True):
            (logits, weights, indices), expected_route = ours.mlp.gate(x), theirs.mlp.gate(x)
            assert torch.equal(logits, expected_route[0])
            order, expected_order = indices.argsort(-1), expected_route[2].argsort(-1)
            assert torch.equal(indices.gather(1, order), expected_route[2].gather(1, expected_order))
            assert_same(weights.gather(1, order), expected_route[1].gather(1, expected_order), 1e-6)
    assert dtypes(model) == before
    stock.save_pretrained(tmp_path / "stock"), model.save_pretrained(tmp_path / "ours")
    saved, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("stock", "ours"))
    assert saved.keys() == ours.keys()
    assert all(torch.equal(saved[key], ours[key]) and saved[key].dtype == ours[key].dtype for key in saved)
    assert dtypes(restore(model)) == before

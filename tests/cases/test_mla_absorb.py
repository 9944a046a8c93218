"""Class mla-absorb: weight absorption, layouts, shapes."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fixtures import MLA, assert_generates_as, assert_same, count, feed, feed_once, lora, tokens, whole

from deepseek_accel import optimize, restore
from deepseek_accel.cache import paged_cache
from deepseek_accel.generation.lines import absorbed_weights
from deepseek_accel.ops.mla_attention import absorb_query, dense_latent_attention, project_values
from deepseek_accel.testing import relative_error, tiny_model

pytest.importorskip("peft")


@pytest.mark.parametrize("order", ["optimize first", "wrap first"])
@pytest.mark.parametrize("model_type", MLA)
def test_M01_lora_on_kv_b_proj_is_heard(model_type, order):
    """A LoRA on kv_b_proj is accepted and has no effect, because absorbed decode uses the raw weight."""
    base = tiny_model(model_type)
    stock = lora(copy.deepcopy(base), ["kv_b_proj"])
    if order == "optimize first":
        model = lora(optimize(copy.deepcopy(base)), ["kv_b_proj"])
    else:
        model = optimize(lora(copy.deepcopy(base), ["kv_b_proj"]))
    ids = tokens(32)
    plain, expected = feed(base, ids, 23), feed(stock, ids, 23)
    assert relative_error(expected, plain) > 0.3, "the adapter must be impossible to miss"
    assert_same(feed(model, ids, 23), expected)
    assert count(model, "attention: absorbed") == 0
    assert_generates_as(model, stock, ids[:, :23])
    with model.disable_adapter():
        assert_same(feed(model, ids, 23), plain, 1e-5)

    merged = model.merge_and_unload()
    assert_same(feed(merged, ids, 23), expected)
    assert count(merged, "attention: absorbed") > 0, "the merged weight is plain again, so it must be absorbed again"
    assert_same(feed(restore(merged), ids, 23), expected)


def test_M01_absorption_follows_the_live_weight():
    """A copy of kv_b_proj made by optimize would miss an in-place update, a swapped weight or a swapped module."""
    stock = tiny_model("deepseek_v3")
    model = optimize(copy.deepcopy(stock))
    ids = tokens(32)
    before = feed(model, ids, 23)
    for change in ("in place", "weight", "module"):
        for m in (stock, model):
            attention = m.model.layers[1].self_attn
            with torch.no_grad():
                if change == "in place":
                    attention.kv_b_proj.weight.mul_(3)
                elif change == "weight":
                    attention.kv_b_proj.weight = torch.nn.Parameter(attention.kv_b_proj.weight.flip(0))
                else:
                    attention.kv_b_proj = copy.deepcopy(m.model.layers[2].self_attn.kv_b_proj)
        expected = feed(stock, ids, 23)
        assert relative_error(expected, before) > 0.1
        assert_same(feed(model, ids, 23), expected)
        before = expected


def test_M03_absorbed_form_is_the_expanded_one():
    """kv_b_proj's rows are [nope | v] head by head; splitting the matrix in two halves mixes heads."""
    heads, rank, nope, rope, value, length = 4, 32, 16, 8, 24, 7
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weight = normal(heads * (nope + value), rank)
    latent, k_rope = normal(1, 1, length, rank), normal(1, 1, length, rope)
    q_nope, q_rope = normal(1, heads, length, nope), normal(1, heads, length, rope)
    scale = (nope + rope) ** -0.5

    expanded = torch.einsum("btc,rc->btr", latent[:, 0], weight).view(1, length, heads, nope + value)
    scores = torch.einsum("bhsn,bthn->bhst", q_nope, expanded[..., :nope])
    scores = (scores + torch.einsum("bhsr,btr->bhst", q_rope, k_rope[:, 0])) * scale
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(future, float("-inf")).softmax(-1)
    expected = torch.einsum("bhst,bthv->bshv", probabilities, expanded[..., nope:])

    def absorbed(w_uk, w_uv):
        q_latent = absorb_query(q_nope, w_uk)
        return project_values(
            dense_latent_attention(q_latent, q_rope.transpose(1, 2), latent, k_rope, scale, causal=True), w_uv
        )

    module = SimpleNamespace(
        qk_nope_head_dim=nope, v_head_dim=value, kv_lora_rank=rank, kv_b_proj=SimpleNamespace(weight=weight)
    )
    assert relative_error(absorbed(*absorbed_weights(module)), expected) < 1e-12
    halves = weight.split([heads * nope, heads * value])
    wrong = absorbed(halves[0].view(heads, nope, rank), halves[1].view(heads, value, rank))
    assert relative_error(wrong, expected) > 0.5


@pytest.mark.parametrize("q_lora_rank", [None, 48])
@pytest.mark.parametrize("model_type", MLA)
def test_M03_whole_model_absorbed(model_type, q_lora_rank):
    """The same for a model: absorbed decode on a stock and on a paged cache equals one uncached unpatched run."""
    stock = tiny_model(model_type, q_lora_rank=q_lora_rank)
    model = optimize(copy.deepcopy(stock))
    ids = tokens(36)
    expected = whole(stock, ids)
    for cache in (None, paged_cache(model)):
        ran = count(model, "attention: absorbed")
        assert_same(feed_once(model, ids, 23, cache), expected)
        assert count(model, "attention: absorbed") - ran == 13 * 3
    assert_generates_as(model, stock, ids[:, :9])

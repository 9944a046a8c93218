"""Class rope-scale: rotary layout, YaRN's softmax scale, other rotary types."""

import copy
import math

import pytest
import torch
from fixtures import CACHE, MLA, TOLERANCE, assert_generates_as, assert_same, feed, greedy, tokens, whole
from transformers import DynamicCache

from deepseek_accel import optimize, restore
from deepseek_accel.cache import paged_cache
from deepseek_accel.testing import FAMILIES, relative_error, tiny_model

LINEAR = dict(rope_type="linear", rope_theta=1e5, factor=4.0)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    original_max_position_embeddings=32,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)


def yarn_multiplier(mscale_all_dim, factor=40.0):
    return (0.1 * mscale_all_dim * math.log(factor) + 1) ** 2


def with_scaling(model, scaling):
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.self_attn.scaling = scaling
    return model


@pytest.mark.parametrize(
    ("model_type", "mscale", "multiplier", "real_scale"),
    [("deepseek_v2", 0.707, 1.589626, 0.1147214), ("deepseek_v3", 1.0, 1.873854, 0.1352338)],
)
def test_R01_softmax_scale_has_the_squared_mscale(model_type, mscale, multiplier, real_scale):
    """The softmax scale lacks the squared YaRN mscale_all_dim factor, or is SDPA's default 1/sqrt(d)."""
    assert yarn_multiplier(mscale) == pytest.approx(multiplier, abs=1e-6)
    assert 192**-0.5 * yarn_multiplier(mscale) == pytest.approx(real_scale, abs=1e-7)
    stock = tiny_model(model_type)
    plain = stock.model.layers[0].self_attn.qk_head_dim ** -0.5
    ids = tokens(30)
    expected = whole(with_scaling(stock, plain * yarn_multiplier(mscale)), ids)  # the formula is the oracle
    wrong = whole(with_scaling(stock, plain), ids)
    assert relative_error(wrong[:, 0], expected[:, 0]) < 1e-5, "the first position cannot see it"
    assert relative_error(wrong[:, -1], expected[:, -1]) > 0.15
    model = optimize(copy.deepcopy(stock))
    for actual in (whole(model, ids), feed(model, ids, 15), feed(model, ids, 15, paged_cache(model))):
        assert_same(actual, expected)
        assert_same(actual[:, -1], expected[:, -1])


@pytest.mark.parametrize("model_type", MLA)
@pytest.mark.parametrize(("mscale", "all_dim"), [(1.0, 0.4), (0.4, 1.0), (0.707, 0.0), (None, None)])
def test_R01_mscale_and_mscale_all_dim_are_two_things(model_type, mscale, all_dim):
    """The scale is taken from mscale instead of mscale_all_dim, or a factor is applied without YaRN."""
    rope = dict(FAMILIES[model_type]["rope_parameters"], mscale=mscale, mscale_all_dim=all_dim)
    if mscale is None:
        rope = dict(rope_type="default", rope_theta=10000.0)
    stock = tiny_model(model_type, rope_parameters=rope)
    model = optimize(copy.deepcopy(stock))
    ids = tokens(30)
    expected = whole(stock, ids)
    factor = yarn_multiplier(all_dim) if all_dim else 1.0
    attention = stock.model.layers[0].self_attn
    assert attention.scaling == pytest.approx(attention.qk_head_dim**-0.5 * factor)
    if all_dim:
        wrong = attention.qk_head_dim**-0.5 * yarn_multiplier(mscale)
        assert relative_error(whole(with_scaling(stock, wrong), ids)[:, -1], expected[:, -1]) > 0.05
    assert_same(whole(model, ids), expected)
    assert_same(feed(model, ids, 15), expected)


ROPES = [("deepseek_v3", {"rope_interleave": True}), ("deepseek_v3", {"rope_interleave": False}), ("deepseek_v2", {})]


@pytest.mark.parametrize(("model_type", "options"), ROPES, ids=str)
def test_R03_rotary_pairs(model_type, options):
    """Interleaved rotary pairs treated as halves, or the reverse."""
    stock = tiny_model(model_type, **options)
    model = optimize(copy.deepcopy(stock))
    ids = tokens(44)
    expected = whole(stock, ids)
    if options:
        other = tiny_model(model_type, rope_interleave=not options["rope_interleave"])
        assert relative_error(whole(other, ids), expected) > 0.3
    assert_same(whole(model, ids), expected)
    assert_same(feed(model, ids, 40), expected)
    assert_same(feed(model, ids, 40, paged_cache(model)), expected)


@pytest.mark.parametrize("kind", ["dynamic", "paged"])
@pytest.mark.parametrize(("model_type", "options"), ROPES, ids=str)
def test_R03_one_cache_for_stock_and_optimized_calls(model_type, options, kind):
    """A cache filled by the unpatched model is misread by the patched one, or the reverse."""
    model = tiny_model(model_type, **options)
    ids = tokens(52)
    expected = whole(model, ids)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else paged_cache(model)
    actual = [feed(model, ids[:, :40], 40, cache)]
    optimize(model)
    actual.append(feed(model, ids[:, 40:44], 1, cache))
    actual.append(feed(model, ids[:, 44:47], 3, cache))
    restore(model)
    actual.append(feed(model, ids[:, 47:], 1, cache))
    assert_same(torch.cat(actual, 1), expected)


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_R05_rope_scaling_of_the_llama_architecture(model_type, rope):
    """rope_scaling of DeepSeek-Coder (linear) or R1-Distill-Llama (llama3) ignored, on prefill or on decode."""
    stock = tiny_model(model_type, rope_parameters=rope)
    model = optimize(copy.deepcopy(stock))
    ids = tokens(50)
    expected = whole(stock, ids)
    unscaled = tiny_model(model_type, rope_parameters=dict(rope_type="default", rope_theta=rope["rope_theta"]))
    assert relative_error(whole(unscaled, ids)[:, 40:], expected[:, 40:]) > 0.3
    assert_same(whole(model, ids), expected)
    assert_same(feed(model, ids, 40), expected)
    assert_same(feed(model, ids, 40, paged_cache(model)), expected)
    assert_generates_as(model, stock, ids[:, :40], 10)


def assisted(target, draft, ids, count):
    """Greedy tokens of assisted decoding, and how often the target ran."""
    calls = []
    hook = target.register_forward_hook(lambda *_: calls.append(1))
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    picked, _ = greedy(target, ids, count, assistant_model=draft)
    hook.remove()
    return picked, len(calls)


@pytest.mark.parametrize("rope", [LINEAR, LLAMA3], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("scaled", ["draft", "target", "both"])
def test_R05_draft_and_target_each_use_their_own_rope(scaled, rope):
    """Speculative decoding where only one of the two models has rope scaling, and the other's table is used."""
    default = dict(rope_type="default", rope_theta=rope["rope_theta"])
    seed = 0 if rope is LINEAR else 3  # weights with which both tables give varied tokens
    target = tiny_model("llama", seed=seed, rope_parameters=default if scaled == "draft" else rope)
    draft = tiny_model("llama", seed=seed, rope_parameters=default if scaled == "target" else rope)
    ids = tokens(40)
    plain, logits = greedy(target, ids, 20)
    best = logits.topk(2).values
    assert len(set(plain[0].tolist())) >= 8 and (best[..., 0] - best[..., 1]).min() > 1e-3
    expected = assisted(target, draft, ids, 20)
    assert torch.equal(expected[0], plain)
    optimize(target), optimize(draft)
    actual = assisted(target, draft, ids, 20)
    assert torch.equal(actual[0], plain)
    assert actual[1] == expected[1], "other drafts were accepted than with the unpatched models"
    if scaled == "both":
        assert actual[1] == 10, "a draft equal to the target is accepted whole"
    else:
        assert actual[1] > 11
    assert_same(feed(draft, ids, 30), whole(draft, ids), TOLERANCE)


def test_R05_cache_argument_is_the_installed_one():
    """The name these tests pass the cache by must be the one the model takes, or every one of them tests nothing."""
    import inspect

    from transformers import LlamaForCausalLM

    assert CACHE in inspect.signature(LlamaForCausalLM.forward).parameters

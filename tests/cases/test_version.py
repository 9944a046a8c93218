"""Class version: the supported range of transformers, renamed arguments, look-alike classes."""

import copy
import inspect
import sys

import pytest
import torch
import transformers
from fixtures import CACHE, FAST, assert_same, count, feed, tokens, whole
from torch import nn
from transformers import DynamicCache

from deepseek_accel import AccelError, UnsupportedModelError, optimize, plan, report, restore
from deepseek_accel.cache import paged_cache
from deepseek_accel.testing import FAMILIES, picture, relative_error, tiny_config, tiny_model


@pytest.mark.parametrize("version", ["4.56.2", "5.14.9", "6.0.0"])
@pytest.mark.parametrize("verb", [optimize, plan])
def test_X01_unsupported_versions_are_refused(monkeypatch, version, verb):
    """On a transformers whose layers differ, optimize breaks the model instead of naming the supported range."""
    model = tiny_model("llama")
    pristine = picture(model)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # some imports load it a second time
    with pytest.raises(AccelError) as caught:
        verb(model)
    assert "5.15" in str(caught.value) and "6" in str(caught.value) and version in str(caught.value)
    assert picture(model) == pristine


@pytest.mark.parametrize("version", ["5.15.0", "5.15", "5.23.1", "5.24.0.dev0", "5.30.0rc1", "5.100.2+local"])
def test_X01_supported_versions_are_not_refused(monkeypatch, version):
    """A check of the version that stumbles over development versions or compares strings."""
    model = tiny_model("llama")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # some imports load it a second time
    assert optimize(model) is model and report(model).optimized


def test_X01_the_range_is_the_one_of_the_package():
    """The range the package checks and the one pip installs drift apart."""
    from packaging.version import Version

    assert Version("5.15") <= Version(transformers.__version__) < Version("6")


@pytest.mark.parametrize("kind", ["dynamic", "paged"])
@pytest.mark.parametrize("model_type", FAST)
def test_X01_the_cache_is_used(model_type, kind):
    """The cache argument was renamed and **kwargs swallows it: the output ignores the history."""
    stock = tiny_model(model_type)
    model = optimize(copy.deepcopy(stock))
    ids = tokens(26)
    expected = whole(stock, ids)
    assert relative_error(whole(stock, ids[:, 23:])[:, -1], expected[:, -1]) > 0.1, "history must matter"
    cache = DynamicCache(config=model.config) if kind == "dynamic" else paged_cache(model)
    assert_same(feed(model, ids, 23, cache), expected)
    assert cache.get_seq_length() == 26
    assert inspect.signature(model.forward) == inspect.signature(stock.forward)
    assert CACHE in inspect.signature(model.forward).parameters


@torch.no_grad()
@pytest.mark.parametrize("model_type", FAST)
def test_X01_layers_called_positionally_and_by_keyword(model_type):
    """A patched layer takes its arguments in another order than the installed transformers, or by other names."""
    stock = tiny_model(model_type)
    model = optimize(copy.deepcopy(stock))
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(6)[None]
    results = []
    for m in (stock, model):
        rope = m.model.rotary_emb(x, positions)
        layer = m.model.layers[1]
        for cache in (None, DynamicCache(config=m.config), paged_cache(m)):
            by_keyword = {"attention_mask": None, "position_embeddings": rope, CACHE: cache}
            results.append(layer(x, position_ids=positions, **by_keyword))
            if cache is not None:
                assert cache.get_seq_length(1) == 6
                cache.reset()
            results.append(layer.self_attn(x, **by_keyword)[0])
            if cache is not None:
                cache.reset()
            order = inspect.signature(type(layer.self_attn).forward).parameters.values()
            names = [p.name for p in order if p.kind is p.POSITIONAL_OR_KEYWORD][2:]
            assert {"attention_mask", "position_embeddings", CACHE} <= set(names)
            results.append(layer.self_attn(x, *[by_keyword.get(name) for name in names])[0])
        results.append(layer.mlp(x))
        results.append(layer.input_layernorm(x))
    half = len(results) // 2
    for actual, expected in zip(results[half:], results[:half], strict=True):
        assert_same(actual, expected)


class Gate(nn.Module):
    """As in DeepSeek's own files: (ids, weights, auxiliary loss)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 64))

    def forward(self, x):
        weights, ids = (x.flatten(0, 1) @ self.weight.T).softmax(-1).topk(2, -1)
        return ids, weights, None


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = Gate(), nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        ids, weights, _ = self.gate(x)
        outputs = torch.stack([expert(x.flatten(0, 1)) for expert in self.experts], 1)
        return (outputs.gather(1, ids[..., None].expand(-1, -1, 64)) * weights[..., None]).sum(1).view_as(x)


class Attention(nn.Module):
    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.kv_a_proj_with_mqa, self.kv_b_proj = nn.Linear(64, 40), nn.Linear(32, 160, bias=False)
        self.o_proj = nn.Linear(96, 64)

    def forward(self, x, attention_mask=None, position_ids=None, past_key_value=None, **kwargs):
        kv = self.kv_b_proj(self.kv_a_proj_with_mqa(x)[..., :32])
        return self.o_proj(kv[..., 64:]), None, past_key_value, None


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x):
        return x * self.weight


class Layer(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.self_attn, self.mlp, self.input_layernorm = Attention(index), MoE(), RMSNorm()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))[0]
        return x + self.mlp(x)


def look_alike(class_name, module_name, model_type):
    """A model of remote code: the names of the native classes, with other insides."""

    class Decoder(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config = config
            self.embed_tokens = nn.Embedding(128, 64)
            self.layers = nn.ModuleList(Layer(i) for i in range(2))
            self.norm = RMSNorm()

        def forward(self, ids):
            x = self.embed_tokens(ids)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    class Model(nn.Module):
        base_model_prefix = "model"

        def __init__(self, config):
            super().__init__()
            self.config = config
            self.model, self.lm_head = Decoder(config), nn.Linear(64, 128)

        def forward(self, ids):
            return self.lm_head(self.model(ids))

        def _prepare_cache_for_generation(self, *args):
            raise AssertionError

    Model.__name__ = Model.__qualname__ = class_name
    Decoder.__name__ = Decoder.__qualname__ = class_name.removesuffix("ForCausalLM") + "Model"
    Model.__module__ = Decoder.__module__ = module_name
    config = tiny_config("deepseek_v2" if model_type == "deepseek" else model_type)
    config.num_hidden_layers, config.model_type = 2, model_type
    torch.manual_seed(0)
    return Model(config).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("class_name", "model_type"),
    [
        ("DeepseekV2ForCausalLM", "deepseek_v2"),
        ("DeepseekV3ForCausalLM", "deepseek_v3"),
        ("DeepseekForCausalLM", "deepseek"),
        ("DeepseekForCausalLM", "deepseek_v2"),
        ("LlamaForCausalLM", "llama"),
    ],
)
@pytest.mark.parametrize("module_name", ["transformers_modules.deepseek_ai.modeling_deepseek", "modeling_deepseek"])
def test_X03_remote_classes_are_refused_by_name(class_name, model_type, module_name):
    """Remote-code classes share the native names: patching by name breaks them or does nothing, silently."""
    model = look_alike(class_name, module_name, model_type)
    pristine, ids = picture(model), tokens(5)
    expected = model(ids)
    for verb in (optimize, plan, report, paged_cache):
        with pytest.raises(UnsupportedModelError) as caught:
            verb(model)
        assert class_name in str(caught.value)
    assert picture(restore(model)) == pristine
    assert torch.equal(model(ids), expected)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_X03_subclasses_of_the_native_classes_work(model_type):
    """A class of one's own on top of the native one is refused only because it lives elsewhere."""
    native = type(tiny_model(model_type))
    mine = type("Mine", (native,), {"__module__": "my_package.models"})
    torch.manual_seed(0)
    model = mine(tiny_config(model_type)).eval()
    ids = tokens(20)
    expected = feed(model, ids, 9)
    optimize(model)
    assert_same(feed(model, ids, 9), expected)
    assert count(model, "layers: fused norm") > 0


PARTS = {
    "attention": lambda layer: layer.self_attn,
    "mlp": lambda layer: layer.mlp,
    "norm": lambda layer: layer.input_layernorm,
    "gate": lambda layer: layer.mlp.gate,
    "experts": lambda layer: layer.mlp.experts,
}


@torch.no_grad()
@pytest.mark.parametrize("how", ["class", "instance"])
@pytest.mark.parametrize("part", PARTS)
def test_X03_a_native_model_with_one_foreign_module(part, how):
    """Another library put its own forward on one module of a native model: the patch drops it without a word."""
    model = tiny_model("deepseek_v3")
    module = PARTS[part](model.model.layers[1])
    native = type(module)

    def doubled(self, *args, **kwargs):
        out = native.forward(self, *args, **kwargs)
        if part == "gate":
            return out[0], out[1] * 2, out[2]
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    plain = whole(model, tokens(12))
    if how == "class":
        module.__class__ = type(native.__name__, (native,), {"forward": doubled, "__module__": "another_library"})
    else:
        module.forward = doubled.__get__(module)
    expected = whole(model, tokens(12))
    assert relative_error(expected, plain) > 0.01
    pristine = picture(model)
    try:
        optimize(model)
    except AccelError as refusal:
        assert native.__name__ in str(refusal)
        assert picture(model) == pristine
        return
    assert_same(whole(model, tokens(12)), expected)
    assert_same(feed(model, tokens(12), 9), expected)
    assert picture(restore(model)) == pristine

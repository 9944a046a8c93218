"""The mixed_precision pass: what it packs, that the model computes with the packed weights, and its undo."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch

from deepseek_accel import (
    AccelError,
    Attention,
    FusedExperts,
    FusedLayers,
    KVCache,
    MixedPrecision,
    OptimizeConfig,
    PlanError,
    RestoreError,
    optimize,
    plan,
    report,
    restore,
)
from deepseek_accel.generation.fingerprint import Fingerprint
from deepseek_accel.ops.int4 import dequantize, pack, quantize, round_to_nearest
from deepseek_accel.testing import FAMILIES, picture, relative_error, tiny_model

IDS = torch.randint(2, 128, (2, 9), generator=torch.Generator().manual_seed(1))
ALL = ("experts", "mlp", "attention", "lm_head")
FAST = (Attention(), FusedExperts(), FusedLayers(), KVCache(page_size=16))


def rtn(**options):
    return MixedPrecision(**{"method": "rtn", "group_size": 32, **options})


def with_rest(*passes):
    return OptimizeConfig(passes, allow_skips=True)


def unpacked(model, names, group_size=32):
    """A copy that holds the rounded weights in plain form. names: parts of parameter names."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and any(part in name for part in names):
            parameter.data = dequantize(quantize(parameter.data, group_size))
    return model


@torch.no_grad()
def logits(model, ids=IDS):
    return model(ids).logits


def generate(model, ids=IDS, **kwargs):
    return model.generate(ids, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids), **kwargs)


MLPS = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "q_a_proj", "q_b_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "o_proj", "lm_head")


@pytest.mark.parametrize("targets", [("experts", "mlp"), ALL], ids=["default", "all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_a_model_of_the_rounded_weights(family, targets):  # S03 with all targets
    model = tiny_model(family)
    expected, before = logits(model), picture(model)
    rounded = unpacked(model, MLPS + (ATTENTION if targets == ALL else ()))
    tokens = generate(rounded)
    assert relative_error(logits(rounded), expected) > 1e-3  # or the test could not fail
    for others in ((), FAST):
        optimize(model, with_rest(rtn(targets=targets), *others))
        assert relative_error(logits(model), logits(rounded)) < 1e-4
        assert torch.equal(generate(model), tokens)
        assert torch.equal(generate(model, IDS[:1]), generate(rounded, IDS[:1]))
        state = report(model)
        assert state.parameter_bytes < 0.9 * state.parameter_bytes_before
        assert any(key.startswith("mixed_precision") for key in state.counters)
        if others and family != "deepseek_v32":
            assert state.counters["mixed_precision: packed layers"] > 0
            assert not any("stock loop" in key for key in state.counters)
        restore(model)
        assert picture(model) == before
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2"])
def test_the_models_own_dtype(family, dtype):  # D01
    model = tiny_model(family).to(dtype)
    rounded = unpacked(model, MLPS)
    optimize(model, with_rest(rtn(), *FAST))
    ours = logits(model)
    assert ours.dtype == dtype and torch.isfinite(ours).all()
    assert relative_error(ours, logits(rounded)) < 0.05
    assert generate(model).shape == (2, 17)


def test_large_activations_stay_finite_in_bf16():  # D01: beyond fp16's range
    weight = quantize(torch.randn(48, 96, generator=torch.Generator().manual_seed(0)).bfloat16(), 32)
    from deepseek_accel.ops.int4_linear import int4_linear

    x = (torch.randn(3, 96, generator=torch.Generator().manual_seed(1)) * 1e5).bfloat16()
    ours = int4_linear(x, weight)
    assert ours.dtype == torch.bfloat16 and ours.abs().max() > 65504
    assert relative_error(ours, x.double() @ dequantize(weight, torch.float64).T) < 0.02


def packed_names(model):
    return {
        f"{name}.{key.removeprefix('_accel_')}".removeprefix("model.")
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key.startswith("_accel_") and hasattr(value, "words")
    }


def test_selection():  # S01
    model = tiny_model("deepseek_v3", num_hidden_layers=12)
    stock = copy.deepcopy(model)
    config = OptimizeConfig((rtn(skip=("gate", "layers.1")),))
    planned = plan(model, config)
    optimize(model, config)
    expected = {f"layers.0.mlp.{name}.weight" for name in MLPS}
    for layer in range(2, 12):
        expected |= {f"layers.{layer}.mlp.shared_experts.{name}.weight" for name in MLPS}
        expected |= {f"layers.{layer}.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    assert packed_names(model) == expected
    for layer in range(12):
        assert (f"layers.{layer}: " in str(planned)) == (layer != 1)
    for one, other in zip(model.model.layers[1:], stock.model.layers[1:], strict=True):
        hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
        assert torch.equal(one.mlp.gate(hidden)[0], other.mlp.gate(hidden)[0])
    for regex, spared in ((r".*\.experts", 24), (r"model\.layers\.(2|3)\..*", 4), ("down_proj", 13)):
        restore(model)
        optimize(model, [rtn(skip=(regex,))])
        assert len(packed_names(model)) < 3 + 11 * 5
        assert spared
    restore(model)
    with pytest.raises(PlanError, match="which no module"):
        optimize(model, [rtn(skip=("layers.12",))])
    assert not packed_names(model)


def test_kv_b_proj_is_refused():
    model = tiny_model("deepseek_v2")
    with pytest.raises(PlanError, match="kv_b_proj: absorbed attention"):
        optimize(model, [rtn(targets=("attention",))])
    optimize(model, [rtn(targets=("attention",), skip=("kv_b_proj",))])
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in packed_names(model)} == {
        "q_proj",
        "kv_a_proj_with_mqa",
        "o_proj",
    }


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 8}, "bits must be 4"),
        ({"group_size": 100}, "multiple of 32"),
        ({"method": "gptq"}, "method must be one of"),
        ({"originals": "gpu"}, "originals must be one of"),
        ({"targets": "experts"}, "sequence of strings"),
        ({"targets": ("ffn",)}, "unknown targets"),
        ({"targets": ()}, "must not be empty"),
        ({"skip": ("(",)}, "no regular expression"),
    ],
)
def test_options(options, message):
    with pytest.raises(PlanError, match=message):
        rtn(**options)


def test_awq_needs_a_calibration():
    model = tiny_model("llama")
    with pytest.raises(PlanError, match="calibrate_awq"):
        optimize(model, [MixedPrecision()])
    assert [row["status"] for row in plan(model, with_rest(MixedPrecision())).rows()] == ["skipped"]
    with pytest.raises(PlanError, match="takes no calibration"):
        optimize(model, [rtn(calibration=Calibration(32))])
    with pytest.raises(PlanError, match="what `calibrate_awq` returns"):
        optimize(model, [MixedPrecision(calibration=7)])
    with pytest.raises(PlanError, match="groups of 32, not 128"):
        optimize(model, [MixedPrecision(calibration=Calibration(32))])


class Calibration:
    """Doubles what the norm before an MLP gives, and halves the columns that read it; exact in binary."""

    def __init__(self, group_size, layers=(0, 1, 2)):
        self.group_size, self.layers = group_size, layers
        self.names = {f"model.layers.{i}.mlp.{name}.weight" for i in layers for name in ("gate_proj", "up_proj")}
        self.rescaled_names = {f"model.layers.{i}.post_attention_layernorm.weight" for i in layers} | self.names

    def check(self, model):
        assert model is not None

    def quantize(self, name, weight):
        assert name in self.names
        return round_to_nearest(weight / 2, self.group_size)

    def rescaled(self, name, tensor):
        return tensor * 2 if "norm" in name else tensor / 2


@pytest.mark.parametrize("skip", [(), ("layers.1.mlp.up_proj",)])
def test_a_calibrations_scales_reach_what_stays(skip):
    model = tiny_model("llama")
    rounded, before = unpacked(model, MLPS), picture(model)
    if skip:
        rounded.model.layers[1].mlp.up_proj.weight = model.model.layers[1].mlp.up_proj.weight
    for others in ((), FAST):
        optimize(model, with_rest(MixedPrecision(group_size=32, calibration=Calibration(32), skip=skip), *others))
        assert relative_error(logits(model), logits(rounded)) < 1e-5
        assert torch.equal(generate(model), generate(rounded))
        restore(model)
        assert picture(model) == before


def test_nan_weights_are_named_and_nothing_changes():
    model = tiny_model("deepseek_v3")
    with torch.no_grad():
        model.model.layers[2].mlp.experts.down_proj[3, 1, 2] = torch.nan
    before = picture(model)
    for originals in ("host", "drop"):
        with pytest.raises(PlanError, match=r"model\.layers\.2\.mlp\.experts\.down_proj cannot be packed: .*NaN"):
            optimize(model, [rtn(originals=originals)])
        assert picture(model) == before


def test_dropped_originals():  # L03
    model = tiny_model("deepseek_v3")
    size = sum(p.nbytes for p in model.parameters())
    gone = [weakref.ref(p) for name, p in model.named_parameters() if any(part in name for part in MLPS)]
    gone_bytes = sum(reference().nbytes for reference in gone)
    optimize(model, [rtn(originals="drop"), FusedExperts()])
    gc.collect()
    assert not any(reference() is not None for reference in gone)
    assert report(model).parameter_bytes == size - gone_bytes + sum(
        value.nbytes for module in model.modules() for value in vars(module).values() if hasattr(value, "words")
    )
    expected = logits(model)
    with pytest.raises(RestoreError, match="load the model again"):
        restore(model)
    assert torch.equal(logits(model), expected)


def test_saving_is_refused(tmp_path):
    model = optimize(tiny_model("llama"), [rtn()])
    with pytest.raises(AccelError, match=r"restore\(model\).*deepseek-accel quantize"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    restore(model).save_pretrained(tmp_path)
    assert list(tmp_path.glob("*.safetensors"))


def test_moved_or_converted_models_say_so():
    model = optimize(tiny_model("llama"), [rtn()])
    assert model.model.layers[0].mlp(torch.zeros(2, 0, 64)).shape == (2, 0, 64)
    with pytest.raises(AccelError, match=r"restore\(model\)"):
        logits(model.bfloat16())
    restore(model.float())
    assert torch.isfinite(logits(model)).all()


def test_copies_and_pickles_are_independent():
    model = optimize(tiny_model("deepseek_v2"), with_rest(rtn(), *FAST))
    expected, tokens = logits(model), generate(model)
    clone = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    restore(model)
    assert torch.equal(logits(clone), expected) and torch.equal(generate(clone), tokens)
    restore(clone)
    assert torch.equal(logits(clone), logits(model))


def test_hooks_are_called():
    model = optimize(tiny_model("deepseek_v2"), with_rest(rtn(), *FAST))
    expected = generate(model)
    calls = []
    handle = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *args: calls.append(1))
    assert torch.equal(generate(model), expected)
    assert len(calls) == 8
    handle.remove()


def test_fingerprints_see_packed_weights():
    model = optimize(tiny_model("llama"), [rtn()])
    first = Fingerprint(model)
    assert Fingerprint(model).has_tensors_of(first)
    packed = vars(model.model.layers[1].mlp.up_proj)["_accel_weight"]
    packed.words.bitwise_xor_(1)
    assert not Fingerprint(model).has_tensors_of(first)


def test_adapters_train_on_top():
    peft = pytest.importorskip("peft")
    model = optimize(tiny_model("llama"), [rtn()])
    rounded = unpacked(restore(copy.deepcopy(model)), MLPS)
    config = peft.LoraConfig(r=4, target_modules=["gate_proj", "q_proj"], init_lora_weights=False)
    gradients = []
    for base in (model, rounded):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT reads attributes transformers 5.24 renamed
            adapted = peft.get_peft_model(base, config)
        adapted(IDS).logits.square().mean().backward()
        gradients.append({name: p.grad for name, p in adapted.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-6)


def test_tied_weights_stay():
    model = tiny_model("llama", tie_word_embeddings=True)
    with pytest.raises(PlanError, match="lm_head: its weight is shared"):
        optimize(model, [rtn(targets=("mlp", "lm_head"))])


def test_weights_that_are_not_there_come_from_the_calibration():
    """A checkpoint's codes for a model whose own weights were never read."""
    model, full = tiny_model("llama"), tiny_model("llama")

    class Checkpoint:
        group_size, rescaled_names = 32, frozenset()
        names = frozenset(name for name, _ in full.named_parameters() if any(part in name for part in MLPS))

        def check(self, model): ...

        def quantize(self, name, weight):
            own = full.get_parameter(name).detach()
            assert weight.is_meta and weight.shape == own.shape
            return round_to_nearest(own, 32)

    for module in (layer.mlp for layer in model.model.layers):
        module.to("meta")
    optimize(model, [MixedPrecision(group_size=32, calibration=Checkpoint(), originals="drop")])
    assert torch.equal(logits(model), logits(unpacked(full, MLPS)))


def test_packing_is_what_the_pass_uses():
    model = tiny_model("llama")
    weight = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    optimize(model, [rtn(group_size=96)])  # 128 inputs: one group and a short one
    packed = vars(model.model.layers[0].mlp.down_proj)["_accel_weight"]
    codes, scales, zeros = round_to_nearest(weight, 96)
    assert torch.equal(packed.codes(), codes) and packed.scales.shape == (64, 2)
    assert torch.equal(packed.words, pack(codes, scales, zeros, 96).words)

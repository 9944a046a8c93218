"""Packed weights beside what else is asked of a model: gates that drop experts, adapters, autocast, saving, undo."""

import warnings

import pytest
import torch

from deepseek_accel import (
    AccelError,
    AdaptiveTopK,
    MixedPrecision,
    OptimizeConfig,
    PlanError,
    calibrate_awq,
    calibrate_gates,
    models,
    optimize,
    plan,
    report,
    restore,
)
from deepseek_accel.ops.int4 import dequantize, quantize
from deepseek_accel.passes.mixed_precision import Kept
from deepseek_accel.testing import picture, relative_error, tiny_model

DATA = [torch.randint(2, 128, (1, 96), generator=torch.Generator().manual_seed(i)) for i in range(3)]


def rtn(**options):
    return MixedPrecision(**{"method": "rtn", "group_size": 32, **options})


def with_rest(*passes):
    return OptimizeConfig((*passes, *OptimizeConfig.lossless().passes), allow_skips=True)


def outliers(model_type):
    """A tiny model for which a calibration chooses scales."""
    model = tiny_model(model_type)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight[::37] *= 8
    return model


@torch.no_grad()
def logits(model):
    return model(DATA[0]).logits


def test_gates_drop_the_same_experts_where_scales_are_in_the_norm():
    """The rule reads what the router reads, which the scales divide. Nothing but the last product is in four bits."""
    model = outliers("deepseek_v3")
    calibration, sensitivity = calibrate_awq(model, DATA, group_size=32), calibrate_gates(model, DATA)
    assert "model.layers.1.mlp.gate.weight" in calibration.rescaled_names
    adaptive = AdaptiveTopK(target=0.6, sensitivity=sensitivity)
    last = len(model.model.layers) - 1
    but_one = r"layers\.\d+\.mlp\.experts", rf"layers\.(?!{last}\.)\d+\.mlp", rf"layers\.{last}\.mlp.*(gate|up)_proj"
    kept = []
    for others in ((), (MixedPrecision(group_size=32, calibration=calibration, skip=but_one),)):
        optimize(model, [adaptive, *others])
        logits(model)
        kept.append(report(model).gating["experts_per_token_by_layer"])
        restore(model)
    assert kept[0] == kept[1]
    assert max(kept[0]) < model.config.num_experts_per_tok


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_autocast(model_type):
    model = tiny_model(model_type)
    before = picture(model)
    optimize(model, [rtn()])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = logits(model)
    restore(model)
    assert picture(model) == before
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and any(part in name for part in ("gate_proj", "up_proj", "down_proj", "gate_up_proj")):
            parameter.data = dequantize(quantize(parameter.data, 32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = logits(model)
    assert ours.dtype == expected.dtype
    assert relative_error(ours.float(), expected.float()) < 0.05


def test_converted_experts_say_so():
    model = optimize(tiny_model("deepseek_v3"), [rtn(targets=("experts",))]).to(torch.bfloat16)
    with pytest.raises(AccelError, match=r"packed for that dtype.*restore\(model\)"):
        logits(model)


def test_saving_a_part_or_a_model_without_originals_is_refused(tmp_path):
    model = optimize(tiny_model("llama"), [rtn(originals="drop")])
    for part in (model, model.model):
        with pytest.raises(AccelError, match=r"were dropped.*deepseek-accel quantize"):
            part.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_adapter_that_scales_would_pass_by_is_refused():
    peft = pytest.importorskip("peft")
    model = outliers("llama")
    mixed = MixedPrecision(group_size=32, calibration=calibrate_awq(model, DATA, group_size=32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads attributes transformers 5.24 renamed
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up_proj"]))
    before = picture(model)
    with pytest.raises(PlanError, match=r"mlp\.up_proj\.weight stays in 16 bits and must follow .* adapter"):
        optimize(adapted, OptimizeConfig((mixed,), allow_skips=True))
    assert picture(model) == before


def test_an_undo_that_fails_halfway_can_be_called_again(monkeypatch):
    """As on a GPU that has no room for the 16-bit weights."""
    model = tiny_model("llama")
    before = picture(model)
    optimize(model, [rtn()])
    calls = []

    def fails(self, parameter):
        calls.append(parameter)
        if len(calls) == 3:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(Kept, "bring_back", fails)
    with pytest.raises(torch.OutOfMemoryError):
        restore(model)
    restore(model)
    assert picture(model) == before
    assert not report(model).optimized


def test_what_scales_replace_is_dropped_too():
    import gc
    import weakref

    model = outliers("llama")
    calibration = calibrate_awq(model, DATA, group_size=32)
    old = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    assert "model.layers.0.mlp.up_proj.weight" in calibration.rescaled_names
    mixed = MixedPrecision(group_size=32, calibration=calibration, skip=("up_proj",), originals="drop")
    optimize(model, [mixed])
    gc.collect()
    assert old() is None


def test_calibrated_when_the_model_is_optimized():
    model, data = tiny_model("deepseek_v3"), DATA
    before = picture(model)
    made = MixedPrecision(group_size=32, calibration=calibrate_awq(model, data, group_size=32))
    optimize(model, with_rest(made))
    expected = logits(model)
    restore(model)
    given = MixedPrecision(group_size=32, calibration=data)
    intended = plan(model, with_rest(given))
    assert f"calibrated first, on {len(data)} samples" in str(intended)
    assert picture(model) == before  # a plan measures nothing, and writes nothing
    assert torch.equal(logits(optimize(model, with_rest(given))), expected)
    again = MixedPrecision(group_size=32, calibration=[tokens.clone() for tokens in data])
    assert optimize(model, with_rest(again)) is model  # the same config
    with pytest.raises(PlanError, match="another config"):
        optimize(model, with_rest(MixedPrecision(group_size=32, calibration=data[:1])))
    restore(model)
    assert picture(model) == before
    assert OptimizeConfig.from_dict(OptimizeConfig((given,)).to_dict()).passes == (given,)


def test_what_it_is_calibrated_on_is_checked_first():
    model = tiny_model("deepseek_v3")
    before = picture(model)
    for bad, message in (
        ({"calibration": ["some text"]}, "tokenizer is not to be found"),
        ({"calibration": [torch.zeros(3, 4)]}, "must be a text or a tensor"),
        ({"calibration": []}, "list of texts"),
        ({"calibration": DATA, "targets": ("lm_head",)}, "nothing that is calibrated"),
        ({"calibration": DATA, "method": "rtn"}, "takes no calibration"),
    ):
        for act in (plan, optimize):
            with pytest.raises(PlanError, match=message):
                act(model, with_rest(MixedPrecision(**{"group_size": 32} | bad)))
    model.train()
    with pytest.raises(PlanError, match="training mode"):
        optimize(model, with_rest(MixedPrecision(group_size=32, calibration=DATA)))
    assert picture(model.eval()) == before


def test_texts_are_read_by_the_checkpoints_tokenizer():
    model, tokenizer = models.load_tiny(dtype=torch.float32)
    texts = ["def area(width, height):\n    return width * height\n", "for name in names:\n    print(name)\n"]
    tokens = [tokenizer(text, return_tensors="pt").input_ids for text in texts]
    optimize(model, with_rest(MixedPrecision(calibration=texts, targets=("mlp",))))
    with torch.no_grad():
        ours = model(tokens[0]).logits
    restore(model)
    made = calibrate_awq(model, tokens, targets=("mlp",))
    optimize(model, with_rest(MixedPrecision(calibration=made, targets=("mlp",))))
    with torch.no_grad():
        assert torch.equal(model(tokens[0]).logits, ours)

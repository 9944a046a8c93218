"""AWQ calibration: rounding that keeps outputs, scales that are folded away exactly, and a model left as it was."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from deepseek_accel import (
    AdaptiveTopK,
    AwqCalibration,
    CheckpointError,
    MixedPrecision,
    PlanError,
    calibrate_awq,
    calibrate_gates,
    models,
    optimize,
    restore,
)
from deepseek_accel.ops.int4 import round_to_nearest
from deepseek_accel.quantization import awq, rounding, search
from deepseek_accel.quantization.blocks import is_named, owner_of, parameter
from deepseek_accel.quantization.calibration import layer_file, pack_nibbles, unpack_nibbles
from deepseek_accel.quantization.text import windows
from deepseek_accel.testing import FAMILIES, picture, tiny_model

GROUP = 32


def tokens(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 128, (1, length), generator=generator) for length in lengths]


DATA = tokens(96, 64, 40)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated(count, size, seed=0):
    """[E, K, K] of inputs that depend on each other, some of them large."""
    mix = draw(count, size, 20, seed=seed)
    return mix @ mix.mT / 20 + 0.05 * torch.diag_embed(draw(count, size, seed=seed + 1).square())


def values(codes, scales, zeros, group):
    size = codes.shape[-1]
    return (codes.float() - rounding.per_column(zeros, size, group)) * rounding.per_column(scales, size, group)


def loss(weight, rounded, hessian):
    error = rounded - weight
    return ((error @ hessian) * error).sum((-1, -2))


def outliers(model_type="deepseek_v3"):
    """A tiny model whose MLPs meet two inputs much larger than the others, one in each group."""
    model = tiny_model(model_type)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight[::37] *= 8
    return model


@functools.cache
def calibrated(model_type, feedback=True):
    return calibrate_awq(tiny_model(model_type), DATA, group_size=GROUP, feedback=feedback)


def logits(model, ids=DATA[1]):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


# ------------------------------------------------------------------------------------------------------------ rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 64), (3, 100), (2, 31)])
def test_nearest_is_what_the_op_rounds_to(dtype, shape):
    weight = draw(*shape).to(dtype)
    weight[0, :32] = 0
    codes, scales, zeros = rounding.nearest(weight, GROUP, dtype)
    expected = round_to_nearest(weight, GROUP)
    assert torch.equal(codes, expected[0]) and torch.equal(zeros, expected[2])
    assert torch.equal(scales, expected[1].float())


def test_a_range_is_clipped_only_where_that_helps_and_never_where_nothing_is_known():
    weight, hessian = draw(3, 8, 80), correlated(3, 80)
    weight[:, 0, 5], weight[:, 0, 6] = 9, -9  # worth losing: their inputs are always 0
    hessian[:, 5:7, :] = hessian[:, :, 5:7] = 0
    trusted = torch.tensor([True, True, False])
    scales, zeros = rounding.clipped_ranges(weight, hessian, trusted, GROUP, torch.float16)
    whole = [rounding.nearest(w, GROUP, torch.float16) for w in weight]
    assert scales[0, 0, 0] < 0.8 * whole[0][1][0, 0]
    assert torch.equal(scales[2], whole[2][1]) and torch.equal(zeros[2], whole[2][2].float())


def test_feedback_lowers_the_cost_and_without_correlation_rounds_to_nearest():
    weight, hessian = draw(2, 16, 150), correlated(2, 150)
    trusted = torch.tensor([True, True])
    plain = rounding.round_for(weight, hessian, trusted, GROUP, torch.float16, feedback=False)
    fed = rounding.round_for(weight, hessian, trusted, GROUP, torch.float16, feedback=True)
    ratio = loss(weight, values(*fed, GROUP), hessian) / loss(weight, values(*plain, GROUP), hessian)
    assert (ratio < 0.3).all(), ratio
    assert torch.equal(fed[1], plain[1]) and torch.equal(fed[2], plain[2])
    scattered = torch.diag_embed(draw(2, 150).square() + 0.1)
    fed, plain = (rounding.round_for(weight, scattered, trusted, GROUP, torch.float16, f) for f in (True, False))
    assert torch.equal(fed[0], plain[0])


def test_feedback_in_blocks_is_feedback_column_by_column(monkeypatch):
    weight, hessian = draw(2, 6, 96), correlated(2, 96)
    ranges = rounding.clipped_ranges(weight, hessian, torch.tensor([True, True]), GROUP, torch.float16)
    whole = rounding.feed_back(weight, hessian, *ranges, GROUP)
    monkeypatch.setattr(rounding, "COLUMNS", 7)
    assert (rounding.feed_back(weight, hessian, *ranges, GROUP) != whole).float().mean() < 0.01


def test_feedback_survives_inputs_that_are_always_zero_or_always_the_same():
    weight = draw(2, 4, 64)
    hessian = torch.stack((torch.zeros(64, 64), torch.ones(64, 64)))
    codes, scales, zeros = rounding.round_for(weight, hessian, torch.tensor([True, True]), GROUP, torch.float16, True)
    assert codes.max() <= 15 and torch.isfinite(values(codes, scales, zeros, GROUP)).all()


def test_scales_follow_large_inputs_and_are_powers_of_two():
    activation = torch.ones(2, 64)
    activation[0, 3] = 100.0
    found = [search.exponents(activation, alpha) for alpha in search.ALPHAS]
    assert not found[0].any() and [int(e[0, 3]) for e in found] == [0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7]
    assert not any(e[1].any() for e in found)
    assert not any(e[0, 4:].any() for e in found)


def test_nibbles():
    codes = torch.randint(0, 16, (3, 4, 7), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes), 7), codes)


# --------------------------------------------------------------------------------------------------------- calibration


@pytest.mark.parametrize("model_type", FAMILIES)
def test_outputs_are_nearer_than_rounded_ones_and_the_model_is_left_alone(model_type):
    model = tiny_model(model_type)
    before, exact = picture(model), logits(model)
    calibration = calibrate_awq(model, DATA, group_size=GROUP)
    assert picture(model) == before and torch.equal(logits(model), exact)
    errors = {}
    for name, config in {
        "awq": MixedPrecision(group_size=GROUP, calibration=calibration),
        "rtn": MixedPrecision(group_size=GROUP, method="rtn"),
    }.items():
        optimize(model, [config])
        errors[name] = float((logits(model, DATA[0]) - exact_of(model_type)).norm())
        restore(model)
    assert errors["awq"] < errors["rtn"]
    assert picture(model) == before
    row = calibration.rows[-1]
    assert row["tokens"] == 200 and row["output_snr_db"] > 15 and 15 < row["weight_snr_db"] < 30
    assert 0 <= row["weight_kl"] < 0.2


@functools.cache
def exact_of(model_type):
    return logits(tiny_model(model_type), DATA[0])


def test_every_target_is_calibrated_in_its_shape():
    calibration, model = calibrated("deepseek_v3"), tiny_model("deepseek_v3")
    calibration.check(model)
    assert len(calibration.names) == 3 + 2 * (2 + 3)  # a dense layer; experts and shared experts of two
    for name in calibration.names:
        weight = parameter(model, name)
        codes, scales, zeros = calibration.quantize(name, weight)
        groups = -(-weight.shape[-1] // GROUP)
        assert codes.shape == weight.shape and scales.shape == zeros.shape == (*weight.shape[:-1], groups)
        assert scales.dtype == weight.dtype and codes.dtype == zeros.dtype == torch.uint8
        assert torch.equal(scales, scales.half().float()), "a checkpoint holds them in fp16"


def test_one_expert_can_be_read_alone():
    name = "model.layers.1.mlp.experts.gate_up_proj"
    weight = parameter(tiny_model("deepseek_v3"), name)
    for whole, alone in zip(
        calibrated("deepseek_v3").quantize(name, weight), calibrated("deepseek_v3").stored(name, 3), strict=True
    ):
        assert torch.equal(whole[3], alone)


def test_scales_are_folded_away_without_a_trace():
    """Large inputs get finer columns; and where nothing is quantised, the folded model is the same to the last bit."""
    model = outliers()
    expected = logits(model)
    routed = []
    hook = model.model.layers[1].mlp.gate.register_forward_hook(lambda m, a, out: routed.append(out[0]))
    logits(model)
    calibration = calibrate_awq(model, DATA, group_size=GROUP, feedback=False)
    assert all(row["alpha"] > 0 for row in calibration.rows)
    for name in ("model.layers.1.post_attention_layernorm.weight", "model.layers.1.mlp.gate.weight"):
        assert name in calibration.rescaled_names and name not in calibration.names
    routed[1:] = []
    for name in calibration.rescaled_names:
        owner, attribute = owner_of(model, name)
        setattr(owner, attribute, nn.Parameter(calibration.rescaled(name, parameter(model, name))))
    assert torch.equal(logits(model), expected)
    assert torch.equal(routed[0], routed[1])
    hook.remove()


def test_scales_lower_the_error_where_inputs_differ(monkeypatch):
    scaled = calibrate_awq(outliers(), DATA, group_size=GROUP, feedback=False)
    monkeypatch.setattr(search, "ALPHAS", (0.0,))
    plain = calibrate_awq(outliers(), DATA, group_size=GROUP, feedback=False)
    assert not plain.rescaled_names
    gain = [a["output_snr_db"] - b["output_snr_db"] for a, b in zip(scaled.rows, plain.rows, strict=True)]
    assert min(gain) > 0.3, gain


def test_adaptive_topk_follows_the_scales():
    """The router's input is divided by them, and the slope was measured on what it was."""
    model = outliers()
    calibration, found = calibrate_awq(model, DATA, group_size=GROUP, feedback=False), calibrate_gates(model, DATA)
    feelings = []
    for others in ((), (MixedPrecision(group_size=GROUP, calibration=calibration),)):
        optimize(model, (*others, AdaptiveTopK(0.5, sensitivity=found)))
        gates = {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}
        shifts = {name: calibration.shifts(f"{name}.weight")[0] for name in gates}
        assert all(shift is not None and shift.any() for shift in shifts.values())
        for name, gate in gates.items():
            x = torch.randn(5, gate.weight.shape[1], generator=torch.Generator().manual_seed(0))
            x = x * torch.exp2(-shifts[name].float()) if others else x
            feelings.append(gate.forward.keywords["dropping"].on(x.device).feeling(x))
        restore(model)
    assert torch.equal(torch.cat(feelings[: len(gates)]), torch.cat(feelings[len(gates) :]))


def test_clipping_and_feedback_each_lower_the_error(monkeypatch):
    found = {}
    for name, clips, feedback in (
        ("rtn", (1.0,), False),
        ("clip", rounding.CLIPS, False),
        ("both", rounding.CLIPS, True),
    ):
        monkeypatch.setattr(rounding, "CLIPS", clips)
        rows = calibrate_awq(tiny_model("deepseek_v3"), DATA, group_size=GROUP, feedback=feedback).rows
        found[name] = rows[0]["output_snr_db"]  # later layers meet other inputs
    assert found["rtn"] + 0.3 < found["clip"] and found["clip"] + 1 < found["both"]


def test_what_a_pass_leaves_out_follows_the_scales():
    """Skipping one of the weights that were calibrated together: the others' scales must not break it."""
    model = outliers()
    calibration = calibrate_awq(model, DATA, group_size=GROUP)
    exact = logits(model)
    errors = []
    for skip in ((), ("shared_experts",), ("layers.1.mlp.experts",), ("down_proj",)):
        optimize(model, [MixedPrecision(group_size=GROUP, calibration=calibration, skip=skip)])
        errors.append(float((logits(model) - exact).norm() / exact.norm()))
        restore(model)
    assert max(errors[1:]) < 1.3 * errors[0] < 0.3


def test_16_bit_models_keep_their_dtype():
    model = tiny_model("deepseek_v2").to(torch.bfloat16)
    calibration = calibrate_awq(model, DATA, group_size=GROUP)
    name = "model.layers.1.mlp.experts.down_proj"
    assert calibration.quantize(name, parameter(model, name))[1].dtype == torch.bfloat16
    assert all(row["output_snr_db"] > 10 for row in calibration.rows)


# ------------------------------------------------------------------------------------------------ folders and mistakes


def same(a, b):
    model = tiny_model("deepseek_v3")
    assert a.names == b.names and a.rescaled_names == b.rescaled_names and a.group_size == b.group_size
    for name in a.names:
        for mine, other in zip(*(c.quantize(name, parameter(model, name)) for c in (a, b)), strict=True):
            assert torch.equal(mine, other), name


def test_saved_and_loaded(tmp_path):
    calibration = calibrated("deepseek_v3")
    calibration.save(tmp_path / "kept")
    loaded = AwqCalibration.load(tmp_path / "kept")
    same(calibration, loaded)
    assert loaded.rows == calibration.rows
    same(calibration, copy.deepcopy(loaded))
    by_path = MixedPrecision(group_size=GROUP, calibration=str(tmp_path / "kept"))
    assert by_path == MixedPrecision(group_size=GROUP, calibration=loaded) and hash(by_path)
    assert by_path != MixedPrecision(group_size=GROUP, calibration=calibrated("deepseek_v3", feedback=False))
    same(calibration, pickle.loads(pickle.dumps(calibration)))
    again = tmp_path / "again"
    loaded.save(again)
    same(calibration, AwqCalibration.load(again))
    damaged = again / layer_file(1)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"layer-00001.*cannot be read"):
        AwqCalibration.load(again)
    with pytest.raises(CheckpointError, match="holds no AWQ calibration"):
        AwqCalibration.load(tmp_path)


def test_an_interrupted_calibration_goes_on_where_it_was(tmp_path, monkeypatch):
    model, before = tiny_model("deepseek_v3"), picture(tiny_model("deepseek_v3"))
    real, calls = awq._calibrate, []

    def calibrate(model, block, *args, **kwargs):
        if block.index == 2 and len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(block.index)
        return real(model, block, *args, **kwargs)

    monkeypatch.setattr(awq, "_calibrate", calibrate)
    with pytest.raises(KeyboardInterrupt):
        calibrate_awq(model, DATA, group_size=GROUP, folder=tmp_path)
    assert picture(model)["model.layers.2.mlp"][1] == before["model.layers.2.mlp"][1]
    with pytest.raises(CheckpointError, match="not finished, 2 of 3 layers"):
        AwqCalibration.load(tmp_path)
    calls.append(None)
    same(calibrate_awq(model, DATA, group_size=GROUP, folder=tmp_path), calibrated("deepseek_v3"))
    assert calls == [0, 1, None, 2]
    assert calibrate_awq(model, DATA, group_size=GROUP, folder=tmp_path).rows == calibrated("deepseek_v3").rows
    assert calls == [0, 1, None, 2]  # a finished one is only opened
    with pytest.raises(CheckpointError, match="other data"):
        calibrate_awq(model, DATA[:1], group_size=GROUP, folder=tmp_path)
    with pytest.raises(CheckpointError, match="other weights"):
        calibrate_awq(tiny_model("deepseek_v3", seed=1), DATA, group_size=GROUP, folder=tmp_path)


def test_another_model_is_refused_by_name():
    calibration = calibrated("deepseek_v3")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.gate_proj\.weight differs"):
        calibration.check(tiny_model("deepseek_v3", seed=1))
    with pytest.raises(CheckpointError, match=r"is \[96, 64\] here, \[128, 64\] there"):
        calibration.check(tiny_model("deepseek_v3", intermediate_size=96))
    with pytest.raises(CheckpointError, match="this one has no"):
        calibration.check(tiny_model("deepseek_v3", first_k_dense_replace=0))
    with torch.device("meta"):
        calibration.check(tiny_model("deepseek_v3"))  # shapes are all there is to see
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(CheckpointError, match="differs"):
        calibration.quantize(name, parameter(tiny_model("deepseek_v3", seed=1), name))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(data="text"), "must be a list"),
        (dict(data=[]), "must be a list"),
        (dict(data=["text"]), "tokenizer="),
        (dict(data=[torch.ones(3)]), r"data\[0\].*\[3\]"),
        (dict(data=[torch.ones(2, 3, dtype=torch.long)]), r"data\[0\]"),
        (dict(data=[torch.ones(1, 0, dtype=torch.long)]), "no token"),
        (dict(group_size=33), "multiple of 32"),
        (dict(targets=("attention",)), "targets must be some of"),
        (dict(targets="experts"), "targets must be some of"),
        (dict(skip="mlp"), "skip must be a list"),
        (dict(skip=["mlp("]), "no regular expression"),
        (dict(skip=["mlp"]), "leave no layer"),
    ],
)
def test_wrong_arguments(change, message):
    with pytest.raises(PlanError, match=message):
        calibrate_awq(tiny_model("llama"), **{"data": DATA, "group_size": GROUP, **change})


def test_models_that_cannot_be_calibrated():
    model = tiny_model("deepseek_v3")
    parameter(model, "model.layers.1.mlp.experts.down_proj").data[3, 1, 2] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.down_proj holds a NaN"):
        calibrate_awq(model, DATA, group_size=GROUP)
    with pytest.raises(PlanError, match="training mode"):
        calibrate_awq(tiny_model("llama").train(), DATA)
    with pytest.raises(PlanError, match="is optimized"):
        calibrate_awq(optimize(tiny_model("llama")), DATA)
    with torch.device("meta"):
        nowhere = tiny_model("llama")
    with pytest.raises(PlanError, match="not in memory"):
        calibrate_awq(nowhere, DATA)
    with pytest.raises(PlanError, match=r"layers\.0\.mlp cannot be calibrated: its gate_proj is not a plain"):
        calibrate_awq(tiny_model("llama", mlp_bias=True), DATA)
    with pytest.raises(PlanError, match="not SiLU"):
        calibrate_awq(tiny_model("llama", hidden_act="gelu"), DATA)


@pytest.mark.parametrize("feedback", [True, False])
def test_activations_that_overflow_are_an_error(feedback):  # and no endless search for a factor of their H
    model = tiny_model("llama").half()
    model.model.layers[1].post_attention_layernorm.weight.data.fill_(65504)
    before = picture(model)
    with pytest.raises(PlanError, match=r"layers\.1\.mlp cannot be calibrated: its inputs.*bfloat16"):
        calibrate_awq(model, DATA, group_size=GROUP, feedback=feedback)
    assert picture(model) == before


def test_names_are_matched_whole():
    assert is_named("model.layers.1.mlp", ["layers.1"]) and is_named("model.layers.1", [r"model\.layers\.\d"])
    assert not is_named("model.layers.10.mlp", ["layers.1"])
    assert is_named("model.layers.1.mlp.gate", ["gate"]) and not is_named("model.layers.1.mlp.gate_proj", ["gate"])


def test_text_is_cut_and_spread(tmp_path):
    class Words:
        def __call__(self, text, **kwargs):
            return type("Encoding", (), {"input_ids": [int(word) for word in text.split()]})

    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text(" ".join(map(str, range(5000))))
    short.write_text("7 8 9")
    pieces = windows([long, short], Words(), 3)
    assert [len(piece[0]) for piece in pieces] == [1024, 1024, 904] and pieces[1][0, 0] == 2048
    assert windows([short], Words(), 64)[0].tolist() == [[7, 8, 9]]
    with pytest.raises(PlanError, match="cannot read"):
        windows([tmp_path / "none.txt"], Words(), 3)
    with pytest.raises(PlanError, match="at least 1"):
        windows([short], Words(), 0)


def test_texts_are_encoded_by_the_tokenizer():
    model, tokenizer = models.load_tiny(models.TINY_DRAFT, dtype=torch.float32)
    text = "def add(a, b):\n    return a + b\n" * 4
    by_text = calibrate_awq(model, [text], tokenizer=tokenizer, skip=["layers.1"])
    by_token = calibrate_awq(model, [tokenizer(text, return_tensors="pt").input_ids], skip=["layers.1"])
    assert by_text.rows == by_token.rows and len(by_text.rows) == 1

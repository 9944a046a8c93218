"""Directories in AutoAWQ's layout: written, read back into packed weights, compared with AutoAWQ, and refused."""

import importlib.util
import json
import shutil
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from deepseek_accel import (
    CheckpointError,
    MixedPrecision,
    PlanError,
    RestoreError,
    calibrate_awq,
    cli,
    load_quantized,
    models,
    optimize,
    report,
    restore,
)
from deepseek_accel.loading import load_directory
from deepseek_accel.ops.int4 import Int4Weight, round_to_nearest
from deepseek_accel.passes.attention import Attention
from deepseek_accel.quantization.blocks import owner_of, parameter
from deepseek_accel.quantization.files import TensorFiles
from deepseek_accel.quantization.layout import from_awq, to_awq
from deepseek_accel.quantization.read import QuantizedFiles
from deepseek_accel.quantization.write import write_quantized
from deepseek_accel.testing import assert_accurate, relative_error, tiny_model

GROUP = 32
IDS = torch.randint(2, 128, (1, 40), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """model_type -> the directory of a tiny bf16 checkpoint, as transformers saves it: one tensor per expert."""
    folder = tmp_path_factory.mktemp("sources")
    for model_type in ("deepseek_v2", "deepseek_v3", "llama"):
        tiny_model(model_type).to(torch.bfloat16).save_pretrained(folder / model_type)
    return folder


@pytest.fixture(scope="module")
def written(sources, tmp_path_factory):
    """Directories with every MLP rounded to nearest."""
    folder = tmp_path_factory.mktemp("written")
    for model_type in ("deepseek_v2", "deepseek_v3", "llama"):
        write_quantized(sources / model_type, folder / model_type, group_size=GROUP)
    return folder


def load(directory, **kwargs):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, **kwargs).eval()


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def dequantized(source, directory, dtype):
    """Stock transformers with the values of a quantised directory in place of its own."""
    model = load(source, dtype=dtype)
    files = QuantizedFiles(directory)
    for name, value in model.named_parameters():
        if name in files.names:
            codes, scales, zeros = files.quantize(name, value)
            scale, zero = (x.float().repeat_interleave(GROUP, -1) for x in (scales, zeros))
            owner, attribute = owner_of(model, name)
            owner._parameters[attribute] = nn.Parameter(((codes.float() - zero) * scale).to(dtype))
    return model


# -------------------------------------------------------------------------------------------------------------- layout


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 1000))
def test_layout_and_back(outputs, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = 8 * outputs, 32 * groups
    codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (shape[0], groups), generator=generator, dtype=torch.uint8)
    scales = torch.rand(shape[0], groups, generator=generator).half() + 0.01
    stored = to_awq(codes, scales, zeros)
    assert stored["qweight"].shape == (shape[1], outputs) and stored["qzeros"].shape == (groups, outputs)
    assert stored["scales"].shape == (groups, shape[0])
    for before, after in zip((codes, scales, zeros), from_awq(*stored.values()), strict=True):
        assert torch.equal(before, after)


@pytest.fixture
def autoawq(monkeypatch):
    """AutoAWQ's own packer. Its package imports what transformers 5 no longer has; the packer does not need that."""
    spec = importlib.util.find_spec("awq")
    if spec is None:
        pytest.skip("autoawq is not installed")
    package = types.ModuleType("awq")
    package.__path__ = list(spec.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "awq", package)
    pytest.importorskip("awq.utils.packing_utils")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    yield WQLinear_GEMM, dequantize_gemm
    for name in [name for name in sys.modules if name.startswith("awq.")]:
        del sys.modules[name]


def test_every_tensor_is_what_autoawq_writes(autoawq, sources, written):
    packer, dequantize = autoawq
    directory = written / "deepseek_v3"
    tensors, stock = load_file(directory / "model.safetensors"), load_file(sources / "deepseek_v3/model.safetensors")
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    assert len(modules) == 3 + 2 * (3 + 16 * 3)
    for module in modules:
        codes, scales, zeros = round_to_nearest(stock[f"{module}.weight"], GROUP)
        linear = nn.Linear(*reversed(stock[f"{module}.weight"].shape), bias=False)
        scale, zero = (x.float().repeat_interleave(GROUP, 1) for x in (scales, zeros))
        value = (codes - zero) * scale
        linear.weight.data = value  # AutoAWQ packs weights that are on the grid already
        theirs = packer.from_linear(linear, 4, GROUP, scales=scales.T.float(), zeros=zeros.T.float())
        for name in ("qweight", "qzeros", "scales"):
            assert torch.equal(getattr(theirs, name), tensors[f"{module}.{name}"]), f"{module}.{name}"
        theirs = dequantize(*(tensors[f"{module}.{n}"] for n in ("qweight", "qzeros", "scales")), 4, GROUP)
        assert torch.equal(theirs.T.float(), value.half().float())


# ------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "llama"])
def test_a_written_directory_loads_and_computes_with_its_values(model_type, sources, written):
    expected = logits(dequantized(sources / model_type, written / model_type, torch.float32))
    model = load_quantized(written / model_type, dtype=torch.float32, config=[Attention()])
    assert relative_error(logits(model), expected) < 1e-4
    packed = [v for m in model.modules() for v in vars(m).values() if isinstance(v, Int4Weight)]
    assert len(packed) == {"deepseek_v2": 13, "deepseek_v3": 13, "llama": 9}[model_type]
    assert not any(p.is_meta for p in model.parameters())
    with pytest.raises(RestoreError):
        restore(model)


def test_a_loaded_model_generates_in_its_own_dtype_with_every_pass(written, sources):
    model = load_quantized(written / "deepseek_v3")
    assert model.dtype == torch.bfloat16
    for name, value in load(sources / "deepseek_v3", dtype="auto").named_parameters():
        assert parameter(model, name).dtype == value.dtype, name  # routers in fp32 on newer transformers
    exact = logits(dequantized(sources / "deepseek_v3", written / "deepseek_v3", torch.float32))
    stock = logits(dequantized(sources / "deepseek_v3", written / "deepseek_v3", torch.bfloat16))
    assert_accurate(logits(model), stock, exact)
    tokens = model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, 44)
    assert "mixed_precision" in str(report(model))


def test_what_stays_in_16_bits_is_what_the_checkpoint_had(sources, written):
    before = load_file(sources / "deepseek_v3/model.safetensors")
    after = load_file(written / "deepseek_v3/model.safetensors")
    config = json.loads((written / "deepseek_v3/config.json").read_text())["quantization_config"]
    listed = config.pop("modules_to_not_convert")
    assert config == dict(quant_method="awq", bits=4, group_size=GROUP, zero_point=True, version="gemm")
    for name, tensor in before.items():
        if name in after:
            assert torch.equal(tensor, after[name])
        else:
            assert ".mlp." in name and ".mlp.gate." not in name and f"{name.removesuffix('.weight')}.qweight" in after
    matrices = [
        n.removesuffix(".weight") for n, t in after.items() if t.dim() == 2 and ("proj." in n or "proj_with" in n)
    ]
    matrices = [n for n in matrices if not n.endswith(("qweight", "qzeros", "scales"))]
    assert set(matrices) | {"lm_head", "self_attn"} | {f"model.layers.{i}.mlp.gate" for i in (1, 2)} == set(listed)


def test_transformers_converts_exactly_the_modules_that_are_quantized(written):
    """Its own AWQ path would replace a linear layer unless the list names it."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    for model_type in ("deepseek_v3", "llama"):
        listed = json.loads((written / model_type / "config.json").read_text())["quantization_config"]
        files = TensorFiles(written / model_type)
        for name, module in tiny_model(model_type).named_modules():
            if isinstance(module, nn.Linear):
                converts = should_convert_module(name, listed["modules_to_not_convert"])
                assert converts == (f"{name}.qweight" in files), name


def test_the_published_layout_with_quantized_attention_is_read(sources, written, tmp_path):
    """AutoAWQ quantises attention too; kv_b_proj, which absorbed attention reads by rows, comes back in 16 bits."""
    directory = shutil.copytree(written / "deepseek_v2", tmp_path / "all")
    tensors = load_file(directory / "model.safetensors")
    modules = [n.removesuffix(".weight") for n in tensors if ".self_attn." in n and n.endswith("proj.weight")]
    modules += [n.removesuffix(".weight") for n in tensors if n.endswith("kv_a_proj_with_mqa.weight")]
    values = {}
    for module in dict.fromkeys(modules):
        weight = tensors.pop(f"{module}.weight")
        codes, scales, zeros = round_to_nearest(weight.half(), GROUP)
        values[module] = to_awq(codes, scales, zeros)
        tensors |= {f"{module}.{k}": v for k, v in values[module].items()}
    save_file(tensors, directory / "model.safetensors")
    expected = logits(dequantized(sources / "deepseek_v2", directory, torch.float32))
    model = load_quantized(directory, dtype=torch.float32, config=[Attention()])
    assert relative_error(logits(model), expected) < 1e-4
    attention = model.model.layers[0].self_attn
    assert attention.kv_b_proj.weight.numel() and not attention.q_proj.weight.numel()


def test_awq_codes_are_stored_as_they_were_calibrated(sources, tmp_path):
    model = load(sources / "deepseek_v3", dtype="auto")
    with torch.no_grad():  # large inputs, so that scales are folded
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight[::37] *= 64
    model.save_pretrained(tmp_path / "source")
    model = load(tmp_path / "source", dtype=torch.float32)
    data = [torch.randint(2, 128, (1, 96), generator=torch.Generator().manual_seed(1))]
    calibration = calibrate_awq(model, data, group_size=GROUP)
    assert calibration.rescaled_names
    with pytest.raises(CheckpointError, match="dtype"):  # the files hold bf16
        write_quantized(tmp_path / "source", tmp_path / "out", calibration=calibration, group_size=GROUP)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    model = load(tmp_path / "source", dtype="auto")
    calibration = calibrate_awq(model, data, group_size=GROUP)
    written = write_quantized(
        tmp_path / "source", tmp_path / "out", calibration=calibration, group_size=GROUP, shard_bytes=60_000
    )
    assert written.files > 2 and (tmp_path / "out/model.safetensors.index.json").is_file()
    assert max(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors")) < 75_000  # headers are 10 kB
    loaded = load_quantized(tmp_path / "out", config=[Attention()])
    optimize(model, [MixedPrecision(group_size=GROUP, calibration=calibration), Attention()])
    assert torch.equal(logits(loaded), logits(model))


def test_a_router_that_transformers_widens_is_known_in_the_files(sources, tmp_path):
    """In newer transformers routers of a bf16 checkpoint are fp32 in the model, but bf16 in the files."""
    shutil.copytree(sources / "deepseek_v3", tmp_path / "source")
    tensors = load_file(tmp_path / "source/model.safetensors")
    for name, tensor in tensors.items():  # large inputs, so that scales are folded into the router
        if "post_attention_layernorm" in name:
            tensor[::37] *= 64
    save_file(tensors, tmp_path / "source/model.safetensors", {"format": "pt"})
    router, model = "model.layers.1.mlp.gate.weight", load_directory(tmp_path / "source")
    assert tensors[router].dtype == torch.bfloat16
    calibration = calibrate_awq(model, [torch.arange(2, 98)[None]], group_size=GROUP)
    assert router in calibration.rescaled_names
    write_quantized(tmp_path / "source", tmp_path / "out", calibration=calibration, group_size=GROUP)
    loaded = load_quantized(tmp_path / "out", config=[Attention()])
    weight = model.get_parameter(router)
    with torch.no_grad():
        kept = weight.clone()
        weight[0, 0] += 2.0**-20 if weight.dtype == torch.float32 else 1.0  # in fp32 no number of bf16 any more
        with pytest.raises(CheckpointError, match="other weights"):
            calibration.check(model)
        weight.copy_(kept)
    optimize(model, [MixedPrecision(group_size=GROUP, calibration=calibration), Attention()])
    assert torch.equal(loaded.get_parameter(router).float(), model.get_parameter(router).float())


def test_the_command(sources, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("import os\n\n\ndef name(path):\n    return os.path.basename(path)\n" * 40)
    source = shutil.copytree(cli_source(), tmp_path / "tiny")
    words = ["quantize", str(source), str(tmp_path / "out"), "--method", "rtn", "--targets", "mlp", "--json"]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out)["quantized"] == 6
    assert (tmp_path / "out/tokenizer.json").is_file()
    assert cli.main([*words[:2], str(tmp_path / "awq"), "--text", str(text), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "layer 1: output" in said and "6 weights in 4 bits" in said
    assert load_quantized(tmp_path / "awq").generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape == (1, 4)
    assert cli.main(words) == 2 and "not an empty directory" in capsys.readouterr().err
    assert cli.main(["quantize", "tiny", str(tmp_path / "bundled"), "--method", "rtn", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quantized"] == 206
    assert cli.main(["quantize", str(source), str(tmp_path / "no")]) == 2
    assert "AWQ needs text" in capsys.readouterr().err


def cli_source():
    from deepseek_accel.models import TINY_DRAFT, path

    return path(TINY_DRAFT)


# -------------------------------------------------------------------------------------------------------- bad input


def change_tensor(directory, name, change):
    """Rewrite one tensor of a directory; `change` returns the new one, or None to leave it out."""
    tensors = load_file(directory / "model.safetensors")
    new = change(tensors.pop(name) if name in tensors else None)
    save_file(tensors | ({} if new is None else {name: new}), directory / "model.safetensors", {"format": "pt"})


def change_config(directory, **changes):
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))


def poison(tensor):
    tensor = tensor.clone()
    tensor.view(-1)[3] = float("nan")
    return tensor


EXPERT = "model.layers.1.mlp.experts.3.up_proj"
BROKEN = {
    "scales gone": (lambda d: change_tensor(d, f"{EXPERT}.scales", lambda t: None), rf"{EXPERT}\.scales is missing"),
    "expert gone": (
        lambda d: [change_tensor(d, f"{EXPERT}.{s}", lambda t: None) for s in ("qweight", "qzeros", "scales")],
        rf"{EXPERT}\.qweight is missing",
    ),
    "NaN scale": (lambda d: change_tensor(d, f"{EXPERT}.scales", poison), rf"{EXPERT}\.scales: a scale is a NaN"),
    "NaN norm": (lambda d: change_tensor(d, "model.norm.weight", poison), r"model\.norm\.weight holds a NaN"),
    "fewer groups": (
        lambda d: change_tensor(d, f"{EXPERT}.scales", lambda t: t[:1].clone()),
        rf"{EXPERT}\.scales is \[",
    ),
    "cut zeros": (
        lambda d: change_tensor(d, f"{EXPERT}.qzeros", lambda t: t[:, :1].clone()),
        rf"{EXPERT}\.qzeros is \[",
    ),
    "float words": (
        lambda d: change_tensor(d, f"{EXPERT}.qweight", lambda t: t.float()),
        rf"{EXPERT}\.qweight is of F32",
    ),
    "act order": (
        lambda d: change_tensor(d, f"{EXPERT}.g_idx", lambda t: torch.zeros(64)),
        rf"{EXPERT}\.g_idx.*act-order",
    ),
    "stranger": (
        lambda d: change_tensor(d, "model.layers.1.extra", lambda t: torch.zeros(2)),
        r"has model\.layers\.1\.extra",
    ),
    "norm gone": (lambda d: change_tensor(d, "model.norm.weight", lambda t: None), r"has no model\.norm\.weight"),
    "short head": (
        lambda d: change_tensor(d, "lm_head.weight", lambda t: t[:9].clone()),
        r"lm_head\.weight is \[9, 64\]",
    ),
    "other group": (lambda d: change_config(d, group_size=64), r"group_size 64 it should be \[2, 8\]"),
    "odd group": (lambda d: change_config(d, group_size=48), "multiple of 32"),
    "gemv": (lambda d: change_config(d, version="gemv"), "version='gemv'"),
    "gptq": (lambda d: change_config(d, quant_method="gptq"), "quant_method='gptq'"),
    "8 bits": (lambda d: change_config(d, bits=8), "bits=8"),
    "symmetric": (lambda d: change_config(d, zero_point=False), "zero_point=False"),
    "desc_act": (lambda d: change_config(d, desc_act=True), "desc_act=True"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_directory_is_refused_by_the_name_of_the_tensor(what, written, tmp_path):
    directory = shutil.copytree(written / "deepseek_v3", tmp_path / "broken")
    spoil, message = BROKEN[what]
    spoil(directory)
    with pytest.raises(CheckpointError, match=message):
        load_quantized(directory)


def test_files_that_are_cut_off_or_missing(written, sources, tmp_path):
    directory = shutil.copytree(written / "llama", tmp_path / "cut")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_quantized(directory)
    with pytest.raises(CheckpointError, match="neither"):
        file.unlink()
        load_quantized(directory)
    with pytest.raises(CheckpointError, match="no quantization_config"):
        load_quantized(sources / "llama")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_quantized(tmp_path)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside the directory"):
        TensorFiles(directory)
    save_file({"a": torch.ones(1)}, directory / "one.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match="has no tensor 'b'"):
        TensorFiles(directory)


def test_what_cannot_be_written(sources, written, tmp_path):
    with pytest.raises(CheckpointError, match="quantised already, as awq"):
        write_quantized(written / "llama", tmp_path / "out", group_size=GROUP)
    with pytest.raises(PlanError, match=r"experts\.0\.down_proj cannot be stored: its 32 inputs do not divide"):
        write_quantized(sources / "deepseek_v3", tmp_path / "out", group_size=64)
    with pytest.raises(PlanError, match="multiple of 32"):
        write_quantized(sources / "llama", tmp_path / "out", group_size=20)
    with pytest.raises(PlanError, match="nothing to quantise"):
        write_quantized(sources / "llama", tmp_path / "out", group_size=GROUP, skip=["mlp"])
    for options, message in (
        (dict(targets=["experts", "mpl"]), "targets must be some of"),
        (dict(skip=["mlp("]), "no regular expression"),
        (dict(skip=["up_porj"]), "skip names 'up_porj'"),
    ):
        with pytest.raises(PlanError, match=message):
            write_quantized(sources / "llama", tmp_path / "out", group_size=GROUP, **options)
    bad = shutil.copytree(sources / "llama", tmp_path / "bad")
    change_tensor(bad, "model.layers.0.mlp.up_proj.weight", poison)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight: the weight holds a NaN"):
        write_quantized(bad, tmp_path / "out", group_size=GROUP)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad"]
    with pytest.raises(PlanError, match="leave it out"):
        load_quantized(written / "llama", config=[MixedPrecision(method="rtn")])
    with pytest.raises(PlanError, match="dtype must be"):
        load_quantized(written / "llama", dtype="int8")


def test_the_command_refuses_before_it_loads_a_model(sources, tmp_path, capsys, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.delattr(AutoModelForCausalLM, "from_pretrained")
    text = tmp_path / "text"
    text.write_text("some words")
    command = ["quantize", str(sources / "deepseek_v3"), str(tmp_path / "out")]
    for options, message in (
        (["--text", str(text), "--group-size", "64"], "cannot be stored: its 32 inputs"),
        (["--text", str(text), "--group-size", "32", "--skip", "up_porj"], "skip names 'up_porj'"),
        (["--text", str(text), "--method", "rtn"], "--text, --calibration and --no-feedback do nothing"),
        (["--method", "rtn", "--shard-gb", "0"], "--shard-gb must be above 0"),
    ):
        assert cli.main([*command, *options]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_calibration_whose_weights_have_other_names_is_refused(tmp_path):
    model = tiny_model("llama").to(torch.bfloat16)
    calibration = calibrate_awq(model, [IDS], group_size=GROUP)
    model.model.save_pretrained(tmp_path / "decoder")  # names without "model."
    with pytest.raises(CheckpointError, match=r"has no model\.layers\.0\.mlp"):
        write_quantized(tmp_path / "decoder", tmp_path / "out", group_size=GROUP, calibration=calibration)


def test_a_tied_head_may_be_stored_too(tmp_path):
    tiny_model("llama", tie_word_embeddings=True).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    write_quantized(tmp_path / "source", tmp_path / "out", group_size=GROUP)
    file = tmp_path / "out/model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    for factor in (1, 2):
        head = factor * tensors["model.embed_tokens.weight"]
        save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})
        if factor == 1:
            model = load_quantized(tmp_path / "out")
            assert model.lm_head.weight is model.model.embed_tokens.weight
            continue
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
            load_quantized(tmp_path / "out")


def test_sizes_that_do_not_divide_stay_in_16_bits(tmp_path):
    """As the dense layer of V2-Lite, 10,944 = 85.5 x 128; the layout has no place for half a group."""
    tiny_model("deepseek_v2", intermediate_size=80).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    done = write_quantized(tmp_path / "source", tmp_path / "out", group_size=GROUP)
    assert (
        list(done.kept) == ["model.layers.0.mlp.down_proj"] and "80 inputs" in done.kept["model.layers.0.mlp.down_proj"]
    )
    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.down_proj.weight" in file.keys()  # noqa: SIM118 a file, no dict
    model = load_quantized(tmp_path / "out")
    assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    assert model.model.layers[0].mlp.up_proj.weight.numel() == 0


def test_experts_that_are_stored_as_one_tensor_are_written_one_by_one(sources, written, tmp_path):
    source = shutil.copytree(sources / "deepseek_v3", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors = {k: v for k, v in tensors.items() if ".mlp.experts." not in k}
    for name, value in load(source, dtype="auto").named_parameters():
        if value.dim() == 3:
            tensors[name] = value.detach()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    write_quantized(source, tmp_path / "out", group_size=GROUP)
    mine, other = (load_file(d / "model.safetensors") for d in (tmp_path / "out", written / "deepseek_v3"))
    assert mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in mine)


def test_a_checkpoint_is_loaded_whole_or_not_at_all(tmp_path, sources, capfd, recwarn):
    """transformers draws what is missing at random, and reports MTP layers, which nothing is wrong with, as a table."""
    directory = tmp_path / "model"
    shutil.copytree(sources / "deepseek_v3", directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    layers = tiny_model("deepseek_v3").config.num_hidden_layers
    save_file(tensors | {f"model.layers.{layers}.eh_proj.weight": torch.zeros(2)}, file, {"format": "pt"})
    assert logits(load_directory(directory)).isfinite().all()
    assert not any("eh_proj" in str(w.message) for w in recwarn) and "eh_proj" not in "".join(capfd.readouterr())
    save_file(tensors | {"model.layers.0.odd.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.warns(UserWarning, match=r"have no place in .*, such as model\.layers\.0\.odd"):
        load_directory(directory)
    tensors.pop("model.norm.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no tensors for 1 parameters .* model\.norm\.weight"):
        load_directory(directory)
    text = tmp_path / "text.txt"
    text.write_text("words " * 50)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.path() / name, directory)
    words = ["quantize", str(directory), str(tmp_path / "out"), "--text", str(text), "--group-size", str(GROUP)]
    assert cli.main([*words, "--device", "cpu"]) != 0 and not (tmp_path / "out").exists()
    assert "model.norm.weight" in capfd.readouterr().err

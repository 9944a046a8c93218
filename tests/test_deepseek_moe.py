"""DeepSeek-MoE-16B: our class against the formulas of arXiv 2401.06066 in float64, and the published checkpoints."""

import importlib
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from moe_formulas import CONFIG, publish, reference
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from deepseek_accel import CheckpointError, models, optimize, plan, report
from deepseek_accel.bench import shapes
from deepseek_accel.models.deepseek import registration
from deepseek_accel.ops.choice import triton_missing
from deepseek_accel.testing import relative_error, tiny_model

VARIANTS = {
    "published": {},
    "normalised": {"norm_topk_prob": True},
    "every second layer, no shared experts": {"moe_layer_freq": 2, "n_shared_experts": None, "num_hidden_layers": 4},
    "one of all": {"num_experts_per_tok": 1, "first_k_dense_replace": 0},
}
IDS = torch.randint(2, 96, (2, 13), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_greedy_tokens_are_those_of_the_formulas(name, tmp_path):
    config = CONFIG | VARIANTS[name]
    weights = publish(tmp_path / "stored", config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stored", dtype=torch.float32).eval()
    expected = reference(weights, config, IDS)
    with torch.no_grad():
        assert relative_error(model(IDS).logits, expected) < 1e-5
    ids = IDS
    for _ in range(4):
        ids = torch.cat([ids, reference(weights, config, ids)[:, -1:].argmax(-1)], -1)
    options = dict(max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert model.generate(IDS, **options).tolist() == ids.tolist()
    optimize(model)
    assert model.generate(IDS, **options).tolist() == ids.tolist()
    with torch.no_grad():
        assert relative_error(model(IDS).logits, expected) < 1e-5
    assert report(model).counters["experts: fused"] > 0


def test_every_implementation_of_transformers_can_be_chosen(tmp_path):
    weights = publish(tmp_path / "stored")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stored", dtype=torch.float32).eval()
    assert model.config._experts_implementation == "grouped_mm"  # the default of their own mixtures
    expected = reference(weights, CONFIG, IDS)
    for experts, attention in itertools.product(("eager", "grouped_mm", "batched_mm"), ("eager", "sdpa")):
        model.set_experts_implementation(experts)
        model.set_attn_implementation(attention)
        with torch.no_grad():
            assert relative_error(model(IDS).logits, expected) < 1e-5


def test_gradients_are_those_of_the_formulas(tmp_path):
    """Of every tensor of the checkpoint, the router's and idle experts' included, before and after `optimize`."""
    weights = {n: t.double().requires_grad_() for n, t in publish(tmp_path / "stored").items()}
    labels = IDS[:, 1:].reshape(-1)
    loss = torch.nn.functional.cross_entropy(reference(weights, CONFIG, IDS)[:, :-1].reshape(-1, 96), labels)
    loss.backward()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stored", dtype=torch.float32).train()
    for change in (lambda m: m, optimize):
        change(model).zero_grad()
        ours = model(IDS, labels=IDS).loss
        ours.backward()
        assert ours.item() == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            if ".experts." not in name:
                assert relative_error(parameter.grad, weights[name].grad) < 1e-4, name
                continue
            block, _, part = name.rpartition(".")
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            expected = torch.stack([
                torch.cat([_grad(weights[f"{block}.{e}.{p}.weight"]) for p in parts]) for e in range(12)
            ])  # fmt: skip
            assert relative_error(parameter.grad, expected) < 1e-4, name


def _grad(tensor):
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def test_a_checkpoint_is_saved_as_it_was_published(tmp_path):
    """Names, dtypes and bytes, also of the gate, which transformers' V2 would widen to fp32; config.json's fields."""
    weights = publish(tmp_path / "stored")
    assert shapes.local_config(str(tmp_path / "stored")).model_type == "deepseek"  # its auto_map is not followed
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "stored", dtype="auto", output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {t.dtype for t in model.state_dict().values()} == {torch.bfloat16}
    optimize(model).save_pretrained(tmp_path / "again", max_shard_size="200KB")
    files = list((tmp_path / "again").glob("*.safetensors"))
    saved = {n: t for file in files for n, t in load_file(file).items()}
    assert len(files) > 1 and saved.keys() == weights.keys()
    for name, tensor in weights.items():
        assert saved[name].dtype == tensor.dtype and torch.equal(saved[name], tensor), name
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    kept = CONFIG.keys() - {"torch_dtype", "rope_scaling", "rope_theta"}  # transformers 5 writes dtype, rope_parameters
    assert {name: config[name] for name in kept} == {name: CONFIG[name] for name in kept}
    assert config["rope_parameters"]["rope_theta"] == 10000


def test_decoder_alone_and_stacked_experts(tmp_path):
    """The decoder without a head from the whole, and its own checkpoint; and experts saved as they are in memory."""
    publish(tmp_path / "stored")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "stored")
    decoder = AutoModel.from_pretrained(tmp_path / "stored")
    decoder.save_pretrained(tmp_path / "decoder")
    whole.save_pretrained(tmp_path / "stacked", save_original_format=False)
    again = AutoModel.from_pretrained(tmp_path / "decoder")
    stacked = AutoModelForCausalLM.from_pretrained(tmp_path / "stacked")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor) and torch.equal(stacked.model.state_dict()[name], tensor)
    assert plan(decoder).steps["attention"].status() == plan(decoder).steps["experts"].status() == "planned"
    fewer = AutoModelForCausalLM.from_pretrained(tmp_path / "stored", num_hidden_layers=2)
    assert len(fewer.model.layers) == 2


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


def _edit(directory, name, change):
    """Rewrite the file that holds a tensor."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    file = directory / index["weight_map"][name]
    stored = load_file(file)
    change(stored)
    save_file(stored, file, {"format": "pt"})


def _configure(directory, **fields):
    (directory / "config.json").write_text(json.dumps(CONFIG | fields))


SHARD = "model-00002-of-00003.safetensors"
BAD = {
    "an expert is missing": (
        lambda d: _edit(d, EXPERT, lambda t: t.pop(EXPERT)),
        r"lacks 1 of \d+ tensors: layers.1.mlp.experts.3.up_proj.weight",
    ),
    "a norm is missing": (
        lambda d: _edit(d, "model.norm.weight", lambda t: t.pop("model.norm.weight")),
        r"lacks 1 of \d+ tensors: norm.weight",
    ),
    "another size": (
        lambda d: _edit(d, EXPERT, lambda t: t.update({EXPERT: t[EXPERT][:5].clone()})),
        r"experts.3.up_proj.weight is \[5, 64\], and config.json asks for \[24, 64\]",
    ),
    "another config": (lambda d: _configure(d, n_routed_experts=13), r"lacks 6 of \d+ tensors.*experts.12"),
    "experts beyond": (lambda d: _configure(d, n_routed_experts=11), "holds experts that config.json does not have"),
    "a file is missing": (lambda d: (d / SHARD).unlink(), f"lacks {SHARD}"),
    "a file is cut": (lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes()[:9000]), f"{SHARD}' cannot be read"),
    "no index": (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "is not an index"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints_are_refused_before_they_are_loaded(name, tmp_path):
    publish(tmp_path / "stored")
    change, message = BAD[name]
    change(tmp_path / "stored")
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "stored")


def test_tensors_missing_elsewhere_are_refused_too():
    """What the look at the directory cannot see: a state dict by hand."""
    model = tiny_model("deepseek")
    state = {n: t for n, t in model.state_dict().items() if n != "model.layers.1.mlp.gate.weight"}
    message = r"1 parameters of DeepseekForCausalLM, such as model\.layers\.1\.mlp\.gate\.weight"
    with pytest.raises(CheckpointError, match=message):
        type(model).from_pretrained(None, config=model.config, state_dict=state)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scoring_func": "sigmoid"}, "scoring_func must be 'softmax'"),
        ({"num_experts_per_tok": 13}, "between 1 and n_routed_experts=12, not 13"),
        ({"num_experts_per_tok": None}, "between 1 and n_routed_experts=12"),
        ({"num_key_value_heads": 3}, "3 key-value heads do not divide 4 heads"),
        ({"moe_layer_freq": 0}, "moe_layer_freq must be at least 1"),
    ],
)
def test_bad_configs(fields, message):
    with pytest.raises(Exception, match=message):
        AutoConfig.for_model(**CONFIG | fields)


RUN = """
import sys
{first}
import deepseek_accel
assert {light}
from transformers import AutoConfig, AutoModelForCausalLM
AutoConfig.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(type(model).__module__, type(model).__name__, model.config.n_routed_experts)
"""


@pytest.mark.parametrize("first", ["", "import transformers.models.auto.modeling_auto"], ids=["after", "before"])
def test_known_to_transformers_whichever_is_imported_first(first, tmp_path):
    publish(tmp_path / "stored")
    light = "'transformers' not in sys.modules" if not first else "True"
    command = [sys.executable, "-c", RUN.format(first=first, light=light), tmp_path / "stored"]
    run = subprocess.run(command, capture_output=True, text=True)
    expected = ["deepseek_accel.models.deepseek.modeling_deepseek", "DeepseekForCausalLM", "12"]
    assert run.stdout.split() == expected, run.stderr


def test_an_import_that_failed_is_waited_for_again(tmp_path, monkeypatch):
    """A notebook's interrupted `import transformers`, and then again."""
    (tmp_path / "late_module.py").write_text("import late_state\nif late_state.broken: raise KeyboardInterrupt")
    (tmp_path / "late_state.py").write_text("broken = True")
    monkeypatch.syspath_prepend(tmp_path)
    import late_state

    seen = []
    registration.once_imported("late_module", seen.append)
    with pytest.raises(KeyboardInterrupt):
        importlib.import_module("late_module")
    assert not seen
    late_state.broken = False
    late_module = importlib.import_module("late_module")
    assert seen == [late_module]
    registration.once_imported("late_module", seen.append)
    assert seen == [late_module] * 2


def test_registering_again_changes_nothing():
    before = len(sys.meta_path), AutoConfig.for_model("deepseek").__class__
    registration.register()
    assert (len(sys.meta_path), AutoConfig.for_model("deepseek").__class__) == before


def test_the_tokenizer_is_read_as_stored(tmp_path):
    """The published tokenizer_config.json names Llama's class, which would split byte-level text in its own way."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    stored = models.path()
    (tmp_path / "tokenizer.json").write_bytes((stored / "tokenizer.json").read_bytes())
    fields = json.loads((stored / "tokenizer_config.json").read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    text = "def main(x):\n    return x  + 12345  # h\u00e9llo"
    ids = AutoTokenizer.from_pretrained(tmp_path)(text).input_ids
    assert ids == AutoTokenizer.from_pretrained(stored)(text).input_ids


def test_the_published_shape():
    """16.4 billion parameters, 2.8 billion of them used for a token, as the paper says."""
    config = AutoConfig.for_model(**shapes.SHAPES["deepseek-moe-16b"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(p.numel() for p in model.parameters())
    idle = 27 * (64 - 6) * 3 * 2048 * 1408
    assert round(count / 1e9, 1) == 16.4 and round((count - idle) / 1e9, 1) == 2.8
    default = AutoConfig.for_model("deepseek")
    with torch.device("meta"):
        same = AutoModelForCausalLM.from_config(default)
    shapes_of = lambda m: {name: p.shape for name, p in m.named_parameters()}  # noqa: E731
    assert shapes_of(model) == shapes_of(same)


STEP = """
import sys, torch, deepseek_accel
import deepseek_accel.generation.decode, deepseek_accel.ops.experts, deepseek_accel.ops.gqa_attention
for module in [m for name, m in sys.modules.items() if name.startswith("deepseek_accel.")]:
    for name, value in (("uses_triton", lambda device: True), ("why_not_triton", lambda device: None)):
        if hasattr(module, name):
            setattr(module, name, value)
from deepseek_accel.testing import relative_error, tiny_model
small = dict(num_hidden_layers=1, first_k_dense_replace=0, n_routed_experts=4, num_experts_per_tok=2, vocab_size=32)
model = tiny_model("deepseek", **small)
options = dict(max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True)
ids = torch.tensor([[5, 9, 2, 7]])
expected = model.generate(ids, **options)
deepseek_accel.optimize(model, {"attention": {}, "experts": {}, "layers": {}, "kv_cache": {"page_size": 16}})
ours = model.generate(ids, **options)
assert torch.equal(ours.sequences, expected.sequences)
assert max(relative_error(a, b) for a, b in zip(ours.logits, expected.logits)) < 1e-5
counters = deepseek_accel.report(model).counters
assert counters["attention: paged"] and counters["experts: fused"] and counters["layers: fused step"], counters
assert not [name for name in counters if "stock loop" in name], counters
print("ok")
"""


def test_a_step_of_grouped_query_attention_and_experts_in_kernels():
    """The one pairing that no other family has: a mixture in the straight line behind grouped-query attention."""
    if reason := triton_missing():
        pytest.skip(reason)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", STEP], env=environment, capture_output=True, text=True, timeout=300)
    assert run.stdout == "ok\n", run.stderr[-3000:]

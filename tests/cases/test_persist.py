"""Class persist: state_dict, save, load."""

import copy
import json

import pytest
import torch
from fixtures import assert_same, feed, lora, tokens
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from deepseek_accel import optimize, restore
from deepseek_accel.testing import FAMILIES, tiny_model

SAVED_KEYS = {"deepseek_v2": (39, 131), "deepseek_v3": (47, 139)}
"""Entries of the state dict, and keys transformers saves: per-expert names."""


def saved(model, directory):
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_W01_saved_files_are_the_unpatched_model_s(model_type, tmp_path):
    """state_dict keys of a fused layer differ, so checkpoints do not load in plain transformers, or the reverse."""
    stock = tiny_model(model_type)
    model = optimize(copy.deepcopy(stock))
    feed(model, tokens(12), 9)
    expected, actual = stock.state_dict(), model.state_dict()
    assert list(actual) == list(expected)
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype and torch.equal(actual[key], tensor), key

    files, config = saved(model, tmp_path / "ours")
    expected_files, expected_config = saved(stock, tmp_path / "stock")
    if model_type in SAVED_KEYS:
        assert (len(expected), len(expected_files)) == SAVED_KEYS[model_type]
    assert files.keys() == expected_files.keys()
    for key, tensor in expected_files.items():
        assert files[key].dtype == tensor.dtype and torch.equal(files[key], tensor), key
    assert config == expected_config
    assert "accel" not in json.dumps(config) and "attn_implementation" not in json.dumps(config)
    names = {path.name for path in (tmp_path / "stock").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == names
    AutoConfig.from_pretrained(tmp_path / "ours")

    ids = tokens(20)
    logits = feed(stock, ids, 9)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert all(torch.equal(reloaded.state_dict()[key], tensor) for key, tensor in expected.items())
    assert_same(feed(reloaded, ids, 9), logits, 1e-6)  # matmul kernels round by the alignment of the loaded weights
    assert_same(feed(optimize(reloaded), ids, 9), logits)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_W01_state_dicts_load_strictly_both_ways(model_type):
    """A state dict loaded into an optimized model is refused, or goes to tensors the fast path does not read."""
    first, second = tiny_model(model_type), tiny_model(model_type, seed=1)
    ids = tokens(20)
    expected_first, expected_second = feed(first, ids, 9), feed(second, ids, 9)
    model = optimize(copy.deepcopy(first))
    for assign in (False, True):
        state = {key: tensor.clone() for key, tensor in second.state_dict().items()}
        result = model.load_state_dict(state, strict=True, assign=assign)
        assert not result.missing_keys and not result.unexpected_keys
        assert_same(feed(model, ids, 9), expected_second)
        model.load_state_dict({k: t.clone() for k, t in first.state_dict().items()}, strict=True, assign=assign)
        assert_same(feed(model, ids, 9), expected_first)
    fresh = tiny_model(model_type, seed=2)
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert_same(feed(fresh, ids, 9), expected_first, 1e-6)
    assert_same(feed(restore(model), ids, 9), expected_first, 1e-6)


def test_W01_adapters_saved_from_an_optimized_model(tmp_path):
    """A PEFT adapter trained on an optimized model has other keys than one of the unpatched model."""
    peft = pytest.importorskip("peft")
    import warnings

    base = tiny_model("deepseek_v3")
    stock = lora(copy.deepcopy(base), ["q_b_proj", "o_proj", "kv_b_proj"])
    model = optimize(lora(copy.deepcopy(base), ["q_b_proj", "o_proj", "kv_b_proj"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock.save_pretrained(tmp_path / "stock"), model.save_pretrained(tmp_path / "ours")
        expected, actual = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("stock", "ours"))
        assert actual.keys() == expected.keys() and all(torch.equal(actual[k], expected[k]) for k in expected)
        again = peft.PeftModel.from_pretrained(optimize(copy.deepcopy(base)), tmp_path / "ours").eval()
    ids = tokens(20)
    assert_same(feed(again, ids, 9), feed(stock, ids, 9))

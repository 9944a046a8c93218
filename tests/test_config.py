"""Bad input gets a clear error before anything is changed."""

import json

import pytest
import torch
from torch import nn

from deepseek_accel import (
    AccelError,
    Attention,
    FusedExperts,
    FusedLayers,
    KVCache,
    OptimizeConfig,
    PlanError,
    UnsupportedModelError,
    optimize,
    plan,
    report,
    restore,
)
from deepseek_accel.testing import picture, tiny_config, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("deepseek_v3")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"atention": {}}, "did you mean 'attention'"),
        ({"kv_cache": {"pagesize": 64}}, "did you mean 'page_size'"),
        ({"kv_cache": {"page_size": 48}}, "power of two"),
        ({"kv_cache": {"page_size": 8}}, "at least 16"),
        ({"kv_cache": {"page_size": True}}, "power of two"),
        ({"kv_cache": {"max_pages": 0}}, "positive integer"),
        ({"kv_cache": 64}, "must be a mapping"),
        ({"allow_skips": 1}, "true or false"),
        ([KVCache], "write `KVCache\\(\\)`"),
        ([KVCache(), KVCache(page_size=16)], "given twice"),
        (["attention"], "write `Attention\\(\\)`"),
        (["atention"], "did you mean 'attention'"),
        ([7], "7 is not a pass"),
        ("attention", "must be an OptimizeConfig.*from_json"),
        ({}, "no passes given"),
        ([], "no passes given"),
        (7, "must be an OptimizeConfig"),
    ],
)
def test_wrong_configs(model, config, message):
    before = picture(model)
    with pytest.raises(PlanError, match=message):
        optimize(model, config)
    assert picture(model) == before


def test_forms_of_a_config(model, tmp_path):
    config = OptimizeConfig((KVCache(page_size=32), Attention()))
    assert [p.name for p in config.ordered()] == ["attention", "kv_cache"]
    assert OptimizeConfig.from_dict(config.to_dict()) == OptimizeConfig((Attention(), KVCache(page_size=32)))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    assert OptimizeConfig.from_json(path) == OptimizeConfig.from_json(json.dumps(config.to_dict()))
    assert OptimizeConfig.of([Attention()]) == OptimizeConfig.of(Attention()) == OptimizeConfig.of({"attention": {}})
    lossless = OptimizeConfig.lossless()
    assert OptimizeConfig.from_dict(lossless.to_dict()) == lossless and lossless.allow_skips
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)))
    for source in (tmp_path / "missing.json", "x" * 5000, binary):
        with pytest.raises(PlanError, match=r"no such file|cannot read"):
            OptimizeConfig.from_json(source)
    for wrong in (None, 5, "attention"):
        with pytest.raises(PlanError, match="sequence of passes"):
            OptimizeConfig(wrong)
    with pytest.raises(PlanError, match="must be a mapping"):
        OptimizeConfig.from_dict([])
    with pytest.raises(PlanError, match="not valid JSON"):
        OptimizeConfig.from_json("{")


def test_what_does_not_apply_is_an_error_unless_skips_are_allowed():
    llama = tiny_model("llama")
    before = picture(llama)
    with pytest.raises(PlanError, match="no routed experts"):
        optimize(llama, [FusedExperts()])
    assert picture(llama) == before
    optimize(llama, OptimizeConfig((FusedExperts(), FusedLayers()), allow_skips=True))
    rows = {row["pass"]: row for row in report(llama).passes}
    assert rows["experts"]["status"] == "skipped" and "no routed experts" in rows["experts"]["skipped"][0]
    assert rows["layers"]["status"] == "applied"


def test_unsupported_models():
    from transformers import GPT2Config, GPT2LMHeadModel

    small = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    with pytest.raises(UnsupportedModelError, match="'gpt2'"):
        optimize(small)
    with pytest.raises(UnsupportedModelError, match="model_type=None"):
        optimize(nn.Linear(2, 2))
    for verb in (optimize, plan, report, restore):
        with pytest.raises(UnsupportedModelError, match="expected a loaded transformers model"):
            verb("deepseek-ai/DeepSeek-V2-Lite")
    assert issubclass(UnsupportedModelError, AccelError)


def test_plan_prints_and_shows_in_a_notebook(model):
    text, table = str(plan(model)), plan(model)._repr_html_()
    for name in ("attention", "experts", "layers", "kv_cache"):
        assert name in text and f"<td>{name}</td>" in table


def test_plan_needs_no_weights():
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(tiny_config("deepseek_v2"))
    assert [row["status"] for row in plan(empty).rows()] == ["planned"] * 4 + ["skipped"]  # no graphs without a GPU


def test_report_counts_and_warns(model):
    fresh = tiny_model("deepseek_v3")
    assert not report(fresh).optimized and "not optimized" in str(report(fresh))
    optimize(fresh)
    assert any("has not run yet" in line for line in report(fresh).warnings())
    fresh.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    now = report(fresh)
    assert not now.warnings()
    assert now.counters["attention: absorbed"] == 9  # 3 layers, 3 steps after the prefill
    assert now.cache["bytes_per_token_and_layer"] == (32 + 8) * 4
    assert json.dumps(now.to_dict()) and "absorbed" in str(now) and "absorbed" in now._repr_html_()

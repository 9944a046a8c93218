"""restore() puts the same objects back, for every pass and family; a failure on the way in changes nothing."""

import copy
import pickle

import pytest
import torch

from deepseek_accel import OptimizeConfig, PlanError, RestoreError, optimize, plan, report, restore
from deepseek_accel.passes import PASSES, load
from deepseek_accel.testing import FAMILIES, picture, relative_error, tiny_model

IDS = torch.randint(2, 128, (2, 9), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=MASK).logits[MASK.bool()]


def generate(model, **kwargs):
    return model.generate(IDS, attention_mask=MASK, max_new_tokens=10, do_sample=False, **kwargs)


@pytest.fixture(scope="module")
def models():
    return {name: tiny_model(name) for name in FAMILIES}


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("family", FAMILIES)
def test_undo_is_exact(models, family, name):
    model = models[family]
    expected, tokens = logits(model), generate(model)
    before = picture(model)
    config = OptimizeConfig((load(name)(),), allow_skips=True)
    applies = any(plan(model, config).edits())
    assert picture(model) == before  # planning touched nothing
    optimize(model, config)
    changed = picture(model) != before
    logits(model)
    assert torch.equal(generate(model), tokens)
    restore(model)
    assert changed == applies or not applies  # `_deepseek_accel` alone is private and not in the picture
    assert picture(model) == before
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_copies_are_independent(family):
    model = tiny_model(family)
    expected, tokens = logits(model), generate(model)
    optimize(model)
    assert relative_error(logits(model), expected) < 1e-4
    assert torch.equal(generate(model), tokens)
    clone = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(logits(clone), logits(model))
    with torch.no_grad():
        clone.lm_head.weight.zero_()
    assert torch.equal(generate(model), tokens)
    assert generate(clone).max() < 128 and not torch.equal(generate(clone), tokens)
    restore(clone)
    assert report(model).optimized and not report(clone).optimized
    restore(model)
    assert torch.equal(logits(model), expected)


def test_a_failure_leaves_the_model_alone(monkeypatch):
    model = tiny_model("deepseek_v3")
    before = picture(model)

    def fail(config):
        raise ZeroDivisionError

    monkeypatch.setattr("deepseek_accel.passes.attention.private_config", fail)
    with pytest.raises(ZeroDivisionError):
        optimize(model)
    assert picture(model) == before
    assert not report(model).optimized


def test_a_foreign_change_is_refused_before_anything_is_restored():
    model = optimize(tiny_model("deepseek_v3"))
    attention = model.model.layers[1].self_attn
    ours, attention.expand_kv = attention.expand_kv, lambda *states: states
    now = picture(model)
    with pytest.raises(RestoreError, match="expand_kv"):
        restore(model)
    assert picture(model) == now
    attention.expand_kv = ours
    restore(model)
    assert not report(model).optimized


def test_restore_twice_and_optimize_again():
    model = tiny_model("deepseek_v2")
    before = picture(model)
    for _ in range(3):
        restore(optimize(model))
        restore(model)
    assert picture(model) == before


def test_the_same_config_twice_changes_nothing_and_another_is_refused():
    model = optimize(tiny_model("deepseek_v3"))
    now = picture(model)
    assert optimize(model) is model and picture(model) == now
    with pytest.raises(PlanError, match="already optimized"):
        optimize(model, {"kv_cache": {}})
    assert picture(model) == now

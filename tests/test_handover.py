"""Which calls of `generate` are left to transformers, and that the answer is worked out anew when it may differ."""

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.utils import GenerationMode

from deepseek_accel import optimize, report
from deepseek_accel.testing import tiny_model

IDS = torch.arange(3, 11)[None]


@pytest.fixture
def model():
    return optimize(tiny_model("deepseek_v3"))


@pytest.fixture
def prepared(monkeypatch):
    """How often transformers prepared a config, `generate`'s own time each call included."""
    times, stock = [], GenerationMixin._prepare_generation_config

    def counted(self, *args, **kwargs):
        times.append(1)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_prepare_generation_config", counted)
    return times


def run(model, **options):
    """The reasons for which this call was left to transformers."""
    before = report(model).counters
    options = {"max_new_tokens": 2, "pad_token_id": 0} | options
    model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)
    after = report(model).counters
    return [name for name in after if "stock loop" in name and after[name] != before.get(name, 0)]


def test_the_same_call_is_not_prepared_twice(model, prepared):
    for times in (2, 1, 1):
        prepared.clear()
        assert run(model, do_sample=False) == [] and len(prepared) == times


def test_what_changes_between_calls_is_seen(model):
    beams = ["layers: stock loop (beam search)"]
    assert run(model, do_sample=False) == []
    assert run(model, do_sample=False, num_beams=2) == beams
    assert run(model, do_sample=False) == []
    model.generation_config.num_beams = 2
    assert run(model, do_sample=False) == beams
    model.generation_config.num_beams = 1
    assert run(model, do_sample=False) == []
    given = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert run(model, generation_config=given) == []
    given.num_beams = 2
    assert run(model, generation_config=given) == beams
    given.num_beams = 1
    given.output_attentions = True
    given.return_dict_in_generate = True
    assert run(model, generation_config=given) == ["layers: stock loop (attentions or hidden states wanted)"]


def test_errors_of_transformers_stay_errors(model):
    assert run(model, do_sample=False) == []
    model.config.num_beams = 2  # "not supported anymore"
    with pytest.raises(ValueError, match="generation"):
        model.generate(IDS, attention_mask=torch.ones_like(IDS), do_sample=False, max_new_tokens=2)


def test_another_object_with_equal_values_is_compared_by_value(model, prepared):
    run(model, do_sample=False, temperature=None)
    prepared.clear()
    assert run(model, do_sample=False, temperature=None) == [] and len(prepared) == 1
    prepared.clear()
    assert run(model, do_sample=False, temperature=None, eos_token_id=[1, 2], max_new_tokens=3) == []
    assert len(prepared) == 1  # they decide nothing


def test_who_replaced_what_is_asked_is_asked_every_time(model):
    assert run(model, do_sample=False) == []
    stock = type(model)._prepare_generation_config.__get__(model)

    def with_beams(config, **kwargs):
        return stock(config, **kwargs | {"num_beams": 2})

    model._prepare_generation_config = with_beams
    assert run(model, do_sample=False) == ["layers: stock loop (beam search)"]
    del model._prepare_generation_config
    assert run(model, do_sample=False) == []

    class Own(GenerationConfig):
        pass

    given = Own(max_new_tokens=2, do_sample=False, pad_token_id=0)
    for mode in ("beam search", None, "beam search"):
        Own.get_generation_mode = lambda self, mode=mode: GenerationMode("beam_search" if mode else "greedy_search")
        assert run(model, generation_config=given) == ([f"layers: stock loop ({mode})"] if mode else [])


def test_options_that_the_models_config_does_not_have(model):
    """As one that was pickled under another release."""
    del model.generation_config.prompt_lookup_num_tokens
    assert run(model, do_sample=False) == []
    assert run(model, do_sample=False, prompt_lookup_num_tokens=3) == ["layers: stock loop (assisted generation)"]

"""Which calls of `generate` are left to transformers, and that the answer is worked out anew when it may differ."""

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.utils import GenerationMode

from deepseek_accel import optimize, report
from deepseek_accel.generation import handover
from deepseek_accel.testing import tiny_model

IDS = torch.arange(3, 11)[None]
BEAMS, CONTRASTIVE = "beam search", "contrastive search"


@pytest.fixture
def model():
    return optimize(tiny_model("deepseek_v3"))


@pytest.fixture
def ask(model):
    """The reason for a call with these arguments, of a model that remembers the last one."""
    decision = handover.Decision()
    return lambda **options: handover.why_stock_loop(model, decision, (), options)


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


def with_beams(stock):
    """`_prepare_generation_config` of somebody who always wants beams."""
    return lambda self, config, **kwargs: stock(self, config, **kwargs | {"num_beams": 2})


def test_the_same_call_is_not_prepared_twice(model, prepared):
    for times in (2, 1, 1):
        prepared.clear()
        assert run(model, do_sample=False) == [] and len(prepared) == times


def test_what_decides_nothing_does_not_make_it_prepare_again(ask, prepared):
    for options in (
        {"max_new_tokens": 3},
        {"max_new_tokens": 4, "temperature": None},
        {"eos_token_id": [1, 2], "max_length": 7},
        {"stop_strings": ["a"], "tokenizer": object()},
    ):
        assert ask(do_sample=False, **options) is None
    assert len(prepared) == 1
    assert ask(do_sample=False, stop_strings=["a"]) == "stop strings without a tokenizer"
    assert ask(do_sample=True) is None and len(prepared) == 2


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


def test_options_that_decide_together(ask):
    for sampling in (True, False, True):
        assert ask(do_sample=sampling, penalty_alpha=0.6, top_k=4) == (None if sampling else CONTRASTIVE)
    for alpha, k in ((None, 4), (0.6, 4), (0.6, 1), (0.6, 4)):
        assert ask(do_sample=False, penalty_alpha=alpha, top_k=k) == (CONTRASTIVE if alpha and k > 1 else None)
    given = GenerationConfig(do_sample=False, top_k=4)
    for alpha in (None, 0.6, None):
        given.penalty_alpha = alpha
        assert ask(generation_config=given) == (CONTRASTIVE if alpha else None)


def test_options_that_the_models_config_does_not_have(model, ask):
    """As one that was pickled under another release."""
    del model.generation_config.prompt_lookup_num_tokens
    assert ask(do_sample=False) is None
    assert ask(do_sample=False, prompt_lookup_num_tokens=3) == "assisted generation"
    given = GenerationConfig(do_sample=False)
    assert ask(generation_config=given, num_beams=2) == BEAMS
    # taken by whoever applies the options, which then are others
    assert handover._grounds(model, given, {"num_beams": 2, "defaults_only": True}) is None


def test_errors_of_transformers_stay_errors(model, ask):
    assert ask(do_sample=False) is None
    model.config.num_beams = 2  # "not supported anymore"
    with pytest.raises(ValueError, match="generation"):
        ask(do_sample=False)


def test_who_replaces_what_is_asked_is_asked(model, ask, monkeypatch):
    stock = GenerationMixin._prepare_generation_config
    assert ask(do_sample=False) is None
    model._prepare_generation_config = with_beams(stock).__get__(model)
    assert ask(do_sample=False) == BEAMS
    del model._prepare_generation_config
    assert ask(do_sample=False) is None
    with monkeypatch.context() as patched:
        patched.setattr(GenerationMixin, "_prepare_generation_config", with_beams(stock))
        assert ask(do_sample=False) == BEAMS
    assert ask(do_sample=False) is None
    with monkeypatch.context() as patched:
        patched.setattr(GenerationConfig, "get_generation_mode", lambda self: GenerationMode.BEAM_SEARCH)
        assert ask(do_sample=False) == BEAMS
    assert ask(do_sample=False) is None


@pytest.mark.parametrize("whose", ["class", "model", "call"])
def test_subclasses_are_asked_every_time(model, ask, whose):
    """What theirs depends on nobody knows: here on `beams`."""

    class Own(GenerationConfig):
        beams = False

        def get_generation_mode(self, assistant_model=None):
            return GenerationMode.BEAM_SEARCH if Own.beams else GenerationMode.GREEDY_SEARCH

    class Model(type(model)):
        def _prepare_generation_config(self, config, **kwargs):
            return super()._prepare_generation_config(config, **kwargs | {"num_beams": 1 + Own.beams})

    options = {"do_sample": False}
    if whose == "class":
        model.__class__ = Model
    elif whose == "call":
        options["generation_config"] = Own()
    else:  # `generate` makes one of its own class of it: it is told apart all the same
        model.generation_config = Own()
        assert handover._grounds(model, None, options) is None
        return
    for Own.beams in (False, True, False):
        assert ask(**options) == (BEAMS if Own.beams else None)

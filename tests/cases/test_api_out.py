"""Outputs and signatures are those of the model that was loaded."""

import inspect
import logging

import pytest
import torch
import transformers
from support import CACHE, MODELS, A, assert_close, config, fast, generate, greedy, stock

from deepseek_accel import models, optimize
from deepseek_accel.testing import tiny_model

FLAGS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")
NEW = 3


def assert_same(ours, theirs, path=""):
    """The same nesting, the same types, and close values."""
    assert type(ours) is type(theirs), path
    if isinstance(theirs, torch.Tensor):
        if theirs.is_floating_point():
            assert_close(ours, theirs)
        else:
            assert torch.equal(ours, theirs), path
    elif isinstance(theirs, (tuple, list)):
        assert len(ours) == len(theirs), path
        for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(x, y, f"{path}[{i}]")
    else:
        assert ours == theirs, path


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", MODELS)
def test_A01_generate_returns_what_was_asked_for(model_type, implementation):
    """Attentions, hidden states or scores come back None, short, or of the wrong shape."""
    ours = fast(model_type, attn_implementation=implementation)
    theirs = stock(model_type, attn_implementation=implementation)
    for wanted in [*((flag,) for flag in FLAGS), FLAGS]:
        options = dict(max_new_tokens=NEW, return_dict_in_generate=True, **dict.fromkeys(wanted, True))
        out, expected = generate(ours, A, **options), generate(theirs, A, **options)
        assert set(out.keys()) == set(expected.keys())
        for name in ("sequences", "scores", "logits", "hidden_states", "attentions"):
            assert_same(out.get(name), expected.get(name), name)
    assert [s.shape for s in out.scores] == [s.shape for s in out.logits] == [(1, 128)] * NEW
    assert [len(step) for step in out.hidden_states] == [4] * NEW
    assert [h.shape for h in out.hidden_states[0]] == [(1, 23, 64)] * 4
    assert [h.shape for h in out.hidden_states[1]] == [(1, 1, 64)] * 4
    if implementation == "eager":
        assert [a.shape for a in out.attentions[0]] == [(1, 4, 23, 23)] * 3
        assert [a.shape for a in out.attentions[1]] == [(1, 4, 1, 24)] * 3
        for step in out.attentions:
            for weights in step:
                assert (weights.sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", MODELS)
def test_A01_forward_returns_what_was_asked_for(model_type, implementation):
    """The same of `model(...)`, in its three spellings: an argument, the config, and a plain tuple."""
    ours = fast(model_type, attn_implementation=implementation)
    theirs = stock(model_type, attn_implementation=implementation)
    for options in (
        dict(output_hidden_states=True),
        dict(output_attentions=True),
        dict(output_hidden_states=True, output_attentions=True, use_cache=False),
        dict(labels=A),
        dict(logits_to_keep=2),
    ):
        with torch.no_grad():
            out, expected = ours(A, **options), theirs(A, **options)
        assert list(out.keys()) == list(expected.keys())
        for name in ("loss", "logits", "hidden_states", "attentions"):
            assert_same(out.get(name), expected.get(name), name)
    with torch.no_grad():
        out = ours(A, use_cache=False, return_dict=False, output_attentions=True)
        expected = theirs(A, use_cache=False, return_dict=False, output_attentions=True)
    assert_same(out, expected)


@pytest.mark.parametrize("model_type", MODELS)
def test_A01_the_flag_in_the_config(model_type):
    """`config.output_attentions = True` set after `optimize` is honoured, and so is taking it back."""
    results = []
    for model in (tiny_model(model_type, attn_implementation="eager"),
                  optimize(tiny_model(model_type, attn_implementation="eager"), config())):  # fmt: skip
        model.config.output_attentions = True
        with torch.no_grad():
            with_weights = model(A)
            model.config.output_attentions = False
            results.append((with_weights.logits, with_weights.attentions, model(A).attentions))
    assert_same(results[1], results[0])
    assert len(results[0][1]) == 3


@pytest.mark.parametrize("model_type", MODELS)
def test_A01_weights_of_decode_steps_after_plain_ones(model_type):
    """Asking for weights in the middle of a generation: earlier steps ran on the fast path and left nothing out."""
    runs = []
    for model in (stock(model_type, attn_implementation="eager"), fast(model_type, attn_implementation="eager")):
        with torch.no_grad():
            out = model(A, use_cache=True)
            out = model(A[:, :1], **{CACHE: out[CACHE]})
            runs.append(model(A[:, 1:2], output_attentions=True, **{CACHE: out[CACHE]}))
    assert_same(runs[1].attentions, runs[0].attentions)
    assert [a.shape for a in runs[1].attentions] == [(1, 4, 1, 25)] * 3
    assert_close(runs[1].logits, runs[0].logits)


@pytest.fixture(scope="module")
def pair():
    """(stock, ours, tokenizer): the bundled tokenizer with tiny models of its vocabulary."""
    _, tokenizer = models.load_tiny()
    tokenizer.padding_side = "left"
    if tokenizer.chat_template is None:
        tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    build = [tiny_model("deepseek_v3", vocab_size=2048) for _ in range(2)]
    return build[0], optimize(build[1], config()), tokenizer


TEXTS = ["import os\n\ndef main(", "x", "for i in range(10):\n    print(i"]


def test_A03_pipeline(pair, caplog):
    """`pipeline()` says "not supported", breaks, or gives other text for a batch than for single prompts."""
    theirs, ours, tokenizer = pair
    options = dict(max_new_tokens=8, do_sample=False, return_full_text=False)
    transformers.utils.logging.enable_propagation()
    with caplog.at_level(logging.WARNING):
        pipe = transformers.pipeline("text-generation", ours, tokenizer=tokenizer)
        single = [pipe(text, **options)[0]["generated_text"] for text in TEXTS]
        listed = [out[0]["generated_text"] for out in pipe(TEXTS, **options)]
        batched = [out[0]["generated_text"] for out in pipe(TEXTS, batch_size=2, **options)]
        chat = pipe([{"role": "user", "content": "Hello"}], max_new_tokens=8, do_sample=False)
    assert "not supported" not in caplog.text.lower()
    assert single == listed == batched
    stock_pipe = transformers.pipeline("text-generation", theirs, tokenizer=tokenizer)
    assert single == [stock_pipe(text, **options)[0]["generated_text"] for text in TEXTS]
    assert chat == stock_pipe([{"role": "user", "content": "Hello"}], max_new_tokens=8, do_sample=False)
    assert all(single) and len(set(single)) == len(TEXTS)


def accepts(ours, theirs):
    """Whether `ours` takes every argument of `theirs`, by position and by name."""
    names = [p.name for p in inspect.signature(theirs).parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    signature = inspect.signature(ours)
    signature.bind(*names)
    signature.bind(**dict.fromkeys(names))
    return True


@pytest.mark.parametrize("model_type", MODELS)
def test_A03_it_is_still_the_same_class(model_type):
    """Class, signature or module tree change, and libraries that look at them no longer know the model."""
    plain, ours = stock(model_type), fast(model_type)
    assert type(ours) is type(plain)
    assert isinstance(ours, transformers.PreTrainedModel)
    assert isinstance(ours, transformers.GenerationMixin)
    assert ours.can_generate()
    assert [(n, type(m)) for n, m in ours.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    for name in ("forward", "generate", "prepare_inputs_for_generation", "save_pretrained"):
        assert inspect.signature(getattr(ours, name)) == inspect.signature(getattr(plain, name))
    for (_, x), (_, y) in zip(ours.named_modules(), plain.named_modules(), strict=True):
        assert accepts(x.forward, y.forward)
    assert ours.config.to_dict() == plain.config.to_dict()
    assert ours.config._attn_implementation == plain.config._attn_implementation
    assert ours.generation_config.to_dict() == plain.generation_config.to_dict()


@pytest.mark.parametrize("model_type", MODELS)
def test_A03_a_mistyped_argument_still_raises(model_type):
    """A forward that swallows **kwargs would accept a misspelt `max_new_tokens` in silence."""
    with pytest.raises(ValueError, match="max_new_token"):
        fast(model_type).generate(A, max_new_token=5)
    assert greedy(fast(model_type), A, new=5)[0].shape == (1, 5)

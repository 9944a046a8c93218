"""Which tokens a layer may forget."""

import pytest
import torch
from support import CACHE, MODELS, A, B, assert_close, fast, greedy, left_pad, logits, prompt, stock

from deepseek_accel.cache import Window, paged_cache
from deepseek_accel.testing import relative_error

OFF = dict(sliding_window=8, use_sliding_window=False)
MIXED = dict(sliding_window=8, use_sliding_window=True, max_window_layers=1)
ALL = dict(sliding_window=8, use_sliding_window=True, max_window_layers=0)


def run(model, text, prefill=40, cache=None):
    """Logits of a prefill and of one step for each further token."""
    cache = paged_cache(model, 16) if cache is None else cache
    parts = [logits(model, text[:, :prefill], **{CACHE: cache})]
    parts += [logits(model, text[:, i : i + 1], **{CACHE: cache}) for i in range(prefill, text.shape[1])]
    return torch.cat(parts, 1)


def test_K10_window_switched_off():
    """`sliding_window` is in the config and `use_sliding_window` is false: applied anyway, long prompts differ."""
    text = prompt(46)
    assert torch.equal(run(fast("qwen2", **OFF), text), run(fast("qwen2"), text))
    assert torch.equal(greedy(fast("qwen2", **OFF), text)[1], greedy(fast("qwen2"), text)[1])
    assert_close(run(fast("qwen2", **OFF), text), logits(stock("qwen2", **OFF), text, use_cache=False))
    assert [layer.is_sliding for layer in paged_cache(fast("qwen2", **OFF)).layers] == [False] * 3


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("options", [MIXED, ALL], ids=["mixed", "all"])
def test_K10_window_of_some_layers(options, implementation):
    """Layers below `max_window_layers` see everything, the others a window: the flag is per layer."""
    text, options = prompt(46), options | dict(attn_implementation=implementation)
    expected = logits(stock("qwen2", **options), text, use_cache=False)
    assert_close(run(fast("qwen2", **options), text), expected)
    assert relative_error(logits(stock("qwen2"), text, use_cache=False), expected) > 0.1, "the window must matter"


@pytest.mark.parametrize("options", [MIXED, ALL], ids=["mixed", "all"])
def test_K10_generation_beyond_the_window(options):
    """Pages that leave the window are given back, and what remains is read at the right place."""
    ours, expected = fast("qwen2", **options), stock("qwen2", **options)
    for ids, mask in (left_pad(A), left_pad(A, B), left_pad(prompt(40), B, A)):
        tokens, values = greedy(ours, ids, mask, new=60)
        expected_tokens, expected_values = greedy(expected, ids, mask, new=60)
        assert tokens.tolist() == expected_tokens.tolist()
        assert_close(values, expected_values)


def test_K10_a_window_bounds_the_memory():
    """A layer with a window of 8 never needs more than two pages of 16 for a row while decoding."""
    model = fast("qwen2", **ALL)
    cache = paged_cache(model, 16)
    run(model, prompt(120), cache=cache)
    assert cache.pages_in_use <= 2
    mixed = paged_cache(fast("qwen2", **MIXED), 16)
    run(fast("qwen2", **MIXED), prompt(120), cache=mixed)
    assert mixed.pages_in_use <= 2 + 8


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33])
def test_K10_windows_around_a_page(window):
    """Window lengths at and around the page size, fed by single tokens and by chunks that end anywhere."""
    options = dict(sliding_window=window, use_sliding_window=True, max_window_layers=1)
    text = prompt(75)
    expected = logits(stock("qwen2", **options), text, use_cache=False)
    assert_close(run(fast("qwen2", **options), text, prefill=30), expected)
    cache, parts = paged_cache(fast("qwen2", **options), 16), []
    for chunk in text.split([1, 14, 1, 1, 16, 17, 5, 20], 1):
        parts.append(logits(fast("qwen2", **options), chunk, **{CACHE: cache}))
    assert_close(torch.cat(parts, 1), expected)


@pytest.mark.parametrize("model_type", MODELS)
def test_K08_a_window_with_sinks(model_type):
    """Output collapses once the sequence exceeds the kept window, from positions that are counted anew.

    The oracle is one unpatched forward whose mask lets row i see j < 2 and i - j < 8, at true positions.
    """
    text, at = prompt(40), torch.arange(40)
    visible = (at[None] <= at[:, None]) & ((at[None] < 2) | (at[:, None] - at[None] < 8))
    mask = torch.zeros(1, 1, 40, 40).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = logits(stock(model_type, attn_implementation="eager"), text, attention_mask=mask, use_cache=False)
    cache = paged_cache(fast(model_type), 16, eviction=Window(sinks=2, recent=8))
    actual = run(fast(model_type), text, prefill=1, cache=cache)
    for i in range(40):
        assert_close(actual[:, i], expected[:, i])
    full = logits(stock(model_type), text, use_cache=False)
    assert_close(actual[:, :10], full[:, :10])
    assert relative_error(actual[:, 10:], full[:, 10:]) > 0.1, "the window must matter"
    assert cache.tokens_held == [10] * 3 and cache.pages_in_use == 3

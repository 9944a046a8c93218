"""Taking back rejected drafts."""

import pytest
import torch
from support import CACHE, MODELS, A, B, C, assert_close, fast, logits, prompt, stock
from transformers import DynamicCache

from deepseek_accel.cache import paged_cache
from deepseek_accel.testing import relative_error
from deepseek_accel.versions import crop_takes_length

CACHES = {
    "paged": lambda model: paged_cache(model, 16),
    "dynamic": lambda model: DynamicCache(config=model.config),
}


def caches(model_type):
    model = fast(model_type)
    return [(model, make(model)) for make in CACHES.values()]


def step(model, ids, cache):
    out = logits(model, ids, **{CACHE: cache})
    return out


def alone(model_type, *ids):
    """Logits of the last part, by one forward of the stock model without a cache."""
    return logits(stock(model_type), torch.cat(ids, 1), use_cache=False)[:, -ids[-1].shape[1] :]


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("model_type", MODELS)
def test_K06_rejected_tokens_leave_no_trace(model_type, kind):
    """After a rollback the cache still holds the rejected draft, or a copy was cropped and the live cache was not."""
    model = fast(model_type)
    cache = CACHES[kind](model)
    step(model, A, cache)
    step(model, B, cache)
    cache.crop(-9)
    assert cache.get_seq_length() == 23
    assert_close(step(model, C, cache), alone(model_type, A, C))
    assert cache.get_seq_length() == 24


@pytest.mark.parametrize("model_type", MODELS)
def test_K06_the_fault_would_show(model_type):
    """A draft that stays moves the logits."""
    assert relative_error(alone(model_type, A, B, C), alone(model_type, A, C)) > 0.1


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("model_type", MODELS)
def test_K06_nothing_everything_and_too_early(model_type, kind):
    """Rolling back no token, every token, more than every token, and before there is any."""
    model = fast(model_type)
    cache = CACHES[kind](model)
    if kind == "paged" or CACHE == "cache":  # the library's own cache raises on 5.15
        cache.crop(-5)
    cache.crop(0)
    assert cache.get_seq_length() == 0
    step(model, A, cache)
    cache.crop(0)
    assert cache.get_seq_length() == 23
    assert_close(step(model, B, cache), alone(model_type, A, B))
    cache.crop(-32)
    assert cache.get_seq_length() == 0
    assert_close(step(model, B, cache), alone(model_type, B))
    cache.crop(-50)
    assert cache.get_seq_length() == 0
    assert_close(step(model, A, cache), alone(model_type, A))


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("model_type", MODELS)
def test_K06_many_rounds_across_page_ends(model_type, kind):
    """Drafts of every length, rejected in every amount, over the end of a page and back."""
    model, text = fast(model_type), prompt(70, seed=3)
    cache = CACHES[kind](model)
    step(model, text[:, :10], cache)
    accepted = 10
    for round_, (drafted, rejected) in enumerate([(7, 7), (6, 3), (8, 8), (20, 4), (1, 1), (3, 0), (17, 16), (16, 1)]):
        draft = prompt(drafted, seed=round_ + 10)
        keep = drafted - rejected
        draft[:, :keep] = text[:, accepted : accepted + keep]
        step(model, draft, cache)
        cache.crop(-rejected)
        accepted += keep
        assert cache.get_seq_length() == accepted
        probe = text[:, accepted : accepted + 1]
        assert_close(step(model, probe, cache), alone(model_type, text[:, :accepted], probe))
        cache.crop(-1)


@pytest.mark.parametrize("model_type", MODELS)
def test_K06_positive_argument_follows_the_library(model_type):
    """Up to 5.17 a positive argument is the length to keep, later it raises: ours does what the library's does."""
    kept = []
    for model, cache in caches(model_type):
        step(model, A, cache)
        if crop_takes_length():
            cache.crop(30)
            assert cache.get_seq_length() == 23
            cache.crop(9)
            kept.append(step(model, C, cache))
        else:
            with pytest.raises(ValueError, match="negative"):
                cache.crop(9)
            assert cache.get_seq_length() == 23
    if kept:
        assert_close(kept[0], kept[1])
        assert_close(kept[0], alone(model_type, A[:, :9], C))


@pytest.mark.parametrize("model_type", MODELS)
def test_K06_rows_that_share_pages(model_type):
    """A rollback after the rows were permuted: pages that two rows share are given back once, and rewritten twice."""
    model = fast(model_type)
    cache = paged_cache(model, 16)
    two = torch.cat([A, prompt(23, seed=5)])
    step(model, two, cache)
    cache.reorder_cache(torch.tensor([1, 1]))
    step(model, torch.cat([B, prompt(9, seed=6)]), cache)
    cache.crop(-12)
    last = torch.cat([prompt(12, seed=8), prompt(12, seed=9)])
    actual = step(model, last, cache)
    for row in range(2):
        assert_close(actual[row : row + 1], alone(model_type, two[1:, :20], last[row : row + 1]))


def test_K06_sliding_window_rolls_back_when_told_in_time():
    """A window drops what no later token sees; recording keeps it, and without it a rollback raises."""
    options = dict(sliding_window=8, use_sliding_window=True, max_window_layers=1)
    model = fast("qwen2", **options)
    cache = paged_cache(model, 16)
    step(model, prompt(60), cache)
    cache.activate_past_recording()
    step(model, prompt(20), cache)
    cache.crop(-20)
    assert cache.get_seq_length() == 60
    expected = logits(stock("qwen2", **options), torch.cat([prompt(60), B], 1), use_cache=False)[:, -9:]
    assert_close(step(model, B, cache), expected)

    forgetful = paged_cache(model, 16)
    step(model, prompt(60), forgetful)
    step(model, prompt(20), forgetful)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        forgetful.crop(-50)
    assert [layer.get_seq_length() for layer in forgetful.layers] == [80, 80, 80], "a failed crop must change nothing"
    both = torch.cat([prompt(60), prompt(20), B], 1)
    assert_close(step(model, B, forgetful), logits(stock("qwen2", **options), both, use_cache=False)[:, -9:])

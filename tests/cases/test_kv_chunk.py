"""Several queries against a cache that already holds something."""

import copy

import pytest
import torch
from support import (
    CACHE,
    MODELS,
    A,
    B,
    C,
    assert_close,
    fast,
    generate,
    greedy,
    left_pad,
    logits,
    stock,
)
from transformers import DynamicCache

from deepseek_accel.cache import paged_cache
from deepseek_accel.testing import relative_error


@pytest.mark.parametrize("size", [1, 5, 16, 23, 99])
@pytest.mark.parametrize("model_type", MODELS)
def test_K11_chunk_size_does_not_matter(model_type, size):
    """The second chunk of a prompt gets wrong positions, or a mask that ignores what the first one left."""
    ids, mask = left_pad(A, B)
    tokens, values = greedy(fast(model_type), ids, mask, new=6, prefill_chunk_size=size)
    expected_tokens, expected = greedy(stock(model_type), ids, mask, new=6)
    assert tokens.tolist() == expected_tokens.tolist()
    assert_close(values, expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", MODELS)
def test_K11_chunks_by_hand(model_type, implementation):
    """7 and 16 tokens, the second part with a warm cache; with padding, and without any mask."""
    model = fast(model_type, attn_implementation=implementation)
    whole = stock(model_type, attn_implementation=implementation)
    ids, mask = left_pad(A, B)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    expected = logits(whole, ids, attention_mask=mask, position_ids=positions)
    cache = paged_cache(model, 16)
    for part in (slice(0, 7), slice(7, 23)):
        options = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part], CACHE: cache}
        assert_close(logits(model, ids[:, part], **options)[0], expected[0, part])
    assert_close(logits(model, ids[:, -1:], **{**options, "position_ids": positions[:, -1:] + 1}
                        | {"attention_mask": torch.cat([mask, mask[:, -1:]], 1)})[1],
                 logits(whole, torch.cat([B, B[:, -1:]], 1))[0, -1:])  # fmt: skip
    cache = paged_cache(model, 16)
    parts = [logits(model, A[:, :7], **{CACHE: cache}), logits(model, A[:, 7:], **{CACHE: cache})]
    assert_close(torch.cat(parts, 1), logits(whole, A))


@pytest.mark.parametrize("model_type", MODELS)
def test_K11_the_fault_would_show(model_type):
    """A second chunk that forgets the first, or starts again at position 0, is far off."""
    whole = logits(stock(model_type), A)[:, 7:]
    assert relative_error(logits(stock(model_type), A[:, 7:]), whole) > 0.1
    cache = DynamicCache(config=stock(model_type).config)
    logits(stock(model_type), A[:, :7], **{CACHE: cache})
    restarted = logits(stock(model_type), A[:, 7:], position_ids=torch.arange(16)[None], **{CACHE: cache})
    assert relative_error(restarted, whole) > 0.1


def tensors(cache):
    return [t.clone() for layer in cache.layers for t in (layer.keys, layer.values)]


@pytest.mark.parametrize("model_type", MODELS)
def test_K13_a_prefix_serves_two_continuations(model_type):
    """The second continuation of a copied prompt cache is contaminated by the first."""
    model = fast(model_type)
    cache = paged_cache(model, 16)
    logits(model, A, **{CACHE: cache})
    before = tensors(cache)
    for tail in (B, C):
        ids = torch.cat([A, tail], 1)
        tokens, values = greedy(model, ids, new=8, **{CACHE: copy.deepcopy(cache)})
        expected_tokens, expected = greedy(stock(model_type), ids, new=8)
        assert tokens.tolist() == expected_tokens.tolist()
        assert_close(values, expected)
        assert cache.get_seq_length() == 23
        assert all(torch.equal(x, y) for x, y in zip(tensors(cache), before, strict=True))


@pytest.mark.parametrize("model_type", MODELS)
def test_K13_two_copies_grow_in_turns(model_type):
    """Copies share no page: tokens written through one are not seen by the other."""
    model = fast(model_type)
    cache = paged_cache(model, 16)
    logits(model, A, **{CACHE: cache})
    one, two = copy.deepcopy(cache), copy.deepcopy(cache)
    for i in range(9):
        first = logits(model, B[:, i : i + 1], **{CACHE: one})
        second = logits(model, B.flip(1)[:, i : i + 1], **{CACHE: two})
    assert_close(first, logits(stock(model_type), torch.cat([A, B], 1))[:, -1:])
    assert_close(second, logits(stock(model_type), torch.cat([A, B.flip(1)], 1))[:, -1:])
    assert cache.get_seq_length() == 23


@pytest.mark.parametrize("model_type", MODELS)
def test_K13_the_passed_cache_itself_is_used(model_type):
    """The object handed in is replaced by a copy, so that its owner never sees the new tokens."""
    model = fast(model_type)
    for cache in (paged_cache(model, 16), DynamicCache(config=model.config)):
        with torch.no_grad():
            out = model(A, **{CACHE: cache})
        assert out[CACHE] is cache
        assert cache.get_seq_length() == 23
        out = generate(model, torch.cat([A, B], 1), max_new_tokens=4, return_dict_in_generate=True, **{CACHE: cache})
        assert out[CACHE] is cache
        assert cache.get_seq_length() == 23 + 9 + 3


@pytest.mark.parametrize("model_type", MODELS)
def test_K13_reuse_after_a_rollback(model_type):
    """Without a copy: generate, roll back to the prompt, generate something else."""
    model = fast(model_type)
    cache = paged_cache(model, 16)
    logits(model, A, **{CACHE: cache})
    for tail in (B, C, B):
        ids = torch.cat([A, tail], 1)
        tokens, values = greedy(model, ids, new=8, **{CACHE: cache})
        expected_tokens, expected = greedy(stock(model_type), ids, new=8)
        assert tokens.tolist() == expected_tokens.tolist()
        assert_close(values, expected)
        cache.crop(23 - cache.get_seq_length())
        assert cache.get_seq_length() == 23


@pytest.mark.parametrize("model_type", MODELS)
def test_K14_the_whole_prompt_is_cached(model_type):
    """Nothing is left to feed: the step indexes an empty tensor, or reads past the end."""
    outcomes = []
    for model, cache in (
        (stock(model_type), DynamicCache(config=stock(model_type).config)),
        (fast(model_type), paged_cache(fast(model_type), 16)),
        (fast(model_type), DynamicCache(config=fast(model_type).config)),
    ):
        logits(model, A, **{CACHE: cache})
        try:
            outcomes.append(generate(model, A, max_new_tokens=4, **{CACHE: cache}).tolist())
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[1] == outcomes[0]
    assert outcomes[2] == outcomes[0]


@pytest.mark.parametrize("model_type", MODELS)
def test_K14_nothing_new_leaves_the_cache_alone(model_type):
    """A forward of zero tokens over a warm cache raises like the stock model's, or changes nothing."""
    model = fast(model_type)
    cache = paged_cache(model, 16)
    logits(model, A, **{CACHE: cache})
    before = tensors(cache)
    try:
        logits(model, A[:, :0], **{CACHE: cache})
    except Exception as error:
        stock_cache = DynamicCache(config=model.config)
        logits(stock(model_type), A, **{CACHE: stock_cache})
        with pytest.raises(type(error)):
            logits(stock(model_type), A[:, :0], **{CACHE: stock_cache})
    assert cache.get_seq_length() == 23
    assert all(torch.equal(x, y) for x, y in zip(tensors(cache), before, strict=True))


def block_diagonal(dtype, implementation, rows, columns):
    """[1, 1, rows, columns]: causal inside a document of 23 tokens and one of the rest, added to scores or boolean."""
    position = torch.arange(columns)
    document = position >= 23
    visible = (document[:, None] == document) & (position <= position[:, None])
    visible = visible[None, None, -rows:]
    if implementation == "bool":
        return visible
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", MODELS)
def test_K14_two_documents_in_one_row(model_type, implementation, kind):
    """A block-diagonal mask and positions that restart: each document must read as if alone, decoding included."""
    if implementation == "eager" and kind == "bool":
        pytest.skip("the stock eager attention adds its mask to the scores")
    model = fast(model_type, attn_implementation=implementation)
    expected = [logits(stock(model_type), document) for document in (A, torch.cat([B, C], 1))]
    positions = torch.cat([torch.arange(23), torch.arange(9)])[None]
    mask = block_diagonal(torch.float32, kind, 32, 32)
    packed = torch.cat([A, B], 1)
    actual = logits(model, packed, attention_mask=mask, position_ids=positions, use_cache=False)
    assert_close(actual[:, :23], expected[0])
    cache = paged_cache(model, 16)
    actual = logits(model, packed, attention_mask=mask, position_ids=positions, **{CACHE: cache})
    assert_close(actual[:, :23], expected[0])
    assert_close(actual[:, 23:], expected[1][:, :9])
    mask = block_diagonal(torch.float32, kind, 1, 33)
    last = logits(model, C, attention_mask=mask, position_ids=torch.tensor([[9]]), **{CACHE: cache})
    assert_close(last, expected[1][:, 9:])

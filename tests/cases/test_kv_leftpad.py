"""Ragged batches: masks and positions per row, rows whose every key is hidden."""

import pytest
import torch
from support import (
    CACHE,
    MODELS,
    A,
    B,
    C,
    assert_close,
    config,
    count,
    fast,
    greedy,
    left_pad,
    logits,
    stock,
)

from deepseek_accel import optimize
from deepseek_accel.testing import relative_error, tiny_model


@pytest.mark.parametrize("model_type", MODELS)
def test_K01_every_row_decodes_as_if_alone(model_type):
    """The longest row of a left-padded batch is right, shorter rows turn to garbage once decoding starts."""
    model = fast(model_type)
    before = count(model, "paged generate calls")
    tokens, batch = greedy(model, *left_pad(A, B, C))
    assert count(model, "paged generate calls") == before + 1
    for row, alone in enumerate((A, B, C)):
        expected_tokens, expected = greedy(stock(model_type), alone)
        assert tokens[row].tolist() == expected_tokens[0].tolist()
        for step in range(expected.shape[1]):
            assert_close(batch[row, step], expected[0, step])


@pytest.mark.parametrize("model_type", MODELS)
def test_K01_the_fault_would_show(model_type):
    """Ignoring the mask, or giving every row the same positions, moves the DECODE logits far beyond the tolerance."""
    ids, mask = left_pad(A, B, C)
    model = stock(model_type)
    _, right = greedy(model, ids, mask)
    _, no_mask = greedy(model, ids, torch.ones_like(mask))
    assert relative_error(no_mask[1:], right[1:]) > 0.1
    # prefill with shared positions is right (rotary embeddings are shift-invariant), the step after it is not
    shared = torch.arange(ids.shape[1])[None].expand_as(ids)
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=shared, use_cache=True)
        assert relative_error(out.logits[:, -1], right[:, 0]) < 1e-4
        step = model(
            right[:, 0].argmax(-1, keepdim=True),
            attention_mask=torch.cat([mask, mask[:, -1:]], 1),
            position_ids=mask.sum(1, keepdim=True),
            **{CACHE: out[CACHE]},
        )
    assert relative_error(step.logits[1:, -1], right[1:, 1]) > 0.01


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", MODELS)
def test_K01_forward_by_hand(model_type, implementation):
    """The same through `model(...)`, with the position ids and the mask the caller builds."""
    ids, mask = left_pad(A, B, C)
    positions = (mask.cumsum(1) - 1).clamp_min(0)

    def steps(model):
        out = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
        yield out.logits[:, -1]
        grown, position = mask, positions[:, -1:]
        for token in (5, 77, 30):
            grown, position = torch.cat([grown, mask[:, -1:]], 1), position + 1
            new = torch.full((3, 1), token)
            out = model(new, attention_mask=grown, position_ids=position, **{CACHE: out[CACHE]})
            yield out.logits[:, -1]

    with torch.no_grad():
        ours = steps(fast(model_type, attn_implementation=implementation))
        for actual, expected in zip(ours, steps(stock(model_type, attn_implementation=implementation)), strict=True):
            assert_close(actual, expected)


def ragged_steps(model, ids, mask, decode=2):
    """Logits at all positions of a prefill, then of `decode` steps, through the model's own paged cache."""
    from deepseek_accel.cache import paged_cache

    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = paged_cache(model, 16)
    parts = [logits(model, ids, attention_mask=mask, position_ids=positions, **{CACHE: cache})]
    for step in range(decode):
        mask = torch.cat([mask, mask[:, -1:]], 1)
        positions = positions[:, -1:] + 1
        new = torch.full((len(ids), 1), 40 + step)
        parts.append(logits(model, new, attention_mask=mask, position_ids=positions, **{CACHE: cache}))
    return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", MODELS)
def test_K03_padding_queries_are_finite(model_type, implementation, dtype):
    """A leading padding query sees no key; its NaN must not spread through 0 * NaN."""
    model = optimize(tiny_model(model_type, attn_implementation=implementation).to(dtype), config())
    ids, mask = left_pad(A, B)
    assert torch.isfinite(ragged_steps(model, ids, mask)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", MODELS)
def test_K03_a_row_of_padding_only(model_type, implementation, dtype):
    """A dummy row with no key at all: finite itself, and the real row does not notice it."""
    model = optimize(tiny_model(model_type, attn_implementation=implementation).to(dtype), config())
    ids = torch.cat([A, A])
    mask = torch.ones_like(ids)
    mask[1] = 0
    both, alone = ragged_steps(model, ids, mask), ragged_steps(model, A, mask[:1])
    assert torch.isfinite(both).all()
    if dtype == torch.float32:
        assert_close(both[:1], alone)
        expected = logits(stock(model_type, attn_implementation=implementation), A)
        assert_close(both[:1, : A.shape[1]], expected)


@pytest.mark.parametrize("model_type", MODELS)
def test_K03_generate_beside_a_row_of_padding(model_type):
    """The same inside `generate`: the real row gets its own tokens."""
    ids = torch.cat([A, A])
    mask = torch.ones_like(ids)
    mask[1] = 0
    tokens, both = greedy(fast(model_type), ids, mask, new=6)
    expected_tokens, expected = greedy(stock(model_type), A, new=6)
    assert tokens[0].tolist() == expected_tokens[0].tolist()
    assert torch.isfinite(both).all()
    assert_close(both[0], expected[0])

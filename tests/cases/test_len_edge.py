"""The shortest inputs."""

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
    fast,
    generate,
    greedy,
    left_pad,
    logits,
    stock,
)

from deepseek_accel import optimize
from deepseek_accel.cache import paged_cache
from deepseek_accel.testing import tiny_model


@pytest.mark.parametrize("model_type", MODELS)
def test_B01_a_prompt_of_one_token(model_type):
    """One token: the first step already looks like decoding, with nothing cached."""
    tokens, values = greedy(fast(model_type), C, new=4)
    expected_tokens, expected = greedy(stock(model_type), C, new=4)
    assert tokens.tolist() == expected_tokens.tolist()
    assert_close(values, expected)
    assert generate(fast(model_type), C, max_new_tokens=4).shape == (1, 5)


@pytest.mark.parametrize("model_type", MODELS)
def test_B01_no_prompt_at_all(model_type):
    """`generate()` starts from BOS, without a mask of the caller's."""
    runs = [model.generate(max_new_tokens=4, do_sample=False) for model in (fast(model_type), stock(model_type))]
    assert runs[0].tolist() == runs[1].tolist()
    assert runs[0].shape == (1, 5)


@pytest.mark.parametrize("model_type", MODELS)
def test_B01_an_empty_prompt(model_type):
    """`[1, 0]` ids: an error, as of the stock model, never junk."""
    empty = torch.zeros(1, 0, dtype=torch.long)
    outcomes = []
    for model in (stock(model_type), fast(model_type)):
        try:
            outcomes.append(generate(model, empty, max_new_tokens=4).tolist())
        except (RuntimeError, ValueError, IndexError) as error:
            outcomes.append(type(error))
    assert outcomes[1] in (outcomes[0], ValueError)
    assert greedy(fast(model_type), A, new=4)[0].tolist() == greedy(stock(model_type), A, new=4)[0].tolist()


@pytest.mark.parametrize("ids", [A, C], ids=["23", "1"])
@pytest.mark.parametrize("model_type", MODELS)
def test_B01_one_new_token(model_type, ids):
    """`max_new_tokens=1`: no decode step follows the prefill."""
    tokens, values = greedy(fast(model_type), ids, new=1)
    expected_tokens, expected = greedy(stock(model_type), ids, new=1)
    assert tokens.tolist() == expected_tokens.tolist()
    assert_close(values, expected)


@pytest.mark.parametrize("model_type", MODELS)
def test_B01_a_row_of_one_token_in_a_batch(model_type):
    """22 of 23 positions of a row are padding; then a batch of single tokens only."""
    for rows in ((A, C), (C, C, C), (B, C)):
        tokens, values = greedy(fast(model_type), *left_pad(*rows), new=6)
        expected_tokens, expected = greedy(stock(model_type), *left_pad(*rows), new=6)
        assert tokens.tolist() == expected_tokens.tolist()
        assert_close(values, expected)


@pytest.mark.parametrize("model_type", MODELS)
def test_B01_speculation_from_one_token(model_type):
    """Drafting from a prompt too short to look anything up in."""
    expected = generate(stock(model_type), C, max_new_tokens=9).tolist()
    assert generate(fast(model_type), C, max_new_tokens=9, prompt_lookup_num_tokens=3).tolist() == expected
    draft = optimize(tiny_model(model_type, num_hidden_layers=1), config())
    assert generate(fast(model_type), C, max_new_tokens=9, assistant_model=draft).tolist() == expected
    assert generate(fast(model_type), C, max_new_tokens=1, assistant_model=draft).tolist() == [
        row[:2] for row in expected
    ]


@pytest.mark.parametrize("model_type", MODELS)
def test_B01_one_token_beams_and_samples(model_type):
    """The shortest prompt, expanded to several rows."""
    options = dict(num_beams=3, num_return_sequences=2, max_new_tokens=5)
    assert generate(fast(model_type), C, **options).tolist() == generate(stock(model_type), C, **options).tolist()


@pytest.mark.parametrize("model_type", MODELS)
def test_B01_token_by_token_from_nothing(model_type):
    """A cache filled one token at a time equals one forward, page ends included."""
    ids = torch.cat([A, B, A[:, :4]], 1)
    cache = paged_cache(fast(model_type), 16)
    steps = [logits(fast(model_type), ids[:, i : i + 1], **{CACHE: cache}) for i in range(ids.shape[1])]
    assert_close(torch.cat(steps, 1), logits(stock(model_type), ids))


@pytest.mark.parametrize("model_type", MODELS)
def test_B01_up_to_the_last_position(model_type):
    """The longest sequence the model was made for, and page counts that do not divide it."""
    longest = 48
    ours = optimize(tiny_model(model_type, max_position_embeddings=longest), config())
    theirs = tiny_model(model_type, max_position_embeddings=longest)
    runs = [generate(model, A, max_length=longest) for model in (ours, theirs)]
    assert runs[0].tolist() == runs[1].tolist()
    assert runs[0].shape == (1, longest)

"""Beam search permutes the rows of the cache: all of it, in every layer."""

import pytest
import torch
from support import MODELS, A, B, fast, generate, greedy, left_pad, logits, stock

from deepseek_accel.cache import PagedCache

NEW = 10


def beams(model, ids, mask=None, **kwargs):
    options = dict(num_beams=4, num_return_sequences=3, max_new_tokens=NEW, length_penalty=1.0)
    return generate(model, ids, mask, return_dict_in_generate=True, output_scores=True, **options | kwargs)


def recomputed_scores(model_type, sequences, prompt_lengths):
    """Mean log probability of the new tokens, by one forward of the stock model without a cache, row by row."""
    scores = []
    for row, length in zip(sequences, prompt_lengths, strict=True):
        row = row[-(length + NEW) :][None]
        log_probs = logits(stock(model_type), row, use_cache=False).log_softmax(-1)[0, -NEW - 1 : -1]
        scores.append(log_probs.gather(1, row[0, -NEW:, None]).sum() / NEW)
    return torch.stack(scores)


@pytest.mark.parametrize("model_type", MODELS)
def test_K04_beam_scores_are_those_of_the_returned_text(model_type):
    """The cache is not permuted, so a beam continues from another beam's history; nothing is raised."""
    out = beams(fast(model_type), A)
    scores = recomputed_scores(model_type, out.sequences, [A.shape[1]] * 3)
    assert (scores - out.sequences_scores).abs().max() <= 1e-3
    assert out.sequences.tolist() == beams(stock(model_type), A).sequences.tolist()


@pytest.mark.parametrize("model_type", MODELS)
def test_K04_beams_of_a_ragged_batch(model_type):
    """Rows of two prompts share no history; each group of beams is permuted within itself."""
    out = beams(fast(model_type), *left_pad(A, B))
    lengths = [A.shape[1]] * 3 + [B.shape[1]] * 3
    scores = recomputed_scores(model_type, out.sequences, lengths)
    assert (scores - out.sequences_scores).abs().max() <= 1e-3
    assert out.sequences.tolist() == beams(stock(model_type), *left_pad(A, B)).sequences.tolist()


@pytest.mark.parametrize("model_type", MODELS)
def test_K04_the_fault_would_show(model_type, monkeypatch):
    """The oracle does see a cache that is never permuted."""
    monkeypatch.setattr(PagedCache, "reorder_cache", lambda self, beam_idx: None)
    out = beams(fast(model_type), A)
    scores = recomputed_scores(model_type, out.sequences, [A.shape[1]] * 3)
    assert (scores - out.sequences_scores).abs().max() > 0.05


@pytest.mark.parametrize("model_type", MODELS)
def test_K04_beam_sampling_and_return_sequences(model_type):
    """The other ways rows are copied: sampled beams, and several samples of one prompt, as the stock model's."""
    for options in (dict(num_beams=3), dict(num_beams=1)):
        runs = []
        for model in (stock(model_type), fast(model_type)):
            torch.manual_seed(7)
            runs.append(generate(model, A, do_sample=True, num_return_sequences=3, max_new_tokens=NEW, **options))
        assert runs[0].tolist() == runs[1].tolist()
        assert len({tuple(row) for row in runs[0].tolist()}) > 1


@pytest.mark.parametrize("model_type", MODELS)
def test_K04_a_greedy_call_after_beams(model_type):
    """A permuted pool must not reach the next call."""
    beams(fast(model_type), A)
    assert greedy(fast(model_type), A)[0].tolist() == greedy(stock(model_type), A)[0].tolist()

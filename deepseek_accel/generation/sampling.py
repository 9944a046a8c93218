"""Ways of choosing the next token that need nothing but its logits, so that they can run inside a CUDA graph."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

MAX_EOS_TOKENS = 16


class Choice(NamedTuple):
    """Greedy, or sampling after warpers that look at scores only."""

    warpers: tuple[Any, ...]
    do_sample: bool

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for choices that do the same."""
        return (self.do_sample, *((type(w).__name__, *sorted(vars(w).items())) for w in self.warpers))

    @property
    def is_greedy(self) -> bool:
        """Whether this is the largest logit and nothing else."""
        return not self.do_sample and not self.warpers

    def pick(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [B, vocabulary] -> token ids [B]."""
        scores = logits.float()
        for warper in self.warpers:
            scores = warper(None, scores)
        if not self.do_sample:
            return scores.argmax(-1)
        return draw(scores.softmax(-1))


def draw(probabilities: torch.Tensor) -> torch.Tensor:
    """One index per row of probabilities [B, N], [B] int64, drawn with torch's generator.

    p / e with e exponentially distributed is largest at i with probability p_i. `torch.multinomial` does the same with
    the same random numbers, so the draws are equal, but it also asks the host whether the probabilities are valid,
    which a graph cannot.
    """
    return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(-1)


def choice_of(processors: Any, do_sample: bool) -> Choice | None:
    """The `Choice` that does what these logits processors do, or None if they need more than the scores."""
    from transformers.generation import logits_process as known

    simple = (known.TemperatureLogitsWarper, known.TopKLogitsWarper, known.TopPLogitsWarper, known.MinPLogitsWarper)
    if all(type(processor) in simple for processor in processors):
        return Choice(tuple(processors), do_sample)
    return None

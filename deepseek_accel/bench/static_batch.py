"""Stock `generate` on one static batch, for the ratio: it waits for the longest of its requests before the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import greedy
from .drive import Job
from .generate import release
from .measure import seconds
from .shapes import Subject

WARM_TOKENS = 4


@dataclass(frozen=True)
class Batch:
    seconds: float
    tokens: list[list[int]]
    """New tokens of each request, no more than it asked for."""
    padded: bool
    """Whether prompts had different lengths."""

    @property
    def tokens_per_second(self) -> float:
        """Of tokens that were asked for."""
        return sum(map(len, self.tokens)) / self.seconds


def padded(jobs: Sequence[Job], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [B, S] padded on the left with 0, and their mask."""
    longest = max(len(job.prompt) for job in jobs)
    ids = torch.tensor([[0] * (longest - len(job.prompt)) + job.prompt for job in jobs])
    mask = torch.tensor([[0] * (longest - len(job.prompt)) + [1] * len(job.prompt) for job in jobs])
    return ids.to(device), mask.to(device)


def measure(subject: Subject, jobs: Sequence[Job], requests: int) -> tuple[Batch | None, dict[str, Any]]:
    """One batch of the jobs, timed once after a short call; and its facts, the time for `requests` scaled from it.

    None, and facts that say why, if the batch does not fit into memory.
    """
    model, device = subject.model, subject.model.device
    ids, mask = padded(jobs, device)
    count = max(job.ask.new_tokens for job in jobs)

    def generate(new_tokens: int) -> Any:
        with greedy.endless(model), torch.no_grad():
            return model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)

    try:
        generate(min(WARM_TOKENS, count))
        duration, output = seconds(lambda: generate(count), device)
    except torch.OutOfMemoryError:
        release(device)
        return None, {"batch": len(jobs), "status": "error", "detail": "out of memory"}
    new = output[:, ids.shape[1] :].tolist()
    tokens = [row[: job.ask.new_tokens] for row, job in zip(new, jobs, strict=True)]
    batch = Batch(duration, tokens, not bool(mask.all()))
    return batch, {
        "batch": len(jobs),
        "status": "ok",
        "detail": f"one batch measured; the time for {requests} requests is {requests / len(jobs):g} times its time",
        "seconds": duration,
        "scaled_seconds": duration * requests / len(jobs),
        "new_tokens": sum(map(len, tokens)),
        "tokens_per_second": batch.tokens_per_second,
    }

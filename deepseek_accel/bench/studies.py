"""One request at a time through the engine: its prefill and decode apart, and where the time of a long one goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import greedy
from .drive import Answer, Job, Watch, closed_loop
from .loads import Ask
from .shapes import Point, Subject

NEW_TOKENS = 128
REPEATS = 3


def alone(engine: Any, watch: Watch, prompt: list[int]) -> Answer:
    """One request of NEW_TOKENS more tokens on an engine that does nothing else. Raises its error if it fails."""
    watch.begin()
    (answer,) = closed_loop(engine, watch, [Job(Ask(len(prompt), NEW_TOKENS), prompt)], 1)
    if answer.error is not None:
        raise answer.error
    return answer


def further_ms(answer: Answer) -> float:
    times = answer.result.token_times
    return float(1e3 * (times[-1] - times[0]) / (len(times) - 1))


def split(
    engine: Any, watch: Watch, subject: Subject, lengths: Sequence[int], step: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Medians of REPEATS single requests, after one: ms from admission to the first token, and ms per further token."""
    rows = []
    for length in lengths:
        step(f"one request of {length} tokens, {1 + REPEATS} times")
        prompts = subject.prompt(Point(1 + REPEATS, length), seed=77).tolist()
        answers = [alone(engine, watch, prompt) for prompt in prompts][1:]
        first = [a.result.times.first_token - a.result.times.admitted for a in answers]
        rows.append(_split_row(length, statistics.median(first), statistics.median(map(further_ms, answers)) / 1e3))
    return rows


def stock_split(subject: Subject, lengths: Sequence[int], step: Callable[[str], None]) -> list[dict[str, Any]]:
    """The same of stock `generate`."""
    rows = []
    for length in lengths:
        step(f"stock, one prompt of {length} tokens")
        prompt = subject.prompt(Point(1, length), seed=77)
        greedy.timed(subject.model, prompt, 4)
        timed = [greedy.timed(subject.model, prompt, NEW_TOKENS)[:2] for _ in range(REPEATS)]
        first, rest = (statistics.median(times) for times in zip(*timed, strict=True))
        rows.append(_split_row(length, first, rest / (NEW_TOKENS - 1)))
    return rows


def _split_row(length: int, prefill: float, decode: float) -> dict[str, Any]:
    return {
        "prompt_tokens": length,
        "new_tokens": NEW_TOKENS,
        "prefill_ms": 1e3 * prefill,
        "decode_ms_per_token": 1e3 * decode,
    }


def breakdown(engine: Any, watch: Watch, subject: Subject, tokens: int) -> dict[str, Any]:
    """Where the time of one request with a prompt of `tokens` goes, in ms, after one such request:

    tokenise: the text to ids, by the checkpoint's tokenizer or else by the bundled one. queue: until the engine gave it
    a row. prefill: from then until the host had the first token. first token: all of these together. further token:
    mean of the NEW_TOKENS - 1 others. total: from the text to the last token.
    """
    whose, tokenizer = tokenizer_of(subject)
    text = text_of(tokenizer, tokens)
    tokenizer(text[:1000], verbose=False)
    start = time.perf_counter()
    ids = tokenizer(text, verbose=False).input_ids
    tokenised = time.perf_counter() - start
    ids = ids[:tokens]
    alone(engine, watch, ids[::-1])
    answer = alone(engine, watch, ids)
    times = answer.result.times
    return {
        "prompt_tokens": len(ids),
        "new_tokens": NEW_TOKENS,
        "tokenizer": whose,
        "tokenise_ms": 1e3 * tokenised,
        "queue_ms": 1e3 * (times.admitted - times.submitted),
        "prefill_ms": 1e3 * (times.first_token - times.admitted),
        "prefill_steps": sum(bool(facts.prompt_tokens) for facts in watch.steps),
        "first_token_ms": 1e3 * (tokenised + times.first_token - times.submitted),
        "further_token_ms": further_ms(answer),
        "total_ms": 1e3 * (tokenised + times.finished - times.submitted),
    }


def tokenizer_of(subject: Subject) -> tuple[str, Any]:
    """The checkpoint's, or the bundled one where the model has none."""
    from .. import models

    name = subject.name if Path(subject.name).is_dir() else str(models.path())
    from transformers import AutoTokenizer

    return ("the checkpoint's" if name == subject.name else "bundled"), AutoTokenizer.from_pretrained(name)


def text_of(tokenizer: Any, tokens: int) -> str:
    """Bundled held-out text, repeated, of at least `tokens` tokens and little more."""
    from .. import models

    documents = "\n".join(models.heldout_documents())
    one = tokenizer(documents, verbose=False).input_ids
    whole, rest = divmod(tokens, len(one))
    return documents * whole + documents[: round(len(documents) * min(1.0, 1.05 * (rest + 64) / len(one))) + 256]

"""What checking several tokens costs against a plain step, and what it gains where guesses come true by a draw.

The guesses are random tokens that cost nothing, and each is taken as right with a given probability whatever the model
says. So the text is nonsense, and the times are those of the real loop: a model with random weights has no drafts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..api import optimize, restore
from ..config import OptimizeConfig
from ..errors import AccelError
from ..generation.latency import MOST_DRAFTS
from ..generation.speculate import Speculated
from ..passes.mixed_precision import MixedPrecision
from ..passes.speculative import Speculative
from . import greedy
from .environment import environment, resolve_device, resolve_dtype
from .generate import release
from .record import Keep, forget
from .shapes import Point, load


class ForcedDraft:
    """Random tokens."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary, self._random = vocabulary, random.Random(0)

    def propose(self, texts: list[list[int]], counts: list[int], pick: Any) -> list[list[int]]:
        return [[self._random.randrange(self._vocabulary) for _ in range(count)] for count in counts]

    def learn(self, hidden: torch.Tensor, rows: list[int], counts: list[int], stand: list[int]) -> None:
        pass


class ForcedSource:
    num_states = 0

    def begin(self, call: Any, input_ids: torch.Tensor, starts: list[int] | None) -> Any:
        return lambda loop: ForcedDraft(len(call.stepper.model.head[0]))


def forced_loop(acceptance: float) -> type[Speculated]:
    """A loop whose picks are the guesses with this probability, each on its own, drawn the same way in every call: what
    is timed are equal calls, of shapes that were met before."""

    class Forced(Speculated):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._draw = random.Random(1)

        def _accept(self, logits: Any, rows: list[int], drafts: list[list[int]], counts: list[int]) -> list[int]:
            self._guesses = drafts
            return super()._accept(logits, rows, drafts, counts)

        def _pick_all(self, logits: Any, rows: list[int], counts: list[int]) -> list[list[int]]:
            picks = super()._pick_all(logits, rows, counts)
            for pick, r, count in zip(picks, rows, counts, strict=True):
                for i, guess in enumerate(self._guesses[r]):
                    at = len(pick) - count + i
                    pick[at] = guess if self._draw.random() < acceptance else (guess + 1) % logits.shape[-1]
            return picks

    return Forced


def run(
    model_name: str, points: Sequence[Point], drafts: Sequence[int], acceptances: Sequence[float], new_tokens: int,
    device_name: str = "auto", dtype_name: str | None = None, keep: Keep = forget, *, int4: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """{"environment", "model", "rows"}: a row for each point, number of drafts and acceptance.

    keep: told the rows so far after each of them. int4: with weights in four bits, plain decoding too.
    """
    if any(not 1 <= number <= MOST_DRAFTS for number in drafts) or any(not 0 <= a <= 1 for a in acceptances):
        raise AccelError(f"drafts must be 1 to {MOST_DRAFTS}, acceptances 0 to 1")
    if new_tokens < 4 * MOST_DRAFTS:
        raise AccelError(f"at least {4 * MOST_DRAFTS} new tokens are needed to measure")
    device = resolve_device(device_name)
    subject = load(model_name, device, resolve_dtype(dtype_name, device))
    chosen: tuple[Any, ...] = OptimizeConfig.lossless().passes
    if int4:
        chosen = (MixedPrecision(method="rtn"), *chosen)
    model, rows = subject.model, []  # type: Any, list[dict[str, Any]]
    result = {"environment": environment(device), "model": model_name, "int4": int4, "new_tokens": new_tokens}
    result["rows"] = rows
    for point in points:
        prompt = subject.prompt(point)
        optimize(model, OptimizeConfig(chosen, allow_skips=True))
        plain = _step_seconds(model, prompt, new_tokens)
        restore(model)
        release(device)
        for number in drafts:
            optimize(model, OptimizeConfig((*chosen, Speculative("ngram", number)), allow_skips=True))
            speculation: Any = vars(model)["_accel_speculation"]
            speculation.source = ForcedSource()
            for acceptance in acceptances:
                speculation.loop_type = forced_loop(acceptance)
                counters = speculation.counters
                counters.clear()
                per_token = _step_seconds(model, prompt, new_tokens)
                check = speculation.pace.costs[point.batch][0].of(1 + number)
                rows.append(
                    {
                        "point": str(point),
                        "drafts": number,
                        "forced": acceptance,
                        "plain_ms": 1e3 * plain,
                        "check_ms": check,
                        "tokens_per_step": counters["speculative: tokens"] / counters["speculative: rows in steps"],
                        "speed_up": plain / per_token,
                    }
                )
                keep(result)
            restore(model)
            release(device)
    return result


def _step_seconds(model: Any, prompt: torch.Tensor, new_tokens: int) -> float:
    """Seconds for each further token of every row: the best of three calls, the prompt's time taken off."""

    def seconds(count: int) -> float:
        best = float("inf")
        for _ in range(3):
            if prompt.is_cuda:
                torch.cuda.synchronize(prompt.device)
            begun = time.perf_counter()
            greedy.generate(model, prompt, count)
            if prompt.is_cuda:
                torch.cuda.synchronize(prompt.device)
            best = min(best, time.perf_counter() - begun)
        return best

    for _ in range(2 if prompt.is_cuda else 1):  # kernels, then graphs, which are recorded when met again
        greedy.generate(model, prompt, new_tokens)
    return (seconds(new_tokens) - seconds(1)) / (new_tokens - 1)

"""Driving an engine with a load, from one thread, and seeing what became of each request."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import AccelError
from .loads import Ask

PATIENCE = 180.0
"""Seconds without a token or an end of any request after which the rest count as lost."""


class LostError(AccelError):
    """Requests that the engine never answered; `answers` are those it did."""

    def __init__(self, lost: int, answers: list[Answer]) -> None:
        super().__init__(f"{lost} requests were not answered, and nothing came for {PATIENCE:g} s")
        self.answers = answers


class Watch:
    """An observer of the engine: hands ends of requests over to the driver, and keeps what steps were like."""

    def __init__(self) -> None:
        self.ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.last_sign = time.perf_counter()
        self.steps: list[Any] = []
        self.preemptions = 0
        self.guard_notes: list[str] = []

    def begin(self) -> None:
        """Forget what was seen so far. Nothing may be running."""
        self.steps, self.preemptions, self.guard_notes = [], 0, []

    def submitted(self, request: Any) -> None:
        pass

    def admitted(self, request: Any) -> None:
        self.last_sign = time.perf_counter()

    def token(self, request: Any, count: int, when: float) -> None:
        self.last_sign = when

    def preempted(self, request: Any) -> None:
        self.preemptions += 1

    def finished(self, request: Any, result: Any) -> None:
        self.last_sign = time.perf_counter()
        self.ended.put(result)

    def step(self, facts: Any) -> None:
        if facts.prompt_tokens:
            self.last_sign = time.perf_counter()
        self.steps.append(facts)

    def guard(self, stage: Any, detail: str) -> None:
        self.guard_notes.append(f"{stage}: {detail}")

    def decoding_rows(self) -> float | None:
        """Mean over the steps that decoded."""
        rows = [step.decoding_rows for step in self.steps if step.decoding_rows]
        return sum(rows) / len(rows) if rows else None

    def pages_peak(self) -> int | None:
        return max((step.pages_in_use for step in self.steps), default=None)


@dataclass(frozen=True)
class Job:
    """A request to be made."""

    ask: Ask
    prompt: list[int]


@dataclass(frozen=True)
class Answer:
    """What became of a job. Moments are `time.perf_counter()` seconds."""

    job: Job
    due: float
    """When its user wanted it: latencies count from here, not from when the driver or a window handed it over."""
    sent: float
    result: Any
    """The engine's Result, or None if it was refused at once."""
    error: Exception | None

    @property
    def ttft(self) -> float | None:
        first = None if self.result is None else self.result.times.first_token
        return None if first is None else first - self.due

    @property
    def latency(self) -> float | None:
        """End to end."""
        finished = None if self.result is None else self.result.times.finished
        return None if finished is None else finished - self.due

    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        times = [] if self.result is None else self.result.token_times
        return [after - before for before, after in itertools.pairwise(times)]


class _Driver:
    def __init__(self, engine: Any, watch: Watch) -> None:
        self._engine, self._watch = engine, watch
        self.answers: list[Answer] = []
        self._flying: dict[int, tuple[Job, float, float]] = {}
        watch.last_sign = time.perf_counter()

    def send(self, job: Job, due: float | None = None) -> bool:
        """False if the engine refused it at once."""
        sent = time.perf_counter()
        due = sent if due is None else due
        try:
            request = self._engine.submit(job.prompt, max_new_tokens=job.ask.new_tokens, do_sample=False)
        except AccelError as error:
            self.answers.append(Answer(job, due, sent, None, error))
            return False
        self._flying[request.id] = (job, due, sent)
        return True

    def next_end(self, until: float | None = None) -> bool:
        """Wait for the end of a request, or until a moment. False if none came before it."""
        while True:
            now = time.perf_counter()
            if until is not None and now >= until:
                return False
            wait = min(1.0, 1.0 if until is None else until - now)
            try:
                result = self._watch.ended.get(timeout=wait)
            except queue.Empty:
                if self._flying and time.perf_counter() - self._watch.last_sign > PATIENCE:
                    raise LostError(len(self._flying), self.answers) from None
                continue
            job, due, sent = self._flying.pop(result.id)
            self.answers.append(Answer(job, due, sent, result, result.error))
            return True

    @property
    def flying(self) -> int:
        return len(self._flying)


def closed_loop(engine: Any, watch: Watch, jobs: Sequence[Job], users: int) -> list[Answer]:
    """`users` users, each of whom sends the next of the jobs as soon as the last one ended. Answers in order of end.

    Raises LostError if the engine falls silent.
    """
    driver, waiting = _Driver(engine, watch), iter(jobs)

    def send_next() -> None:
        for job in waiting:
            if driver.send(job):
                return

    for _ in range(users):
        send_next()
    while driver.flying:
        driver.next_end()
        send_next()
    return driver.answers


def open_loop(
    engine: Any, watch: Watch, jobs: Sequence[Job], arrivals: Sequence[float], handed: Sequence[float]
) -> tuple[list[Answer], float]:
    """Job i is due `arrivals[i]` seconds after the start and submitted at `handed[i]`, whether or not others ended.

    Returns the answers, and the most seconds by which a job was submitted later than that.
    Raises LostError if the engine falls silent.
    """
    driver, start, late = _Driver(engine, watch), time.perf_counter(), 0.0
    for job, due, moment in zip(jobs, arrivals, handed, strict=True):
        while driver.next_end(until=start + moment):
            pass
        late = max(late, time.perf_counter() - start - moment)
        driver.send(job, start + due)
    while driver.flying:
        driver.next_end()
    return driver.answers, late

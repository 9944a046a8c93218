"""An engine under load: throughput and latencies at numbers of users, or at rates of arrival.

Closed loop: N users, each sends the next request when the last one ended. Open loop: Poisson arrivals that do not wait.
Latencies count from when a user wanted the request. A point whose requests were not all answered with exactly the
tokens asked for is wrong, and its times are not shown.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ..config import OptimizeConfig
from ..errors import AccelError
from . import greedy, latency_fit, static_batch, studies
from .accuracy import CLOSE_CHOICE
from .drive import Answer, Job, LostError, Watch, closed_loop, open_loop
from .environment import dtype_name, environment, resolve_device, resolve_dtype
from .generate import applied, release
from .loads import Ask, Mix, gathered, poisson
from .measure import peak_above_weights
from .record import Keep, forget
from .rows import ERROR, OK, WRONG
from .shapes import Point, Subject, load

CLOSED, OPEN, NONE = latency_fit.CLOSED, latency_fit.OPEN, "none"
SAMPLES = 3
"""Requests of a point that are computed once more by a single `generate`."""
WARM_OPEN = {"cuda": 128, "cpu": 8}
"""Requests at once before an open loop, whose rows nobody knows beforehand."""

CLOSE_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    """The arguments of `deepseek-accel bench stress`."""

    model: str
    mix: Mix
    load: str = CLOSED
    users: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Of the closed loop."""
    rates: tuple[float, ...] = ()
    """Requests per second of the open loop."""
    windows: tuple[float, ...] = (0.0,)
    """Milliseconds for which the open loop gathers requests before it hands them over."""
    requests: int | None = None
    """Per point; by default four per user, at least 16, and 256 of an open loop."""
    stock: bool = False
    split: tuple[int, ...] = ()
    """Prompt lengths at which a single request's prefill and decode are timed."""
    breakdown: int | None = None
    """Prompt tokens of a single request whose time is broken down."""
    max_batch: int | None = None
    max_pages: int | None = None
    prefill_tokens: int = 1024
    device: str = "auto"
    dtype: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.load not in (CLOSED, OPEN, NONE):
            raise AccelError(f"no such load: {self.load!r}. Use closed, open or none.")
        if self.load == CLOSED and (not self.users or min(self.users) < 1):
            raise AccelError("a closed loop needs numbers of users, 1 or more")
        if self.load == OPEN and (not self.rates or min(self.rates) <= 0):
            raise AccelError("an open loop needs rates: `--rate 1,2,4`, requests per second")
        if self.load != OPEN and (self.rates or self.windows != (0.0,)):
            raise AccelError("rates and windows belong to the open loop: `--load open`")
        if min(self.windows, default=-1) < 0:
            raise AccelError("windows are milliseconds, 0 or more")
        if self.requests is not None and self.requests < 1:
            raise AccelError("requests must be 1 or more")
        if self.stock and self.load == OPEN:
            raise AccelError("static batches have no arrivals: `--stock` goes with the closed loop")
        if self.load == NONE and not self.split and self.breakdown is None:
            raise AccelError("`--load none` leaves nothing to measure; give --split or --breakdown")
        if min((self.prefill_tokens, self.breakdown or 1, *self.split)) < 1:
            raise AccelError("numbers of tokens must be 1 or more")


@dataclass
class Row:
    """One point. What was not measured is None; distributions are `distribution` of milliseconds."""

    load: str
    users: int | None
    rate: float | None
    window_ms: float | None
    requests: int
    answered: int = 0
    errors: int = 0
    status: str = OK
    detail: str = ""
    seconds: float | None = None
    """From the first request to the last end, ramps included."""
    prompt_tokens: int = 0
    """Of the requests that were answered, as are the next."""
    new_tokens: int = 0
    new_tokens_per_second: float | None = None
    total_tokens_per_second: float | None = None
    """Prompt tokens included."""
    requests_per_second: float | None = None
    ttft_ms: dict[str, float] | None = None
    itl_ms: dict[str, float] | None = None
    """Of every gap between two tokens of a request."""
    e2e_ms: dict[str, float] | None = None
    preemptions: int = 0
    decoding_rows: float | None = None
    """Mean over decoding steps."""
    pages_peak: int | None = None
    peak_bytes_above_weights: int | None = None
    """GPU only."""
    late_ms: float | None = None
    """The most by which the driver handed a request over late: it counts in the latencies."""
    stock_tokens_per_second: float | None = None
    stock_ratio: float | None = None
    """Our new tokens per second divided by stock's."""
    e2e_each_ms: list[float] | None = None

    @property
    def of_load(self) -> float:
        return float(self.users or self.rate or 0)

    def __str__(self) -> str:
        if self.load == CLOSED:
            return f"{self.users} user(s)"
        return f"{self.rate:g} requests/s" + (f", window {self.window_ms:g} ms" if self.window_ms else "")


def distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    """Percentiles (linear between neighbours), mean and variance (ms^2) in milliseconds; None of nothing."""
    if not seconds:
        return None
    values = 1e3 * np.asarray(seconds)
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return {"p50": p50, "p95": p95, "p99": p99, "mean": float(values.mean()), "variance": float(values.var())}


def points(options: Options) -> list[Row]:
    """A row for each point, not measured yet."""
    if options.load == CLOSED:
        return [Row(CLOSED, n, None, None, options.requests or max(16, 4 * n)) for n in options.users]
    rates = options.rates if options.load == OPEN else ()
    return [Row(OPEN, None, r, w, options.requests or 256) for r in rates for w in options.windows]


def jobs_of(subject: Subject, asks: Sequence[Ask], seed: int) -> list[Job]:
    """Prompts of the asked lengths, no two alike."""
    if len({ask.prompt_tokens for ask in asks}) == 1:
        rows = subject.prompt(Point(len(asks), asks[0].prompt_tokens), seed).tolist()
        return [Job(ask, row) for ask, row in zip(asks, rows, strict=True)]
    return [Job(a, subject.prompt(Point(1, a.prompt_tokens), seed + i)[0].tolist()) for i, a in enumerate(asks)]


@contextlib.contextmanager
def engine_of(subject: Subject, options: Options, watch: Watch) -> Iterator[Any]:
    """The engine on the optimized model; requests end at their length only. Stock again afterwards."""
    from ..engine import Engine

    lossless = OptimizeConfig(OptimizeConfig.lossless().passes, allow_skips=True)
    with applied(subject.model, lossless), greedy.endless(subject.model):
        engine = Engine(
            subject.model, max_batch=options.max_batch, max_pages=options.max_pages,
            prefill_tokens=options.prefill_tokens, reuse_prefix=False, observer=watch,
        )  # fmt: skip
        try:
            yield engine
        finally:
            closing = threading.Thread(target=engine.close, kwargs={"cancel": True}, daemon=True)
            closing.start()
            closing.join(CLOSE_SECONDS)  # one that fell silent may not close either
            if closing.is_alive():
                raise AccelError(f"the engine did not close within {CLOSE_SECONDS:g} s")


class PointRun:
    """One point: its jobs, stock's time for them, and ours."""

    def __init__(self, subject: Subject, options: Options, row: Row, number: int) -> None:
        self.subject, self.options, self.row = subject, options, row
        seed = 1_000_003 * options.seed + 10_007 * (1 + number // len(options.windows))  # windows see the same requests
        self.jobs = jobs_of(subject, options.mix.asks(row.requests, seed), seed)
        self.seed = seed
        self.stock: static_batch.Batch | None = None

    def run_stock(self) -> dict[str, Any]:
        """The first jobs, one for each user, as one static batch."""
        batch, entry = static_batch.measure(self.subject, self.jobs[: self.row.users], self.row.requests)
        self.stock = batch
        return {"users": self.row.users} | entry

    def run(self, engine: Any, watch: Watch) -> None:
        """Fill the row."""
        row, device = self.row, self.subject.model.device
        self._warm_up(engine, watch)
        watch.begin()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        lost = ""
        try:
            answers = self._drive(engine, watch)
        except LostError as error:
            answers, lost = error.answers, str(error)
        fill(row, answers)
        row.preemptions, row.decoding_rows = watch.preemptions, watch.decoding_rows()
        row.pages_peak = watch.pages_peak()
        row.peak_bytes_above_weights = peak_above_weights(self.subject.model)
        if lost:
            row.status, row.detail = WRONG, lost
            return
        if row.status == OK:
            self._check_sample(answers)
        if row.status == OK and self.stock is not None and row.new_tokens_per_second:
            row.stock_tokens_per_second = self.stock.tokens_per_second
            row.stock_ratio = row.new_tokens_per_second / self.stock.tokens_per_second

    def _drive(self, engine: Any, watch: Watch) -> list[Answer]:
        if self.row.users is not None:
            return closed_loop(engine, watch, self.jobs, self.row.users)
        arrivals = poisson(self.row.rate or 0.0, len(self.jobs), self.options.seed)
        handed = gathered(arrivals, (self.row.window_ms or 0.0) / 1e3)
        answers, late = open_loop(engine, watch, self.jobs, arrivals, handed)
        self.row.late_ms = 1e3 * late
        return answers

    def _warm_up(self, engine: Any, watch: Watch) -> None:
        """Kernels, and graphs of every number of rows: as many requests at once, which end one after the other, and not
        before all of them decode: the engine may take up one prompt a step."""
        count = self.row.users or min(self.row.requests, WARM_OPEN.get(self.subject.model.device.type, 8))
        asks = self.options.mix.asks(count, self.seed + 1)
        short = [Ask(a.prompt_tokens, min(a.new_tokens, count + 3 + i % 13)) for i, a in enumerate(asks)]
        closed_loop(engine, watch, jobs_of(self.subject, short, self.seed + 5_000), count)

    def _check_sample(self, answers: Sequence[Answer]) -> None:
        """Compare with single `generate` of the same optimized model, and in fp32 with all of stock's batch.

        In 16 bits tokens may differ, but each must be a close choice."""
        row, model = self.row, self.subject.model
        exact = model.dtype == torch.float32
        by_job = {id(answer.job): answer.result.tokens for answer in answers}
        same, far = 0, 0.0
        for job in self.jobs[:SAMPLES]:
            prompt = torch.tensor([job.prompt], device=model.device)
            alone = greedy.generate(model, prompt, job.ask.new_tokens)[0, len(job.prompt) :].tolist()
            same += alone == (ours := by_job[id(job)])
            far = far if exact or alone == ours else max(far, greedy.furthest(model, prompt, ours))
        of = min(SAMPLES, len(self.jobs))
        row.detail = f"{same}/{of} as generate" + (f", within {far:.2g} of the best" if same < of and not exact else "")
        if (exact and same < of) or far > CLOSE_CHOICE:
            row.status = WRONG
        if exact and self.stock is not None and not self.stock.padded:
            batch = zip(self.jobs, self.stock.tokens, strict=False)
            equal = sum(tokens == by_job[id(job)] for job, tokens in batch)
            row.detail += f", {equal}/{len(self.stock.tokens)} as stock's"
            row.status = OK if row.status == OK and equal == len(self.stock.tokens) else WRONG


def fill(row: Row, answers: Sequence[Answer]) -> None:
    """Counts, rates and distributions of a point's answers; its status if something is missing."""
    good = [a for a in answers if a.error is None and a.result is not None]
    short = [a for a in good if len(a.result.tokens) != a.job.ask.new_tokens]
    row.answered, row.errors = len(good), sum(a.error is not None for a in answers)
    if row.errors:
        first = next(a.error for a in answers if a.error is not None)
        row.status, row.detail = ERROR, f"{row.errors} failed, first: {type(first).__name__}: {first}".splitlines()[0]
    if short:
        row.status = WRONG
        row.detail = f"{len(short)} requests did not have the tokens asked for"
    if len(answers) != row.requests:
        row.status, row.detail = WRONG, f"{row.requests - len(answers)} requests were not answered"
    if not good or row.status == WRONG:
        return
    row.seconds = max(a.result.times.finished for a in good) - min(a.due for a in answers)
    row.prompt_tokens = sum(a.job.ask.prompt_tokens for a in good)
    row.new_tokens = sum(len(a.result.tokens) for a in good)
    row.new_tokens_per_second = row.new_tokens / row.seconds
    row.total_tokens_per_second = (row.prompt_tokens + row.new_tokens) / row.seconds
    row.requests_per_second = len(good) / row.seconds
    latencies = [a.latency for a in good if a.latency is not None]
    row.ttft_ms = distribution([a.ttft for a in good if a.ttft is not None])
    row.itl_ms = distribution([gap for a in good for gap in a.gaps()])
    row.e2e_ms = distribution(latencies)
    row.e2e_each_ms = [round(1e3 * latency, 3) for latency in latencies]


def fits(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """`latency_fit.study` of P50 and P99 for each window that was measured at enough loads."""
    found = []
    for window in dict.fromkeys(row.window_ms for row in rows):
        own = sorted((r for r in rows if r.window_ms == window and r.e2e_each_ms), key=lambda r: r.of_load)
        loads = [row.of_load for row in own]
        for percentile in (50.0, 99.0) if len(set(loads)) >= latency_fit.LEAST_LOADS else ():
            study = latency_fit.study(rows[0].load, loads, [r.e2e_each_ms or [] for r in own], percentile)
            found.append({"window_ms": window} | study)
    return found


def run(
    options: Options,
    step: Callable[[str], None] = lambda text: None,
    subject: Subject | None = None,
    keep: Keep = forget,
) -> dict[str, Any]:
    """Measure every point: {"bench": "stress", "environment", "rows", "fits", "stock", "split", "breakdown", ...}.

    step: told what is measured next; keep: told the result so far after every point. Raises AccelError on options that
    do not fit the model. A point that fails says so in its row.
    """
    device = resolve_device(options.device) if subject is None else subject.model.device
    if subject is None:
        step(f"loading {options.model}")
        subject = load(options.model, device, resolve_dtype(options.dtype, device))
    require_positions(subject, options)
    result: dict[str, Any] = {
        "bench": "stress", "environment": environment(device), "model": options.model,
        "dtype": dtype_name(subject.model.dtype), "load": options.load, "mix": options.mix.describe(),
        "seed": options.seed, "prefill_tokens": options.prefill_tokens, "max_batch": options.max_batch,
        "max_pages": options.max_pages, "rows": [], "stock": [], "fits": [],
    }  # fmt: skip
    runs = [PointRun(subject, options, row, i) for i, row in enumerate(points(options))]
    # On a CPU stock and engine take turns, so that whatever else the machine does meets both. On a GPU a turn would
    # capture graphs anew.
    turns = [[point] for point in runs] if options.stock and device.type == "cpu" and runs else [runs]
    if options.stock and options.split:
        result["stock_split"] = studies.stock_split(subject, options.split, step)
    watch = Watch()
    for turn in turns:
        if options.stock:
            _run_stock(turn, result, step, keep)
        with engine_of(subject, options, watch) as engine:
            whole = all(_run_point(point, engine, watch, result, step, keep) for point in turn)
            if turn is turns[-1] and whole:
                result["fits"] = fits([point.row for point in runs]) if runs else []
                _run_studies(engine, watch, subject, options, result, step, keep)
        if not whole:
            break
    return result


def _run_stock(turn: Sequence[PointRun], result: dict[str, Any], step: Callable[[str], None], keep: Keep) -> None:
    for point in turn:
        step(f"stock, batch of {point.row.users}")
        result["stock"].append(point.run_stock())
        keep(result)
        release(point.subject.model.device)


def _run_point(
    point: PointRun, engine: Any, watch: Watch, result: dict[str, Any], step: Callable[[str], None], keep: Keep
) -> bool:
    """False if the engine lost requests, or may still have some: it is not measured further."""
    row = point.row
    step(f"{point.options.model} {row}")
    try:
        point.run(engine, watch)
    except Exception as error:  # what was measured before is kept
        row.status = ERROR
        row.detail = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
    result["rows"].append(asdict(row))
    keep(result)
    return row.answered + row.errors == row.requests


def _run_studies(
    engine: Any, watch: Watch, subject: Subject, options: Options, result: dict[str, Any],
    step: Callable[[str], None], keep: Keep,
) -> None:  # fmt: skip
    if options.split:
        result["split"] = studies.split(engine, watch, subject, options.split, step)
        keep(result)
    if options.breakdown is not None:
        step(f"one request of {options.breakdown} tokens")
        result["breakdown"] = studies.breakdown(engine, watch, subject, options.breakdown)


def require_positions(subject: Subject, options: Options) -> None:
    """Raise AccelError if a request could be longer than the model's positions."""
    limit = getattr(subject.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    longest = 0 if options.load == NONE else options.mix.longest()
    longest = max(longest, *(n + studies.NEW_TOKENS for n in (*options.split, options.breakdown or 0)))
    if limit is not None and longest > limit:
        raise AccelError(
            f"requests may hold up to {longest:,} tokens, and {options.model} has {limit:,} positions. Ask for less "
            "with --prompt-tokens and --new-tokens (of a chat mix they are means), --split or --breakdown."
        )


def exit_code(rows: Sequence[dict[str, Any]]) -> int:
    """3 if a point was wrong, 1 if requests failed or nothing was measured where points were asked for, else 0."""
    states = {row["status"] for row in rows}
    return 3 if WRONG in states else 1 if ERROR in states else 0

"""What an engine does, as Prometheus metrics; and spans of its requests, where OpenTelemetry is installed.

`Metrics` is an observer of the engine: it only adds to numbers. What Prometheus sees is made when it asks.
docs/metrics.md lists every metric.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .. import api
from ..errors import AccelError
from .spans import Spans, spans_if_installed

if TYPE_CHECKING:
    from .observer import StepFacts
    from .requests import Request, Result

PREFIX = "deepseek_accel_"
REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)
REPLAYS = {
    "step": "cuda_graphs: replays",
    "prompt": "cuda_graphs: prompts replayed",
    "speculative": "cuda_graphs: speculative runs replayed",
}
CAPTURES = {"step": "cuda_graphs: captured", "prompt": "cuda_graphs: prompts captured"}
DRAFTED, ACCEPTED = "speculative: drafted tokens", "speculative: accepted tokens"
MAX_KINDS = 30
"""Kinds of errors with a series of their own; those that come later are "other"."""
_FINISHED = ("eos", "stop", "length")


class Histogram:
    """Counts by upper bound, and the sum. Cheap enough for every token of every row."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """`times` observations of `value`; one on a bound is below it, as in Prometheus."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as the client library takes them."""
        found, so_far = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            found.append((bound, float(so_far)))
        return found


class Metrics:
    """An observer that counts: `Engine(model, observer=Metrics(model))`.

    model: whose graphs, experts and guesses are shown too; None leaves those out. registry: a `CollectorRegistry` of
    prometheus-client that holds no other `Metrics`; None makes one, so that several engines of a process do not
    clash. spans: True needs OpenTelemetry, None uses it if it is installed, False does not; `tracer_provider` is its
    provider, or None for the global one. experts_every: seconds between two looks at how many experts are read, each of
    which waits for the device, on the engine's thread; only where `AdaptiveTopK` counts them.
    Raises AccelError if prometheus-client is missing, or the registry has such metrics already.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        registry: Any = None,
        spans: bool | None = None,
        tracer_provider: Any = None,
        experts_every: float = 10.0,
    ) -> None:
        client = _client()
        self._lock = threading.Lock()
        self.request_seconds, self.queue_seconds = Histogram(REQUEST_SECONDS), Histogram(FIRST_TOKEN_SECONDS)
        self.first_token_seconds, self.token_seconds = Histogram(FIRST_TOKEN_SECONDS), Histogram(TOKEN_SECONDS)
        self.step_seconds = Histogram(TOKEN_SECONDS)
        self.counts: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.stages: Counter[str] = Counter()
        self._stage = 0
        self._last: StepFacts | None = None
        self._last_token: dict[int, float] = {}
        self._model, self._experts_every, self._experts_when = model, experts_every, time.monotonic()
        self._gating: dict[str, Any] = {}
        self._has_gating = model is not None and bool(api.report(model).gating)
        self._spans: Spans | None = None
        if spans is not False:
            self._spans = Spans(tracer_provider) if spans else spans_if_installed(tracer_provider)
        self.registry = client.CollectorRegistry() if registry is None else registry
        try:
            self.registry.register(_Collector(self))
        except ValueError as error:
            raise AccelError(
                "this registry has the metrics of an engine already: give each `Metrics` its own, or none"
            ) from error
        self._server: tuple[Any, threading.Thread] | None = None

    # The observer, on the engine's thread

    def submitted(self, request: Request) -> None:
        with self._lock:
            self.counts["submitted"] += 1

    def admitted(self, request: Request) -> None:
        """Also after a preemption; the time in the queue is that before the first."""
        with self._lock:
            self.counts["admissions"] += 1

    def token(self, request: Request, count: int, when: float) -> None:
        with self._lock:
            self.counts["tokens"] += count
            before = self._last_token.get(request.id)
            self._last_token[request.id] = when
            if before is None:
                self.first_token_seconds.observe(when - request.times.submitted)
                before, count = when, count - 1  # the others of the first came with it
            if count > 0:
                self.token_seconds.observe((when - before) / count, count)

    def preempted(self, request: Request) -> None:
        with self._lock:
            self.counts["preemptions"] += 1

    def finished(self, request: Request, result: Result) -> None:
        times = result.times
        with self._lock:
            self._last_token.pop(result.id, None)
            self.finish_reasons[result.finish_reason] += 1
            self.counts["prompt_tokens"] += result.num_prompt_tokens
            self.counts["cached_tokens"] += result.num_cached_tokens
            if times.admitted is not None:
                self.queue_seconds.observe(times.admitted - times.submitted)
            if times.finished is not None and result.finish_reason in _FINISHED:
                self.request_seconds.observe(times.finished - times.submitted)
            if result.error is not None:
                kind = type(result.error).__name__
                known = kind in self.errors or len(self.errors) < MAX_KINDS
                self.errors[kind if known else "other"] += 1
        if self._spans is not None:
            self._spans.record(result)

    def step(self, facts: StepFacts) -> None:
        with self._lock:
            self._last = facts
            self.counts["steps"] += 1
            self.counts["computed_prompt_tokens"] += facts.prompt_tokens
            self.step_seconds.observe(facts.seconds)
        now = time.monotonic()
        if self._has_gating and now - self._experts_when >= self._experts_every:
            self._experts_when = now
            self.look_at_experts()

    def guard(self, stage: Any, detail: str) -> None:
        name = str(getattr(stage, "name", stage)).lower()
        with self._lock:
            self.stages[name] += 1
            self._stage = int(getattr(stage, "value", 0))

    # Whoever asks, on any thread

    def look_at_experts(self) -> None:
        """Ask the device how many experts were read, now. Waits for it."""
        self._gating = api.report(self._model).gating

    def text(self) -> str:
        """All metrics in Prometheus' text format."""
        text: str = _client().generate_latest(self.registry).decode()
        return text

    def serve(self, port: int = 0, addr: str = "127.0.0.1") -> int:
        """Answer at http://addr:port/metrics until `close`. port: 0 takes a free one. Returns the port.

        Whoever reaches the address can read the metrics; they hold no prompts and no texts.
        Raises AccelError if the port is taken or none, or if this serves already.
        """
        if self._server is not None:
            raise AccelError("these metrics are served already; `close()` first")
        try:
            server, thread = _client().start_http_server(port, addr=addr, registry=self.registry)
        except (OSError, OverflowError, TypeError) as error:  # the last two: no port at all
            raise AccelError(f"cannot serve metrics at {addr}:{port}: {error}. Port 0 takes a free one.") from error
        self._server = (server, thread)
        return int(server.server_port)

    def close(self) -> None:
        """Stop serving. Counting goes on."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def families(self) -> Iterator[Any]:
        """Every metric with its samples, as prometheus-client takes them."""
        core = _client().core
        with self._lock:
            families = [*self._histograms(core), *self._counters(core), *self._gauges(core)]
        yield from families
        if self._model is not None:
            yield from _model_families(core, dict(api.counters(self._model)), self._gating)

    def _histograms(self, core: Any) -> Iterator[Any]:
        for name, what, histogram in (
            ("request_latency", "From submit to the last token, of requests that finished", self.request_seconds),
            ("queue_time", "From submit to the first admission", self.queue_seconds),
            ("time_to_first_token", "From submit until the host knows the first token", self.first_token_seconds),
            ("inter_token_latency", "Between tokens as the host knows them", self.token_seconds),
            ("step_duration", "One step of the engine", self.step_seconds),
        ):
            yield core.HistogramMetricFamily(
                f"{PREFIX}{name}_seconds", f"{what}.", buckets=histogram.cumulative(), sum_value=histogram.total
            )

    def _counters(self, core: Any) -> Iterator[Any]:
        for name, key, what in (
            ("requests_submitted", "submitted", "Requests that reached the engine"),
            ("prompt_tokens", "prompt_tokens", "Tokens of the prompts of requests that ended"),
            ("cached_prompt_tokens", "cached_tokens", "Of prompt tokens, those found in kept pages"),
            ("generated_tokens", "tokens", "New tokens"),
            ("computed_prompt_tokens", "computed_prompt_tokens", "Prompt tokens computed, again after a preemption"),
            ("steps", "steps", "Steps of the engine"),
            ("admissions", "admissions", "Requests given a row, again after a preemption"),
            ("preemptions", "preemptions", "Rows given up so that others could go on"),
        ):
            yield core.CounterMetricFamily(PREFIX + name, f"{what}.", value=self.counts[key])
        for name, label, what, counts in (
            ("requests", "finish_reason", "Requests that ended", self.finish_reasons),
            ("errors", "kind", "Requests that ended with an error, by its class", self.errors),
            ("guard_steps", "stage", "What the memory guard decided", self.stages),
        ):
            yield _labelled(core.CounterMetricFamily(PREFIX + name, f"{what}.", labels=[label]), counts)

    def _gauges(self, core: Any) -> Iterator[Any]:
        yield core.GaugeMetricFamily(f"{PREFIX}guard_stage", "Stage of the memory guard, 0 is normal.", self._stage)
        for name, what, field in (
            ("requests_waiting", "Requests without a row", "waiting"),
            ("requests_running", "Requests with a row", "running"),
            ("decoding_rows", "Rows of the last decoding step", "decoding_rows"),
            ("pages_in_use", "Pages of the cache that hold something", "pages_in_use"),
            ("pages_limit", "Pages there may be", "pages_total"),
            ("memory_reserved_bytes", "Bytes in use as the memory guard reads them", "bytes_reserved"),
            ("memory_limit_bytes", "Bytes that may be used at most", "bytes_limit"),
        ):
            value = 0 if self._last is None else getattr(self._last, field)
            yield core.GaugeMetricFamily(PREFIX + name, f"{what}.", value)


class _Collector:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Any]:
        return self._metrics.families()

    describe = collect
    """The names, so that a second one in the same registry is refused."""


def _model_families(core: Any, counters: dict[str, int], gating: dict[str, Any]) -> Iterator[Any]:
    """What the optimized model counts itself, since `optimize` and in all its calls."""
    for name, what, keys in (
        ("graph_replays", "CUDA graphs replayed", REPLAYS),
        ("graph_captures", "CUDA graphs captured", CAPTURES),
    ):
        counts = {label: counters.get(key, 0) for label, key in keys.items()}
        yield _labelled(core.CounterMetricFamily(PREFIX + name, f"{what}.", labels=["kind"]), counts)
    drafted, accepted = counters.get(DRAFTED, 0), counters.get(ACCEPTED, 0)
    yield core.CounterMetricFamily(f"{PREFIX}drafted_tokens", "Tokens guessed.", value=drafted)
    yield core.CounterMetricFamily(f"{PREFIX}accepted_tokens", "Guessed tokens that stood.", value=accepted)
    if drafted:
        yield core.GaugeMetricFamily(
            f"{PREFIX}acceptance_ratio", "Accepted of drafted tokens since optimize.", accepted / drafted
        )
    if gating.get("experts_per_token") is not None:
        yield core.GaugeMetricFamily(
            f"{PREFIX}experts_per_token", "Mean experts a token kept.", gating["experts_per_token"]
        )
    read = [value for value in gating.get("experts_read_per_step_by_layer", ()) if value is not None]
    if read:
        yield core.GaugeMetricFamily(
            f"{PREFIX}experts_read_per_step", "Mean distinct experts a step read in a layer.", sum(read) / len(read)
        )


def _labelled(family: Any, counts: dict[str, int] | Counter[str]) -> Any:
    for label, count in counts.items():
        family.add_metric([label], count)
    return family


def _client() -> Any:
    try:
        import prometheus_client.core
    except ImportError as error:
        raise AccelError('metrics need prometheus-client: pip install "deepseek-accel[serve]"') from error
    return prometheus_client

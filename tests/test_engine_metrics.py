"""Metrics of an engine as Prometheus reads them over HTTP, and spans as OpenTelemetry's SDK collects them."""

import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import deepseek_accel
from deepseek_accel import AccelError, AdaptiveTopK, api, optimize, restore
from deepseek_accel.engine import metrics as module
from deepseek_accel.engine.guard import Stage
from deepseek_accel.engine.metrics import MAX_KINDS, Histogram, Metrics
from deepseek_accel.engine.observer import StepFacts
from deepseek_accel.engine.requests import Request
from deepseek_accel.models import load_tiny

ROOT = Path(deepseek_accel.__file__).parent


def begin(metrics, number, submitted, prompt=10):
    request = Request(number, None, lambda request: None)
    request.times = request.times.__class__(submitted)
    request.num_prompt_tokens = prompt
    metrics.submitted(request)
    return request


def give(metrics, request, when, count=1):
    for token in range(count):
        request.add(token, when)
    metrics.token(request, count, when)


def end(metrics, request, reason="length", error=None, cached=0, preemptions=0, finished=None):
    result = request.finish(reason, error, cached, preemptions)
    if finished is not None:
        object.__setattr__(result, "times", result.times.__class__(**{**vars(result.times), "finished": finished}))
    metrics.finished(request, result)
    return result


def admit(metrics, request, when):
    request.times = request.times.__class__(**{**vars(request.times), "admitted": when})
    metrics.admitted(request)


def samples(text):
    """(name, labels) -> value, of what a scrape says; every family must have a help text."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith("."), family.name
        for sample in family.samples:
            key = (sample.name.removeprefix("deepseek_accel_"), tuple(sorted(sample.labels.items())))
            assert key not in found and sample.name.startswith("deepseek_accel_")
            found[key] = sample.value
    return found


def scrape(port, route="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{route}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return samples(answer.read().decode())


def value(found, name, **labels):
    return found[name, tuple(sorted(labels.items()))]


def run_some(metrics):
    """Three requests: one answers, one fails, one is cancelled in the queue."""
    first = begin(metrics, 1, 100.0, prompt=64)
    admit(metrics, first, 100.5)
    give(metrics, first, 100.75)
    give(metrics, first, 100.80)
    metrics.preempted(first)
    metrics.admitted(first)
    give(metrics, first, 100.85, count=3)
    second = begin(metrics, 2, 101.0)
    admit(metrics, second, 101.0)
    third = begin(metrics, 3, 102.0)
    metrics.step(StepFacts(0.004, 2, 64, 1, 2, 7, 20, 900, 1_000))
    metrics.guard(Stage.EVICT_PREFIXES, "96 %")
    metrics.guard(Stage.LOWER_ADMISSION, "96 %")
    end(metrics, first, "eos", cached=16, preemptions=1, finished=101.0)
    end(metrics, second, "error", ValueError("no"), finished=101.0)
    end(metrics, third, "cancelled", finished=103.0)
    metrics.step(StepFacts(0.002, 0, 0, 0, 0, 0, 20, 500, 1_000))


def test_a_scrape_over_http():
    with Metrics(spans=False) as metrics:
        port = metrics.serve()
        before = scrape(port)
        assert value(before, "generated_tokens_total") == 0
        run_some(metrics)
        found = scrape(port)
        assert found == samples(metrics.text())
    for name, expected in {
        "requests_submitted_total": 3,
        "prompt_tokens_total": 84,
        "cached_prompt_tokens_total": 16,
        "generated_tokens_total": 5,
        "computed_prompt_tokens_total": 64,
        "steps_total": 2,
        "admissions_total": 3,
        "preemptions_total": 1,
        "requests_waiting": 0,
        "pages_limit": 20,
        "memory_reserved_bytes": 500,
        "memory_limit_bytes": 1_000,
        "guard_stage": 2,
        "time_to_first_token_seconds_count": 1,
        "time_to_first_token_seconds_sum": 0.75,
        "inter_token_latency_seconds_count": 4,
        "inter_token_latency_seconds_sum": 0.1,
        "queue_time_seconds_count": 2,
        "queue_time_seconds_sum": 0.5,
        "request_latency_seconds_count": 1,
        "request_latency_seconds_sum": 1.0,
        "step_duration_seconds_sum": 0.006,
    }.items():
        assert value(found, name) == pytest.approx(expected), name
    assert value(found, "requests_total", finish_reason="eos") == 1
    assert value(found, "requests_total", finish_reason="cancelled") == 1
    assert value(found, "errors_total", kind="ValueError") == 1
    assert value(found, "guard_steps_total", stage="lower_admission") == 1
    assert (
        value(found, "inter_token_latency_seconds_bucket", le="0.02") == 3
    )  # three that came together, 0.05 s after the second
    assert value(found, "inter_token_latency_seconds_bucket", le="0.015") == 0
    assert value(found, "time_to_first_token_seconds_bucket", le="0.5") == 0
    assert value(found, "time_to_first_token_seconds_bucket", le="1.0") == 1
    assert not metrics._last_token  # nothing is kept of requests that ended


def test_gauges_show_the_last_step():
    metrics = Metrics(spans=False)
    metrics.step(StepFacts(0.004, 5, 64, 3, 6, 7, 20, 900, 1_000))
    found = samples(metrics.text())
    assert [value(found, name) for name in ("requests_waiting", "requests_running", "decoding_rows")] == [3, 6, 5]
    assert (value(found, "pages_in_use"), value(found, "memory_reserved_bytes")) == (7, 900)


def test_histograms_count_as_prometheus_does():
    from prometheus_client import Histogram as Theirs
    from prometheus_client import generate_latest

    registry, ours = CollectorRegistry(), Histogram((0.1, 0.5, 2.0))
    theirs = Theirs("x", "y", buckets=ours.bounds, registry=registry)
    for seen in (0.0, 0.1, 0.1000001, 0.5, 1.9, 2.0, 2.1, 500):
        ours.observe(seen)
        theirs.observe(seen)
    expected = [
        (sample.labels["le"], sample.value)
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name == "x_bucket"
    ]
    assert ours.cumulative() == expected


def test_two_engines_in_a_process_do_not_clash():
    with Metrics(spans=False) as one, Metrics(spans=False) as other:
        ports = one.serve(), other.serve()
        run_some(one)
        assert [value(scrape(port), "generated_tokens_total") for port in ports] == [5, 0]
        with pytest.raises(AccelError, match="served already"):
            one.serve()
        with pytest.raises(AccelError, match="cannot serve"):
            Metrics(spans=False).serve(ports[0])
        for port in ("9100", 70_000):
            with pytest.raises(AccelError, match="cannot serve"):
                Metrics(spans=False).serve(port)
    one.close()
    with pytest.raises(OSError):
        scrape(ports[0])
    with Metrics(spans=False) as third:
        assert third.serve(ports[0]) == ports[0]  # it was let go


def test_a_registry_holds_one():
    registry = CollectorRegistry()
    Metrics(registry=registry, spans=False)
    with pytest.raises(AccelError, match="its own"):
        Metrics(registry=registry, spans=False)


def test_serving_leaves_no_thread():
    before = threading.active_count()
    with Metrics(spans=False) as metrics:
        scrape(metrics.serve())
        assert threading.active_count() > before
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread of the last answer
    assert threading.active_count() == before


def test_kinds_of_errors_are_bounded():
    metrics = Metrics(spans=False)
    for i in range(2 * MAX_KINDS):
        request = begin(metrics, i, 0.0)
        end(metrics, request, "error", type(f"Error{i}", (Exception,), {})())
    found = samples(metrics.text())
    kinds = [key for key in found if key[0] == "errors_total"]
    assert len(kinds) == MAX_KINDS + 1 and value(found, "errors_total", kind="other") == MAX_KINDS


def test_scrapes_while_counting_are_consistent():
    metrics, stop = Metrics(spans=False), threading.Event()

    def work():
        number = 0
        while not stop.is_set():
            number += 1
            request = begin(metrics, number, 0.0)
            give(metrics, request, 0.25)
            give(metrics, request, 0.5)
            end(metrics, request)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(100):
            found = samples(metrics.text())
            count = value(found, "inter_token_latency_seconds_count")
            assert value(found, "inter_token_latency_seconds_sum") == 0.25 * count
            assert 0 <= value(found, "time_to_first_token_seconds_count") - count <= 1
    finally:
        stop.set()
        thread.join()
    assert count > 0


def test_what_the_model_counts():
    model, tokenizer = load_tiny(dtype="float32")
    optimize(model, {"attention": {}, "experts": {}, "kv_cache": {}, "layers": {}, "speculative": {"draft": "ngram"}})
    metrics = Metrics(model, spans=False)
    assert "acceptance_ratio" not in metrics.text()
    prompt = tokenizer("a = 1\nb = 1\na = 1\nb = 1\na = 1\nb =", return_tensors="pt")
    model.generate(**prompt, max_new_tokens=24, do_sample=False)
    found, counted = samples(metrics.text()), deepseek_accel.report(model).counters
    drafted, accepted = counted["speculative: drafted tokens"], counted["speculative: accepted tokens"]
    assert drafted > 0
    assert value(found, "drafted_tokens_total") == drafted and value(found, "accepted_tokens_total") == accepted
    assert value(found, "acceptance_ratio") == accepted / drafted
    assert value(found, "graph_replays_total", kind="step") == 0
    api.counters(model)["cuda_graphs: replays"] += 7
    assert value(samples(metrics.text()), "graph_replays_total", kind="step") == 7
    restore(model)
    assert value(samples(metrics.text()), "graph_replays_total", kind="step") == 0


def test_experts_that_are_read():
    model, tokenizer = load_tiny(dtype="float32")
    sensitivity = deepseek_accel.calibrate_gates(model, ["def f(x):\n    return x + 1\n" * 20], tokenizer=tokenizer)
    optimize(model, [AdaptiveTopK(0.75, sensitivity=sensitivity)])
    metrics = Metrics(model, spans=False, experts_every=0)
    assert "experts_per_token" not in metrics.text()  # nothing ran yet
    model.generate(**tokenizer("def g(", return_tensors="pt"), max_new_tokens=4)
    assert "experts_per_token" not in metrics.text()  # a scrape asks no device
    metrics.step(StepFacts(0.004, 1, 0, 0, 1, 1, 20, 0, 0))
    found, gating = samples(metrics.text()), deepseek_accel.report(model).gating
    assert value(found, "experts_per_token") == pytest.approx(gating["experts_per_token"])
    layers = gating["experts_read_per_step_by_layer"]
    assert value(found, "experts_read_per_step") == pytest.approx(sum(layers) / len(layers))


def test_the_counters_it_shows_are_counted_somewhere():
    names = {*module.REPLAYS.values(), *module.CAPTURES.values(), module.DRAFTED, module.ACCEPTED}
    source = "".join(path.read_text() for path in (ROOT / "generation").rglob("*.py"))
    assert [name for name in names if f'"{name}"' not in source] == []


def test_the_page_lists_every_metric_and_no_other():
    """Those of a model that guesses and leaves out experts too."""
    core = module._client().core
    counters = {module.DRAFTED: 4, module.ACCEPTED: 2}
    gating = {"experts_per_token": 3.0, "experts_read_per_step_by_layer": [None, 5.0]}
    metrics = Metrics(spans=False)
    families = [*metrics.families(), *module._model_families(core, counters, gating)]
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    page = (ROOT.parent / "docs" / "metrics.md").read_text()
    assert names == set(re.findall(r"`(deepseek_accel_\w+)`", page)) and len(names) > 25


def test_a_token_costs_little():
    metrics = Metrics(spans=False)
    request = begin(metrics, 1, 0.0)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for i in range(1_000):
            metrics.token(request, 1, i * 0.01)
        best = min(best, (time.perf_counter() - start) / 1_000)
    assert best < 20e-6  # measured below 2 microseconds; 128 rows in a step of 10 ms


@pytest.mark.parametrize("missing", ["prometheus_client", "opentelemetry"])
def test_what_is_missing_is_said(monkeypatch, missing):
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "prometheus_client":
        with pytest.raises(AccelError, match=r"pip install \"deepseek-accel\[serve\]\""):
            Metrics()
    else:
        with pytest.raises(AccelError, match="opentelemetry-api"):
            Metrics(spans=True)
        run_some(Metrics())  # by default there are none then


def test_importing_it_loads_neither():
    code = (
        "import sys, deepseek_accel.engine.metrics; "
        "print([m for m in sys.modules if m.split('.')[0] in ('prometheus_client', 'opentelemetry', 'triton')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert run.stdout.strip() == "[]"


def collected():
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter


def test_a_span_for_every_request_with_its_phases():
    provider, exporter = collected()
    run_some(Metrics(tracer_provider=provider))
    spans = exporter.get_finished_spans()
    roots = [span for span in spans if span.parent is None]
    assert Counter(span.name.removeprefix("deepseek_accel.") for span in spans) == {
        "request": 3, "queue": 3, "prefill": 2, "decode": 1,
    }  # fmt: skip
    assert len({span.context.trace_id for span in spans}) == 3
    first, second, third = sorted(roots, key=lambda span: span.attributes["deepseek_accel.request_id"])
    assert dict(first.attributes) == {
        "gen_ai.usage.input_tokens": 64,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("eos",),
        "deepseek_accel.request_id": 1,
        "deepseek_accel.cached_tokens": 16,
        "deepseek_accel.preemptions": 1,
    }
    assert first.end_time - first.start_time == pytest.approx(1e9, abs=1e3)
    children = {span.name: span for span in spans if span.parent and span.parent.span_id == first.context.span_id}
    lengths = [(children[f"deepseek_accel.{name}"]) for name in ("queue", "prefill", "decode")]
    assert [(s.end_time - s.start_time) / 1e9 for s in lengths] == pytest.approx([0.5, 0.25, 0.25], abs=1e-5)
    assert not second.status.is_ok and "no" in second.status.description and second.events[0].name == "exception"
    assert first.status.status_code.name == third.status.status_code.name == "UNSET"


def test_span_times_are_the_worlds():
    provider, exporter = collected()
    metrics = Metrics(tracer_provider=provider)
    before = time.time_ns()
    request = begin(metrics, 1, time.perf_counter())
    end(metrics, request)
    after = time.time_ns()
    (span,) = [span for span in exporter.get_finished_spans() if span.parent is None]
    assert before - 5_000_000 <= span.start_time <= span.end_time <= after + 5_000_000


def test_nobody_records_and_nothing_is_made():
    provider, exporter = collected()
    run_some(Metrics())  # the global provider, which nobody has set
    run_some(Metrics(spans=False, tracer_provider=provider))
    assert not exporter.get_finished_spans()

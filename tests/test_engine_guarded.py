"""An engine with a memory guard and with metrics: what is decided is done, counted and told, and no request pays."""

import functools
import gc
import logging
import threading
import time
from collections import Counter

import pytest
import torch
from test_engine_metrics import samples, scrape, value

from deepseek_accel import AccelError, KVCache, models, optimize
from deepseek_accel.cache import Window
from deepseek_accel.engine import Engine
from deepseek_accel.engine.guard import MemoryGuard, Stage
from deepseek_accel.engine.metrics import Metrics
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.testing import tiny_model

PAGE = 16
LIMIT = 100 << 40
FULL, BAND, EMPTY = 96 << 40, 92 << 40, 1 << 40


@functools.cache
def tiny(**cache):
    passes = {name: {} for name in PASSES} | {"kv_cache": {"page_size": PAGE, **cache}, "allow_skips": True}
    return optimize(tiny_model("deepseek_v3"), passes)


class Budget:
    """Bytes in use as the test says, and how many rows ran when the guard asked."""

    def __init__(self, used=EMPTY):
        self.used = used

    def __call__(self):
        return self.used, LIMIT


class Seen(Metrics):
    """Metrics that also note the rows of every step, and what the guard did."""

    def __init__(self, model):
        super().__init__(model, spans=False)
        self.rows, self.said = [], []

    def step(self, facts):
        super().step(facts)
        self.rows.append((facts.running, facts.bytes_reserved, facts.bytes_limit))

    def guard(self, stage, detail):
        super().guard(stage, detail)
        self.said.append((stage, detail))


def alone(model, prompt, new=12):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    return out[0, len(prompt) :].tolist()


def prompts(count, length=20):
    return [[3 + (7 * i + j * (i + 1)) % 120 for j in range(length + i % 5)] for i in range(count)]


def until(what, seconds=20):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


def test_short_memory_lowers_the_rows_and_recovers(caplog):
    model, budget = tiny(), Budget(FULL)
    guard, seen = MemoryGuard(patience=2, calm=2, read=budget), Seen(model)
    asked = prompts(24)
    with (
        caplog.at_level(logging.INFO, "deepseek_accel.engine.guard"),
        Engine(model, guard=guard, observer=seen, max_batch=8) as engine,
    ):
        requests = [engine.submit(prompt, max_new_tokens=12, do_sample=False) for prompt in asked]
        until(lambda: guard.admitted == 1)
        low = len(seen.rows)
        until(lambda: len(seen.rows) > low + 30)
        assert max(rows for rows, _, _ in seen.rows[low + 20 : low + 30]) == 1  # who ran went on, nobody new came
        budget.used = EMPTY
        results = [request.result(60) for request in requests]
        more = engine.generate(prompts(30), max_new_tokens=12, do_sample=False)
        until(lambda: engine.generate([[3, 4]], max_new_tokens=4)[0].error or guard.stage is Stage.NORMAL)
    assert [result.tokens for result in results] == [alone(model, prompt) for prompt in asked]
    assert not any(result.num_preemptions for result in results) and not any(result.error for result in more)
    assert guard.admitted == 8 and max(rows for rows, _, _ in seen.rows[low:]) > 1
    told = [stage for stage, detail in seen.said if "rows admitted" in detail]
    assert len(told) == guard.counts["evict_prefixes"] + guard.counts["lower_admission"] + guard.counts["recover"]
    assert told[:2] == [Stage.EVICT_PREFIXES, Stage.LOWER_ADMISSION] and told[-1] is Stage.NORMAL
    assert len(caplog.records) == len(told)  # each step logged
    assert all(limit == LIMIT and used <= FULL for _, used, limit in seen.rows)
    assert sum(seen.stages.values()) == len(seen.said)  # and counted


def test_short_memory_gives_kept_prefixes_up():
    model, budget = tiny(), Budget()
    guard = MemoryGuard(patience=1_000, read=budget)
    prompt = prompts(1, 64)[0]
    with Engine(model, guard=guard) as engine:
        engine.generate([prompt], max_new_tokens=2)
        assert engine.facts()["pages_kept"] > 0
        assert engine.generate([prompt], max_new_tokens=2)[0].num_cached_tokens > 0
        budget.used = FULL
        engine.generate([[3, 4, 5]], max_new_tokens=4)
        assert guard.stage is Stage.EVICT_PREFIXES and engine.facts()["pages_evicted"] > 0
        assert engine.generate([prompt], max_new_tokens=2)[0].num_cached_tokens == 0


def test_shrinking_is_for_requests_that_begin_later():
    """Those that run end as without a guard; those after them are stored in FP8, until memory is plenty again."""
    model, budget = tiny(), Budget()
    guard = MemoryGuard(shrink="fp8_e4m3", patience=1, calm=1, read=budget)
    asked = prompts(12, 50)
    exact, rounded = ([alone(each, prompt, 40) for prompt in asked] for each in (tiny(), tiny(dtype="fp8_e4m3")))
    assert exact != rounded
    long = [alone(model, prompt, 120) for prompt in asked[:4]]
    with Engine(model, guard=guard, max_batch=4) as engine:
        options = {"max_new_tokens": 40, "do_sample": False}
        first = [engine.submit(prompt, max_new_tokens=120, do_sample=False) for prompt in asked[:4]]
        until(lambda: all(request.tokens for request in first))
        plain = engine.facts()["bytes_reserved"] / engine.facts()["pages_total"]
        budget.used = FULL
        until(lambda: guard.stage is Stage.SHRINK)
        assert not any(request.done for request in first)
        second = [engine.submit(prompt, **options) for prompt in asked]
        assert [request.result(60).tokens for request in first] == long
        assert [request.result(60).tokens for request in second] == rounded
        small = engine.facts()["bytes_reserved"] / engine.facts()["pages_total"]
        assert small < 0.6 * plain
        budget.used = EMPTY
        engine.generate([[3, 4]] * 8, max_new_tokens=20)
        assert guard.stage < Stage.SHRINK
        assert [result.tokens for result in engine.generate(asked, **options)] == exact
        facts = engine.facts()
    assert facts["preemptions"] == 0 and guard.counts["shrink"] == 1


def test_who_was_preempted_goes_on_as_it_began():
    """Too few pages for all: rows are given up, and come back after the guard has switched to FP8 for others."""
    model, budget = tiny(), Budget()
    guard = MemoryGuard(shrink="fp8_e4m3", patience=1, calm=10_000, read=budget)
    asked = prompts(4, 40)
    with Engine(model, guard=guard, max_batch=4, max_pages=16, reuse_prefix=False) as engine:
        first = [engine.submit(prompt, max_new_tokens=60, do_sample=False) for prompt in asked]
        until(lambda: engine.facts()["preemptions"] > 0)
        assert all(request.tokens for request in first)
        budget.used = FULL
        results = [request.result(60) for request in first]
        later = engine.generate(asked, max_new_tokens=60, do_sample=False)
    assert guard.stage is Stage.SHRINK and any(result.num_preemptions for result in results)
    assert [result.tokens for result in results] == [alone(model, prompt, 60) for prompt in asked]
    assert [result.tokens for result in later] == [alone(tiny(dtype="fp8_e4m3"), prompt, 60) for prompt in asked]


def test_what_a_guard_cannot_ask_of_an_engine():
    with pytest.raises(AccelError, match="keeps all tokens"):
        Engine(tiny(), guard=MemoryGuard(shrink=Window()))
    with pytest.raises(AccelError, match="in FP8 already"):
        Engine(tiny(dtype="fp8_e4m3"), guard=MemoryGuard(shrink=KVCache(dtype="fp8_e5m2")))


def test_out_of_memory_in_a_step_reaches_the_guard_and_no_request(monkeypatch):
    from deepseek_accel.engine.compute import Compute

    model, guard, seen = tiny(), MemoryGuard(calm=1, read=Budget()), Seen(tiny())
    step, fails = Compute.step, Counter()

    def failing(self, rows, *rest):
        if len(rows) > 3 and not fails["so far"]:
            fails["so far"] += 1
            raise torch.OutOfMemoryError("no memory, says the test")
        return step(self, rows, *rest)

    monkeypatch.setattr(Compute, "step", failing)
    asked = prompts(10)
    with Engine(model, guard=guard, observer=seen, max_batch=8) as engine:
        results = engine.generate(asked, max_new_tokens=12, do_sample=False)
    assert fails["so far"] == 1 == guard.counts["out_of_memory"]
    assert [result.tokens for result in results] == [alone(model, prompt) for prompt in asked]
    assert any("out of memory" in detail for _, detail in seen.said)


def test_the_metrics_of_a_real_run():
    """What a scrape says is what the requests saw."""
    model, tokenizer = models.load_tiny(dtype=torch.float32)
    optimize(model)
    texts = [f"def function_{i}(x):\n    return x + " for i in range(20)]
    with Metrics(model, spans=False) as metrics:
        port, scrapes, stop = metrics.serve(), [], threading.Event()

        def keep_scraping():
            while not stop.is_set():
                scrapes.append(scrape(port))

        thread = threading.Thread(target=keep_scraping)
        thread.start()
        begun = time.perf_counter()
        with Engine(model, tokenizer, observer=metrics, max_batch=4) as engine:
            results = engine.generate(texts, max_new_tokens=8, do_sample=False)
            lost = engine.submit("x = ", max_new_tokens=2_000)
            until(lambda: len(lost.tokens) > 3)
            lost.cancel()
            results.append(lost.result(60))
        long = time.perf_counter() - begun
        stop.set()
        thread.join()
        found = scrape(port)
    assert all(result.error is None for result in results)
    tokens = sum(len(result.tokens) for result in results)
    assert value(found, "generated_tokens_total") == tokens
    assert value(found, "prompt_tokens_total") == sum(result.num_prompt_tokens for result in results)
    assert value(found, "cached_prompt_tokens_total") == sum(result.num_cached_tokens for result in results)
    reasons = Counter(result.finish_reason for result in results)
    assert value(found, "requests_total", finish_reason="cancelled") == reasons["cancelled"] == 1
    assert value(found, "time_to_first_token_seconds_count") == len(results)
    assert value(found, "inter_token_latency_seconds_count") == tokens - len(results)
    gaps = sum(result.token_times[-1] - result.token_times[0] for result in results)
    assert value(found, "inter_token_latency_seconds_sum") == pytest.approx(gaps, rel=0.01)
    firsts = sum(result.times.first_token - result.times.submitted for result in results)
    assert value(found, "time_to_first_token_seconds_sum") >= firsts * 0.99
    assert 0 < value(found, "step_duration_seconds_sum") < long + 1
    assert value(found, "request_latency_seconds_count") == len(results) - 1
    assert scrapes and max(value(each, "requests_running") for each in scrapes) <= 4
    counts = [value(each, "generated_tokens_total") for each in scrapes]
    assert counts == sorted(counts)
    assert samples(metrics.text()) == found


def test_an_engine_that_nobody_closed_leaves_no_threads():
    model, tokenizer = models.load_tiny(dtype=torch.float32)
    optimize(model)
    before = set(threading.enumerate())
    engine = Engine(model, tokenizer)
    assert engine.generate(["x = "], max_new_tokens=2)[0].error is None
    assert len(set(threading.enumerate()) - before) == 4  # the engine's, two that tokenise, one for text
    del engine
    until(lambda: gc.collect() is not None and set(threading.enumerate()) <= before)

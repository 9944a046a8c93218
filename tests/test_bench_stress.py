"""`bench stress`: what is asked and when, what is measured, that wrong answers are found, and the fit of the curve."""

import json
import math
import statistics
import threading
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_accel import AccelError, api, cli, models
from deepseek_accel.bench import drive, greedy, latency_fit, loads, static_batch, stress, stress_tables, studies, tables
from deepseek_accel.bench.loads import Ask, Mix
from deepseek_accel.bench.shapes import Point, load

CPU = torch.device("cpu")
SMALL = Mix.named("fixed", 48, 8)


@pytest.fixture(scope="module")
def tiny():
    return load("tiny", CPU, torch.float32)


def options(**changes):
    return stress.Options(**(dict(model="tiny", mix=SMALL, users=(1, 3), requests=6, device="cpu") | changes))


# What is asked


def test_chat_lengths_have_the_published_means():
    asks = Mix.named("chat").asks(40_000, seed=3)
    for got, mean in (
        ([a.prompt_tokens for a in asks], loads.CHAT_PROMPT_MEAN),
        ([a.new_tokens for a in asks], loads.CHAT_ANSWER_MEAN),
    ):
        assert statistics.fmean(got) == pytest.approx(mean, rel=0.03)
        assert statistics.median(got) < 0.75 * mean, "skewed to the right"
        assert min(got) >= loads.CLIP_LOW and max(got) == round(loads.CLIP_HIGH * mean), "clipped where it says"
    assert asks == Mix.named("chat").asks(40_000, seed=3) != Mix.named("chat").asks(40_000, seed=4)
    lengths = np.log([[a.prompt_tokens, a.new_tokens] for a in asks])
    assert abs(np.corrcoef(lengths.T)[0, 1]) < 0.03, "independent"


def test_the_location_is_that_of_the_clipped_mean():
    length = loads.LogNormal(20.0, 1.5, 10, 40)  # clipping moves this one far
    grid = np.random.default_rng(0).lognormal(length.mu, length.sigma, 400_000)
    assert np.clip(grid, 10, 40).mean() == pytest.approx(20.0, rel=0.01)


def test_a_fixed_mix_and_wrong_ones():
    assert Mix.named("fixed").asks(2, 0) == [Ask(1024, 128)] * 2
    assert Mix.named("fixed", 7, 3).longest() == 10
    chat = Mix.named("chat", 40, 20)
    assert max(a.prompt_tokens + a.new_tokens for a in chat.asks(5000, 0)) <= chat.longest() == 480
    assert chat.describe()["prompt"]["mean"] == 40 and "SOSP 2023" in chat.describe()["source"]
    for words in (("talk",), ("fixed", 0), ("fixed", 5, -1), ("chat", 5, 100)):
        with pytest.raises(AccelError):
            Mix.named(*words)


def test_poisson_arrivals():
    moments = loads.poisson(50.0, 20_000, seed=1)
    gaps = np.diff([0.0, *moments])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03) and gaps.std() == pytest.approx(1 / 50, rel=0.03)
    assert (gaps >= 0).all() and moments == loads.poisson(50.0, 20_000, seed=1)
    with pytest.raises(AccelError, match="above 0"):
        loads.poisson(0, 1, 0)


@given(st.lists(st.floats(0, 10), max_size=40).map(sorted), st.floats(0, 2))
@settings(max_examples=200, deadline=None)
def test_gathering(arrivals, window):
    handed = loads.gathered(arrivals, window)
    assert handed == sorted(handed) and len(handed) == len(arrivals)
    for moment in set(handed):
        group = [a for a, h in zip(arrivals, handed, strict=True) if h == moment]
        assert moment == group[0] + window, "a window opens with the first that finds none open"
        assert all(a <= moment for a in group)
    assert loads.gathered([0.0, 0.1, 0.3, 0.31], 0.2) == [0.2, 0.2, 0.5, 0.5]


# The curve

LOADS = [1, 2, 4, 8, 16, 32, 64, 128]


@pytest.mark.parametrize(("a", "b", "c"), [(1.0, 0.01, 1.5), (0.2, 0.003, 2.0), (0.0, 2.0, 0.8), (0.5, 1e-9, 4.5)])
def test_a_known_curve_is_found(a, b, c):
    curve = latency_fit.fit(LOADS, [a + b * n**c for n in LOADS])
    assert curve.error < 0.003
    for n in (1, 3, 50, 128):
        assert curve.at(n) == pytest.approx(a + b * n**c, rel=0.01)
    assert curve.c == pytest.approx(c, rel=0.02)


@pytest.mark.parametrize("kind", ["closed", "open"])
def test_the_knee_is_where_throughput_over_latency_is_most(kind):
    a, b, c = 0.8, 0.004, 1.6
    fine = np.geomspace(1, 128, 200_000)
    latency = a + b * fine**c
    throughput = fine / latency if kind == "closed" else fine
    best = fine[(throughput / latency).argmax()]
    knee = latency_fit.knees(np.array([a]), np.array([b]), np.array([c]), kind, LOADS)[0]
    assert 1 < knee < 128 and knee == pytest.approx(best, rel=1e-3)


def test_confidence_covers_the_truth_and_shrinks_with_requests():
    noise = np.random.default_rng(7)

    def study(count):
        samples = [(1 + 0.01 * n**1.5) * noise.lognormal(0, 0.15, count) for n in LOADS]
        return latency_fit.study("closed", LOADS, samples, 50.0)

    few, many = study(20), study(2000)
    truth = (1 / (0.01 * 2)) ** (1 / 1.5)
    widths = [found["knee_interval"][1] - found["knee_interval"][0] for found in (few, many)]
    assert few["knee_interval"][0] < truth < few["knee_interval"][1] and widths[1] < widths[0] / 3
    assert many["knee"] == pytest.approx(truth, rel=0.05) and many["knee_share"] == 1.0
    assert "users, 95 % within" in many["knee_text"] and "uncertain" not in many["knee_text"]
    assert latency_fit.study("closed", LOADS, [[1.0, 2.0]] * 8, 50.0) == latency_fit.study(
        "closed", LOADS, [[1.0, 2.0]] * 8, 50.0
    ), "seeded"


def test_where_there_is_no_knee_it_says_so():
    flat = latency_fit.study("closed", LOADS, [[1.0, 1.01, 0.99]] * 8, 50.0)
    assert flat["knee"] is None and flat["knee_text"].startswith("none")
    straight = latency_fit.study("open", LOADS, [[1 + 0.1 * n] * 3 for n in LOADS], 99.0)
    assert straight["knee"] is None
    early = latency_fit.study("closed", LOADS, [[1e-3 + n**1.2] * 3 for n in LOADS], 50.0)
    assert early["knee"] is None
    with pytest.raises(AccelError, match="4 different loads, got 3"):
        latency_fit.fit([1, 2, 4, 4], [1.0, 2.0, 3.0, 3.0])
    with pytest.raises(AccelError, match="above 0"):
        latency_fit.fit([1, 2, 4, 8], [1.0, 0.0, 3.0, 3.0])


# Points


def test_a_closed_loop_on_the_bundled_model(tiny):
    seen, kept = [], []
    wanted = options(stock=True, split=(40,), breakdown=150)
    result = stress.run(wanted, seen.append, tiny, lambda r: kept.append((len(r["stock"]), len(r["rows"]))))
    assert kept == [(1, 0), (1, 1), (2, 1), (2, 2), (2, 2)] and seen[-1] == "one request of 150 tokens"
    for row, users in zip(result["rows"], (1, 3), strict=True):
        assert (row["status"], row["answered"], row["errors"]) == ("ok", 6, 0), row["detail"]
        assert row["detail"] == f"3/3 as generate, {users}/{users} as stock's"
        assert row["new_tokens"] == 6 * 8 and row["prompt_tokens"] == 6 * 48
        assert row["new_tokens_per_second"] == pytest.approx(48 / row["seconds"])
        assert row["total_tokens_per_second"] == pytest.approx(7 * row["new_tokens_per_second"])
        for name in ("ttft_ms", "itl_ms", "e2e_ms"):
            assert 0 < row[name]["p50"] <= row[name]["p95"] <= row[name]["p99"]
        assert row["ttft_ms"]["p50"] < row["e2e_ms"]["p50"] < 1e3 * row["seconds"]
        assert len(row["e2e_each_ms"]) == 6 and row["pages_peak"] >= users
        assert 1 <= row["decoding_rows"] <= users and (users == 1 or row["decoding_rows"] > 1)
        assert row["stock_ratio"] == pytest.approx(row["new_tokens_per_second"] / row["stock_tokens_per_second"])
    for entry, users in zip(result["stock"], (1, 3), strict=True):
        assert entry["new_tokens"] == 8 * users and entry["scaled_seconds"] == pytest.approx(
            entry["seconds"] * 6 / users
        )
    split, stock = result["split"][0], result["stock_split"][0]
    assert split["prompt_tokens"] == stock["prompt_tokens"] == 40 and split["prefill_ms"] > 0
    assert 0.2 < split["decode_ms_per_token"] / stock["decode_ms_per_token"] < 5
    parts = result["breakdown"]
    assert parts["prompt_tokens"] == 150 and parts["tokenizer"] == "bundled"
    assert parts["first_token_ms"] == pytest.approx(parts["tokenise_ms"] + parts["queue_ms"] + parts["prefill_ms"])
    total = parts["first_token_ms"] + 127 * parts["further_token_ms"]
    assert total == pytest.approx(parts["total_ms"], rel=0.1)
    assert not api.report(tiny.model).passes and tiny.model.generation_config.eos_token_id is not None, "as it was"
    lines = stress_tables.stress_lines(result)
    assert any("the time for 6 requests is 2 times its time" in line for line in lines)


def test_an_open_loop_counts_from_the_arrival(tiny):
    wanted = options(load="open", users=(), rates=(40.0,), windows=(0.0, 150.0), mix=Mix.named("chat", 16, 8))
    at_once, late = stress.run(wanted, subject=tiny)["rows"]
    assert at_once["status"] == late["status"] == "ok", (at_once["detail"], late["detail"])
    assert at_once["new_tokens"] == late["new_tokens"], "every window sees the same requests"
    arrivals = loads.poisson(40.0, 6, seed=0)
    waits = [1e3 * (h - a) for h, a in zip(loads.gathered(arrivals, 0.15), arrivals, strict=True)]
    assert late["ttft_ms"]["mean"] > statistics.fmean(waits) > 50
    assert max(late["e2e_each_ms"]) > 150, "the first of a window waits all of it"
    assert 0 <= at_once["late_ms"] < 1e3 and at_once["rate"] == 40.0 and at_once["users"] is None


def test_enough_loads_are_fitted(tiny):
    result = stress.run(options(users=(1, 2, 3, 4), requests=4, mix=Mix.named("fixed", 8, 4)), subject=tiny)
    assert [fit["percentile"] for fit in result["fits"]] == [50.0, 99.0]
    for fit in result["fits"]:
        worst = max(np.percentile(row["e2e_each_ms"], fit["percentile"]) for row in result["rows"])
        assert fit["a"] + fit["b"] * 4 ** fit["c"] == pytest.approx(worst, rel=1.0) and fit["knee_text"]


# Wrong results


def test_a_wrong_token_is_found(tiny, monkeypatch, capsys):
    right = greedy.generate

    def wrong(*arguments, **named):
        output = right(*arguments, **named)
        output[0, -1] += 1
        return output

    monkeypatch.setattr(greedy, "generate", wrong)
    (row,) = stress.run(options(users=(2,)), subject=tiny)["rows"]
    assert row["status"] == "wrong" and row["detail"].startswith("0/3 as generate")
    assert stress.exit_code([row]) == 3


@pytest.mark.parametrize("moved, status", [(0, "ok"), (1, "wrong")])
def test_in_16_bits_a_token_that_no_rounding_chooses_is_found(moved, status, monkeypatch):
    subject, drive_all, single = load("tiny", CPU, torch.bfloat16), stress.closed_loop, greedy.generate

    def driven(*arguments):
        answers = drive_all(*arguments)
        for answer in answers:
            answer.result.tokens[5] = (answer.result.tokens[5] + moved) % 100
        return answers

    def other(*arguments, **named):  # single calls that went another way, as they may
        output = single(*arguments, **named)
        output[0, -1] += 1
        return output

    monkeypatch.setattr(greedy, "generate", other)
    if moved:
        monkeypatch.setattr(stress, "closed_loop", driven)
    (row,) = stress.run(options(users=(3,)), subject=subject)["rows"]
    far = float(row["detail"].removeprefix("0/3 as generate, within ").removesuffix(" of the best"))
    assert row["status"] == status and (far > 2 if moved else far < 0.3), row["detail"]


def test_stocks_tokens_are_compared_too(tiny, monkeypatch):
    right = static_batch.measure

    def wrong(*arguments):
        batch, entry = right(*arguments)
        batch.tokens[1][-1] += 1
        return batch, entry

    monkeypatch.setattr(static_batch, "measure", wrong)
    (row,) = stress.run(options(users=(2,), stock=True), subject=tiny)["rows"]
    assert row["status"] == "wrong" and row["detail"] == "3/3 as generate, 1/2 as stock's"
    assert row["stock_ratio"] is None


def test_requests_that_cannot_be_held_are_errors(tiny):
    rows = stress.run(options(users=(2,), max_pages=1, mix=Mix.named("fixed", 100, 8)), subject=tiny)["rows"]
    assert rows[0]["status"] == "error" and rows[0]["errors"] == 6 and "CacheFullError" in rows[0]["detail"]
    assert rows[0]["ttft_ms"] is None and stress.exit_code(rows) == 1
    assert "error: 6 failed" in "".join(tables.lines(stress_tables.stress_table(_result(rows))))


def _result(rows):
    environment = dict(hardware="x", torch="1", triton="1", transformers="1", commit="1")
    return dict(load="closed", rows=rows, environment=environment, model="m", dtype="d", mix=SMALL.describe())


class Answering:
    """Not an engine: answers at once with as many tokens as it is told to, or never."""

    def __init__(self, watch, tokens):
        self.watch, self.tokens, self.count = watch, tokens, 0

    def submit(self, prompt, max_new_tokens, do_sample):
        self.count += 1
        if self.tokens is not None:
            times = types.SimpleNamespace(submitted=0.0, first_token=math.inf, finished=math.inf)
            answer = types.SimpleNamespace(id=self.count, tokens=[1] * self.tokens, error=None, times=times)
            self.watch.finished(None, answer)
        return types.SimpleNamespace(id=self.count)


def test_too_few_tokens_and_silence_are_wrong(monkeypatch):
    monkeypatch.setattr(drive, "PATIENCE", 0.2)
    jobs = [drive.Job(Ask(2, 5), [1, 2])] * 4
    watch = drive.Watch()
    row = stress.Row("closed", 2, None, None, 4)
    stress.fill(row, drive.closed_loop(Answering(watch, 4), watch, jobs, 2))
    assert row.status == "wrong" and row.detail == "4 requests did not have the tokens asked for"
    assert row.new_tokens_per_second is None
    with pytest.raises(drive.LostError, match="2 requests were not answered") as lost:
        drive.closed_loop(Answering(watch, None), watch, jobs, 2)
    assert lost.value.answers == []
    with pytest.raises(drive.LostError):
        drive.open_loop(Answering(watch, None), watch, jobs, [0, 0, 0, 0], [0, 0, 0, 0])


# Around it


def test_a_padded_static_batch_has_the_tokens_of_single_prompts(tiny):
    asks = [Ask(9, 6), Ask(30, 3), Ask(17, 6)]
    jobs = stress.jobs_of(tiny, asks, seed=5)
    assert [len(job.prompt) for job in jobs] == [9, 30, 17] and len({tuple(job.prompt) for job in jobs}) == 3
    batch, entry = static_batch.measure(tiny, jobs, 12)
    assert batch.padded and entry["new_tokens"] == 15 and entry["scaled_seconds"] == pytest.approx(4 * batch.seconds)
    for job, tokens in zip(jobs, batch.tokens, strict=True):
        alone = greedy.generate(tiny.model, torch.tensor([job.prompt]), job.ask.new_tokens)[0, len(job.prompt) :]
        assert tokens == alone.tolist()


def test_text_for_a_breakdown_is_long_enough(tiny):
    _, tokenizer = studies.tokenizer_of(tiny)
    one = len(tokenizer("\n".join(models.heldout_documents())).input_ids)
    for tokens in (1, 500, one - 5, one + 3000, 3 * one + 17):
        found = len(tokenizer(studies.text_of(tokenizer, tokens), verbose=False).input_ids)
        assert tokens <= found <= 1.1 * tokens + 1000


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(load="half"), "closed, open or none"),
        (dict(users=(0,)), "1 or more"),
        (dict(load="open", users=()), "--rate"),
        (dict(rates=(1.0,)), "open loop"),
        (dict(windows=(0.0, 50.0)), "open loop"),
        (dict(load="open", rates=(1.0,), windows=(-1.0,)), "0 or more"),
        (dict(requests=0), "1 or more"),
        (dict(load="open", rates=(1.0,), stock=True), "closed loop"),
        (dict(load="none"), "nothing to measure"),
        (dict(split=(0,)), "1 or more"),
    ],
)
def test_wrong_options(changes, says):
    with pytest.raises(AccelError, match=says):
        options(**changes)


def test_requests_longer_than_the_model_are_refused(tiny):
    limit = tiny.model.config.max_position_embeddings
    for changes in (dict(mix=Mix.named("fixed", limit, 1)), dict(breakdown=limit), dict(split=(limit - 100,))):
        with pytest.raises(AccelError, match="positions"):
            stress.run(options(**changes), subject=tiny)


def test_the_command(tmp_path, capsys):
    file = tmp_path / "stress.json"
    words = ["bench", "stress", "--device", "cpu", "--concurrency", "1,2", "--requests", "3", "--json", str(file)]
    assert cli.main([*words, "--prompt-tokens", "20", "--new-tokens", "4"]) == 0
    said = capsys.readouterr()
    assert "no curve of latency against load: that takes 4 different loads" in said.out
    assert "TTFT ms 50/95/99" in said.out
    assert "users 1, requests 3" in said.err, "rows come as they are measured"
    result = json.loads(file.read_text())
    assert result["bench"] == "stress" and [row["users"] for row in result["rows"]] == [1, 2]
    assert "complete" not in result and result["mix"] == {"kind": "fixed", "prompt_tokens": 20, "new_tokens": 4}
    assert cli.main(["bench", "stress", "--device", "cpu", "--load", "none", "--split", "16"]) == 0
    assert "engine, one request of 16 tokens: prefill" in capsys.readouterr().out
    assert cli.main(["bench", "stress", "--device", "cpu", "--concurrency", "two"]) == 2
    assert cli.main(["bench", "stress", "--device", "cpu", "--load", "open"]) == 2


def test_nothing_is_left_running(tiny):
    before = {thread.name for thread in threading.enumerate()}
    stress.run(options(users=(1,), requests=1), subject=tiny)
    assert {thread.name for thread in threading.enumerate()} == before
    assert tiny.prompt(Point(1, 4)).shape == (1, 4)

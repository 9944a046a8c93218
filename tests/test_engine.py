"""The engine gives every request what `generate` gives it alone, whoever shares its steps, whatever happens to them."""

import asyncio
import functools
import random
import threading
import time

import pytest
import torch
from processors import Broken, Slow, processing
from transformers import LogitsProcessor, StoppingCriteria

from deepseek_accel import AccelError, CacheFullError, KVCache, models, optimize, report, restore
from deepseek_accel.cache import Window
from deepseek_accel.engine import Engine, loop
from deepseek_accel.engine.guard import MemoryGuard, Stage
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.testing import picture, tiny_model

PAGE = 16
FAMILIES = ("deepseek", "deepseek_v2", "deepseek_v3", "llama", "qwen2")


def fresh(model_type="deepseek_v3", **options):
    return optimize(
        tiny_model(model_type),
        {name: {} for name in PASSES} | {"kv_cache": {"page_size": PAGE, **options}, "allow_skips": True},
    )


@functools.cache
def tiny(model_type="deepseek_v3"):
    return fresh(model_type)


@functools.cache
def bundled():
    model, tokenizer = models.load_tiny(dtype=torch.float32)
    return optimize(model), tokenizer


@pytest.fixture(params=["at once", "lagging"], autouse=True)
def lag(request, monkeypatch):
    """On a GPU tokens are read one step behind. Everything must be the same, so that it is tried here too."""
    if request.param == "lagging":
        if "sixty_four" in request.node.name:
            pytest.skip("takes long, and others do the same")
        monkeypatch.setattr(loop, "lags", lambda device: True)


def prompts(count, longest=40, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(2, 128) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


def alone(model, prompt, **options):
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    return model.generate(ids, **options)[0, len(prompt) :].tolist()


def expect_empty(engine):
    """No row holds a page, and what is in use is kept for later requests."""
    facts = engine.facts()
    assert facts["running"] == facts["waiting"] == facts["pages_of_rows"] == 0
    assert facts["pages_in_use"] == facts["pages_kept"]


# --- the same tokens as alone


def test_sixty_four_requests_equal_single_generate():
    model, tokenizer = bundled()
    draw = random.Random(3)
    documents = [document for document in models.heldout_documents() if len(document) > 1200]
    texts = [each[at : at + draw.randrange(20, 400)] for at in range(0, 1000, 100) for each in documents][:64]
    assert len(texts) == 64
    lengths = [draw.randrange(1, 24) for _ in texts]
    with Engine(model, tokenizer, max_batch=16, prefill_tokens=128) as engine:
        results = engine.generate(texts, options=[{"max_new_tokens": n} for n in lengths], do_sample=False)
        expect_empty(engine)
    for text, length, result in zip(texts, lengths, results, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert result.error is None
        assert result.tokens == alone(model, ids, max_new_tokens=length)
        assert result.text == tokenizer.decode(result.tokens, skip_special_tokens=True)
        assert result.num_prompt_tokens == len(ids)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family(model_type):
    model, asked = tiny(model_type), prompts(12, 150, seed=1)
    with Engine(model, max_batch=5, prefill_tokens=32) as engine:
        results = engine.generate(asked, max_new_tokens=9, do_sample=False)
    assert [result.tokens for result in results] == [alone(model, each, max_new_tokens=9) for each in asked]
    assert {result.finish_reason for result in results} == {"length"}


def test_a_prompt_longer_than_a_piece_is_cut_and_others_are_not_held_up():
    model = tiny()
    long, short = prompts(1, 2)[0] * 300, [5, 6, 7]
    with Engine(model, prefill_tokens=32) as engine:
        gate = Slow()
        first = engine.submit(short, max_new_tokens=60, **processing(gate))
        assert gate.reached.wait(30)  # it runs
        second = engine.submit(long, max_new_tokens=4, do_sample=False)
        gate.go.set()
        results = first.result(30), second.result(30)
    assert results[0].tokens == alone(model, short, max_new_tokens=60)
    assert results[1].tokens == alone(model, long, max_new_tokens=4)
    # between the tokens of the long prompt's first piece and its last, the other one was given tokens
    assert sum(results[1].times.admitted < when < results[1].times.first_token for when in results[0].token_times) >= 3


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_pages_do_not_depend_on_who_shares_the_batch(dtype):
    model, asked, runs = fresh(dtype=dtype), prompts(6, 30), []
    for rows in (1, 6):
        with Engine(model, max_batch=rows) as engine:
            runs.append([r.tokens for r in engine.generate(asked, max_new_tokens=6, do_sample=False)])
            assert engine._core.scheduler.rows.fp8 == dtype[-4:]
    assert runs[0] == runs[1]
    assert all(len(tokens) == 6 for tokens in runs[0])


def test_eos_lists_lengths_and_min_new_tokens():
    model, prompt = tiny(), [9, 8, 7]
    free = alone(model, prompt, max_new_tokens=12)
    cases = [
        {"eos_token_id": free[3], "max_new_tokens": 12},
        {"eos_token_id": [free[5], free[2]], "max_new_tokens": 12},
        {"max_length": 8},
        {"eos_token_id": free[1], "min_new_tokens": 6, "max_new_tokens": 12},
        {"eos_token_id": free[1], "min_length": 9, "max_new_tokens": 12},
        {"repetition_penalty": 1.7, "max_new_tokens": 12},
        {"no_repeat_ngram_size": 1, "max_new_tokens": 12},
        {"suppress_tokens": [free[0]], "max_new_tokens": 12},
        {},
    ]
    with Engine(model) as engine:
        results = engine.generate([prompt] * len(cases), options=cases, do_sample=False)
    for case, result in zip(cases, results, strict=True):
        expected = alone(model, prompt, **case)
        assert (result.error, result.tokens) == (None, expected), case
        eos = case.get("eos_token_id")
        ended = expected[-1] in (eos if isinstance(eos, list) else [eos])
        assert result.finish_reason == ("eos" if ended else "length")
    assert results[0].tokens[-1] == free[3]


def test_stop_strings_end_where_generate_ends():
    model, tokenizer = bundled()
    asked = ["def main(", "import os\nimport ", "for i in range(", "class Foo:\n    def "] * 2
    stops = [["\n"], ["(", ")"], ["self"], ["\n\n", "import"]] * 2
    with Engine(model, tokenizer) as engine:
        options = [{"stop_strings": each} for each in stops]
        results = engine.generate(asked, options=options, do_sample=False, max_new_tokens=40)
    assert "stop" in {result.finish_reason for result in results}
    for text, stop, result in zip(asked, stops, results, strict=True):
        ids = tokenizer(text, return_tensors="pt")
        expected = model.generate(**ids, do_sample=False, max_new_tokens=40, stop_strings=stop, tokenizer=tokenizer)
        assert result.tokens == expected[0, ids["input_ids"].shape[1] :].tolist()


# --- drawing


def test_a_drawn_request_depends_on_its_seed_and_not_on_who_shares_the_batch():
    model, asked = tiny(), prompts(10, 30, seed=4)
    ways = [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8, "temperature": 1.5}, {"min_p": 0.1}, {"top_k": 0}]
    options = [ways[i % 5] | {"do_sample": True, "max_new_tokens": 10} for i in range(10)]
    with Engine(model) as engine:
        together = engine.generate(asked, seeds=range(10), options=options)
        backwards = engine.generate(asked[::-1], seeds=range(10)[::-1], options=options[::-1])[::-1]
        single = [engine.submit(p, seed=i, **o).result() for i, (p, o) in enumerate(zip(asked, options, strict=True))]
        others = engine.generate(asked, seeds=range(100, 110), options=options)
    tokens = [[result.tokens for result in results] for results in (together, backwards, single, others)]
    assert tokens[0] == tokens[1] == tokens[2]
    assert sum(a != b for a, b in zip(tokens[0], tokens[3], strict=True)) >= 8
    assert {result.error for result in together} == {None}


def test_without_a_seed_torchs_generator_decides():
    with Engine(tiny()) as engine:
        runs = []
        for _ in range(2):
            torch.manual_seed(11)
            runs.append([r.tokens for r in engine.generate([[3, 4]] * 4, do_sample=True, top_k=0, max_new_tokens=8)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) > 1


def test_greedy_and_drawing_requests_share_steps():
    model, asked = tiny(), prompts(8, 20, seed=6)
    with Engine(model) as engine:
        options = [{"do_sample": i % 2 == 1, "max_new_tokens": 7} for i in range(8)]
        results = engine.generate(asked, seeds=[0] * 8, options=options)
    for prompt, result in list(zip(asked, results, strict=True))[::2]:
        assert result.tokens == alone(model, prompt, max_new_tokens=7)


# --- pages


def test_preemption_loses_and_repeats_nothing():
    model, asked = tiny(), prompts(12, 50, seed=7)
    for reuse in (False, True):
        with Engine(model, max_pages=12, reuse_prefix=reuse, max_batch=8) as engine:
            streams = [engine.submit(each, max_new_tokens=40, do_sample=False) for each in asked]
            seen = [list(each) for each in streams]
            facts = engine.facts()
            expect_empty(engine)
        assert facts["preemptions"] > 0
        assert facts["pages_in_use"] <= 12
        assert seen == [alone(model, each, max_new_tokens=40) for each in asked]
        assert sum(each.result().num_preemptions for each in streams) == facts["preemptions"]


def test_preemption_keeps_what_is_drawn_and_processed():
    model, asked = tiny(), prompts(8, 40, seed=8)
    options = [{"do_sample": i % 2 == 0, "repetition_penalty": 1.3 if i % 3 else 1.0} for i in range(8)]
    runs = []
    for pages in (None, 9):
        with Engine(model, max_pages=pages, max_batch=8) as engine:
            runs.append(engine.generate(asked, seeds=range(8), options=options, max_new_tokens=40))
            assert (engine.facts()["preemptions"] > 0) == (pages is not None)
    assert [r.tokens for r in runs[0]] == [r.tokens for r in runs[1]]
    assert all(len(r.tokens) == 40 for r in runs[1])


def test_a_request_that_can_never_fit_fails_alone():
    model = tiny()
    with Engine(model, max_pages=6) as engine:
        small = engine.submit([5] * 20, max_new_tokens=30, do_sample=False)
        prompt_too_long = engine.submit([5] * 200, max_new_tokens=3, do_sample=False)
        grows_too_long = engine.submit([6] * 10, max_new_tokens=500, do_sample=False)
        results = [each.result(60) for each in (small, prompt_too_long, grows_too_long)]
        expect_empty(engine)
        after = engine.submit([5] * 20, max_new_tokens=3, do_sample=False).result(60)
    assert results[0].tokens == alone(model, [5] * 20, max_new_tokens=30)
    assert [type(result.error) for result in results] == [type(None), CacheFullError, CacheFullError]
    assert "max_pages" in str(results[1].error)
    assert results[2].tokens == alone(model, [6] * 10, max_new_tokens=len(results[2].tokens))
    assert len(results[2].tokens) == 6 * PAGE - 10 + 1  # every token that there were pages for
    assert after.tokens == results[0].tokens[:3]


def test_prefixes_are_computed_once():
    model, shared = tiny(), prompts(1, 2)[0] * 100
    asked = [shared + tail for tail in prompts(6, 20, seed=9)]
    with Engine(model) as engine:
        first = engine.submit(shared, max_new_tokens=2, do_sample=False).result()
        results = engine.generate(asked, max_new_tokens=6, do_sample=False)
        again = engine.submit(asked[0] + results[0].tokens, max_new_tokens=3, do_sample=False).result()
        hits = engine.facts()["prefix_hit_tokens"]
    with Engine(model, reuse_prefix=False) as engine:
        plain = engine.generate(asked, max_new_tokens=6, do_sample=False)
        assert engine.facts()["pages_in_use"] == 0
    assert first.num_cached_tokens == 0
    assert all(result.num_cached_tokens == 96 for result in results)  # the full pages of a hundred tokens
    assert again.num_cached_tokens == (len(asked[0]) + 5) // PAGE * PAGE
    assert hits == 96 * 6 + again.num_cached_tokens
    assert [r.tokens for r in plain] == [r.tokens for r in results]
    assert all(result.num_cached_tokens == 0 for result in plain)


def test_the_same_prompt_many_times_at_once_is_computed_once():
    model, shared, gate = tiny(), prompts(1, 2, seed=20)[0] * 100, Slow()
    with Engine(model, prefill_tokens=32) as engine:
        first = engine.submit([3], max_new_tokens=20, **processing(gate))
        assert gate.reached.wait(30)
        requests = [engine.submit(shared, max_new_tokens=4, do_sample=False) for _ in range(5)]
        requests.append(engine.submit(shared[:50] + [9] * 30, max_new_tokens=4, do_sample=False))
        gate.go.set()
        results = [each.result(30) for each in requests]
        assert first.result(30).error is None
    assert [result.num_cached_tokens for result in results] == [0, 96, 96, 96, 96, 48]
    assert [r.tokens for r in results[:5]] == [alone(model, shared, max_new_tokens=4)] * 5
    assert results[5].tokens == alone(model, shared[:50] + [9] * 30, max_new_tokens=4)


def test_pages_of_other_weights_are_not_used():
    model, prompt = fresh(), [7] * 60
    with Engine(model) as engine:
        engine.submit(prompt, max_new_tokens=2, do_sample=False).result()
        with torch.no_grad():
            model.model.layers[0].self_attn.o_proj.weight.mul_(-1.5)
        result = engine.submit(prompt, max_new_tokens=6, do_sample=False).result()
        assert result.num_cached_tokens == 0
        assert result.tokens == alone(model, prompt, max_new_tokens=6)


# --- what goes wrong in one request stays there


class BrokenStreamer:
    def __init__(self):
        self.got, self.ended = [], False

    def put(self, value):
        self.got.append(value)
        if len(self.got) > 3:
            raise RuntimeError("injected")

    def end(self):
        self.ended = True


class BrokenCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] > 5:
            raise RuntimeError("injected")
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Minus(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -torch.inf)


def test_prompts_that_are_no_list_of_prompts():
    with Engine(tiny()) as engine:
        for prompts, message in (
            ("def main(", "list of prompts"), ([3, 4, 5], "list of prompts"), ({"input_ids": [[3]]}, "list of prompts"),
        ):  # fmt: skip
            with pytest.raises(AccelError, match=message):
                engine.generate(prompts, max_new_tokens=2)
        assert engine.generate([]) == []
        for prompt, options, message in ((3, {}, "got int"), ([3], {"max_new_tokens": "2"}, "at least 1, got '2'")):
            with pytest.raises(AccelError, match=message):
                engine.submit(prompt, **options)
    with pytest.raises(AccelError, match="closed"):
        engine.generate([[3, 4, 5]], max_new_tokens=2)
    with pytest.raises(AccelError, match="must be a MemoryGuard"):
        Engine(tiny(), guard=0.9)


def test_injected_failures_reach_only_their_request():
    model, prompt = tiny(), [3, 4, 5]
    streamer = BrokenStreamer()
    options = [
        {},
        processing(Broken(2)),
        {"streamer": streamer},
        {"stopping_criteria": [BrokenCriterion()]},
        {**processing(Minus()), "do_sample": True},
        processing(Broken(0)),
        {},
    ]
    with Engine(model) as engine:
        results = engine.generate([prompt] * 7, options=options, max_new_tokens=8)
        expect_empty(engine)
    good = alone(model, prompt, max_new_tokens=8)
    assert [type(result.error) for result in results] == [
        type(None), RuntimeError, RuntimeError, RuntimeError, AccelError, RuntimeError, type(None),
    ]  # fmt: skip
    assert results[0].tokens == results[6].tokens == good
    assert [len(result.tokens) for result in results[1:6]] == [2, 3, 3, 0, 0]
    assert all(result.tokens == good[: len(result.tokens)] for result in results)
    assert streamer.got[0].tolist() == [prompt]
    assert streamer.ended
    with pytest.raises(RuntimeError, match="injected"), Engine(model) as engine:
        list(engine.submit(prompt, max_new_tokens=4, **processing(Broken(1))))


def test_a_streamer_gets_what_generate_gives_it():
    class Streamer:
        def __init__(self):
            self.got = []

        def put(self, value):
            self.got.append(value.tolist())

        def end(self):
            self.got.append("end")

    ours, theirs, model = Streamer(), Streamer(), tiny()
    with Engine(model) as engine:
        engine.submit([3, 4, 5], max_new_tokens=5, do_sample=False, streamer=ours).result()
    alone(model, [3, 4, 5], max_new_tokens=5, streamer=theirs)
    assert ours.got == theirs.got


def test_out_of_memory_never_ends_requests(monkeypatch):
    model, asked = tiny(), prompts(8, 30, seed=12)
    with Engine(model) as engine:
        from deepseek_accel.engine.compute import Compute

        calls, step = [], Compute.step

        def failing(self, rows, *arguments):
            calls.append(len(rows))
            if len(calls) in (3, 4, 9) or (len(calls) < 40 and len(rows) > 2):
                raise torch.OutOfMemoryError("injected")
            return step(self, rows, *arguments)

        monkeypatch.setattr(Compute, "step", failing)
        results = engine.generate(asked, max_new_tokens=12, do_sample=False)
        expect_empty(engine)
    assert [result.tokens for result in results] == [alone(model, each, max_new_tokens=12) for each in asked]
    assert max(calls) > 2
    assert min(calls[3:]) <= 2


def test_a_request_too_large_for_memory_fails_and_the_engine_goes_on(monkeypatch):
    from deepseek_accel.engine.compute import Compute

    with Engine(tiny()) as engine:
        with monkeypatch.context() as patch:

            def full(self, *arguments):
                raise torch.OutOfMemoryError("injected")

            patch.setattr(Compute, "_run_ragged", full)
            result = engine.submit([3, 4], max_new_tokens=4, do_sample=False).result(30)
        assert isinstance(result.error, torch.OutOfMemoryError)
        assert engine.submit([3, 4], max_new_tokens=4, do_sample=False).result(30).error is None


def test_another_failure_of_a_step_fails_those_who_run_and_the_engine_stays_usable(monkeypatch):
    from deepseek_accel.engine.compute import Compute

    model = tiny()
    with Engine(model, max_batch=2) as engine:
        with monkeypatch.context() as patch:
            gate, broken = Slow(), []

            def bad(self, *arguments):
                broken.append(1)
                raise ValueError("injected")

            patch.setattr(Compute, "step", bad)
            first = engine.submit([3, 4], max_new_tokens=4, do_sample=False, **processing(gate))
            assert gate.reached.wait(30)
            gate.go.set()
            assert isinstance(first.result(30).error, ValueError)
        results = engine.generate([[3, 4], [5]], max_new_tokens=4, do_sample=False)
        expect_empty(engine)
    assert broken
    assert [r.tokens for r in results] == [alone(model, p, max_new_tokens=4) for p in ([3, 4], [5])]


def test_a_model_that_cannot_run_fails_requests_and_may_come_back():
    model = fresh()
    with Engine(model) as engine:
        model.train()
        result = engine.submit([3, 4], max_new_tokens=2).result(30)
        assert isinstance(result.error, AccelError)
        assert "training mode" in str(result.error)
        model.eval()
        assert engine.submit([3, 4], max_new_tokens=2).result(30).error is None
        restore(model)
        assert "optimize" in str(engine.submit([3, 4], max_new_tokens=2).result(30).error)


# --- cancelling and closing


def test_cancelling_at_any_time():
    model = tiny()
    gate = Slow()
    with Engine(model, max_batch=1) as engine:
        running = engine.submit([3, 4], max_new_tokens=2400, do_sample=False, **processing(gate))
        assert gate.reached.wait(30)
        waiting = [engine.submit([5], max_new_tokens=3, do_sample=False) for _ in range(3)]
        waiting[1].cancel()
        gate.go.set()
        tokens = [token for token, _ in zip(running, range(5), strict=False)]
        running.cancel()
        result = running.result(30)
        others = [each.result(30) for each in waiting]
        running.cancel()  # again: nothing
        expect_empty(engine)
    assert result.finish_reason == "cancelled"
    assert result.error is None
    assert 5 <= len(result.tokens) < 2400
    assert result.tokens[:5] == tokens == alone(model, [3, 4], max_new_tokens=5)
    assert [each.finish_reason for each in others] == ["length", "cancelled", "length"]
    assert others[1].tokens == []
    assert others[1].times.admitted is None


def test_close_waits_or_cancels():
    model = tiny()
    engine = Engine(model)
    requests = [engine.submit([3, i], max_new_tokens=20, do_sample=False) for i in range(5)]
    engine.close()
    assert all(each.done and len(each.tokens) == 20 for each in requests)
    with pytest.raises(AccelError, match="closed"):
        engine.submit([3])
    engine.close()
    engine = Engine(model)
    requests = [engine.submit([3, i], max_new_tokens=2000, do_sample=False) for i in range(2, 5)]
    next(iter(requests[0]))
    engine.close(cancel=True)
    assert {each.result().finish_reason for each in requests} == {"cancelled"}
    assert not any(thread.name == "deepseek_accel-engine" for thread in threading.enumerate())


def test_an_engine_that_nobody_has_ends_its_thread():
    def run():
        engine = Engine(tiny())
        engine.submit([3], max_new_tokens=2).result()

    run()
    deadline = time.monotonic() + 10
    while any(thread.name == "deepseek_accel-engine" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_results_time_out_and_requests_go_on():
    gate = Slow()
    with Engine(tiny()) as engine:
        request = engine.submit([3], max_new_tokens=2, **processing(gate))
        with pytest.raises(TimeoutError, match="goes on"):
            request.result(0.05)
        assert not request.done
        gate.go.set()
        assert len(request.result(30).tokens) == 2


def test_max_waiting():
    gate = Slow()
    with Engine(tiny(), max_batch=1, max_waiting=2) as engine:
        first = engine.submit([3], max_new_tokens=2, **processing(gate))
        assert gate.reached.wait(30)
        waiting = [engine.submit([4], max_new_tokens=2) for _ in range(2)]
        with pytest.raises(AccelError, match="max_waiting"):
            engine.submit([5], max_new_tokens=2)
        gate.go.set()
        results = engine.generate([[5]] * 9, max_new_tokens=2)  # waits for room
        assert all(each.result().error is None for each in (first, *waiting))
    assert [len(each.tokens) for each in results] == [2] * 9


# --- threads and asyncio


def test_threads_submit_and_model_generate_works_meanwhile():
    model = tiny()
    asked = {(i, j): [3 + i, 4 + j, 5] for i in range(6) for j in range(6)}
    found, errors = {}, []

    with Engine(model, max_batch=8) as engine:

        def work(i):
            try:
                for j in range(6):
                    if i == 0:
                        found[i, j] = alone(model, asked[i, j], max_new_tokens=12)
                    else:
                        found[i, j] = engine.submit(asked[i, j], max_new_tokens=12, do_sample=False).result(60).tokens
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert found == {key: alone(model, prompt, max_new_tokens=12) for key, prompt in asked.items()}


def test_asyncio():
    model, tokenizer = bundled()

    async def run(engine):
        results = await asyncio.gather(
            *(engine.agenerate(text, max_new_tokens=10, do_sample=False) for text in ("def f(", "import ", "x = "))
        )
        pieces = [piece async for piece in engine.astream("def f(", max_new_tokens=10, do_sample=False)]
        long = asyncio.ensure_future(engine.agenerate("def g(", max_new_tokens=5000, do_sample=False, eos_token_id=-1))
        await asyncio.sleep(0.05)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        async for piece in engine.astream("def h(", max_new_tokens=5000, do_sample=False, eos_token_id=-1):
            if piece:
                break
        with pytest.raises(AccelError, match="beam"):
            await engine.agenerate("x", num_beams=2)
        return results, pieces

    with Engine(model, tokenizer) as engine:
        results, pieces = asyncio.run(run(engine))
        begin = time.monotonic()
    assert time.monotonic() - begin < 20  # nobody is left to wait for
    assert [r.tokens for r in results] == [
        alone(model, tokenizer(text)["input_ids"], max_new_tokens=10) for text in ("def f(", "import ", "x = ")
    ]
    assert "".join(pieces) == results[0].text


def test_streams():
    model, tokenizer = bundled()
    with Engine(model, tokenizer) as engine:
        pieces = list(engine.stream("def main(", max_new_tokens=20, do_sample=False))
        text = engine.generate(["def main("], max_new_tokens=20, do_sample=False)[0].text
        reader = engine.stream("def main(", max_new_tokens=5000, do_sample=False, eos_token_id=-1)
        next(reader)
        reader.close()  # cancels
    assert "".join(pieces) == text
    assert len(pieces) > 5
    with Engine(model) as engine:
        assert list(engine.stream([5, 6], max_new_tokens=4, do_sample=False)) == alone(model, [5, 6], max_new_tokens=4)


# --- refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "beam"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences"),
        ({"return_dict_in_generate": True}, "Result"),
        ({"use_cache": False}, "pages"),
        ({"guidance_scale": 2.0}, "guidance"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_length": 2}, "max_length"),
        ({"assistant_model": object()}, "assistant_model"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask"),
        ({"tempurature": 2.0}, "tempurature"),
        ({"stop_strings": "x"}, "tokenizer"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_is_refused_at_submit(options, words):
    with Engine(tiny()) as engine, pytest.raises(AccelError, match=words):
        engine.submit([3, 4, 5], **options)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [([], "no tokens"), ("text", "tokenizer"), ([3, 500], "500"), ([-1], "-1"), ([1.5], "token ids"),
     (7.0, "token ids"), (torch.ones(2, 3, dtype=torch.int64), "token ids"), (torch.ones(3), "token ids")],
)  # fmt: skip
def test_prompts_that_are_refused(prompt, words):
    with Engine(tiny()) as engine:
        with pytest.raises(AccelError, match=words):
            engine.submit(prompt)
        results = engine.generate([[3], prompt, [4]], max_new_tokens=2, do_sample=False)
    assert [result.error is None for result in results] == [True, False, True]


def test_a_text_without_tokens_fails_by_itself():
    model, tokenizer = bundled()
    with Engine(model, tokenizer) as engine:
        results = engine.generate(["", "x"], max_new_tokens=2)
    assert isinstance(results[0].error, AccelError)
    assert results[1].error is None


def test_models_and_options_that_are_refused():
    with pytest.raises(AccelError, match="optimize"):
        Engine(tiny_model("llama"))
    with pytest.raises(AccelError, match="eviction"):
        Engine(optimize(tiny_model("llama"), {"attention": {}, "layers": {}, "kv_cache": {"eviction": Window(4, 32)}}))
    with pytest.raises(AccelError, match="optimize"):
        Engine(optimize(tiny_model("llama"), (KVCache(),)))
    for name in ("max_batch", "max_pages", "prefill_tokens", "max_waiting"):
        with pytest.raises(AccelError, match=name):
            Engine(tiny(), **{name: 0})


# --- who watches


def test_the_report_counts_what_the_engine_ran():
    model = fresh()
    with Engine(model) as engine:
        for prompt in ([3] * 200, [4, 5]):
            engine.generate([prompt], max_new_tokens=5, do_sample=False)
    counters = report(model).counters
    assert counters["engine: steps"] in (2 * 4, 2 * 5)  # one more where tokens are read one step behind
    assert counters["layers: fused step"] == 3 * 2 * 4  # layers; the first token comes with the prompt
    assert counters["attention: expanded (prefill)"] == 3
    assert counters["attention: absorbed"] == 3 * (2 * 4 + 1)
    assert counters["experts: fused"] == 2 * (2 * 4 + 2)
    assert counters["kv_cache: most pages in use"] == 13  # twelve of the first prompt are kept then


class Notes:
    def __init__(self):
        self.events = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *what: self.events.append((name, *what))


def test_an_observer_sees_everything_in_order():
    notes, model = Notes(), tiny()
    with Engine(model, observer=notes, max_pages=8) as engine:
        results = engine.generate([[3] * 20, [4] * 20, [5] * 20], max_new_tokens=30, do_sample=False)
    kinds = [event[0] for event in notes.events]
    for result in results:
        mine = [e[0] for e in notes.events if e[0] != "step" and e[0] != "guard" and e[1].id == result.id]
        assert mine[0] == "submitted"
        assert mine[1] == "admitted"
        assert mine[-1] == "finished"
        assert mine.count("token") == 30
        assert mine.count("preempted") == result.num_preemptions
    steps = [event[1] for event in notes.events if event[0] == "step"]
    assert kinds.count("preempted") > 0
    assert sum(step.decoding_rows for step in steps) >= 3 * 30 - 3 - kinds.count("preempted")
    assert max(step.pages_in_use for step in steps) <= 8
    assert {step.pages_total for step in steps} == {8}


def test_an_observer_that_fails_is_left_alone():
    class Bad(Notes):
        def token(self, *what):
            raise RuntimeError("injected")

    with Engine(tiny(), observer=Bad()) as engine:
        assert engine.submit([3], max_new_tokens=3).result(30).error is None


def test_the_guard_is_asked_and_obeyed(monkeypatch):
    from deepseek_accel.engine import guarding

    used = [99]

    class Memory:
        def __init__(self, device):
            self.device = device

        def __call__(self, reusable):
            return used[0], 100

    monkeypatch.setattr("deepseek_accel.engine.guard.DeviceMemory", Memory)
    assert guarding.Guarded
    notes, model = Notes(), tiny()
    guard = MemoryGuard(0.95, patience=1, calm=1)
    with Engine(model, guard=guard, observer=notes, max_batch=8) as engine:
        asked = [[3 + i] * 20 for i in range(12)]
        results = engine.generate(asked, max_new_tokens=12, do_sample=False)
        stages = {event[1] for event in notes.events if event[0] == "guard"}
        assert Stage.LOWER_ADMISSION in stages
        assert guard.admitted == 1
        used[0] = 1
        again = engine.generate([[3 + i] * 20 for i in range(40)], max_new_tokens=20, do_sample=False)
        assert guard.admitted > 1
    assert [r.tokens for r in results] == [alone(model, each, max_new_tokens=12) for each in asked]
    assert all(r.error is None for r in again)


# --- transformers' generate_batch


def test_generate_batch_is_routed_and_restored():
    from transformers import GenerationConfig
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

    model = tiny_model("deepseek_v3")
    before = picture(model)
    optimize(model)
    asked = prompts(5, 30, seed=14)
    outputs = model.generate_batch(asked, GenerationConfig(max_new_tokens=6, do_sample=False), record_timestamps=True)
    assert list(outputs) == [f"req_{i}" for i in range(5)]
    for prompt, output in zip(asked, outputs.values(), strict=True):
        assert type(output) is GenerationOutput
        assert output.prompt_ids == prompt
        assert output.generated_tokens == alone(model, prompt, max_new_tokens=6)
        assert output.is_finished()
        assert output.status == RequestStatus.FINISHED
        assert output.error is None
        assert len(output.timestamps) == 6
        assert output.created_time <= output.lifespan[0] <= output.lifespan[1]
    mixed = model.generate_batch([[3], [999]], max_new_tokens=2, do_sample=False)
    assert [each.status for each in mixed.values()] == [RequestStatus.FINISHED, RequestStatus.FAILED]
    assert "999" in mixed["req_1"].error
    several = model.generate_batch([[3, 4]], max_new_tokens=4, do_sample=True, num_return_sequences=3, seeds=[1, 2, 3])
    assert list(several) == ["req_0__child#0", "req_0__child#1", "req_0"]
    assert model.generate_batch([]) == {}
    with pytest.raises(AccelError, match="beam"):
        model.generate_batch([[3]], num_beams=2)
    restore(model)
    assert picture(model) == before

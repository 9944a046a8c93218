"""The engine at its edges: what others do on its thread, what changes under it, and what it keeps."""

import asyncio
import functools
import threading
import time

import numpy as np
import pytest
import torch
from processors import processing
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from deepseek_accel import AccelError, models, optimize, restore
from deepseek_accel.engine import Engine, core, loop, rows, settings
from deepseek_accel.engine import engine as engine_module
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.testing import tiny_model

PAGE = 16


def fresh(**options):
    return optimize(
        tiny_model("deepseek_v3"),
        {name: {} for name in PASSES} | {"kv_cache": {"page_size": PAGE, **options}, "allow_skips": True},
    )


@functools.cache
def tiny():
    return fresh()


def alone(model, prompt, **options):
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


class Calls(LogitsProcessor, StoppingCriteria):
    """Calls `act` with how many tokens there are."""

    def __init__(self, act):
        self.act = act

    def __call__(self, input_ids, scores):
        self.act(input_ids.shape[1])
        return scores if scores is not None else torch.zeros(1, dtype=torch.bool)


def processor(act):
    return processing(Calls(act))


# --- nobody's code ends the engine's thread


def leave(length=0):
    raise SystemExit(3)


class Leaving:
    def put(self, value):
        leave()

    def end(self):
        pass


class LeavingAtTheEnd:
    def put(self, value):
        pass

    def end(self):
        leave()


@pytest.mark.parametrize(
    "options",
    [processor(leave), {"stopping_criteria": [Calls(leave)]}, {"streamer": Leaving()}, {"streamer": LeavingAtTheEnd()}],
    ids=["processor", "criterion", "streamer", "end of a streamer"],
)
def test_what_would_end_a_thread_is_an_error_of_its_request(options):
    with Engine(tiny()) as engine:
        bad = engine.submit([3], max_new_tokens=4, **options)
        good = engine.submit([5], max_new_tokens=4, do_sample=False)
        error = bad.result(30).error
        assert good.result(30).tokens == alone(tiny(), [5], max_new_tokens=4, do_sample=False)
    assert isinstance(error, AccelError)
    assert isinstance(error.__cause__, SystemExit)


def test_an_observer_that_leaves_is_left_alone():
    class Observer:
        def __getattr__(self, name):
            return lambda *what: leave() if name == "token" else None

    with Engine(tiny(), observer=Observer()) as engine:
        assert engine.submit([3], max_new_tokens=3).result(30).error is None


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_listener_that_raises_is_left_alone(at_the_end):
    with Engine(tiny()) as engine:
        go = threading.Event()
        request = engine.submit([3], max_new_tokens=900, **processor(lambda length: go.wait(30)))

        def listener():
            if request.done or not at_the_end:
                raise RuntimeError("injected")

        request.listen(listener)
        other = engine.submit([5], max_new_tokens=4, do_sample=False)
        go.set()
        if at_the_end:
            request.cancel()
        assert other.result(30).error is None
        assert engine.submit([5], max_new_tokens=4).result(30).error is None
        request.cancel()
        assert request.result(30).error is None


def test_an_event_loop_that_closes_meanwhile_is_nobodys_error():
    class Loop:
        """As one that closes between the question and the call."""

        def is_closed(self):
            return False

        def call_soon_threadsafe(self, what):
            raise RuntimeError("Event loop is closed")

    engine_module._tell(Loop(), print)


def test_the_engines_own_thread_cannot_close_it_and_changes_nothing_by_trying():
    raised = []

    def act(length):
        try:
            engine.close(cancel=True)
        except AccelError as error:
            raised.append(error)

    with Engine(tiny()) as engine:
        assert len(engine.submit([3], max_new_tokens=3, **processor(act)).result(30).tokens) == 3
        assert engine.submit([3], max_new_tokens=3).result(30).error is None
    assert len(raised) == 3


# --- counting while things change


def test_one_after_the_other_never_waits_for_room():
    with Engine(tiny(), max_waiting=1) as engine:
        for _ in range(60):
            assert engine.submit([3, 4], max_new_tokens=1).result(30).error is None


def test_close_with_cancel_reaches_whoever_was_let_in(monkeypatch):
    engine = Engine(tiny())
    announce = engine._core.announce

    def late(*what):  # close(cancel=True) comes while `submit` is not done
        closing.start()
        time.sleep(0.3)
        announce(*what)

    monkeypatch.setattr(engine._core, "announce", late)
    closing = threading.Thread(target=engine.close, kwargs={"cancel": True})
    request = engine.submit([3], max_new_tokens=400)
    assert request.result(60).finish_reason == "cancelled"
    closing.join(30)
    assert not closing.is_alive()


# --- the model changes


@pytest.mark.parametrize("cancelled", [False, True])
def test_no_request_meets_what_is_left_of_the_model_as_it_was(monkeypatch, cancelled):
    """Tokens that are read one step behind leave a step of rows that are over; the next request must not join it."""
    monkeypatch.setattr(loop, "lags", lambda device: True)
    model, prompt = fresh(), [7] * 40
    ends = alone(model, prompt, max_new_tokens=4, do_sample=False)[3]

    class Observer:
        """The model changes and the next request comes while the turn that ended the first one is not over."""

        def finished(self, request, result):
            if not follower:
                with torch.no_grad():
                    model.model.layers[0].self_attn.o_proj.weight.mul_(-1.5)
                follower.append(engine.submit(prompt, max_new_tokens=6, do_sample=False))
                came.set()

        def __getattr__(self, name):
            return lambda *what: None

    follower, came = [], threading.Event()
    with Engine(model, observer=Observer()) as engine:
        if cancelled:
            first = engine.submit(
                prompt, max_new_tokens=90, **processor(lambda length: length == 45 and first.cancel())
            )
        else:
            first = engine.submit(prompt, max_new_tokens=90, do_sample=False, eos_token_id=ends)
        assert first.result(30).finish_reason == ("cancelled" if cancelled else "eos")
        assert came.wait(30)
        result = follower[0].result(30)
    assert result.num_cached_tokens == 0
    assert result.tokens == alone(model, prompt, max_new_tokens=6, do_sample=False)


def test_a_model_optimized_anew_needs_another_engine():
    model = fresh()
    with Engine(model) as engine:
        assert engine.submit([3], max_new_tokens=2).result(30).error is None
        restore(model)
        optimize(model, {name: {} for name in PASSES} | {"kv_cache": {"dtype": "fp8_e4m3"}, "allow_skips": True})
        error = engine.submit([3], max_new_tokens=2).result(30).error
        assert isinstance(error, AccelError)
        assert "anew" in str(error)
    with Engine(model) as engine:
        assert engine.submit([3], max_new_tokens=2).result(30).error is None


# --- options and prompts


@pytest.mark.parametrize("given", [None, GenerationConfig(do_sample=False)], ids=["model's config", "own config"])
@pytest.mark.parametrize("lengths", [{"max_length": 12}, {"max_length": 12, "min_length": 9}, {"min_length": 9}])
def test_lengths_of_the_models_config_count_as_in_generate(given, lengths):
    model = fresh()
    free = alone(model, [3, 4, 5], max_new_tokens=4, do_sample=False)
    model.generation_config.update(**lengths, eos_token_id=free[2])
    with Engine(model) as engine:
        result = engine.submit([3, 4, 5], given).result(30)
    assert result.error is None
    assert result.tokens == alone(model, [3, 4, 5], generation_config=given)


@pytest.mark.parametrize("wrong", ["def main(", b"x", {"input_ids": [[3]]}])
def test_what_would_be_taken_apart_is_refused(wrong):
    model, tokenizer = bundled()
    with Engine(model, tokenizer) as engine, pytest.raises(AccelError, match="list of prompts"):
        engine.generate(wrong, max_new_tokens=1)
    with pytest.raises(AccelError, match="list of prompts"):
        model.generate_batch(wrong, max_new_tokens=1)


def test_a_token_is_no_prompt_and_numpy_is_taken():
    with Engine(tiny()) as engine:
        with pytest.raises(AccelError, match="one list of token ids"):
            engine.generate([3, 4], max_new_tokens=1)
        results = engine.generate([np.array([3, 4]), [np.int64(3), 4], [3, 4]], max_new_tokens=3, do_sample=False)
    assert results[0].tokens == results[1].tokens == results[2].tokens


@pytest.mark.parametrize("wrong", [None, "x", 5, [1.5]])
def test_a_prompt_that_generate_batch_cannot_take_fails_alone(wrong):
    outputs = tiny().generate_batch([torch.tensor([[3, 4]]), wrong], max_new_tokens=2, do_sample=False)
    good, bad = outputs.values()
    assert good.prompt_ids == [3, 4]
    assert good.generated_tokens == alone(tiny(), [3, 4], max_new_tokens=2, do_sample=False)
    assert (bad.status.name, bad.prompt_ids, bad.generated_tokens) == ("FAILED", [], [])
    assert bad.error.startswith("AccelError")


# --- what is kept, and for how long


@functools.cache
def bundled():
    model, tokenizer = models.load_tiny(dtype=torch.float32)
    return optimize(model), tokenizer


class Ended:
    ended = False

    def put(self, value):
        pass

    def end(self):
        self.ended = True


def test_a_streamer_ends_whatever_becomes_of_its_text(monkeypatch):
    model, tokenizer = bundled()
    streamers = [Ended(), Ended()]
    with Engine(model, tokenizer) as engine:
        refused = engine.submit("", streamer=streamers[0]).result(30)
        monkeypatch.setattr(engine._texts, "submit", lambda text, then: None)  # takes for ever
        cancelled = engine.submit("x", streamer=streamers[1])
        cancelled.cancel()
        assert cancelled.result(30).finish_reason == "cancelled"
    assert isinstance(refused.error, AccelError)
    assert [streamer.ended for streamer in streamers] == [True, True]


def test_a_stream_that_nobody_reads_is_cancelled():
    go, ended = threading.Event(), []

    class Observer:
        def __getattr__(self, name):
            return lambda *what: ended.append(what[1]) if name == "finished" else None

    with Engine(tiny(), observer=Observer()) as engine:
        stream = engine.stream([3], max_new_tokens=2000, **processor(lambda length: go.wait(30)))
        del stream
        go.set()
    assert [result.finish_reason for result in ended] == ["cancelled"]


class Reciting(LogitsProcessor):
    """Chooses these tokens, then fails."""

    def __init__(self, tokens):
        self.tokens = iter(tokens)

    def __call__(self, input_ids, scores):
        if (token := next(self.tokens, None)) is None:
            raise RuntimeError("injected")
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0.0)


def test_streams_hand_out_what_they_held_back_and_then_the_error():
    model, tokenizer = models.load_tiny(dtype=torch.float32)
    ids = tokenizer("x €", add_special_tokens=False)["input_ids"][:-1]
    said = tokenizer.decode(ids)
    assert said.endswith("\N{REPLACEMENT CHARACTER}")  # within a character

    def options():
        return {"max_new_tokens": 50, **processing(Reciting(ids))}

    async def read(engine, pieces):
        async for piece in engine.astream("def", **options()):
            pieces.append(piece)

    with Engine(optimize(model), tokenizer) as engine:
        for run in (
            lambda pieces: pieces.extend(engine.stream("def", **options())),
            lambda pieces: asyncio.run(read(engine, pieces)),
        ):
            pieces = []
            with pytest.raises(RuntimeError, match="injected"):
                run(pieces)
            assert "".join(pieces) == said


def until(what):
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def test_kept_pages_are_bounded_without_a_limit_on_pages(monkeypatch):
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.2)
    model = fresh(reuse_prefix=True, prefix_bytes=100_000)
    with Engine(model) as engine:
        engine.submit([3], max_new_tokens=1).result(30)
        first = engine.facts()["bytes_reserved"]
        for i in range(4):
            asked = [[2 + i, 2 + j, *[5] * 60] for j in range(60)]
            results = engine.generate(asked, max_new_tokens=2, do_sample=False)
            facts = engine.facts()
            assert facts["pages_kept"] * engine._core.scheduler.rows.page_bytes <= 100_000
            until(lambda: engine.facts()["bytes_reserved"] == first)  # the memory of 32 rows at once goes back
        again = engine.submit(asked[-1], max_new_tokens=2, do_sample=False).result(30)
    assert facts["pages_kept"] > 0
    assert facts["pages_evicted"] > 100
    assert again.num_cached_tokens == 48  # the latest ones stay
    assert again.tokens == results[-1].tokens


def test_an_engine_rests_once_and_only_after_a_while(monkeypatch):
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 1.0)
    rests, stock = [], core.Core.rest
    monkeypatch.setattr(core.Core, "rest", lambda self: (rests.append(time.monotonic()), stock(self)))
    with Engine(tiny()) as engine:
        for times in (1, 2):
            engine.generate([[3, 4]], max_new_tokens=2)
            done = time.monotonic()
            assert len(rests) == times - 1
            until(lambda times=times: len(rests) == times)
            assert rests[-1] - done > 0.5
        time.sleep(2.5)
    assert len(rests) == 2  # it waits for work then, however long


def every_second(full):
    """`torch.index_select`, but for every second time that it is told where to write."""
    stock, calls = torch.index_select, []

    def run(*arguments, **options):
        calls.extend("out" for _ in options.keys() & {"out"})
        return full() if "out" in options and len(calls) % 2 == 0 else stock(*arguments, **options)

    return run


def test_pages_that_cannot_be_moved_are_forgotten(monkeypatch):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.2)
    asked = [[2, 2 + j, *[5] * 60] for j in range(40)]
    with Engine(fresh(reuse_prefix=True, prefix_bytes=50_000)) as engine:
        with monkeypatch.context() as patched:
            # Of the layers the second one finds no memory, whenever it is tried: on a busy machine requests may come so
            # slowly that the engine rests between them.
            patched.setattr(torch, "index_select", every_second(full))
            results = engine.generate(asked, max_new_tokens=2, do_sample=False)
            until(lambda: engine.facts()["bytes_reserved"] == 0)
        again = engine.generate(asked, max_new_tokens=2, do_sample=False)
    assert [result.tokens for result in again] == [result.tokens for result in results]
    assert again[0].num_cached_tokens == 0


def test_few_stop_strings_are_kept_ready():
    model, tokenizer = bundled()
    with Engine(model, tokenizer) as engine:
        for i in range(settings.MAX_STOPS + 5):
            engine.submit("a", stop_strings=[f"stop {i}"], max_new_tokens=1).result(30)
        assert len(engine._options._stops) == settings.MAX_STOPS
        known = engine._options._stops[f"stop {i}",]
        engine.submit("a", stop_strings=f"stop {i}", max_new_tokens=1).result(30)
        assert engine._options._stops[f"stop {i}",] is known


def test_a_prompt_that_waits_for_pages_is_hashed_once(monkeypatch):
    hashed, chain = [], rows.chain

    def counting(*arguments):
        found = list(chain(*arguments))
        hashed.append(len(found))
        return found

    monkeypatch.setattr(rows, "chain", counting)
    with Engine(tiny(), max_pages=16) as engine:
        runs = engine.submit([3] * 20, max_new_tokens=60, do_sample=False)
        next(iter(runs))
        waits = engine.submit([4] * 230, max_new_tokens=3, do_sample=False)  # 15 pages: not beside the other one
        assert waits.result(30).tokens == alone(tiny(), [4] * 230, max_new_tokens=3, do_sample=False)
        assert runs.result(30).times.finished < waits.result().times.admitted
    assert sum(hashed) == (20 + 60 - 1) // 16 + (230 + 3 - 1) // 16  # each page once, the last tokens have no entries


def test_longer_than_the_models_positions_is_said_once(caplog):
    def said():
        return [record.message for record in caplog.records if record.name == settings.__name__]

    settings._warn_of_positions.cache_clear()
    passes = {name: {} for name in PASSES} | {"allow_skips": True}
    model = optimize(tiny_model("llama", max_position_embeddings=32), passes)
    with Engine(model) as engine:
        engine.generate([[3] * 20], max_new_tokens=4)
        assert not said()
        results = engine.generate([[3] * 20, [3] * 40], max_new_tokens=13, do_sample=False, eos_token_id=[])
    assert [len(result.tokens) for result in results] == [13, 13]
    assert said() == ["a request may get longer than the 32 positions that the model was made for"]

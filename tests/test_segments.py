"""Recordings cut into several CUDA graphs, on graphs that only say what was asked of them."""

import contextlib
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from deepseek_accel.generation import segments
from deepseek_accel.generation.graphs import StepGraphs


@pytest.fixture
def told(monkeypatch):
    """What is asked of CUDA. `told.fails`: which call raises."""
    told = SimpleNamespace(calls=[], fails=None)

    class Graph:
        def __init__(self):
            self.number = sum(call == "begin" for call in told.calls)

        def _tell(self, what):
            told.calls.append(what)
            if told.fails == (what, self.number):
                raise torch.OutOfMemoryError(f"{what} {self.number}")

        def capture_begin(self, pool=None, capture_error_mode="global"):
            assert pool == "pool" and capture_error_mode == "thread_local"
            self._tell("begin")

        def capture_end(self):
            self._tell("end")

        def replay(self):
            told.calls.append(self.number)

    stream = SimpleNamespace(device="cuda", wait_stream=lambda other: None, synchronize=lambda: None)
    for name in ("synchronize", "empty_cache", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: "state")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    told.stream = stream
    return told


def test_where_cuts_are():
    assert segments.cuts(27) == {3, 9} and segments.cuts(61) == {6, 20}
    assert segments.cuts(5) == {1} and segments.cuts(2) == frozenset()


def test_what_is_recorded_replays_in_order(told):
    with segments.recorded("pool", told.stream) as recorded:
        recorded.cut()
        recorded.cut()
    assert told.calls == ["begin", "end"] * 3
    told.calls.clear()
    recorded.replay()
    assert told.calls == [0, 1, 2]


@pytest.mark.parametrize("fails", [("begin", 0), ("begin", 1), ("end", 0), ("end", 1)])
def test_every_capture_that_began_is_ended_once(told, fails):
    told.fails = fails
    with (
        pytest.raises(torch.OutOfMemoryError, match=f"{fails[0]} {fails[1]}"),
        segments.recorded("pool", told.stream) as recorded,
    ):
        recorded.cut()
    begun = told.calls.count("begin") - (fails[0] == "begin")
    assert told.calls.count("end") == begun


def test_an_error_of_what_is_recorded_comes_through(told):
    with pytest.raises(KeyError), segments.recorded("pool", told.stream):
        raise KeyError
    assert told.calls == ["begin", "end"]


@pytest.mark.parametrize("fails", [None, ("end", 1), ("begin", 1)])
def test_layers_are_not_cut_afterwards(told, fails):
    """Whether the recording went well or not."""
    record_in_segments(told, fails, True)


def test_a_decoding_step_is_one_graph(told):
    record_in_segments(told, None, False)


def record_in_segments(told, fails, in_segments):
    graphs = StepGraphs((1,), Counter())
    graphs._stream, graphs._pool = told.stream, "pool"
    stepper = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")), between=None)
    ran = []

    def record():
        ran.append(stepper.between is not None)
        if stepper.between is not None:
            stepper.between()
        return torch.zeros(1)

    told.fails = fails
    with contextlib.nullcontext() if fails is None else pytest.raises(torch.OutOfMemoryError):
        captured = graphs._record(stepper, record, (), in_segments)
        told.calls.clear()
        captured.graph.replay()
        assert told.calls == ([0, 1] if in_segments else [0])
    assert stepper.between is None and ran == [False, False, in_segments]

"""One recording as several CUDA graphs that replay one after the other.

The device begins to work on a graph when the host has handed over all of it, about two microseconds a launch, half a
millisecond for a model. Where the host waited for what came before, the device waits too. Of a recording in three
graphs it waits for the first, a ninth of the layers; the rest is handed over while it works.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def cuts(num_layers: int) -> frozenset[int]:
    """The layers that a new graph begins with: a ninth, two ninths and two thirds of them, for while the device runs a
    graph the host can hand over one of three times the size. Fewer graphs for fewer than nine layers."""
    return frozenset((num_layers // 9, num_layers // 3)) - {0}


class Segments:
    """Graphs of one memory pool, in the order they were recorded and replay in."""

    def __init__(self, pool: Any) -> None:
        self._pool, self._recording = pool, False
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def cut(self) -> None:
        """End the graph that is being recorded; what comes is recorded into another one."""
        self._end()
        self._begin()

    def replay(self) -> None:
        for graph in self._graphs:
            graph.replay()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # other threads may go on using the device while this one records
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graphs.append(graph)
        self._recording = True

    def _end(self) -> None:
        if self._recording:
            self._recording = False
            self._graphs[-1].capture_end()


@contextmanager
def recorded(pool: Any, stream: torch.cuda.Stream) -> Iterator[Segments]:
    """What is launched inside, on `stream`, is recorded and not run."""
    torch.cuda.synchronize(stream.device)
    # As `torch.cuda.graph` does, so that the graphs have what there is, but for pinned memory, which is in use here.
    torch.cuda.empty_cache()
    segments = Segments(pool)
    with torch.cuda.stream(stream):
        segments._begin()
        try:
            yield segments
        finally:
            segments._end()

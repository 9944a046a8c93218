"""Clocks, peak memory, and the speed limit everything is held against: the measured copy bandwidth of the device."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..passes.mixed_precision import packed_bytes

COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 27}
DEFAULT_L2_BYTES = 64 << 20


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Wall-clock time of one call, waited for, and its result."""
    synchronize(device)
    start = time.perf_counter()
    result = function()
    synchronize(device)
    return time.perf_counter() - start, result


@functools.cache
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a plain copy between two large buffers."""
    source = torch.ones(COPY_BYTES.get(device.type, 1 << 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    copies = 5
    times = [seconds(lambda: [target.copy_(source) for _ in range(copies)], device)[0] for _ in range(7)]
    return 2 * copies * source.numel() / statistics.median(times)


def peak_above_weights(model: Any) -> int | None:
    """The most bytes that were allocated on the model's device since `torch.cuda.reset_peak_memory_stats`, without what
    its weights take, packed ones included; None if that is not a GPU."""
    if model.device.type != "cuda":
        return None
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) + packed_bytes(model)
    return torch.cuda.max_memory_allocated(model.device) - held


def l2_bytes(device: torch.device) -> int:
    """Size of the last-level cache that repeated inputs must not stay in."""
    if device.type != "cuda":
        return DEFAULT_L2_BYTES
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or DEFAULT_L2_BYTES


def median_seconds(calls: Sequence[Callable[[], Any]], device: torch.device, repeats: int = 20) -> float:
    """Median time of one call, launched one by one: what a caller without CUDA graphs waits."""
    for call in calls[:2]:
        call()
    times = [seconds(lambda: [call() for call in calls], device)[0] / len(calls) for _ in range(repeats)]
    return statistics.median(times)


def graph_seconds(calls: Sequence[Callable[[], Any]], device: torch.device, repeats: int = 20) -> float:
    """Median time of one call inside a CUDA graph of all of them.

    The calls should work on different inputs that together exceed the L2 cache, so that each finds its own cold.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # compiles the kernels, which a capture must not
        for call in calls:
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / len(calls))
    return statistics.median(times)


def call_seconds(calls: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Median time of one call: by graph replay on a GPU, by the clock elsewhere."""
    return graph_seconds(calls, device) if device.type == "cuda" else median_seconds(calls, device)

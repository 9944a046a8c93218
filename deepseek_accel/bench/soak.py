"""Many `generate` calls of mixed batch and length: what they leave behind in memory, and whether they get slower."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from . import greedy
from .shapes import Point, Subject

SAMPLES = 10
"""How often memory is read, the first and the last time included."""


def held_bytes(device: torch.device) -> int:
    """Bytes of tensors on a GPU; on a CPU, of the whole process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    import psutil

    return int(psutil.Process().memory_info().rss)


def mixed_calls(points: tuple[Point, ...], new_tokens: int, calls: int) -> list[tuple[Point, int]]:
    """(point, new tokens) of each call. The first is the largest, so that what grows later grew for no reason."""
    most = Point(max(p.batch for p in points), max(p.prompt_length for p in points))
    generator = torch.Generator().manual_seed(0)

    def draw(limit: int) -> int:
        return int(torch.randint(1, limit + 1, (), generator=generator))

    drawn = [(Point(draw(most.batch), draw(most.prompt_length)), draw(new_tokens)) for _ in range(calls - 1)]
    return [(most, new_tokens), *drawn]


def run(
    subject: Subject,
    points: tuple[Point, ...],
    new_tokens: int,
    calls: int,
    step: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Call `generate` on the subject's model as it is, `calls` times.

    Returns plain values: bytes held after the first call, at the last and at most, and the ITL in ms of the first
    point right after the first call and after the last.
    """
    model, device = subject.model, subject.model.device

    def itl_ms() -> float:
        prompt = subject.prompt(points[0])
        greedy.generate(model, prompt, min(4, new_tokens))
        rest = sorted(greedy.timed(model, prompt, new_tokens)[1] for _ in range(3))[1]
        return rest / (new_tokens - 1) * 1e3

    held: list[tuple[int, int]] = []
    every = max(1, (calls - 1) // (SAMPLES - 1))
    first = last = 0.0
    for i, (point, count) in enumerate(mixed_calls(points, new_tokens, calls)):
        greedy.generate(model, subject.prompt(point, seed=i), count)
        if i == 0:
            first = itl_ms()
        if i == calls - 1:
            last = itl_ms()
        if i % every == 0 or i == calls - 1:
            held.append((i + 1, held_bytes(device)))
            step(f"soak, call {i + 1} of {calls}: {held[-1][1]:,} bytes held")
    return {
        "calls": calls,
        "bytes_held": held,
        "bytes_grown": held[-1][1] - held[0][1],
        "itl_first_ms": first,
        "itl_last_ms": last,
        "point": str(points[0]),
        "what": "tensors on the device" if device.type == "cuda" else "the process",
    }

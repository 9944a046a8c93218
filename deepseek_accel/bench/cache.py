"""What the kinds of cache cost and save: bytes held, peak memory, times, at long contexts, and reuse of a prefix."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ..errors import AccelError
from ..versions import cache_argument
from . import greedy
from .environment import dtype_name, environment, resolve_device, resolve_dtype
from .generate import applied, release
from .measure import peak_above_weights, seconds
from .record import Keep, forget
from .shapes import Point, Subject, load

FULL = "full"
SHARED_TAIL = 64
"""Tokens in which the second prompt of a reused prefix differs from the first."""
CONFIGS: dict[str, dict[str, Any]] = {
    FULL: {},
    "fp8_e4m3": {"dtype": "fp8_e4m3"},
    "fp8_e5m2": {"dtype": "fp8_e5m2"},
    "reuse_prefix": {"reuse_prefix": True},
    "window_50": {"eviction": "window"},
    "top_attention_50": {"eviction": "top_attention"},
}
"""Fields of `KVCache` by the name of the variant. An eviction policy holds half of each point's context."""

Step = Callable[[str], None]


@dataclass
class Row:
    model: str
    dtype: str
    batch: int
    context: int
    variant: str
    status: str = "ok"
    detail: str = ""
    ttft_ms: float | None = None
    itl_ms: float | None = None
    tokens_per_second: float | None = None
    bytes_held: int | None = None
    """Of pages in use after the last token, all layers and rows."""
    peak_bytes_above_weights: int | None = None
    """Of the whole row; GPU only."""
    second_ttft_ms: float | None = None
    """Of later prompts that share all but the last SHARED_TAIL tokens; with prefix reuse only."""


@dataclass(frozen=True)
class Options:
    model: str
    points: tuple[Point, ...]
    variants: tuple[str, ...] = ()
    """Names to measure, or all."""
    new_tokens: int = 64
    repeats: int = 3
    device: str = "auto"
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.new_tokens < 2 or self.repeats < 1:
            raise AccelError("new tokens must be 2 or more, repeats 1 or more")
        if unknown := sorted(set(self.variants) - set(CONFIGS)):
            raise AccelError(f"unknown variants {', '.join(unknown)}; known: {', '.join(CONFIGS)}")


def config_of(fields: dict[str, Any], context: int) -> dict[str, Any]:
    """Every lossless pass, with these fields of `KVCache`; policies by name hold half of `context` tokens."""
    from ..config import OptimizeConfig

    if "eviction" in fields:
        half = {"recent": context // 2 - 4} if fields["eviction"] == "window" else {"budget": context // 2}
        fields = fields | {"eviction": {fields["eviction"]: half}}
    config = OptimizeConfig.lossless().to_dict()
    return config | {"kv_cache": config["kv_cache"] | fields, "allow_skips": True}


def run(
    options: Options, step: Step = lambda text: None, subject: Subject | None = None, keep: Keep = forget
) -> dict[str, Any]:
    """Measure every point with every variant: {"environment": ..., "rows": [...]}, ready for JSON.

    step: told what is measured next; keep: told the rows so far after each of them.
    """
    device = resolve_device(options.device) if subject is None else subject.model.device
    if subject is None:
        step(f"loading {options.model}")
        subject = load(options.model, device, resolve_dtype(options.dtype, device))
    rows: list[dict[str, Any]] = []
    result = {"environment": environment(device), "rows": rows}
    for point in options.points:
        for name, fields in CONFIGS.items():
            if options.variants and name not in options.variants:
                continue
            step(f"{options.model} {point} {name}")
            dtype = dtype_name(subject.model.dtype)
            row = Row(options.model, dtype, point.batch, point.prompt_length, name)
            try:
                with applied(subject.model, config_of(fields, point.prompt_length)):
                    _measure(row, subject, point, options, "reuse_prefix" in fields)
            except Exception as error:  # whatever one variant does, the others are measured
                row.status = "error"
                row.detail = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
            release(device)
            rows.append(asdict(row))
            keep(result)
    return result


def _measure(row: Row, subject: Subject, point: Point, options: Options, reuses: bool) -> None:
    model, device = subject.model, subject.model.device
    prompt = subject.prompt(point)

    def generate(ids: torch.Tensor, new_tokens: int) -> Any:
        return greedy.generate(model, ids, new_tokens, return_dict_in_generate=True)

    # kernels, graphs; of the prompt that is measured, unless that would be kept
    generate(subject.prompt(point, seed=1), 4)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    first, output = seconds(lambda: generate(prompt, 1), device)
    times = [first]
    if not reuses:
        for _ in range(options.repeats - 1):
            del output
            again, output = seconds(lambda: generate(prompt, 1), device)
            times.append(again)
    row.ttft_ms = statistics.median(times) * 1e3
    # Calls that go on from the same cache: the prompt, whose time varies more than all steps take, is not in them.
    steps = []
    for _ in range(2):  # kernels of a call that goes on, and the graph that the second one records
        _, output = greedy.go_on(model, output, 2)
    for _ in range(options.repeats):
        short, output = greedy.go_on(model, output, 1)
        long, output = greedy.go_on(model, output, options.new_tokens)
        steps.append((long - short) / (options.new_tokens - 1))
    itl = statistics.median(steps)
    row.itl_ms, row.tokens_per_second = itl * 1e3, point.batch / itl if itl > 0 else None
    row.bytes_held = int(output[cache_argument()].bytes_held())
    row.peak_bytes_above_weights = peak_above_weights(model)
    if reuses:
        times = []
        for seed in range(2, 4 + options.repeats):
            other = subject.prompt(point, seed=seed)
            other[:, :-SHARED_TAIL] = prompt[:, :-SHARED_TAIL]
            times.append(seconds(partial(generate, other, 1), device)[0])
        # the first builds the kernels of a short rest after a long beginning, the second records a graph of them
        row.second_ttft_ms = statistics.median(times[2:]) * 1e3


def exit_code(rows: Sequence[dict[str, Any]]) -> int:
    """1 if nothing could be measured, else 0."""
    return 0 if any(row["status"] == "ok" for row in rows) else 1

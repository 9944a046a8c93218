"""What `bench generate` is asked for, and the rows it answers with."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import AccelError
from .environment import dtype_name
from .shapes import Point, variants

STOCK = "stock"
OK, WRONG, ERROR, SKIPPED = "ok", "wrong", "error", "skipped"


@dataclass(frozen=True)
class Options:
    """What to measure; the arguments of `deepseek-accel bench generate`."""

    model: str
    points: tuple[Point, ...]
    new_tokens: int = 64
    dtype: str | None = None
    device: str = "auto"
    passes: str = "all"
    ablate: bool = False
    repeats: int = 3
    skip_stock: bool = False
    only_stock: bool = False
    peers: bool = False
    soak: int = 0
    """How many calls of mixed batch and length to run after the points; 0 is none."""
    adaptive: tuple[str, ...] = ()
    """Variants of `gating.variants` besides: targets of AdaptiveTopK, or "top1", "top2"."""
    int4: tuple[str, ...] = ()
    """Also with these targets of MixedPrecision in four bits, rounded to nearest: everything chosen, and the adaptive
    variants."""

    def __post_init__(self) -> None:
        if self.new_tokens < 2:
            raise AccelError(f"new_tokens must be at least 2 to time a step, got {self.new_tokens}")
        if self.repeats < 1:
            raise AccelError(f"repeats must be at least 1, got {self.repeats}")
        if self.soak < 0:
            raise AccelError(f"soak must be a number of calls, got {self.soak}")
        if self.skip_stock and self.only_stock:
            raise AccelError("skip_stock and only_stock leave nothing to measure; give one of them")
        if self.only_stock and (self.adaptive or self.int4):
            raise AccelError("only_stock leaves no adaptive or int4 variants to measure; give one of them")

    def configs(self) -> dict[str, Any]:
        """Variant -> OptimizeConfig, None for stock."""
        ours = {} if self.only_stock else variants(self.passes, ablate=self.ablate)
        return ({} if self.skip_stock else {STOCK: None}) | ours


@dataclass
class Row:
    """One variant at one point. What was not measured is None."""

    model: str
    dtype: str
    batch: int
    prompt_length: int
    new_tokens: int
    variant: str
    status: str = OK
    detail: str = ""
    """What was checked, or why there is no time."""
    ttft_ms: float | None = None
    itl_ms: float | None = None
    tokens_per_second: float | None = None
    """Of the decode: batch / ITL."""
    ttft_ratio: float | None = None
    itl_ratio: float | None = None
    """Stock's time divided by this one: how many times faster."""
    weight_bytes: int | None = None
    """What the model's weights take on the device."""
    peak_bytes_above_weights: int | None = None
    """Of the whole call."""
    prefill_peak_bytes_above_weights: int | None = None
    """Of a call of one token."""
    kv_bytes_per_token_and_layer: float | None = None
    experts_per_step: float | None = None
    """Distinct routed experts hit per decode step and mixture layer."""
    experts_per_token: float | None = None
    """Routed experts that a token kept, per mixture layer, where a pass drops some."""
    floor_ms: float | None = None
    """Bytes a decode step must read, at the device's copy bandwidth."""
    floor_ratio: float | None = None
    """itl_ms / floor_ms: how many times the floor."""
    first_tokens: list[int] | None = None
    """Stock's first new token of each sequence."""
    accuracy: dict[str, Any] | None = None
    traceback: str | None = None

    def fail(self, error: BaseException) -> None:
        self.status, self.detail = ERROR, first_line(error)
        self.traceback = "".join(traceback.format_exception(error))


def first_line(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, AccelError) else f"{type(error).__name__}: {text}"


def new_row(options: Options, point: Point, variant: str, dtype: Any) -> Row:
    return Row(options.model, dtype_name(dtype), point.batch, point.prompt_length, options.new_tokens, variant)


def failed_rows(options: Options, configs: Sequence[str], error: BaseException) -> list[Row]:
    """Rows that say why the whole model could not be measured."""
    rows = [new_row(options, point, name, options.dtype or "-") for point in options.points for name in configs]
    for row in rows:
        row.fail(error)
    return rows


def by_point(rows: Sequence[Row], points: Sequence[Point]) -> list[Row]:
    """The rows of the first point, in their order, then those of the next."""
    sizes = [(point.batch, point.prompt_length) for point in points]
    return sorted(rows, key=lambda row: sizes.index((row.batch, row.prompt_length)))

"""Single ops: checked against an exact result, then timed with cold inputs."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import AccelError
from ..testing import relative_error
from . import int4_cases, op_cases
from .environment import dtype_name, environment, resolve_device, resolve_dtype
from .generate import release
from .measure import call_seconds, copy_bandwidth, median_seconds
from .op_cases import Case, Shape
from .record import Keep, forget
from .rows import ERROR, OK, WRONG

OPS = (*op_cases.OPS, *int4_cases.OPS)

# |out - exact| / |exact| over the whole result. A chain of two rounded products stays below one unit in the last place
# of bf16 (2^-7); fp32 sums of ten thousand terms stay below 1e-5. Expert ids come as float64 and must be equal.
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 1e-5, torch.float64: 0.0}


@dataclass
class OpRow:
    """One op at one shape. What was not measured is None."""

    op: str
    shape: str
    dtype: str
    status: str = OK
    detail: str = ""
    error: float | None = None
    microseconds: float | None = None
    gigabytes_per_second: float | None = None
    teraflops_per_second: float | None = None
    percent_of_copy: float | None = None
    reference_microseconds: float | None = None
    reference_ratio: float | None = None
    """The reference's time divided by this one."""
    traceback: str | None = None


def check(case: Case) -> tuple[float, str | None]:
    """The largest relative error of the case's results, and what is wrong with them, if anything."""
    worst = 0.0
    for actual, exact in case.check():
        if not bool(actual.isfinite().all()):
            return float("inf"), "the result is not finite"
        error = ((actual.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()
        worst, allowed = max(worst, error), TOLERANCE[actual.dtype]
        if not error <= allowed:
            return error, f"the result is off by {error:.2g}, allowed is {allowed:.2g}"
        if not (peak := relative_error(actual, exact)) <= 4 * allowed:
            return error, f"one element is off by {peak:.2g} of the largest"
    return worst, None


def shapes_for(device: torch.device) -> list[Shape]:
    """All shapes that are measured on such a device, by op."""
    if device.type == "cuda":
        return op_cases.gpu_shapes() + int4_cases.gpu_shapes()
    return op_cases.cpu_shapes() + int4_cases.cpu_shapes()


def measure(shape: Shape, device: torch.device, dtype: torch.dtype) -> OpRow:
    """Check and time one shape; a failure is the row's text."""
    row = OpRow(shape.op, shape.name, dtype_name(dtype))
    try:
        torch.manual_seed(0)
        with torch.no_grad():
            case = shape.build(device, dtype)
            row.error, wrong = check(case)
            if wrong is not None:
                row.status, row.detail = WRONG, wrong
                return row
            calls = case.calls if device.type == "cuda" else case.calls[:1]  # the reference's own inputs
            duration = call_seconds(calls, device)
            reference = median_seconds([case.reference], device) if case.reference is not None else None
    except torch.OutOfMemoryError:
        row.status, row.detail = ERROR, "out of memory"
        return row
    except Exception as error:  # a kernel that does not build must not stop the others
        row.status, row.detail = ERROR, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        row.traceback = traceback.format_exc()
        return row
    row.microseconds = duration * 1e6
    row.gigabytes_per_second = case.num_bytes / duration / 1e9
    row.teraflops_per_second = case.flops / duration / 1e12 if case.flops else None
    row.percent_of_copy = 100 * case.num_bytes / duration / copy_bandwidth(device)
    if reference is not None:
        row.reference_microseconds, row.reference_ratio = reference * 1e6, reference / duration
    return row


def run(
    ops: Sequence[str] = OPS,
    device_name: str = "auto",
    dtype_text: str | None = None,
    step: Callable[[str], None] = lambda text: None,
    keep: Keep = forget,
) -> dict[str, Any]:
    """Measure every shape of `ops`; returns {"environment": ..., "rows": [...]}, ready for JSON.

    keep: told the rows so far after each of them.

    On a GPU times are of CUDA graph replays; on a CPU they are of the torch implementations at small shapes.
    Raises AccelError on an unknown op or a missing device.
    """
    if unknown := [op for op in ops if op not in OPS]:
        raise AccelError(f"no such op: {', '.join(map(repr, unknown))}. Known: {', '.join(OPS)}.")
    device = resolve_device(device_name)
    dtype = resolve_dtype(dtype_text, device)
    shapes = [shape for shape in shapes_for(device) if shape.op in ops]
    facts = environment(device) | {"copy_bytes_per_second": copy_bandwidth(device)}
    rows: list[dict[str, Any]] = []
    result = {"environment": facts, "rows": rows}
    for shape in shapes:
        step(f"{shape.op} {shape.name}")
        rows.append(asdict(measure(shape, device, dtype)))
        keep(result)
        release(device)
    return result


def num_shapes(ops: Sequence[str], device_name: str) -> int:
    return sum(shape.op in ops for shape in shapes_for(resolve_device(device_name)))

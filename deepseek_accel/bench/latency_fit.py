"""Latency against load: the curve latency = a + b * load^c, its knee, and how sure both are.

The fit minimises the squared *relative* error over a, b >= 0 and c on a fine grid, so that a point of 10 s does not
outweigh one of 10 ms. The knee is where the load is best used in the sense of Kleinrock's "power", throughput divided
by latency: below it, more load costs little latency; above it, latency grows faster than throughput. It does not depend
on how far the load was driven, as the corner of a picture would:

    closed loop (load = users, throughput = users / latency):  users^c = a / (b (2c - 1)),  c > 1/2
    open loop   (load = throughput = requests per second):     rate^c  = a / (b (c - 1)),   c > 1

A curve has no knee where the exponent is too small, or where that load was not measured. Confidence is by bootstrap:
the requests of each load are drawn again with replacement, percentile, fit and knee computed anew; the interval holds
the middle 95 %. It covers the scatter of requests within a run, not that between runs or machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import AccelError

Array = npt.NDArray[np.float64]
CLOSED, OPEN = "closed", "open"
EXPONENTS = np.geomspace(0.05, 12.0, 600)
LEAST_LOADS = 4
"""Three parameters and one point to be wrong about."""
RESAMPLES = 500
CERTAIN = 0.95
"""A knee is called certain if at least this share of the resamples has one."""


@dataclass(frozen=True)
class Curve:
    """latency = a + b * load^c"""

    a: float
    b: float
    c: float
    error: float
    """Root mean square of the relative error at the points."""

    def at(self, load: float) -> float:
        return self.a + self.b * load**self.c


def fit_many(loads: Sequence[float], latencies: Array) -> tuple[Array, Array, Array, Array]:
    """(a, b, c, error), each [S], of latencies [S, P] at loads [P]."""
    powers = np.asarray(loads, float)[None] ** EXPONENTS[:, None]  # [C, P]
    weights = 1 / latencies  # [S, P]; the target is then one everywhere
    count = latencies.shape[1]
    one, power = weights[:, None], weights[:, None] * powers[None]  # [S, 1, P], [S, C, P]
    aa, ab, bb = (one * one).sum(-1), (one * power).sum(-1), (power * power).sum(-1)
    ay, by = one.sum(-1), power.sum(-1)
    determinant = aa * bb - ab * ab
    safe = np.where(determinant > 1e-12 * aa * bb, determinant, np.inf)
    a, b = (bb * ay - ab * by) / safe, (aa * by - ab * ay) / safe
    only_a, only_b = ay / aa, by / bb
    a, b = (
        np.where(a < 0, 0.0, np.where(b < 0, only_a, a)),
        np.where(a < 0, only_b, np.where(b < 0, 0.0, b)),
    )
    residual = np.square(a[..., None] * one + b[..., None] * power - 1).sum(-1)  # [S, C]
    residual = np.where(np.isfinite(safe), residual, np.inf)
    best = residual.argmin(1)
    rows = np.arange(len(best))
    return a[rows, best], b[rows, best], EXPONENTS[best], np.sqrt(residual[rows, best] / count)


def fit(loads: Sequence[float], latencies: Sequence[float]) -> Curve:
    """The curve of one latency > 0 for each load > 0. Raises AccelError for fewer than LEAST_LOADS different loads."""
    if len(set(loads)) < LEAST_LOADS:
        raise AccelError(f"a latency curve needs {LEAST_LOADS} different loads, got {len(set(loads))}")
    if min(loads) <= 0 or min(latencies) <= 0:
        raise AccelError("loads and latencies must be above 0")
    a, b, c, error = fit_many(loads, np.asarray(latencies, float)[None])
    return Curve(float(a[0]), float(b[0]), float(c[0]), float(error[0]))


def knees(a: Array, b: Array, c: Array, kind: str, loads: Sequence[float]) -> Array:
    """[S]: the loads of the knees, NaN where a curve has none among the measured loads."""
    slope = 2 * c - 1 if kind == CLOSED else c - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        knee = np.where((slope > 0) & (a > 0) & (b > 0), (a / (b * slope)) ** (1 / c), np.nan)
    return np.where((knee >= min(loads)) & (knee <= max(loads)), knee, np.nan)


def study(kind: str, loads: Sequence[float], samples: Sequence[Sequence[float]], percentile: float) -> dict[str, Any]:
    """Curve, knee and intervals of a percentile of the latencies `samples` measured at each load.

    {"percentile", "a", "b", "c", "error", "knee", "knee_interval", "knee_share", "c_interval", "knee_text"}; "knee" is
    None where there is none, which "knee_text" explains.
    """
    curve = fit(loads, [float(np.percentile(sample, percentile)) for sample in samples])
    generator = np.random.default_rng(0)
    drawn = np.empty((RESAMPLES, len(loads)))
    for i, sample in enumerate(samples):
        values = np.asarray(sample, float)
        drawn[:, i] = np.percentile(generator.choice(values, (RESAMPLES, len(values))), percentile, axis=1)
    a, b, c, _ = fit_many(loads, drawn)
    found = knees(a, b, c, kind, loads)
    found = found[~np.isnan(found)]
    share = len(found) / RESAMPLES
    knee = float(knees(np.array([curve.a]), np.array([curve.b]), np.array([curve.c]), kind, loads)[0])
    interval = None if len(found) < 2 else [float(value) for value in np.percentile(found, (2.5, 97.5))]
    has = not np.isnan(knee)
    return asdict(curve) | {
        "percentile": percentile,
        "c_interval": [float(value) for value in np.percentile(c, (2.5, 97.5))],
        "knee": knee if has else None,
        "knee_interval": interval if has else None,
        "knee_share": share,
        "knee_text": _knee_text(curve, kind, loads, knee if has else None, interval, share),
    }


def _knee_text(
    curve: Curve, kind: str, loads: Sequence[float], knee: float | None, interval: list[float] | None, share: float
) -> str:
    unit = "users" if kind == CLOSED else "requests/s"
    if knee is not None and interval is not None:
        sure = "" if share >= CERTAIN else f"; uncertain: only {share:.0%} of the resamples have a knee"
        return f"{knee:.3g} {unit}, 95 % within {interval[0]:.3g} to {interval[1]:.3g}{sure}"
    least = 0.5 if kind == CLOSED else 1.0
    if curve.c <= least or curve.a == 0 or curve.b == 0:
        return f"none: a {curve.a:.3g}, b {curve.b:.3g}, c {curve.c:.2f}; a knee needs a, b > 0 and c > {least:g}"
    return f"none within the measured {min(loads):g} to {max(loads):g} {unit}"

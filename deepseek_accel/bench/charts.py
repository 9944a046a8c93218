"""Pictures of numbers as SVG text: lines over an axis, and dots in rows. Colours come from the page's style.

Every picture says in words what it shows (`<title>`, `<desc>`), and series differ in shape as well as in colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from .tables import number

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 46
ROW, ROW_TOP, NAMES_WIDTH, VALUE_WIDTH = 20, 8, 150, 58
MOST_TICKS = 9
COLOURS = 7
"""Classes c0 to c6 of the page; further series begin anew, with other shapes."""


@dataclass(frozen=True)
class Line:
    """A series. Points without a y are left out."""

    name: str
    points: Sequence[tuple[float, float | None]]
    dashed: bool = False
    """Drawn without marks: a fitted curve."""


@dataclass(frozen=True)
class Chart:
    """A picture and its key."""

    title: str
    svg: str
    key: Sequence[tuple[str, str]] = ()
    """(SVG of 24 x 14, name) of each series; none if the picture names them itself."""


@dataclass(frozen=True)
class Scale:
    """Places numbers between two pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((value - low) / (high - low) if high > low else 0.5)

    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)


def linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers within [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """1, 2 and 5 times powers of ten within [low, high], or powers of ten alone where that is too many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**d for d in decades for f in factors if low * 0.999 <= f * 10.0**d <= high * 1.001]
        if len(found) <= most:
            break
    return found if len(found) > 1 else linear_ticks(low, high, about=3)


def mark(x: float, y: float, series: int) -> str:
    """A sign for a point: its shape and colour say which series it is of."""
    colour = f"c{series % COLOURS}"
    shape = series % 4
    if shape == 0:
        return f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    offsets = (
        ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        ((0, -5), (5, 4), (-5, 4)),
        ((0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)),
    )[shape - 1]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in offsets)
    return f'<polygon class="{colour}" points="{points}"/>'


def lines(
    title: str, series: Sequence[Line], x_label: str, y_label: str, *, x_log: bool = False, y_log: bool = False
) -> Chart | None:
    """Series over an axis; None if there is nothing to draw. A logarithmic axis leaves out what is not above 0."""

    def drawable(x: float, y: float | None) -> bool:
        return y is not None and math.isfinite(y) and (x > 0 or not x_log) and (y > 0 or not y_log)

    kept = [Line(line.name, [(x, y) for x, y in line.points if drawable(x, y)], line.dashed) for line in series]
    kept = [line for line in kept if line.points]
    places = [(x, y) for line in kept for x, y in line.points if y is not None]
    if not places:
        return None
    across = _scale([x for x, _ in places], LEFT, WIDTH - RIGHT, x_log)
    up = _scale([y for _, y in places], HEIGHT - BOTTOM, TOP, y_log, from_zero=True)
    measured = sorted({x for line in kept if not line.dashed for x, _ in line.points})
    parts = [
        _axes(across, up, x_label, y_label, measured if x_log and 0 < len(measured) <= MOST_TICKS else across.ticks())
    ]
    for i, line in enumerate(kept):
        spots = [(across(x), up(y)) for x, y in line.points if y is not None]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        parts.append(f'<path class="line l{i % COLOURS}" d="{path}"{dash}/>')
        if not line.dashed:
            parts += [mark(x, y, i) for x, y in spots]
    words = "; ".join(
        f"{line.name}: " + ", ".join(f"{number(y)} at {x:g}" for x, y in line.points)
        for line in kept
        if not line.dashed
    )
    description = f"{y_label} against {x_label}. {words}."
    key = [(_sign(i, line.dashed), line.name) for i, line in enumerate(kept)]
    return Chart(title, _svg(title, description, HEIGHT, parts), key)


def _sign(series: int, dashed: bool) -> str:
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return f'<path class="line l{series % COLOURS}" d="M0 7H24"{dash}/>' + ("" if dashed else mark(12, 7, series))


def _scale(values: Sequence[float], start: float, end: float, log: bool, from_zero: bool = False) -> Scale:
    low, high = min(values), max(values)
    if log:
        low, high = (low / 1.15, high * 1.15) if from_zero or low == high else (low, high)
    else:
        low = min(low, 0.0) if from_zero else low
        room = 0.05 * (high - low) or 1.0
        high += room
        low = low - room if low < 0 or not from_zero else low
    return Scale(low, high, start, end, log)


def _axes(across: Scale, up: Scale, x_label: str, y_label: str, x_ticks: Sequence[float]) -> str:
    parts = []
    for value in up.ticks():
        y = up(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
    for value in x_ticks:
        x = across(value)
        parts.append(f'<path class="grid" d="M{x:.1f} {HEIGHT - BOTTOM}v4"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_tick(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    centre = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 13 {centre:.0f})"'
    parts.append(f'<text x="13" y="{centre:.0f}" text-anchor="middle" {turned}>{escape(y_label)}</text>')
    return "".join(parts)


def _tick(value: float) -> str:
    if value and abs(value) >= 10_000:
        for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if abs(value) >= size:
                return f"{value / size:.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def dots(
    title: str, rows: Sequence[tuple[str, str, float | None]], unit: str, form: Callable[[float], str] = number
) -> Chart | None:
    """A row for each (group, series, value > 0) with a dot on a logarithmic axis and the value beside it."""
    kept = [(group, name, value) for group, name, value in rows if value is not None and value > 0]
    if not kept:
        return None
    names = list(dict.fromkeys(name for _, name, _ in kept))
    groups = list(dict.fromkeys(group for group, _, _ in kept))
    values = [value for _, _, value in kept]
    low, high = min(values) / 1.3, max(values) * 1.3
    across = Scale(low, high, NAMES_WIDTH, WIDTH - VALUE_WIDTH, log=True)
    parts, y = [], ROW_TOP
    for group in groups:
        parts.append(f'<text class="group" x="0" y="{y + 13}">{escape(group)}</text>')
        y += ROW
        for _, name, value in [row for row in kept if row[0] == group]:
            x, middle = across(value), y + ROW / 2
            parts.append(f'<path class="grid" d="M{NAMES_WIDTH} {middle:.1f}H{WIDTH - VALUE_WIDTH}"/>')
            label = f'<text x="{NAMES_WIDTH - 8}" y="{middle + 4:.1f}" text-anchor="end">{escape(_cut(name))}</text>'
            parts += [label, mark(x, middle, names.index(name))]
            parts.append(f'<text x="{WIDTH}" y="{middle + 4:.1f}" text-anchor="end">{escape(form(value))}</text>')
            y += ROW
    parts.append(f'<path class="axis" d="M{NAMES_WIDTH} {y + 4}H{WIDTH - VALUE_WIDTH}"/>')
    for tick in log_ticks(low, high, most=5):
        parts.append(f'<path class="axis" d="M{across(tick):.1f} {y + 4}v4"/>')
        parts.append(f'<text x="{across(tick):.1f}" y="{y + 22}" text-anchor="middle">{_tick(tick)}</text>')
    axis_middle = (NAMES_WIDTH + WIDTH - VALUE_WIDTH) / 2
    parts.append(f'<text x="{axis_middle:.0f}" y="{y + 40}" text-anchor="middle">{escape(unit)}, logarithmic</text>')
    words = "; ".join(f"{group}, {name}: {form(value)}" for group, name, value in kept)
    return Chart(title, _svg(title, f"{unit}. {words}.", y + 48, parts))


def _cut(name: str, most: int = 20) -> str:
    return name if len(name) <= most else name[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _svg(title: str, description: str, height: float, parts: Sequence[str]) -> str:
    # ids are made unique by the page, which knows how many pictures it has
    return (
        f'<svg role="img" aria-labelledby="ID-t ID-d" viewBox="0 0 {WIDTH} {height:.0f}">'
        f'<title id="ID-t">{escape(title)}</title>'
        f'<desc id="ID-d">{escape(description)}</desc>{"".join(parts)}</svg>'
    )

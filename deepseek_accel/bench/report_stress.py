"""The section of the report page about an engine under load."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .charts import Chart, Line, lines
from .report_cells import (
    Column,
    Row,
    Section,
    Table,
    checked,
    drawn,
    gibibytes_of,
    number_of,
    part_of,
    plain,
    ratio_of,
    short_of,
    table_of,
    text_of,
)  # fmt: skip
from .stress_tables import PERCENTILES, heading
from .tables import number

FITTED_POINTS = 40


def stress_section(result: dict[str, Any]) -> Section:
    """Tables of points, stock, fits, split and breakdown, and the curves."""
    opened = result["load"] == "open"
    rows = result["rows"]
    remarks = [
        heading(result).splitlines()[1] + ".",
        "TTFT: time to the first token. ITL: every gap between two tokens. Latency: from when a user wanted the "
        "request to its last token. Percentiles are over all requests of a point (ITL: over all gaps), ramps included.",
    ]
    tables = [_points(rows, opened)] if rows else []
    if result.get("stock"):
        tables.append(_table("Stock generate on static batches", result["stock"]))
    fits = [fit for fit in result.get("fits", ()) if "a" in fit]
    remarks += [f"P{fit['percentile']:g} of the latency: knee: {fit['knee_text']}." for fit in result.get("fits", ())]
    if fits:
        tables.append(_table("Latency = a + b load^c, in ms", [_of_fit(fit) for fit in fits]))
    if result.get("split"):
        both = [{"of": "engine"} | row for row in result["split"]]
        both += [{"of": "stock generate"} | row for row in result.get("stock_split", ())]
        tables.append(_table("Prefill and decode of one request", both))
    if result.get("breakdown"):
        tables.append(_breakdown(result["breakdown"]))
    charts = _curves(rows, fits, opened) if len(rows) > 1 else []
    what = f"Under load ({result['load']} loop)" if rows else "Single requests of the engine"
    return Section(f"{what}: {result.get('model')}, {result.get('dtype')}", remarks, charts, tables)


def _points(rows: list[Row], opened: bool) -> Table:
    columns: list[Column] = [
        ("requests/s asked", short_of("rate")), ("window ms", short_of("window_ms"))
    ]  # fmt: skip
    if not opened:
        columns = [("users", text_of("users")), ("requests", text_of("requests"))]
    columns += [
        ("new tokens/s", number_of("new_tokens_per_second")),
        ("all tokens/s", number_of("total_tokens_per_second")),
    ]
    columns.append(("requests/s", number_of("requests_per_second")))
    for name, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("latency", "e2e_ms")):
        columns.append((f"{name} ms, P50 / P95 / P99", partial(_percentiles, key)))
    if opened:
        columns += [
            ("latency mean ms", part_of("e2e_ms", "mean")),
            ("variance ms\N{SUPERSCRIPT TWO}", part_of("e2e_ms", "variance")),
        ]
    columns += [
        ("rows decoding", number_of("decoding_rows")),
        ("peak GiB above weights", gibibytes_of("peak_bytes_above_weights")),
        ("preempted", text_of("preemptions")), ("errors", text_of("errors")),
    ]  # fmt: skip
    if not opened:
        columns.append(("to stock", ratio_of("stock_ratio")))
    return table_of("Points", rows, [*columns, ("checked", checked)])


def _percentiles(name: str, row: Row) -> str:
    values = row.get(name)
    return "-" if not values else " / ".join(number(values.get(key)) for key in PERCENTILES)


def _table(title: str, rows: list[Row]) -> Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return table_of(title, rows, [(name.replace("_", " "), partial(_value, name)) for name in names])


def _of_fit(fit: Row) -> Row:
    others = {name: value for name, value in fit.items() if name not in ("percentile", "knee_text")}
    return {"percentile": f"P{fit['percentile']:g}"} | others


def _value(name: str, row: Row) -> str:
    value = row.get(name)
    if isinstance(value, list) and len(value) == 2:
        return " to ".join(plain(part) for part in value)
    return plain(value)


def _breakdown(parts: dict[str, Any]) -> Table:
    named = [
        (name.removesuffix("_ms").replace("_", " "), value) for name, value in parts.items() if name.endswith("_ms")
    ]
    title = f"One request of {parts['prompt_tokens']:,} prompt tokens, {parts['tokenizer']} tokenizer"
    return Table(title, ["part", "ms"], [[name, plain(value)] for name, value in named])


def _curves(rows: list[Row], fits: list[Row], opened: bool) -> list[Chart]:
    load, axis = ("rate", "requests/s asked") if opened else ("users", "users")
    windows = list(dict.fromkeys(row.get("window_ms") for row in rows))
    if len(windows) > 1:
        return _window_curves(rows)

    def points(name: str, key: str | None = None) -> list[tuple[float, float | None]]:
        return [(row[load], (row.get(name) or {}).get(key) if key else row.get(name)) for row in rows]

    speed = [Line("engine, new tokens", points("new_tokens_per_second"))]
    if any(row.get("stock_tokens_per_second") for row in rows):
        speed.append(Line("stock, static batches", points("stock_tokens_per_second")))
    latency = [Line(f"P{p}", points("e2e_ms", f"p{p}")) for p in (50, 95, 99)]
    places = np.geomspace(min(r[load] for r in rows), max(r[load] for r in rows), FITTED_POINTS).tolist()
    for fit in fits:
        curve = [(x, fit["a"] + fit["b"] * x ** fit["c"]) for x in places]
        latency.append(Line(f"P{fit['percentile']:g}, fitted", curve, dashed=True))
    if measured := [y for line in latency[:3] for _, y in line.points if y]:
        for fit in fits:
            if fit["knee"] is not None:
                knee = [(fit["knee"], min(measured)), (fit["knee"], max(measured))]
                latency.append(Line(f"knee of P{fit['percentile']:g}", knee, dashed=True))
    logs = {"x_log": True, "y_log": True}
    return drawn(
        lines("Throughput against load", speed, axis, "tokens/s", **logs),
        lines("Latency against load", latency, axis, "ms", **logs),
        *(
            lines(title, [Line(f"P{p}", points(name, f"p{p}")) for p in (50, 95, 99)], axis, "ms", **logs)
            for title, name in (("Time to the first token", "ttft_ms"), ("Gap between tokens", "itl_ms"))
        ),
    )


def _window_curves(rows: list[Row]) -> list[Chart]:
    """Latency mean and spread against the window, a line per rate."""

    def by_rate(value: Any) -> list[Line]:
        rates = dict.fromkeys(row["rate"] for row in rows)
        return [
            Line(
                f"{rate:g} requests/s",
                [(r["window_ms"], value(r["e2e_ms"])) for r in rows if r["rate"] == rate and r["e2e_ms"]],
            )
            for rate in rates
        ]

    return drawn(
        lines("Mean latency against the window", by_rate(lambda e: e["mean"]), "window, ms", "ms"),
        lines("Spread of latency", by_rate(lambda e: e["variance"] ** 0.5), "window, ms", "standard deviation, ms"),
    )

"""The parts of a section of the report page, and how a value of a row becomes the text of a cell."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .charts import Chart
from .tables import number, ratio

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


@dataclass(frozen=True)
class Table:
    """The first column heads its row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    heading: str
    remarks: Sequence[str]
    charts: Sequence[Chart]
    tables: Sequence[Table]


def number_of(name: str) -> Callable[[Row], str]:
    return lambda row: number(row.get(name))


def short_of(name: str) -> Callable[[Row], str]:
    """What somebody asked for, as they would write it."""
    return lambda row: "-" if row.get(name) is None else f"{row[name]:g}"


def ratio_of(name: str) -> Callable[[Row], str]:
    return lambda row: ratio(row.get(name))


def text_of(name: str) -> Callable[[Row], str]:
    return lambda row: plain(row.get(name))


def gibibytes_of(name: str) -> Callable[[Row], str]:
    return lambda row: "-" if row.get(name) is None else f"{row[name] / 2**30:.2f}"


def megabytes_of(name: str) -> Callable[[Row], str]:
    return lambda row: number(None if row.get(name) is None else row[name] / 1e6)


def part_of(name: str, key: str) -> Callable[[Row], str]:
    return lambda row: number((row.get(name) or {}).get(key))


def checked(row: Row) -> str:
    detail, status = plain(row.get("detail")), row.get("status", "ok")
    return detail if status == "ok" else f"{status}: {detail}"


def plain(value: Any) -> str:
    """Any JSON value as a short text."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value, 4)
    if isinstance(value, int):
        return f"{value:,}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 160 else text[:157] + "..."


def table_of(title: str, rows: Sequence[Row], columns: Sequence[Column]) -> Table:
    """A table of the rows, without the columns in which no row has anything."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    kept = [i for i in range(len(columns)) if i == 0 or any(row[i] not in ("-", "n/a") for row in cells)]
    return Table(title, [columns[i][0] for i in kept], [[row[i] for i in kept] for row in cells])


def drawn(*charts: Chart | None) -> list[Chart]:
    return [chart for chart in charts if chart is not None]

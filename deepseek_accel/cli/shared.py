"""What several commands share: the arguments that say where a model runs, and what becomes of a result."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import AccelError

DEVICE_HELP = "auto (default), cpu, cuda or cuda:N"


def numbers(text: str, kind: Any) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise AccelError(f"not a list of numbers: {text!r}") from None


def record(arguments: argparse.Namespace, table: Any) -> Any:
    """What a bench tells its rows to while it runs."""
    from ..bench.record import Record

    return Record(arguments.json, arguments.command_line, table)


def write(arguments: argparse.Namespace, result: dict[str, Any], draw: Any = None) -> None:
    from ..bench import tables

    try:
        if arguments.json:
            tables.write_json(arguments.json, result)
        if getattr(arguments, "png", None):
            (draw or tables.write_png)(arguments.png, result)
    except OSError as error:
        print(f"deepseek-accel: could not write: {error}", file=sys.stderr)


def end(rows: Sequence[dict[str, Any]], code: int) -> int:
    if code == 3:
        wrong = sum(row["status"] == "wrong" for row in rows)
        print(f"deepseek-accel: {wrong} result(s) are wrong and were not timed; see the table", file=sys.stderr)
    return code


def place_arguments(command: argparse.ArgumentParser, dtypes: str) -> None:
    command.add_argument("--device", default="auto", help=DEVICE_HELP)
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=dtypes)

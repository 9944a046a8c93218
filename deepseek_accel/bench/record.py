"""Keeping what a bench has measured while it still measures: a run that is killed loses the row it was at, no more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import tables

Keep = Callable[[dict[str, Any]], None]
"""Told the result so far, after every row: as the result at the end, with fewer rows."""


def forget(result: dict[str, Any]) -> None:
    """The `Keep` of a caller who only wants the result."""


class Record:
    """Writes the rows so far to the file of `--json`, and each new row to stderr as a line.

    The file of a run that goes on says `"complete": false`. An error of writing is said once; measuring goes on.
    """

    def __init__(self, path: str | None, command: Sequence[str], table: Callable[[dict[str, Any]], Any]) -> None:
        """path: the JSON file, or None; table: the rich table of a result, with one line per row of it."""
        self._path, self._command, self._table = path, list(command), table
        self._told = 0

    def __call__(self, result: dict[str, Any]) -> None:
        if self._path:
            try:
                tables.write_json(self._path, result | {"command": self._command, "complete": False})
            except OSError as error:
                print(f"deepseek-accel: could not write: {error}", file=sys.stderr, flush=True)
                self._path = None
        for line in tables.lines(self._table(result))[self._told :]:
            print(line, file=sys.stderr, flush=True)
            self._told += 1

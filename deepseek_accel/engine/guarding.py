"""What a memory guard decides, asked once per step, and what the engine does about it."""

from __future__ import annotations

from typing import Any, NamedTuple

from .observer import Watch
from .rows import Rows


class Limits(NamedTuple):
    """What a step may do."""

    rows: int
    """So many may run; who runs already goes on."""
    used: int
    limit: int
    """Bytes as the guard saw them; 0 without one."""


class Guarded:
    """Carries out a guard's stages: gives up kept prefixes, and admits fewer rows."""

    def __init__(self, guard: Any, watch: Watch, max_rows: int) -> None:
        self._guard, self._watch, self._max_rows = guard, watch, max_rows
        self._memory: Any = None
        self._stage: Any = None
        if guard is not None:
            guard.start(max_rows)
            self._stage = guard.stage

    def react(self, rows: Rows, running: int) -> Limits:
        """Ask the guard, and evict what is kept if it says so. Pages that hold nothing count as free memory."""
        if self._guard is None:
            return Limits(self._max_rows, 0, 0)
        from .guard import DeviceMemory, Stage

        if self._memory is None or self._memory.device != rows.device:
            self._memory = DeviceMemory(rows.device)
        reserved = rows.bytes_reserved()
        used, limit = self._memory(reserved - reserved * rows.pages_in_use // max(1, rows.capacity))
        stage = self._guard.react(used, limit, running)
        if stage >= Stage.EVICT_PREFIXES and (gone := rows.evict()):
            self._watch.tell("guard", stage, f"{gone} kept pages given up")
        if stage != self._stage:
            self._stage = stage
            self._watch.tell(
                "guard", stage, f"{used:,} of {limit:,} bytes in use, {self._guard.admitted} rows admitted"
            )
        return Limits(self._guard.admitted, used, limit)

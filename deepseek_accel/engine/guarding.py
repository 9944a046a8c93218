"""What a memory guard decides, asked once per step, and what the engine does about it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..cache.entries import check_dtype
from ..errors import PlanError
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
    """Carries out a guard's stages: gives up kept prefixes, admits fewer rows, stores new requests in FP8."""

    def __init__(self, guard: Any, watch: Watch, max_rows: int, fp8: str | None) -> None:
        """fp8: how the model's configuration stores tokens. Raises PlanError if the guard asks for what cannot be."""
        self._guard, self._watch, self._max_rows, self._fp8 = guard, watch, max_rows, fp8
        self._memory: Any = None
        self._known: Any = None
        self._shrunk = fp8
        if guard is None:
            return
        if not hasattr(guard, "shrink"):
            raise PlanError(f"guard must be a MemoryGuard, got {guard!r}")
        if guard.shrink is not None:
            if guard.shrink.eviction is not None:
                raise PlanError(
                    "the engine keeps all tokens of a request, so its guard cannot shrink by eviction: "
                    "MemoryGuard(shrink='fp8_e4m3')"
                )
            if fp8 is not None:
                raise PlanError("the model stores tokens in FP8 already: use a MemoryGuard without `shrink`")
            self._shrunk = check_dtype(guard.shrink.dtype)
        guard.start(max_rows)
        self._known = (guard.stage, guard.admitted)

    @property
    def fp8(self) -> str | None:
        """How requests that begin now are stored."""
        from .guard import Stage

        shrinks = self._guard is not None and self._guard.stage >= Stage.SHRINK
        return self._shrunk if shrinks else self._fp8

    def react(self, rows: Rows, running: int) -> Limits:
        """Ask the guard, and evict what is kept if it says so. Pages that hold nothing count as free memory."""
        if self._guard is None:
            return Limits(self._max_rows, 0, 0)
        from .guard import DeviceMemory, Stage

        if self._memory is None or self._memory.device != rows.device:
            read = self._guard.read
            # a budget is asked at every step, a device now and then
            self._memory = DeviceMemory(rows.device) if read is None else DeviceMemory(rows.device, every=0, read=read)
        reserved = rows.bytes_reserved()
        used, limit = self._memory(reserved - reserved * rows.pages_in_use // max(1, rows.capacity))
        stage = self._guard.react(used, limit, running)
        if (stage, self._guard.admitted) != self._known:
            self._tell(f"{used:,} of {limit:,} bytes in use")
        if stage >= Stage.EVICT_PREFIXES and (gone := rows.evict()):
            self._watch.tell("guard", stage, f"{gone} kept pages given up")
        return Limits(self._guard.admitted, used, limit)

    def out_of_memory(self, running: int) -> None:
        """A step of so many rows found no memory; the engine has taken care of them."""
        if self._guard is not None:
            self._guard.out_of_memory(running)
            self._tell("out of memory")

    def _tell(self, why: str) -> None:
        guard = self._guard
        self._known = (guard.stage, guard.admitted)
        self._watch.tell("guard", guard.stage, f"{why}, {guard.admitted} of {guard.max_rows} rows admitted")

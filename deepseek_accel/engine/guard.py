"""What to do when device memory runs short: decisions only, the engine carries them out.

    used / limit   >= limit        one step up the ladder, at most one every `patience` calls
                   in between      nothing changes
                   < low           after `calm` such calls in a row, one step back down

The ladder: NORMAL, EVICT_PREFIXES, LOWER_ADMISSION (half the rows), SHRINK (if configured), then half the rows again,
down to one. Halving is fast and recovery slow, so that a load that does not change never makes it flap:
- Rows come back by so few at a time that, where memory grows with rows, one step cannot cross from below `low` to above
  `limit`; unless a single row can, as where few fit. So a number of rows at which memory ran short again is tried after
  twice as many calm times as the time before.
- SHRINK ends below `low / 2`, where twice the bytes a token are no harm, or when nothing runs.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import PlanError
from ..passes.kv_cache import KVCache

log = logging.getLogger(__name__)
MOST_WAITS = 64
"""Times `calm` calls before rows at which memory ran short again and again are tried once more."""
Read = Callable[[], tuple[int, int]]
"""Returns (bytes held, bytes that may be held at most). Free pages of an engine, which it holds too, are taken off."""


class Stage(enum.IntEnum):
    """How short memory is. Each stage includes those before it."""

    NORMAL = 0
    EVICT_PREFIXES = 1
    """Give back every page that only a kept prefix holds, and keep no more."""
    LOWER_ADMISSION = 2
    """Admit nobody while `MemoryGuard.admitted` rows or more are running. Who runs goes on."""
    SHRINK = 3
    """New requests store their tokens as `MemoryGuard.shrink` says."""


class MemoryGuard:
    """Decides, from bytes in use, what an engine gives up so that requests that run can go on.

    limit: fraction of the limit in bytes from which on memory is short. low: fraction below which it recovers (default:
    0.05 below `limit`). shrink: how new requests store tokens as the last resort: a `KVCache` pass, "fp8_e4m3",
    "fp8_e5m2", or an eviction policy; None (default) never does that. patience: calls from one step up to the next, so
    that a step can take effect. calm: calls in a row below `low` before a step down. read: in place of the device, a
    function that returns (bytes held, limit), asked at every step; such as a budget of your own.
    Raises PlanError on other values. Not thread-safe: one engine, one guard, one thread.
    """

    def __init__(
        self,
        limit: float = 0.95,
        shrink: Any = None,
        *,
        low: float | None = None,
        patience: int = 8,
        calm: int = 64,
        read: Read | None = None,
    ) -> None:
        low = max(limit - 0.05, limit / 2) if low is None else low
        if not 0 < low < limit <= 1:
            raise PlanError(f"a guard needs 0 < low < limit <= 1, got low={low!r} and limit={limit!r}")
        if patience < 1 or calm < 1:
            raise PlanError(f"patience and calm are calls, 1 or more; got {patience!r} and {calm!r}")
        self.limit, self.low, self.patience, self.calm = limit, low, patience, calm
        self.shrink, self.read = to_cache_pass(shrink), read
        self.counts: Counter[str] = Counter()
        """How often each thing was decided: evict_prefixes, lower_admission, shrink, recover, out_of_memory."""
        self.start(128)

    def start(self, max_rows: int) -> None:
        """Begin anew, for an engine of `max_rows` rows. Counts stay."""
        if max_rows < 1:
            raise PlanError(f"max_rows must be 1 or more, got {max_rows!r}")
        self.max_rows, self.stage, self.admitted = max_rows, Stage.NORMAL, max_rows
        self._since_step_up, self._calm_calls = self.patience, 0
        self._short_rows = self._waits = self._waited = 0
        self._tried_again = False

    def react(self, used_bytes: int, limit_bytes: int, running: int | None = None) -> Stage:
        """The stage from now on, given bytes in use and bytes that may be used at most. Call it once per engine step.

        running: rows that run. Where given, halving begins at what runs rather than at what may, and waits while more
        rows run than are admitted: they leave by themselves. Raises PlanError if `limit_bytes` is not positive.
        """
        if limit_bytes <= 0:
            raise PlanError(f"limit_bytes must be positive, got {limit_bytes!r}: is the device's memory known?")
        fraction = used_bytes / limit_bytes
        self._since_step_up += 1
        if fraction >= self.limit:
            self._calm_calls = 0
            if self._since_step_up >= self.patience:
                self._step_up(f"{fraction:.1%} of {limit_bytes:,} bytes in use", running)
        elif fraction >= self.low:
            self._calm_calls = 0
        else:
            self._calm_calls += 1
            if self._calm_calls >= self.calm and self.stage is not Stage.NORMAL:
                unshrinks = fraction < self.low / 2 or running == 0
                self._step_down(f"{fraction:.1%} of {limit_bytes:,} bytes in use", unshrinks)
        return self.stage

    def out_of_memory(self, running: int | None = None) -> Stage:
        """An allocation failed: whatever the bytes say, admit fewer rows at once. The stage from now on."""
        self.counts["out_of_memory"] += 1
        self._calm_calls = 0
        if self.stage is Stage.NORMAL:
            self._enter(Stage.EVICT_PREFIXES, "out of memory")
        if self.stage is Stage.EVICT_PREFIXES:
            self.stage = Stage.LOWER_ADMISSION
        self._halve("out of memory", min(self.admitted, running or self.admitted))
        return self.stage

    def _step_up(self, why: str, running: int | None) -> None:
        rows = self.admitted if running is None else max(1, min(self.admitted, running))
        if self.stage is Stage.NORMAL:
            self._enter(Stage.EVICT_PREFIXES, why)
        elif self.stage is Stage.EVICT_PREFIXES:
            self.stage = Stage.LOWER_ADMISSION
            self._halve(why, rows)
        elif self.stage is Stage.LOWER_ADMISSION and self.shrink is not None:
            self._enter(Stage.SHRINK, why)
        elif self.admitted > 1 and (running is None or running <= self.admitted):
            self._halve(why, rows)

    def _enter(self, stage: Stage, why: str) -> None:
        self.stage = stage
        self._since_step_up = 0
        self.counts[stage.name.lower()] += 1
        log.warning("%s: memory guard: %s", why, _DOES[stage])

    def _halve(self, why: str, rows: int) -> None:
        if self._tried_again:
            self._waits = min(2 * self._waits or 1, MOST_WAITS)
        self._short_rows, self._waited, self._tried_again = min(self.admitted, rows), 0, False
        self.admitted = max(1, self._short_rows // 2)
        self._since_step_up = 0
        self.counts["lower_admission"] += 1
        log.warning("%s: memory guard: at most %d of %d rows are admitted now", why, self.admitted, self.max_rows)

    def _step_down(self, why: str, unshrinks: bool) -> None:
        done = []
        if self.stage is Stage.SHRINK and unshrinks:
            self.stage = Stage.LOWER_ADMISSION
            done.append("new requests store tokens as configured again")
        if self.admitted < self.max_rows:
            # rows * (limit - low) / low more rows are at most (limit - low) more memory, if no byte is used below `low`
            more = max(1, int(self.admitted * (self.limit - self.low) / self.low))
            rows = min(self.max_rows, self.admitted + more)
            if rows >= self._short_rows > 0:
                if self._waited < self._waits:
                    self._waited += 1
                    self._calm_calls = 0
                    rows = self.admitted
                else:
                    self._short_rows, self._tried_again = 0, True
            if rows > self.admitted:
                self.admitted = rows
                done.append(f"at most {self.admitted} of {self.max_rows} rows are admitted now")
        elif not done and self.stage is not Stage.SHRINK:
            self.stage, self._waits, self._tried_again = Stage.NORMAL, 0, False
            done.append("prefixes are kept again")
        if done:
            self._calm_calls = 0
            self.counts["recover"] += 1
            log.info("%s: memory guard: %s", why, "; ".join(done))


_DOES = {
    Stage.EVICT_PREFIXES: "kept prefixes are given up",
    Stage.SHRINK: "new requests store their tokens in fewer bytes",
}


def to_cache_pass(shrink: Any) -> KVCache | None:
    """What `MemoryGuard(shrink=...)` accepts, as a `KVCache` pass. Raises PlanError if it saves nothing."""
    if shrink is None:
        return None
    if isinstance(shrink, KVCache):
        cache = shrink
    elif isinstance(shrink, str) and shrink.startswith("fp8"):
        cache = KVCache(dtype=shrink)
    else:
        cache = KVCache(eviction=shrink)
    if cache.dtype is None and cache.eviction is None:
        raise PlanError(
            f"shrink={shrink!r} stores as many bytes as before. Use 'fp8_e4m3', 'fp8_e5m2', an eviction policy such as "
            "Window(), or a KVCache with a dtype or an eviction policy."
        )
    return cache


class DeviceBytes(NamedTuple):
    """used: bytes this process cannot hand out again without freeing something. limit: what it may use at most."""

    used: int
    limit: int


class DeviceMemory:
    """Reads how much memory of a device this process uses, and how much it may.

    CUDA: torch's reserved bytes against those and what is free on the device; less if
    `torch.cuda.set_per_process_memory_fraction` says so. CPU: the process's resident bytes against those and what the
    system has available; less inside a control group with a limit.
    every: seconds for which a reading stands, since asking takes longer than a guard's decision.
    read: in place of the device, a function that returns (bytes, limit); for tests and for other budgets.
    """

    def __init__(self, device: Any, *, every: float = 0.05, read: Read | None = None) -> None:
        import torch

        self.device, self.every = torch.device(device), every
        self._read = read or (_cuda_bytes(self.device) if self.device.type == "cuda" else _process_bytes)
        self._reading, self._when = (0, 1), float("-inf")

    def __call__(self, reusable_bytes: int = 0) -> DeviceBytes:
        """reusable_bytes: reserved ones that hold nothing, such as free pages of a pool."""
        now = time.monotonic()
        if now - self._when >= self.every:
            self._reading, self._when = self._read(), now
        held, limit = self._reading
        return DeviceBytes(max(0, held - reusable_bytes), limit)


def _cuda_bytes(device: Any) -> Callable[[], tuple[int, int]]:
    import torch

    def read() -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        # unlike the others it takes no "cuda" without a number
        index = torch.cuda.current_device() if torch.device(device).index is None else device
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(index)
        return reserved, min(free + reserved, int(total * fraction))

    return read


def _process_bytes() -> tuple[int, int]:
    import psutil

    used = psutil.Process().memory_info().rss
    room = psutil.virtual_memory().available
    group = _group_room()
    return used, used + (room if group is None else min(room, group))


def _group_room(root: str = "/sys/fs/cgroup") -> int | None:
    """Bytes that this process's control group (version 2) may still take, or None without a limit."""
    try:
        with open(f"{root}/memory.max", encoding="ascii") as file:
            most = int(file.read())
        with open(f"{root}/memory.current", encoding="ascii") as file:
            current = int(file.read())
        with open(f"{root}/memory.stat", encoding="ascii") as file:
            stat = dict(line.split() for line in file)
    except (OSError, ValueError):  # no such control group, or "max": no limit
        return None
    return max(0, most - current + int(stat.get("inactive_file", 0)))  # cached files give way

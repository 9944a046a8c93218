"""What the engine's thread does in one turn: take requests, follow the model, watch the memory, admit, step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ..cache.entries import Entries
from ..errors import AccelError
from ..generation.reuse import default_budget
from .compute import Compute
from .guarding import Guarded
from .loop import Steps
from .observer import StepFacts, Watch
from .preparing import Applied, States, device_scope, read, sizes
from .requests import FinishReason, Request, as_error
from .rows import Rows
from .scheduler import Scheduler, Sequence
from .settings import Settings

logger = logging.getLogger(__name__)

GPU_BATCH = 128
CPU_BATCH = 32
COUNTED_STEPS = 64
"""After so many steps, and when nothing runs, the report knows of them."""


class Core:
    """Everything of an engine that its thread owns. Other threads leave events, and read numbers."""

    def __init__(
        self, model: Any, applied: Applied, max_batch: int, max_pages: int | None, prefill_tokens: int, keeps: bool,
        watch: Watch, guard: Any, changed: Callable[[], None],
    ) -> None:  # fmt: skip
        """changed: called on the engine's thread when requests were admitted or are over."""
        self.model, self.applied, self.max_pages = model, applied, max_pages
        self.prefill_tokens, self.keeps, self.watch = prefill_tokens, keeps, watch
        self.over = False
        self.scheduler = Scheduler(max_batch, watch)
        self.steps: Steps | None = None
        self.num_steps = 0
        self._guarded = Guarded(guard, watch, max_batch, applied.fp8)
        self._states = States()
        self._changed = changed
        self._asked: dict[int, tuple[Request, Any]] = {}
        """Requests whose text is not tokenised yet, and their streamers."""
        self._events: deque[Callable[[], None]] = deque()
        """What other threads want done on this one, in their order."""
        self._seen = (0, 0)

    # From other threads

    def announce(self, request: Request, streamer: Any = None) -> None:
        """A request was submitted; `put` or `refuse` will follow."""
        self._events.append(partial(self._announced, request, streamer))

    def put(self, request: Request, tokens: Sequences[int], settings: Settings) -> None:
        request.num_prompt_tokens = len(tokens)
        self._events.append(partial(self._arrived, Sequence(request, settings, list(tokens))))

    def refuse(self, request: Request, error: Exception) -> None:
        """Its prompt could not be made into tokens, or into settings."""
        self._events.append(partial(self._end, request, "error", error))

    def cancel(self, request: Request) -> None:
        self._events.append(partial(self._cancelled, request))

    def cancel_all(self) -> None:
        self._events.append(self._all_cancelled)

    # On the engine's thread

    def turn(self) -> bool:
        """One turn: whether there was something to do."""
        try:
            while self._events:
                self._events.popleft()()
        except BaseException as error:
            self._fail(as_error(error, "the engine"))
        self._report()
        if not self.scheduler.waiting and not (self.steps is not None and self.steps.busy):
            return bool(self._events)
        try:
            with torch.no_grad(), device_scope(self.model.device):
                self._step()
        except BaseException as error:  # not of a step, which looks after its own: of the model as it is now, say
            self._fail(as_error(error, "the engine"))
        self._report()
        return True

    def end(self) -> None:
        """Give the memory back."""
        self.steps = None
        self.scheduler.rows = None

    def rest(self) -> None:
        """Nothing has been to do for a while: memory that is not for what is kept goes back to torch."""
        if (rows := self.scheduler.rows) is None:
            return
        try:
            with device_scope(rows.device):
                rows.settle()
        except Exception as error:  # some layers have moved and some have not: the next request finds a fresh start
            if not isinstance(error, torch.OutOfMemoryError):
                logger.exception("the engine's pages could not be moved; what was kept is forgotten")
            self.steps = self.scheduler.rows = None

    def _step(self) -> None:
        begin = perf_counter()
        scheduler = self.scheduler
        if self.steps is not None:
            self.steps.settle()  # the last one that ran may have been cancelled
        if self.steps is None or not self.steps.busy:
            self._prepare()
        assert self.steps is not None
        rows = scheduler.pages
        limits = self._guarded.react(rows, len(scheduler.running))
        switches = rows.fp8 != self._guarded.fp8  # once all that began as before are done
        scheduler.admit(min(limits.rows, self.steps.allowed), only_begun=switches)
        running, failed = len(scheduler.running), self.steps.out_of_memory
        decoded, computed = self.steps.run()
        if self.steps.out_of_memory > failed:
            self._guarded.out_of_memory(running)
        self.num_steps += 1
        if not self.steps.busy or self.num_steps % COUNTED_STEPS == 0:
            self.steps.compute.tell_counters()
        self.applied.counters["engine: steps"] += 1
        facts = StepFacts(
            perf_counter() - begin, decoded, computed, len(scheduler.waiting), len(scheduler.running),
            rows.pages_in_use, rows.most_pages or rows.capacity, limits.used, limits.limit,
        )  # fmt: skip
        self.watch.tell("step", facts)

    def _prepare(self) -> None:
        """Nothing runs: follow the model, which may have changed. Raises AccelError if it cannot be run now."""
        stepper = read(self.model, self.applied)
        scheduler, known = self.scheduler, self.steps
        rows = scheduler.rows
        # who was preempted goes on as it began
        fp8 = rows.fp8 if rows is not None and scheduler.next_has_begun else self._guarded.fp8
        entries = [
            Entries(*each, stepper.model.dtype, fp8, self.applied.family.attention == "mla") for each in sizes(stepper)
        ]
        if rows is None or rows.device != stepper.model.device or rows.entries != entries:
            self.steps = known = scheduler.rows = None  # the memory goes before more is taken
            rows = Rows(
                scheduler.max_rows, stepper.model.device, self.applied.page_size, entries, self.max_pages,
                keeps=self.keeps, kept_bytes=self._kept_bytes(stepper.model.device),
            )  # fmt: skip
            scheduler.rows = rows
        state = self._states.now(self.model) if self.keeps else None
        rows.keeps = state is not None
        rows.begin(state or b"")
        if known is None or known.compute.stepper.identity != stepper.identity:
            graphs = vars(self.model).get("_accel_graphs")
            compute = Compute(stepper, rows, graphs, self.applied.counters)
            self.steps = Steps(scheduler, compute, self.prefill_tokens)

    def _kept_bytes(self, device: torch.device) -> int | None:
        """How much may be kept: what `max_pages` leaves, or as much as `generate` keeps between its calls."""
        if self.max_pages is not None:
            return None
        given = self.applied.prefix_bytes
        return default_budget(device) if given is None else given

    def _fail(self, error: Exception) -> None:
        """Nothing can run: who runs and who waits fails with this, and the next request finds a fresh start."""
        if not isinstance(error, AccelError):
            logger.exception("the engine could not go on; all requests fail with it", exc_info=error)
        if self.steps is not None:
            self.steps.drop(error)
        for sequence in [*self.scheduler.running, *self.scheduler.waiting.values()]:
            self.scheduler.finish(sequence, "error", error, keep=False)
        self.steps = self.scheduler.rows = None

    def _report(self) -> None:
        """Tell those who wait for room, or for the end."""
        now = (self.scheduler.finished, self.scheduler.admitted)
        if now != self._seen:
            self._seen = now
            self._changed()

    def _announced(self, request: Request, streamer: Any) -> None:
        self._asked[request.id] = request, streamer
        self.watch.tell("submitted", request)

    def _arrived(self, sequence: Sequence) -> None:
        if self._asked.pop(sequence.request.id, None) is not None:  # else cancelled before its text was tokens
            self.scheduler.add(sequence)

    def _cancelled(self, request: Request) -> None:
        sequence = self.scheduler.find(request.id)
        if sequence is not None:
            self.scheduler.finish(sequence, "cancelled")
        else:
            self._end(request, "cancelled", None)

    def _all_cancelled(self) -> None:
        asked = [request for request, _ in self._asked.values()]
        for request in [*asked, *(each.request for each in self.scheduler.everyone())]:
            self._cancelled(request)

    def _end(self, request: Request, reason: FinishReason, error: Exception | None) -> None:
        """Of a request that the scheduler does not know."""
        if (asked := self._asked.pop(request.id, None)) is not None:
            self.scheduler.finished += 1
            self.scheduler.tell_end(request, asked[1], reason, error)

    # Numbers, for any thread

    def facts(self) -> dict[str, int | float]:
        scheduler, rows = self.scheduler, self.scheduler.rows
        facts: dict[str, int | float] = {
            "waiting": len(scheduler.waiting) + len(self._asked),
            "running": len(scheduler.running),
            "steps": self.num_steps,
            "requests_finished": scheduler.finished,
            "tokens_generated": scheduler.tokens_out,
            "prompt_tokens": scheduler.tokens_asked,
            "prefix_hit_tokens": scheduler.tokens_taken,
            "preemptions": scheduler.preemptions,
            "fragmentation": scheduler.fragmentation(),
        }
        pages = ("pages_in_use", "pages_of_rows", "pages_kept", "pages_total", "pages_evicted", "bytes_reserved")
        if rows is None:
            return facts | dict.fromkeys(pages, 0)
        total = rows.most_pages or rows.capacity
        held = (rows.pages_in_use, rows.pages_of_rows, len(rows.kept), total, rows.evicted, rows.bytes_reserved())
        return facts | dict(zip(pages, held, strict=True))

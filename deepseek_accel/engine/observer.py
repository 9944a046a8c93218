"""Who watches an engine: what it is told, and when."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from .requests import Request, Result

logger = logging.getLogger(__name__)


class StepFacts(NamedTuple):
    """What one step did, and how things stand after it."""

    seconds: float
    decoding_rows: int
    """Requests that were given a token by the decoding step."""
    prompt_tokens: int
    """Tokens of prompts, and of requests that came back after a preemption, that were computed."""
    waiting: int
    running: int
    pages_in_use: int
    pages_total: int
    """How many pages there may be: `max_pages`, or those there is memory for now."""
    bytes_reserved: int
    bytes_limit: int
    """Both as the guard reads them; 0 without a guard."""


class Observer(Protocol):
    """All calls come from the engine's thread, between steps: they must be cheap."""

    def submitted(self, request: Request) -> None: ...

    def admitted(self, request: Request) -> None: ...

    def token(self, request: Request, count: int, when: float) -> None:
        """`count` more tokens are known to the host since `when`, in `time.perf_counter` seconds."""

    def preempted(self, request: Request) -> None: ...

    def finished(self, request: Request, result: Result) -> None: ...

    def step(self, facts: StepFacts) -> None: ...

    def guard(self, stage: Any, detail: str) -> None: ...


class Watch:
    """Tells an observer, if there is one. One that raises is logged and not told any more: requests go on."""

    def __init__(self, observer: Any) -> None:
        self._observer = observer

    def tell(self, event: str, *what: Any) -> None:
        if self._observer is None:
            return
        try:
            getattr(self._observer, event)(*what)
        except BaseException:
            logger.exception("the engine's observer failed in %r and is told nothing any more", event)
            self._observer = None

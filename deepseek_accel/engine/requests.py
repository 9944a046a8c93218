"""A request as its owner sees it: what was asked, the tokens so far, and the result."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal

from ..errors import AccelError

logger = logging.getLogger(__name__)

FinishReason = Literal["eos", "stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Times:
    """`time.perf_counter()` seconds; None where it never came to that."""

    submitted: float
    admitted: float | None = None
    """When it was given a row for the first time."""
    first_token: float | None = None
    finished: float | None = None


@dataclass(frozen=True)
class Result:
    """How a request ended."""

    id: int
    tokens: list[int]
    """The new ones, an end-of-sequence token included."""
    finish_reason: FinishReason
    error: Exception | None
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt, taken from pages that earlier requests had filled."""
    num_preemptions: int
    times: Times
    token_times: list[float] = field(repr=False)
    """When the host knew each token, in `time.perf_counter()` seconds."""
    tokenizer: Any = field(default=None, repr=False, compare=False)

    @functools.cached_property
    def text(self) -> str | None:
        """The new tokens without special ones as text, made when first asked for; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        return text


class Request:
    """Made by `Engine.submit`. Any thread may read, wait and cancel; only the engine's thread adds tokens."""

    def __init__(self, number: int, tokenizer: Any, cancel: Callable[[Request], None]) -> None:
        self.id = number
        self.times = Times(perf_counter())
        self.num_prompt_tokens = 0
        """Known once the prompt is tokenised."""
        self._tokenizer, self._cancel = tokenizer, cancel
        self._tokens: list[int] = []
        self._token_times: list[float] = []
        self._result: Result | None = None
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = "running" if self._result is None else self._result.finish_reason
        return f"Request({self.id}, {len(self._tokens)} tokens, {state})"

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far, a copy."""
        return list(self._tokens)

    @property
    def done(self) -> bool:
        return self._result is not None

    def cancel(self) -> None:
        """Stop as soon as possible; the result holds the tokens so far. Nothing happens to a request that is done."""
        if not self.done:
            self._cancel(self)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end. Errors of the request are in `Result.error`, not raised.

        timeout: seconds, or None to wait for as long as it takes. Raises TimeoutError when they have passed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._result is not None, timeout):
                raise TimeoutError(f"request {self.id} is not done after {timeout} seconds; it goes on")
            assert self._result is not None
            return self._result

    def __iter__(self) -> Iterator[int]:
        """Token ids as they come. Raises the request's error after the tokens that came before it."""
        seen = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._tokens) > seen or self._result is not None)  # noqa: B023
                new, result = self._tokens[seen:], self._result
            yield from new
            seen += len(new)
            if not new and result is not None:
                if result.error is not None:
                    raise result.error
                return

    # The engine's side

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every token and at the end, on the engine's thread; now, if the request is done. One
        that raises is logged and not called any more."""
        with self._changed:
            if self._result is None:
                self._listeners.append(listener)
                return
        listener()

    def was_admitted(self) -> None:
        if self.times.admitted is None:
            self.times = replace(self.times, admitted=perf_counter())

    def add(self, token: int, when: float) -> None:
        with self._changed:
            if not self._tokens:
                self.times = replace(self.times, first_token=when)
            self._tokens.append(token)
            self._token_times.append(when)
            self._changed.notify_all()
        self._call_listeners()

    def finish(self, reason: FinishReason, error: Exception | None, cached: int, preemptions: int) -> Result:
        with self._changed:
            assert self._result is None
            self.times = replace(self.times, finished=perf_counter())
            self._result = result = Result(
                self.id, list(self._tokens), reason, error, self.num_prompt_tokens, cached, preemptions, self.times,
                list(self._token_times), self._tokenizer,
            )  # fmt: skip
            self._changed.notify_all()
        self._call_listeners()
        self._listeners.clear()
        return result

    def _call_listeners(self) -> None:
        for listener in list(self._listeners):
            try:
                listener()
            except BaseException:  # on the thread that serves everybody
                logger.exception("a listener of %r failed and is called no more", self)
                self._listeners.remove(listener)


def as_error(raised: BaseException, who: str) -> Exception:
    """What a request's own code raised, as its error: what would end a thread, such as SystemExit, is wrapped."""
    if isinstance(raised, Exception):
        return raised
    error = AccelError(f"{who} raised {raised!r}")
    error.__cause__ = raised
    return error

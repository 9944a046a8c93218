"""Text to tokens and back, off the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple


class Ids(NamedTuple):
    """Of one text."""

    ids: list[int]


class TextThreads:
    """Tokenises on threads of its own; `TokenizerRing` may stand in its place."""

    def __init__(self, tokenizer: Any, num_threads: int = 2) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="deepseek_accel-text")

    def submit(self, text: str, then: Callable[[Any], None]) -> None:
        """Call then(`Ids`, or the exception) from a thread. Returns at once."""
        self._threads.submit(self._encode, text, then)

    def _encode(self, text: str, then: Callable[[Any], None]) -> None:
        try:
            outcome: Any = Ids(list(self._tokenizer(text)["input_ids"]))
        except Exception as error:
            outcome = error
        then(outcome)

    def close(self) -> None:
        self._threads.shutdown(wait=True)


class Pieces:
    """Turns tokens into text piece by piece; what may be part of a longer character waits for the rest."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._said = ""

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The text that these tokens add. last: nothing follows."""
        self._tokens += tokens
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if not last and text.endswith("\ufffd"):
            return ""
        if not text.startswith(self._said):  # a tokenizer that changes what it said before, at the edges of words
            return "" if not last else text[len(self._said) :]
        piece, self._said = text[len(self._said) :], text
        if text.endswith("\n"):  # nothing reaches back over the end of a line: decoding stays short
            self._tokens, self._said = [], ""
        return piece

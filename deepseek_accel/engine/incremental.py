"""Text of a stream of token ids, in pieces: what is handed out is never taken back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import AccelError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_OF_A_CHARACTER = 4
"""Tokens that one character may span: its bytes in UTF-8."""
_MOST_HELD = 16
"""Tokens held back at most; with so many there is no character to wait for, the text is broken."""


class IncrementalText:
    """Turns token ids into text as they come.

    A token may hold part of a character, and how a token reads may depend on the one before it (a leading space). So
    the newest tokens are decoded together with a few before them, and nothing is handed out while the text ends within
    a character. Tokens are decoded once or twice each, however long the text gets.

    The pieces together equal `tokenizer.decode(all ids)`, save for vocabularies with bytes as a fallback where the ids
    are no valid UTF-8: there one broken byte makes `decode` drop characters that were handed out before it.
    """

    def __init__(self, tokenizer: Any, **options: Any) -> None:
        """options: those of `tokenizer.decode`; special tokens are left out unless `skip_special_tokens=False`."""
        self.tokenizer, self.options = tokenizer, {"skip_special_tokens": True} | options
        self._ids: list[int] = []  # a few that were handed out, for context, and then those that were not
        self._handed_out = 0

    def put(self, ids: Sequence[int]) -> str:
        """The text that these ids complete, maybe none."""
        self._ids += map(int, ids)
        before = len(self._decode(self._ids[: self._handed_out]))
        count = len(self._ids)
        stop = max(self._handed_out, count - _MOST_OF_A_CHARACTER)
        for end in range(count, stop, -1):
            text = self._decode(self._ids[:end])
            if len(text) > before and not text.endswith(_REPLACEMENT):
                return self._hand_out(text[before:], end)
        if stop - self._handed_out < _MOST_HELD:
            return ""
        return self._hand_out(self._decode(self._ids[:stop])[before:], stop)

    def _hand_out(self, piece: str, end: int) -> str:
        """Keep only the tokens of this piece as context for what follows `end`."""
        if piece:  # tokens without text, such as special ones, are no context: they would lose a leading space
            del self._ids[: self._handed_out]
            self._handed_out = end - self._handed_out
        return piece

    def end(self) -> str:
        """What was held back. Then it is ready for another text."""
        rest = self._decode(self._ids)[len(self._decode(self._ids[: self._handed_out])) :]
        self._ids, self._handed_out = [], 0
        return rest

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, **self.options)) if ids else ""


class TextStream:
    """Pieces of text of one stream of ids; made by `TokenizerRing.stream`.

    `put` and `end` only note the ids. What came while the ring was busy is decoded in one go.
    """

    def __init__(
        self,
        schedule: Callable[[Callable[[Any], None]], None],
        then: Callable[[str | Exception, bool], None],
        options: dict[str, Any],
    ) -> None:
        self._schedule, self._then, self._options = schedule, then, options
        self._lock, self._ids = threading.Lock(), list[int]()
        self._text: IncrementalText | None = None
        self._scheduled = self._ended = self._failed = False

    def put(self, ids: Sequence[int]) -> None:
        """More ids. Raises AccelError after `end`, or if the ring is closed."""
        self._note(ids, False)

    def end(self) -> None:
        """No more ids: what was held back is handed out, with `last` set."""
        self._note((), True)

    def _note(self, ids: Sequence[int], ended: bool) -> None:
        with self._lock:
            if self._ended:
                raise AccelError("this stream of text has ended; begin another")
            self._ids += ids
            self._ended = ended
            schedule, self._scheduled = not self._scheduled, True
        if schedule:
            try:
                self._schedule(self._work)
            except AccelError:
                self._ended = True
                raise

    def _work(self, tokenizer: Any) -> None:
        with self._lock:
            ids, last, self._ids, self._scheduled = self._ids, self._ended, [], False
        if self._failed:
            return
        if self._text is None:
            self._text = IncrementalText(tokenizer, **self._options)
        try:
            piece = self._text.put(ids) if ids else ""
            piece += self._text.end() if last else ""
        except Exception as error:  # of this stream alone
            self._failed = True
            self._then(error, True)
            return
        if piece or last:
            self._then(piece, last)

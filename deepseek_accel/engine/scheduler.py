"""Who waits, who runs, and who has which row and pages. Decides; computes nothing."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CacheFullError
from .observer import Watch
from .requests import FinishReason, Request, as_error
from .rows import OutOfPages, Rows
from .settings import Settings


@dataclass(eq=False)
class Sequence:
    """A request as the engine's thread sees it."""

    request: Request
    settings: Settings
    tokens: list[int]
    """The prompt and all tokens that were handed out."""
    num_prompt_tokens: int = 0
    row: int = -1
    """-1 while it waits."""
    length: int = 0
    """Entries that its pages hold, launched ones included."""
    goal: int = 0
    """Until it holds so many it is a prompt that is being computed."""
    ahead: int = 0
    """Tokens that the device has chosen and the host does not know."""
    epoch: int = 0
    """Goes up with every preemption: what was launched before does not count then."""
    cached: int = 0
    preemptions: int = 0
    keys: list[bytes] = field(default_factory=list)
    """Of its full pages, as far as they were asked for: who waits is asked in every step."""
    root: bytes = b""
    """What `keys` begin with."""
    ids: torch.Tensor | None = None
    """[1, T] on the device, for a request that runs processors of its own: tokens and those ahead."""
    error: Exception | None = None
    """What its own processors raised, once they have. The tokens before are still handed out."""
    reason: FinishReason | None = None
    """Once it is over."""
    out_of_memory: int = 0
    """How many steps in a row there was not even memory for it alone."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def produced(self) -> int:
        """Tokens handed out."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_prompt(self) -> bool:
        return self.length < self.goal

    @property
    def goes_on(self) -> bool:
        """Whether a decoding step may give it a token, as far as the host knows."""
        return self.error is None and not self.is_prompt and self.produced + self.ahead < self.settings.max_new_tokens


@dataclass
class Scheduler:
    """max_rows: most sequences that run at once."""

    max_rows: int
    watch: Watch
    rows: Rows | None = None
    """Their pages, once a model has been read."""
    waiting: OrderedDict[int, Sequence] = field(default_factory=OrderedDict)
    """By request, first come first served; preempted ones come first of all."""
    running: list[Sequence] = field(default_factory=list)
    """In the order of admission."""
    preemptions: int = 0
    tokens_taken: int = 0
    """Of prompts, from kept pages."""
    tokens_asked: int = 0
    """Of prompts in all."""
    tokens_out: int = 0
    finished: int = 0
    admitted: int = 0
    _free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = list(range(self.max_rows))[::-1]

    @property
    def pages(self) -> Rows:
        assert self.rows is not None
        return self.rows

    def everyone(self) -> list[Sequence]:
        return [*self.running, *self.waiting.values()]

    def find(self, request_id: int) -> Sequence | None:
        """The sequence of a request that waits or runs."""
        waits = self.waiting.get(request_id)
        return waits or next((each for each in self.running if each.request.id == request_id), None)

    def add(self, sequence: Sequence) -> None:
        self.waiting[sequence.request.id] = sequence

    @property
    def next_has_begun(self) -> bool:
        """Whether the next to be admitted was preempted: those come before all others."""
        return bool(self.waiting) and next(iter(self.waiting.values())).preemptions > 0

    def admit(self, allowed: int, *, only_begun: bool = False) -> None:
        """Give rows and the pages of their prompts to those who wait, in their order, up to `allowed` rows in all.

        Every row that runs may need a page for its next token: so many must be left over. Who can never fit fails.
        only_begun: nobody new.
        """
        while self.waiting and len(self.running) < min(allowed, self.max_rows):
            sequence = next(iter(self.waiting.values()))
            if only_begun and not self.next_has_begun:
                return
            if (error := self._why_never(sequence)) is not None:
                self.finish(sequence, "error", error)
            elif self._take_pages(sequence):
                self._enter(sequence)
            elif self.running:
                return
            else:
                self.finish(sequence, "error", self.full(sequence))

    def _why_never(self, sequence: Sequence) -> CacheFullError | None:
        most, need = self.pages.max_pages, self.pages.pages_for(len(sequence.tokens) + 1)
        return self.full(sequence) if most is not None and need > most else None

    def full(self, sequence: Sequence) -> CacheFullError:
        rows, tokens = self.pages, len(sequence.tokens) + 1
        need, most = rows.pages_for(tokens), rows.most_pages
        return CacheFullError(
            f"a request of {tokens:,} tokens needs {need:,} pages of {rows.page_size} tokens, and there are "
            f"{'no more' if most is None else f'{most:,}'}. "
            + (
                "Raise max_pages, or pass a shorter prompt."
                if rows.max_pages == most
                else "There is no memory for more."
            )
        )

    def _take_pages(self, sequence: Sequence) -> bool:
        rows, row, tokens = self.pages, self._free[-1], sequence.tokens
        found = 0
        if rows.keeps:
            keys = self._keys(sequence, len(tokens) - 1)  # the last one is always computed
            found = rows.count_kept(keys)
            if found < len(keys) and keys[found] in self._computing():
                return False  # what somebody is computing now need not be computed twice
            rows.take_kept(row, keys[:found])
        try:
            rows.make_room(rows.pages_for(len(tokens)) - found + len(self.running))
            rows.extend(row, len(tokens))
        except OutOfPages:
            rows.give_back(row)
            return False
        sequence.length = found * rows.page_size
        return True

    def _keys(self, sequence: Sequence, tokens: int) -> list[bytes]:
        """Of the full pages of its first `tokens` tokens, as many as are known. None is made twice."""
        rows = self.pages
        count = min(tokens, len(sequence.tokens)) // rows.page_size
        if sequence.root != rows.root:
            sequence.keys, sequence.root = [], rows.root
        if len(sequence.keys) < count:
            sequence.keys = rows.keys(sequence.tokens[: count * rows.page_size], sequence.keys)
        return sequence.keys[:count]

    def _computing(self) -> set[bytes]:
        """Keys of the prompts that are being computed; their pages are kept at the end."""
        return {key for each in self.running if each.is_prompt for key in self._keys(each, each.goal - 1)}

    def _enter(self, sequence: Sequence) -> None:
        del self.waiting[sequence.request.id]
        sequence.row, sequence.goal = self._free.pop(), len(sequence.tokens)
        self.running.append(sequence)
        self.admitted += 1
        self.tokens_taken += sequence.length
        self.tokens_asked += sequence.goal
        if not sequence.preemptions:
            sequence.cached = sequence.length
        if sequence.request.times.admitted is None:
            sequence.request.was_admitted()
            self.watch.tell("admitted", sequence.request)

    def preempt(self, sequence: Sequence) -> None:
        """Take its row and pages. It is the next to be admitted, and what it has been given stands."""
        self._leave(sequence, keep=True)
        sequence.length = sequence.goal = sequence.ahead = 0
        sequence.epoch += 1
        sequence.ids = None
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting[sequence.request.id] = sequence
        self.waiting.move_to_end(sequence.request.id, last=False)
        self.watch.tell("preempted", sequence.request)

    def finish(
        self, sequence: Sequence, reason: FinishReason, error: Exception | None = None, *, keep: bool = True
    ) -> None:
        """It is over. keep: whether its entries may be trusted."""
        if sequence.reason is not None:
            return
        sequence.reason = reason
        self.finished += 1  # before it leaves: who counts from another thread counts none too many
        if sequence.row >= 0:
            self._leave(sequence, keep=keep)
        else:
            self.waiting.pop(sequence.request.id, None)
        sequence.ids = None
        streamer, counts = sequence.settings.streamer, (sequence.cached, sequence.preemptions)
        self.tell_end(sequence.request, streamer, reason, error, *counts)

    def tell_end(
        self, request: Request, streamer: Any, reason: FinishReason, error: Exception | None, cached: int = 0,
        preemptions: int = 0,
    ) -> None:  # fmt: skip
        """Of a request that has ended: its streamer, who waits for it, and the observer."""
        if streamer is not None:
            try:
                streamer.end()
            except BaseException as broken:
                reason, error = "error", error or as_error(broken, "the streamer of this request")
        self.watch.tell("finished", request, request.finish(reason, error, cached, preemptions))

    def keep_prompt(self, sequence: Sequence) -> None:
        """Its prompt is computed: others that begin alike need not wait for its end."""
        if self.pages.keeps:
            self.pages.keep(sequence.row, self._keys(sequence, sequence.length))

    def _leave(self, sequence: Sequence, *, keep: bool) -> None:
        if keep and self.pages.keeps:
            self.pages.keep(sequence.row, self._keys(sequence, sequence.length))
        self.pages.give_back(sequence.row)
        self.running.remove(sequence)
        self._free.append(sequence.row)
        sequence.row = -1

    @property
    def tokens_held(self) -> int:
        return sum(sequence.length for sequence in self.running)

    def fragmentation(self) -> float:
        """The share of the rows' pages that is empty: their last pages are filled in part. 0 without rows."""
        rows = self.rows
        room = 0 if rows is None else sum(len(row) for row in rows.rows) * rows.page_size
        return 1 - self.tokens_held / room if room else 0.0

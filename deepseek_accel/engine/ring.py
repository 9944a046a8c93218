"""Tokenising and detokenising beside the engine's thread.

    encode (texts) ─> worker threads: text -> ids ─> page-locked buffer ─> copy on a stream of its own ─> then(results)
    stream, decode (ids) ─> one thread: ids -> text ─> then(piece)

Results come in the order in which the texts were given, whichever worker is done first. At most `num_batches` batches
of `encode` are in flight: who is faster than the workers waits, and memory stays bounded.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import AccelError, PlanError
from .incremental import TextStream

log = logging.getLogger(__name__)
MAX_GATHERED = 64
"""Most texts of `submit` in one batch."""
_FIRST_BUFFER = 16_384
_CLOSED = "the tokenizer ring is closed; make another"


@dataclass(frozen=True, eq=False)
class Tokens:
    """The ids of one text, on the host and on the ring's device."""

    ids: list[int]
    _tensor: torch.Tensor
    _copied: Any = None
    """The event after the copy, or None on a CPU."""

    def __len__(self) -> int:
        return len(self.ids)

    def tensor(self) -> torch.Tensor:
        """[T] int64 on the ring's device. What the current stream does next waits for the copy; the host does not."""
        if self._copied is not None:
            stream = torch.cuda.current_stream(self._tensor.device)
            stream.wait_event(self._copied)
            self._tensor.record_stream(stream)  # its memory belongs to the ring's stream
        return self._tensor


Outcome = Tokens | Exception
Then = Callable[[list[Outcome]], None]


@dataclass
class _Batch:
    texts: list[str]
    then: Then
    number: int
    counted: bool
    """Whether it is one of the `num_batches` that may be in flight."""
    options: dict[str, Any] = field(default_factory=dict)
    outcome: list[Outcome] | None = None


class TokenizerRing:
    """A ring of batches between texts and an engine.

    tokenizer: a Hugging Face tokenizer; the ring works on copies, so that truncation or padding set elsewhere cannot
    disturb it. num_batches: batches of `encode` in flight at most. device: where the ids go; None is the CPU.
    num_threads: workers that tokenise; fast tokenizers let go of Python's lock meanwhile.
    Close it, or use it in a `with` statement: that joins its threads.
    """

    def __init__(self, tokenizer: Any, num_batches: int = 8, device: Any = None, *, num_threads: int = 2) -> None:
        if num_batches < 1 or num_threads < 1:
            raise PlanError(f"num_batches and num_threads must be 1 or more, got {num_batches!r} and {num_threads!r}")
        self.num_batches, self.device = num_batches, torch.device("cpu" if device is None else device)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._work: queue.SimpleQueue[_Batch | str | None] = queue.SimpleQueue()
        self._texts: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._waiting: deque[tuple[str, Callable[[Outcome], None]]] = deque()
        self._ready: dict[int, _Batch] = {}
        self._begun = self._delivered = self._in_flight = 0
        self._num_workers = num_threads
        self._delivering = self._closed = self._texts_closed = self._cancelled = False
        self._counts = {"batches": 0, "texts": 0, "tokens": 0, "failed_texts": 0, "blocked_seconds": 0.0}
        self._buffers = _Buffers(self.device, max(num_batches, num_threads))
        own = _settled_copy(tokenizer)
        copies = [own if getattr(own, "is_fast", False) else copy.deepcopy(own) for _ in range(num_threads + 1)]
        self._threads = [
            threading.Thread(target=self._encode_loop, args=(each,), name="deepseek-accel tokenise", daemon=True)
            for each in copies[1:]
        ]
        self._threads.append(
            threading.Thread(target=self._decode_loop, args=copies[:1], name="deepseek-accel detokenise", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def encode(self, texts: Sequence[str], then: Then, timeout: float | None = None, **options: Any) -> None:
        """Tokenise `texts`; blocks while `num_batches` batches are in flight.

        then: called on a worker with one `Tokens` or exception per text, in their order; batches come in the order of
        `encode`. options: of the tokenizer's call, such as `add_special_tokens=False`.
        Raises AccelError if the ring is closed or `then` of a full ring calls this, TimeoutError after `timeout` s.
        """
        begun = time.perf_counter()
        with self._room:
            if self._in_flight >= self.num_batches and threading.current_thread() in self._threads:
                raise AccelError("all batches are in flight, and their callback asks for another: use `submit` there")
            free = self._room.wait_for(lambda: self._closed or self._in_flight < self.num_batches, timeout)
            self._counts["blocked_seconds"] += time.perf_counter() - begun
            self._check_open()
            if not free:
                raise TimeoutError(f"{self.num_batches} batches were in flight for {timeout} s")
            self._in_flight += 1
            self._work.put(_Batch(list(texts), then, self._take_number(), True, options))

    async def aencode(self, texts: Sequence[str], **options: Any) -> list[Outcome]:
        """`encode` for asyncio: waits, without blocking the loop, for room and for the results."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Outcome]] = loop.create_future()

        def settle(outcome: list[Outcome]) -> None:
            if not future.done():  # nobody waits any more
                future.set_result(outcome)

        def then(outcome: list[Outcome]) -> None:
            loop.call_soon_threadsafe(settle, outcome)

        await asyncio.to_thread(self.encode, texts, then, **options)
        return await future

    def submit(self, text: str, then: Callable[[Outcome], None]) -> None:
        """Tokenise one text; never blocks. Texts that wait are tokenised together, outside of the `num_batches`.

        then: called on a worker, in the order of `submit`. How many may wait is the caller's to limit.
        """
        with self._lock:
            self._check_open()
            self._waiting.append((text, then))
            if len(self._waiting) == 1:
                self._work.put("gather")

    def decode(self, ids: Sequence[int], then: Callable[[str | Exception], None], **options: Any) -> None:
        """The text of finished ids; `then` is called on the ring's thread. Special tokens are left out."""
        ids = list(ids)

        def work(tokenizer: Any) -> None:
            try:
                text: str | Exception = tokenizer.decode(ids, **({"skip_special_tokens": True} | options))
            except Exception as error:  # of these ids alone
                text = error
            then(text)

        self._put_text(work)

    def stream(self, then: Callable[[str | Exception, bool], None], **options: Any) -> TextStream:
        """The text of ids to come, in pieces: `then(piece, last)`, on the ring's thread, in their order."""
        return TextStream(self._put_text, then, options)

    def facts(self) -> dict[str, int | float]:
        """Counts since the start, and what is in flight now."""
        with self._lock:
            return {**self._counts, "in_flight": self._in_flight, "waiting": len(self._waiting)}

    def close(self, cancel: bool = False, wait: bool = True) -> None:
        """Finish what was given, then end the threads. cancel: what has not begun gets an AccelError instead.

        wait: until they have ended. Raises AccelError if a callback of the ring, on one of its threads, would wait.
        """
        if wait and threading.current_thread() in self._threads:
            raise AccelError("a callback of the ring cannot wait for its own thread: close(wait=False)")
        with self._room:
            self._cancelled |= cancel
            if not self._closed:
                self._closed = True
                for _ in self._threads[:-1]:
                    self._work.put(None)
            self._room.notify_all()
        for thread in self._threads if wait else ():
            thread.join()

    def __enter__(self) -> TokenizerRing:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close(cancel=error[0] is not None)

    def _check_open(self) -> None:
        if self._closed:
            raise AccelError(_CLOSED)

    def _take_number(self) -> int:
        self._begun += 1
        return self._begun - 1

    def _put_text(self, work: Callable[[Any], None]) -> None:
        with self._lock:
            if self._texts_closed:
                raise AccelError(_CLOSED)
            self._texts.put(work)

    def _encode_loop(self, tokenizer: Any) -> None:
        while (item := self._work.get()) is not None:
            if isinstance(item, _Batch):
                self._serve(tokenizer, item)
                continue
            while (batch := self._gather()) is not None:
                self._serve(tokenizer, batch)
        with self._lock:
            self._num_workers -= 1
            if not self._num_workers:  # only now: their callbacks may ask for text
                self._texts_closed = True
                self._texts.put(None)

    def _serve(self, tokenizer: Any, batch: _Batch) -> None:
        with self._lock:
            stop = self._cancelled
        if stop:
            error = AccelError("the tokenizer ring was closed before this text was tokenised")
            batch.outcome = [error for _ in batch.texts]
        else:
            batch.outcome = self._outcome(tokenizer, batch)
        self._deliver(batch)

    def _gather(self) -> _Batch | None:
        """What waits, as one batch, or None."""
        with self._lock:
            if not self._waiting:
                return None
            count = min(len(self._waiting), MAX_GATHERED)
            taken = [self._waiting.popleft() for _ in range(count)]
            number = self._take_number()
            if self._waiting:
                self._work.put("gather")  # for another worker

        def then(outcome: list[Outcome]) -> None:
            for (_, each), result in zip(taken, outcome, strict=True):
                with _logged():
                    each(result)

        return _Batch([text for text, _ in taken], then, number, False)

    def _outcome(self, tokenizer: Any, batch: _Batch) -> list[Outcome]:
        found = _tokenise(tokenizer, batch.texts, batch.options)
        try:
            staged = iter(self._buffers.stage([ids for ids in found if not isinstance(ids, Exception)]))
        except Exception as error:  # the device's, so it is everybody's
            return [error for _ in found]
        return [ids if isinstance(ids, Exception) else next(staged) for ids in found]

    def _deliver(self, batch: _Batch) -> None:
        """Call back for every batch whose turn it is; one worker at a time, the others only leave theirs here."""
        with self._lock:
            self._ready[batch.number] = batch
            if self._delivering:
                return
            self._delivering = True
        while True:
            with self._lock:
                due = self._ready.pop(self._delivered, None)
                if due is None:
                    self._delivering = False
                    return
                self._delivered += 1
                self._count(due)
            with _logged():
                due.then(due.outcome or [])
            if due.counted:
                with self._room:
                    self._in_flight -= 1
                    self._room.notify()

    def _count(self, batch: _Batch) -> None:
        good = [tokens for tokens in batch.outcome or [] if isinstance(tokens, Tokens)]
        self._counts["batches"] += 1
        self._counts["texts"] += len(batch.texts)
        self._counts["tokens"] += sum(map(len, good))
        self._counts["failed_texts"] += len(batch.texts) - len(good)

    def _decode_loop(self, tokenizer: Any) -> None:
        while (work := self._texts.get()) is not None:
            with _logged():
                work(tokenizer)


class _Buffers:
    """Page-locked host memory, used again and again, and the stream that copies from it."""

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self._free: queue.SimpleQueue[tuple[torch.Tensor | None, Any]] = queue.SimpleQueue()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        for _ in range(count):
            self._free.put((None, None))

    def stage(self, lists: list[list[int]]) -> list[Tokens]:
        """Every list of ids on the device, in one copy that nobody waits for here."""
        if self._stream is None:
            return [Tokens(ids, torch.tensor(ids, dtype=torch.long)) for ids in lists]
        flat = torch.tensor([token for ids in lists for token in ids], dtype=torch.long)
        buffer, copied = self._free.get()
        try:
            if copied is not None:
                copied.synchronize()  # its last contents are still on their way
            if buffer is None or len(buffer) < len(flat):
                size = max(_FIRST_BUFFER, 1 << max(0, len(flat) - 1).bit_length())
                buffer = torch.empty(size, dtype=torch.long, pin_memory=True)
            buffer[: len(flat)].copy_(flat)
            with torch.cuda.stream(self._stream):
                there = buffer[: len(flat)].to(self.device, non_blocking=True)
                copied = self._stream.record_event()
        finally:
            self._free.put((buffer, copied))
        parts = there.split([len(ids) for ids in lists])
        return [Tokens(ids, part, copied) for ids, part in zip(lists, parts, strict=True)]


def _settled_copy(tokenizer: Any) -> Any:
    """A copy whose calls change nothing in it any more: without truncation and padding, which calls set and unset."""
    own = copy.deepcopy(tokenizer)
    own([""])
    return own


def _tokenise(tokenizer: Any, texts: list[str], options: dict[str, Any]) -> list[list[int] | Exception]:
    """Ids of every text, or what went wrong with it."""
    wrong = [
        None if isinstance(text, str) else TypeError(f"a text is a str, not {type(text).__name__}") for text in texts
    ]
    good = [text for text, error in zip(texts, wrong, strict=True) if error is None]
    options = {"return_attention_mask": False} | options
    try:
        found: list[Any] = list(tokenizer(good, **options)["input_ids"]) if good else []
        if len(found) != len(good):
            raise ValueError("the tokenizer's options made several lists of ids of one text; a ring takes one of each")
    except Exception as error:
        # one of them spoils the call: each by itself says which
        found = [error] if len(good) == 1 else [_tokenise(tokenizer, [text], options)[0] for text in good]
    rest = iter(found)
    return [next(rest) if error is None else error for error in wrong]


@contextmanager
def _logged() -> Iterator[None]:
    """A callback that raises must not end the thread that serves everybody."""
    try:
        yield
    except Exception:
        log.exception("a callback of the tokenizer ring raised")

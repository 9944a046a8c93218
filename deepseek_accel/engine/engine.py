"""Many requests at once on one optimized model: continuous batching over its pages, in this process."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Sequences
from contextlib import suppress
from numbers import Integral
from typing import Any

import torch

from ..cache.pages import check_page_options
from ..errors import AccelError
from .core import CPU_BATCH, GPU_BATCH, Core
from .incremental import IncrementalText
from .observer import Watch
from .preparing import applied_to, unwrapped
from .requests import Request, Result
from .ring import TokenizerRing
from .settings import Draft, Options

IDLE_SECONDS = 5.0
"""After so long without anything to do memory is given back. At once would make it anew for every large request."""


class Engine:
    """Runs requests on a model that `optimize` has changed (attention, kv_cache and layers passes).

    model: stays usable: `model.generate` may be called meanwhile, from any thread. tokenizer: for prompts and
    results as text. max_batch: rows that decode at once; None: 128 on a GPU, or the largest batch size of its CUDA
    graphs, and 32 on a CPU. max_pages: most pages in use at once; None: what KVCache says, else what memory allows.
    prefill_tokens: prompt tokens computed between two decoding steps at most. reuse_prefix: keep full pages for later
    requests that begin with the same tokens. observer: see `Observer`. guard: a `MemoryGuard`. max_waiting: requests
    that may wait; with more `submit` raises AccelError.

    One thread of the engine's own runs all steps. Use it as a context manager, or call `close`. Raises AccelError if
    the model is not optimized as needed or an option is wrong.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_batch: int | None = None,
        max_pages: int | None = None,
        prefill_tokens: int = 1024,
        reuse_prefix: bool = True,
        observer: Any = None,
        guard: Any = None,
        max_waiting: int | None = None,
    ) -> None:
        model = unwrapped(model)
        applied = applied_to(model)
        for name, value in (("max_batch", max_batch), ("prefill_tokens", prefill_tokens), ("max_waiting", max_waiting)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise AccelError(f"{name} must be a positive integer, got {value!r}")
        check_page_options(applied.page_size, max_pages)
        if max_batch is None:
            graphs = vars(model).get("_accel_graphs")
            on_gpu = max(graphs.batch_sizes, default=GPU_BATCH) if graphs is not None else GPU_BATCH
            max_batch = on_gpu if model.device.type == "cuda" else CPU_BATCH
        self.model, self.tokenizer, self.max_waiting = model, tokenizer, max_waiting
        self._options = Options(model, tokenizer)
        self._wake = threading.Event()
        self._mutex = threading.Lock()
        self._room = threading.Condition(self._mutex)
        self._open, self._num_submitted = True, 0
        self._numbers = itertools.count()
        most = max_pages if max_pages is not None else applied.max_pages
        changed = _Weakly(self)
        self._core = Core(
            model, applied, max_batch, most, prefill_tokens, reuse_prefix, Watch(observer), guard, changed
        )
        self._texts: Any = None if tokenizer is None else TokenizerRing(tokenizer)
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self._core), self._wake), name="deepseek_accel-engine", daemon=True
        )
        self._finalizer = weakref.finalize(self, _stop, self._core, self._wake)
        if self._texts is not None:  # an engine that nobody closed leaves no threads; who collects it must not wait
            weakref.finalize(self, self._texts.close, cancel=True, wait=False)
        self._thread.start()

    # Asking

    def submit(
        self,
        prompt: str | Sequences[int] | torch.Tensor,
        generation_config: Any = None,
        *,
        seed: int | None = None,
        stop_strings: str | Sequences[str] | None = None,
        **options: Any,
    ) -> Request:
        """Queue a request and return at once. Any thread may call it.

        prompt: text (the engine needs a tokenizer), token ids, or a LongTensor [T] or [1, T]. options: those of
        `generate`, by its names and with its defaults (max_new_tokens, do_sample, temperature, top_k, top_p, min_p,
        repetition_penalty, eos_token_id, logits_processor, stopping_criteria, streamer, ...). seed: of what is drawn;
        None takes one from torch's generator. stop_strings: end when one of them has been generated.

        Raises AccelError on what the engine does not do, on an empty prompt, when more than `max_waiting` wait, and
        when it is closed. What goes wrong later is in the result.
        """
        draft = self._options.draft(generation_config, seed, stop_strings, options)
        return self._submit(prompt, draft, wait=False)

    def _submit(self, prompt: Any, draft: Draft, wait: bool) -> Request:
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, token_ids(prompt))
        if text is not None and self._texts is None:
            raise AccelError("a prompt that is text needs a tokenizer: Engine(model, tokenizer)")
        settings = None if ids is None else draft.settle(self.model, ids)
        with self._mutex:
            if self._is_full() and wait:
                self._room.wait_for(lambda: not self._open or not self._is_full())
            elif self._is_full():
                raise AccelError(f"{self.max_waiting} requests are waiting already, which is max_waiting: try later")
            if not self._open:
                raise AccelError("the engine is closed")
            request = Request(next(self._numbers), self.tokenizer, self._cancel)
            self._num_submitted += 1
            self._core.announce(request, draft.given.get("streamer"))  # in here, so that `close(cancel=True)` sees it
        if ids is not None and settings is not None:
            self._core.put(request, ids, settings)
        else:
            self._texts.submit(text, lambda found: self._encoded(request, draft, found))
        self._wake.set()
        return request

    def _encoded(self, request: Request, draft: Draft, found: Any) -> None:
        """On a thread of the texts: a prompt has become tokens, or an exception."""
        try:
            if isinstance(found, Exception):
                raise found
            ids = found.ids
            self._core.put(request, ids, draft.settle(self.model, ids))
        except Exception as error:
            self._core.refuse(request, error)
        self._wake.set()

    def _cancel(self, request: Request) -> None:
        self._core.cancel(request)
        self._wake.set()

    @property
    def _num_unfinished(self) -> int:
        return self._num_submitted - self._core.scheduler.finished

    def _is_full(self) -> bool:
        if self.max_waiting is None:
            return False
        # in this order: who ends in between counts as neither, not as one who waits
        running = len(self._core.scheduler.running)
        return self._num_unfinished - running >= self.max_waiting

    def _has_changed(self) -> None:
        with self._mutex:
            self._room.notify_all()

    # Waiting

    def generate(
        self,
        prompts: Sequences[Any],
        generation_config: Any = None,
        *,
        seeds: Sequences[int | None] | None = None,
        options: Sequences[Mapping[str, Any]] | None = None,
        each: Callable[[Result], Any] | None = None,
        **shared: Any,
    ) -> list[Result]:
        """The results of all prompts, in their order. One that fails does not stop the others: see `Result.error`.

        seeds: one for each prompt. options: what differs from prompt to prompt, on top of those that all share. each:
        called with every result, in their order, as soon as it and those before it are there.

        Raises AccelError when `prompts` is one prompt or a mapping, when seeds or options are not as many, and when the
        engine is closed.
        """
        check_prompts(prompts)
        if not self._open:
            raise AccelError("the engine is closed")
        for name, given in (("seeds", seeds), ("options", options)):
            if given is not None and len(given) != len(prompts):
                raise AccelError(f"{name} must be as many as prompts: {len(given)} are given for {len(prompts)}")
        requests: list[Request | Exception] = []
        try:
            for i, prompt in enumerate(prompts):
                own = {**shared, **(options[i] if options is not None else {})}
                seed = own.pop("seed", None) if seeds is None else seeds[i]
                try:
                    draft = self._options.draft(generation_config, seed, own.pop("stop_strings", None), own)
                    requests.append(self._submit(prompt, draft, wait=True))
                except Exception as error:
                    requests.append(error)
            results = []
            for request in requests:
                results.append(request.result() if isinstance(request, Request) else self._refused(request))
                if each is not None:
                    each(results[-1])
            return results
        except BaseException:  # the caller is interrupted: nobody waits for these any more
            for request in requests:
                if isinstance(request, Request):
                    request.cancel()
            raise

    def _refused(self, error: Exception) -> Result:
        request = Request(next(self._numbers), self.tokenizer, self._cancel)
        return request.finish("error", error, 0, 0)

    def stream(self, prompt: Any, generation_config: Any = None, **options: Any) -> Iterator[Any]:
        """Pieces of text as they come, or token ids without a tokenizer. Whoever stops reading cancels the request.

        options: as of `submit`. Raises the request's error after what came before it.
        """
        request = self.submit(prompt, generation_config, **options)
        pieces = self._pieces(request)
        weakref.finalize(pieces, request.cancel).atexit = False  # its `finally` is not run if nobody began to read
        return pieces

    def _pieces(self, request: Request) -> Iterator[Any]:
        try:
            if self.tokenizer is None:
                yield from request
                return
            text = IncrementalText(self.tokenizer)
            try:
                for token in request:
                    if piece := text.put([token]):
                        yield piece
            except Exception:
                if piece := text.end():  # of the tokens that came before
                    yield piece
                raise
            if piece := text.end():
                yield piece
        finally:
            request.cancel()

    async def agenerate(self, prompt: Any, generation_config: Any = None, **options: Any) -> Result:
        """`submit` and the result, for asyncio. Cancelling the task cancels the request."""
        request = self.submit(prompt, generation_config, **options)
        done, loop = asyncio.Event(), asyncio.get_running_loop()
        request.listen(lambda: _tell(loop, done.set) if request.done else None)
        try:
            await done.wait()
        finally:
            request.cancel()
        return request.result()

    async def astream(self, prompt: Any, generation_config: Any = None, **options: Any) -> AsyncIterator[Any]:
        """`stream` for asyncio."""
        request = self.submit(prompt, generation_config, **options)
        changed, loop, seen = asyncio.Event(), asyncio.get_running_loop(), 0
        request.listen(lambda: _tell(loop, changed.set))
        text = None if self.tokenizer is None else IncrementalText(self.tokenizer)
        try:
            over = False
            while not over:
                await changed.wait()
                changed.clear()
                over = request.done  # before the tokens: none comes after it
                tokens = request.tokens
                new, seen = tokens[seen:], len(tokens)
                if text is None:
                    for token in new:
                        yield token
                elif piece := text.put(new) + (text.end() if over else ""):
                    yield piece
            if (error := request.result().error) is not None:
                raise error
        finally:
            request.cancel()

    # The engine itself

    def facts(self) -> dict[str, int | float]:
        """How things stand: queue, rows, pages, what was counted so far."""
        return self._core.facts()

    def close(self, cancel: bool = False) -> None:
        """Take no more requests, wait until those there are over, and give the memory back. Again: nothing.

        cancel: do not wait for them; their results hold the tokens so far.
        """
        if threading.current_thread() is self._thread:
            raise AccelError("the engine cannot be closed from its own thread, by a processor or an observer say")
        with self._mutex:
            self._open = False
            self._room.notify_all()
        if cancel:
            self._core.cancel_all()
            self._wake.set()
        with self._mutex:
            self._room.wait_for(lambda: not self._num_unfinished)
        self._finalizer()
        self._thread.join()
        if self._texts is not None:
            self._texts.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.close(cancel=kind is not None)


def token_ids(prompt: Any) -> list[int]:
    """Token ids of a prompt that is not text. Raises AccelError on anything else."""
    if isinstance(prompt, torch.Tensor):
        if prompt.dim() == 2 and len(prompt) == 1:
            prompt = prompt[0]
        if prompt.dim() != 1 or prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
            raise AccelError(f"a prompt must be [T] or [1, T] token ids, got {prompt.dtype} {list(prompt.shape)}")
        return [int(token) for token in prompt.tolist()]
    try:
        ids = list(prompt)
    except TypeError:
        ids = [None]
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in ids):
        raise AccelError(f"a prompt must be text, a list of token ids or a tensor of them, got {type(prompt).__name__}")
    return [int(token) for token in ids]


def check_prompts(prompts: Any) -> None:
    """Raises AccelError on what would be taken apart into prompts that nobody means."""
    if isinstance(prompts, (str, bytes, Mapping)):
        hint = "[prompt] for one" if isinstance(prompts, (str, bytes)) else "its input_ids without padding, say"
        raise AccelError(f"prompts must be a list of prompts, not {type(prompts).__name__}: {hint}")
    if isinstance(prompts, (list, tuple)) and prompts and isinstance(prompts[0], Integral):
        raise AccelError("prompts must be a list of prompts, not one list of token ids: [prompt] for one")


class _Weakly:
    """Tells an engine that requests were admitted or are over, if it is still there."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> None:
        if (engine := self._engine()) is not None:
            engine._has_changed()


def _tell(loop: asyncio.AbstractEventLoop, what: Any) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(what)


def _stop(core: Core, wake: threading.Event) -> None:
    core.over = True
    wake.set()


def _serve(reference: Any, wake: threading.Event) -> None:
    """The engine's thread. While there is nothing to do it holds nothing, so that an engine nobody has can go."""
    rests = False
    while (core := reference()) is not None:
        busy = core.turn()
        rests = rests and not busy
        over = core.over and not busy
        if over:
            core.end()
            return
        if rests:
            core.rest()
        del core
        if not busy:
            rests = not wake.wait(None if rests else IDLE_SECONDS)
            wake.clear()

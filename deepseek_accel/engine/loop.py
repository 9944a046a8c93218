"""The steps of an engine: prompts in pieces, then one token for every row that runs.

On a GPU the host reads a step's tokens while the next one runs; what that computed for rows that turn out to be over
is dropped.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import AccelError
from ..generation.upload import upload
from .choosing import Sampling, choose, choose_alone, number
from .compute import SHORT_SIZES, Compute
from .requests import as_error
from .rows import OutOfPages
from .scheduler import Scheduler, Sequence

logger = logging.getLogger(__name__)

ALONE_TOKENS = 8192
"""Prompt tokens that are computed at once while no row waits for its next token."""
PATIENCE = 3
"""A request that runs alone fails when so many steps in a row find no memory."""
RECOVERY_STEPS = 32
"""After so many steps without trouble twice as many rows may run again."""
GREEDY = Sampling(False)


class Post(NamedTuple):
    """Tokens that the device has chosen, on their way to the host."""

    tokens: Tensor
    event: Any
    sequences: list[tuple[Sequence, int]]
    """Whose they are, and in which epoch."""


class Steps:
    """Runs what a scheduler has admitted. Lives for as long as the model stays as it is."""

    def __init__(self, scheduler: Scheduler, compute: Compute, prefill_tokens: int) -> None:
        self.scheduler, self.compute, self.prefill_tokens = scheduler, compute, prefill_tokens
        self.allowed = scheduler.max_rows
        """Rows that may run, after there was no memory for as many as `max_rows`."""
        self._lags = lags(compute.device)
        self._posts: deque[Post] = deque()
        self._last = torch.zeros(scheduler.max_rows, dtype=torch.int64, device=compute.device)
        """[rows]: the token that each row's next step starts from."""
        self._good_steps = 0
        self.out_of_memory = 0
        """Steps that found no memory."""

    @property
    def busy(self) -> bool:
        return bool(self._posts) or bool(self.scheduler.running)

    @torch.no_grad()
    def run(self) -> tuple[int, int]:
        """One step: (rows that were given a token, prompt tokens computed). What goes wrong ends here."""
        try:
            with self.compute:
                computed = self._prompts()
                if not self._lags:
                    self.read()
                decoded = self._decode()
            self.read(1 if self._lags and decoded else 0)
            self.settle()
        except torch.OutOfMemoryError as error:
            # out here nothing holds the tensors of what failed
            self._fewer_rows(error.with_traceback(None))
            return 0, 0
        except Exception as error:
            logger.exception("a step of the engine failed; the requests that ran fail with it")
            self.drop(error)
            return 0, 0
        self._good_steps += 1
        if self._good_steps >= RECOVERY_STEPS and self.allowed < self.scheduler.max_rows:
            self.allowed, self._good_steps = min(2 * self.allowed, self.scheduler.max_rows), 0
        return decoded, computed

    def settle(self) -> None:
        """If nobody runs, wait for what was launched for rows that are over: only then is nothing left of the model as
        it was, and the next request finds it as it is."""
        if not self.scheduler.running:
            self.read()

    # Prompts

    def _prompts(self) -> int:
        """Compute pieces of prompts, oldest first, up to the budget: how many tokens."""
        running = self.scheduler.running
        decodes = any(sequence.goes_on for sequence in running)
        budget = self.prefill_tokens if decodes else max(self.prefill_tokens, ALONE_TOKENS)
        computed = 0
        waiting = [sequence for sequence in running if sequence.is_prompt]
        while waiting and computed < budget:
            left = budget - computed
            group = self._group(waiting, left)
            size = left
            if not group:
                group = waiting[:1]
                missing = group[0].goal - group[0].length
                size = min(missing, left)
                if size < missing and size <= SHORT_SIZES[-1] and computed:
                    break  # a piece that is not worth reading the weights for
            computed += self._piece(group, size)
            waiting = [sequence for sequence in waiting if sequence.is_prompt and sequence.reason is None]
        return computed

    def _group(self, waiting: list[Sequence], budget: int) -> list[Sequence]:
        """The first of those who wait whose whole rest is short, as many as run together."""
        lengths: list[int] = []
        for sequence in waiting:
            rest = sequence.goal - sequence.length
            if rest > SHORT_SIZES[-1] or sum(lengths) + rest > budget:
                break
            lengths.append(rest)
        return waiting[: self.compute.together(lengths)]

    def _piece(self, group: list[Sequence], size: int) -> int:
        """Run the next piece of these prompts, of several their whole rest: how many tokens."""
        parts = [sequence.tokens[sequence.length : min(sequence.goal, sequence.length + size)] for sequence in group]
        starts = [sequence.length for sequence in group]
        if len(group) > 1 or (len(parts[0]) <= SHORT_SIZES[-1] and self.compute.together([len(parts[0])])):
            logits = self.compute.pieces([sequence.row for sequence in group], starts, parts)
        else:
            logits = self.compute.piece(group[0].row, starts[0], parts[0])
        for sequence, part in zip(group, parts, strict=True):
            sequence.length += len(part)
        if not group[0].is_prompt:
            self._choose(group, logits)
            for sequence in group:
                if sequence.reason is None:
                    self.scheduler.keep_prompt(sequence)
        return sum(map(len, parts))

    # Tokens

    def _decode(self) -> int:
        """One more token for every row that goes on: how many rows."""
        rows = self._with_pages()
        if not rows:
            return 0
        index = upload([sequence.row for sequence in rows], self._last.device)
        lengths = [sequence.length for sequence in rows]
        logits = self.compute.step([sequence.row for sequence in rows], lengths, self._last[index])
        for sequence in rows:
            sequence.length += 1
        self._choose(rows, logits, index)
        return len(rows)

    def _with_pages(self) -> list[Sequence]:
        """The rows that go on, each with a page for its token. If there are not enough, the youngest has to wait."""
        scheduler = self.scheduler
        while True:
            rows = [sequence for sequence in scheduler.running if sequence.goes_on]
            try:
                for sequence in rows:
                    scheduler.pages.extend(sequence.row, sequence.length + 1)
                return rows
            except OutOfPages:
                if self._posts:
                    self.read()  # some may be over, and nothing that is known gets lost
                elif len(scheduler.running) > 1:
                    scheduler.preempt(scheduler.running[-1])
                else:
                    scheduler.finish(rows[0], "error", scheduler.full(rows[0]))

    def _choose(self, sequences: list[Sequence], logits: Tensor, index: Tensor | None = None) -> None:
        """Choose the next token of each from logits [R, vocabulary], and send them to the host."""
        alone = [i for i, each in enumerate(sequences) if each.settings.processors is not None]
        rules = [GREEDY if each.settings.processors is not None else each.settings.sampling for each in sequences]
        numbers = [
            number(each.settings.seed, each.produced + each.ahead) if each.settings.sampling.do_sample else 0.5
            for each in sequences
        ]
        tokens = choose(logits, rules, numbers)
        for i in alone:
            self._choose_alone(sequences[i], logits[i : i + 1], tokens[i : i + 1], numbers[i])
        index = upload([each.row for each in sequences], self._last.device) if index is None else index
        self._last.index_copy_(0, index, tokens.clamp_min(0))
        for each in sequences:
            each.ahead += 1
        self._post(tokens, sequences)

    def _choose_alone(self, sequence: Sequence, logits: Tensor, token: Tensor, drawn: float) -> None:
        """Let a request's own processors choose, into token [1]. What they raise is its error alone."""
        settings = sequence.settings
        try:
            if sequence.ids is None:
                sequence.ids = upload([sequence.tokens], logits.device)
            token.copy_(choose_alone(settings.processors, sequence.ids, logits, settings.sampling.do_sample, drawn))
            sequence.ids = torch.cat((sequence.ids, token[None]), 1)
        except torch.OutOfMemoryError:
            raise
        except BaseException as error:
            sequence.error = as_error(error, "a processor of this request")

    def _post(self, tokens: Tensor, sequences: list[Sequence]) -> None:
        event = None
        if tokens.is_cuda:
            host = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
            tokens = host.copy_(tokens, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._last.device))
        self._posts.append(Post(tokens, event, [(each, each.epoch) for each in sequences]))

    def read(self, leave: int = 0) -> None:
        """Hand out the tokens of all posts but the latest `leave`."""
        while len(self._posts) > leave:
            post = self._posts.popleft()
            if post.event is not None:
                post.event.synchronize()
            when = perf_counter()
            for token, (sequence, epoch) in zip(post.tokens.tolist(), post.sequences, strict=True):
                if sequence.reason is not None or sequence.epoch != epoch:
                    continue
                if sequence.error is not None and sequence.ahead == 1:  # this is the token that could not be chosen
                    self.scheduler.finish(sequence, "error", sequence.error)
                else:
                    self._hand_out(sequence, token, when)

    def _hand_out(self, sequence: Sequence, token: int, when: float) -> None:
        scheduler, settings = self.scheduler, sequence.settings
        sequence.ahead -= 1
        sequence.out_of_memory = 0
        if token < 0:
            error = AccelError("no token could be drawn: the logits of this request are not finite, or all are -inf")
            scheduler.finish(sequence, "error", error, keep=False)
            return
        first = not sequence.produced
        sequence.tokens.append(token)
        sequence.request.add(token, when)
        scheduler.tokens_out += 1
        scheduler.watch.tell("token", sequence.request, 1, when)
        try:
            if settings.streamer is not None:
                if first:  # as `generate` does, and only once whatever happens to the sequence
                    settings.streamer.put(torch.tensor([sequence.tokens[:-1]]))
                settings.streamer.put(torch.tensor([token]))
            reason = why_over(sequence, token, when)
        except BaseException as error:
            scheduler.finish(sequence, "error", as_error(error, "the streamer or a criterion of this request"))
            return
        if reason is not None:
            scheduler.finish(sequence, reason)

    # When things go wrong

    def _fewer_rows(self, error: torch.OutOfMemoryError) -> None:
        """There was no memory for a step: all rows give their pages back, and half as many run from now on."""
        scheduler = self.scheduler
        self._protect(self.read)
        count = len(scheduler.running)
        if count == 1:
            (last,) = scheduler.running
            last.out_of_memory += 1
            if last.out_of_memory == PATIENCE:
                scheduler.finish(last, "error", error)
        self.allowed, self._good_steps = max(1, count // 2), 0
        self.out_of_memory += 1
        self.compute.counters["engine: steps out of memory"] += 1
        logger.warning("no memory for a step of %d rows; going on with %d", count, self.allowed)
        for sequence in scheduler.running[::-1]:
            scheduler.preempt(sequence)
        scheduler.pages.evict()
        if self.compute.device.type == "cuda":
            torch.cuda.empty_cache()

    def drop(self, error: Exception) -> None:
        """All that run fail. Nothing of what they computed is used again."""
        self._posts.clear()
        for sequence in list(self.scheduler.running):
            self.scheduler.finish(sequence, "error", error, keep=False)
        self.scheduler.pages.evict()

    def _protect(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            logger.exception("the tokens of the last step could not be read")
            self.drop(error)


def lags(device: torch.device) -> bool:
    """Whether a step is launched before the tokens of the last one are known."""
    return device.type == "cuda"


def why_over(sequence: Sequence, token: int, when: float) -> Any:
    """Why a sequence that was given `token` last is over, or None."""
    settings, tokens = sequence.settings, sequence.tokens
    if token in settings.eos:
        return "eos"
    if settings.stop is not None and settings.stop.met(lambda count: tokens[-count:], token):
        return "stop"
    if settings.criteria:
        ids = torch.tensor([tokens])
        if any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in settings.criteria):
            return "stop"
    if sequence.produced >= settings.max_new_tokens:
        return "length"
    if settings.max_time is not None and when - sequence.request.times.submitted > settings.max_time:
        return "length"
    return None

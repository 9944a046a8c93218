"""The steps of the decoding loop, op by op or as graphs, and the board on which the device leaves their tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from .graphs import POSTS, GraphRun, NoRoom
from .step import Stepper

AHEAD = 64
"""Tokens per row for which pages are taken at once."""


def side_by_side(columns: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Tokens [B], the first on like's device and the others there or all on the host, as [B, columns]."""
    first, rest = columns[0].unsqueeze(1), columns[1:]
    return torch.cat((first, torch.stack(rest, 1).to(like.device)), 1) if rest else first


class Board:
    """Where the device leaves each step's tokens and whether to go on, for the host to read without stopping it."""

    def __init__(self, device: torch.device, batch: int) -> None:
        self._posts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]] = []
        self._pinned: list[tuple[torch.Tensor, torch.Tensor]] = []
        if device.type == "cuda":
            self._pinned = [
                (
                    torch.empty(batch, dtype=torch.int64, pin_memory=True),
                    torch.empty(1, dtype=torch.bool, pin_memory=True),
                )
                for _ in range(2)
            ]

    def post(self, tokens: torch.Tensor, running: torch.Tensor) -> None:
        """tokens [B], running [1] bool, on the device."""
        if not self._pinned:
            self._posts.append((tokens, tokens, running, None))
            return
        kept = self._pinned[0]
        self._pinned.reverse()
        kept[0].copy_(tokens, non_blocking=True)
        kept[1].copy_(running, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tokens.device))  # the current device may be another one
        self._posts.append((tokens, *kept, event))

    def read(self, wants_tokens: bool) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
        """The oldest post: tokens where they are, a copy of them on the host if wanted, whether any row goes on."""
        tokens, on_host, running, event = self._posts.pop(0)
        if event is not None:
            event.synchronize()
        return tokens, (on_host.clone() if wants_tokens else None), bool(running)


class EagerSteps:
    """Steps launched one op after the other."""

    chooses, counter = False, ""

    def __init__(self, stepper: Stepper, cache: Any, positions: torch.Tensor, starts: list[int] | None) -> None:
        self.stepper, self.cache, self.positions, self.starts = stepper, cache, positions, starts

    def step(self, tokens: torch.Tensor, unfinished: torch.Tensor) -> torch.Tensor:
        logits = self.stepper.step(tokens, self.positions, self.cache, self.starts)
        self.positions = self.positions + 1
        return logits

    def take_back(self) -> None:
        """The last step does not stand. Its entries are dropped when the cache is committed."""


class GraphSteps:
    """Steps that are replays of a graph, or launched one by one if there is no memory to capture it."""

    def __init__(
        self,
        run: GraphRun,
        eager: EagerSteps,
        eos: list[int],
        pad: torch.Tensor,
        samples: bool,
        counters: Counter[str],
    ) -> None:
        self.run, self.eager, self.eos, self.pad, self.counters = run, eager, eos, pad, counters
        self.chooses, self.counter = run.choice is not None, "cuda_graphs: replays"
        self.length = self.reserved = run.cache.length
        self._generator = torch.cuda.default_generators[run.buffers.tokens.device.index] if samples else None
        self._offset: int | None = None
        self._begun = self._without = False
        self._events = [torch.cuda.Event() for _ in range(POSTS)]
        self._launched = self._read = 0

    def read(self, wants_tokens: bool) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
        """As `Board.read`, of what the graph itself posts."""
        self._events[self._read % POSTS].synchronize()
        post = self.run.buffers.posts[self._read % POSTS].clone()
        self._read += 1
        tokens = post[: self.run.batch]
        return tokens, tokens, bool(post[-1])

    def step(self, tokens: torch.Tensor, unfinished: torch.Tensor) -> torch.Tensor:
        if self._without:
            return self.eager.step(tokens, unfinished)
        if self.length + 1 > self.reserved:
            self.reserved = self.run.cache.reserve(self.length + 1, AHEAD)
        if not self._begun:
            try:
                self.run.begin(tokens, self.eager.positions, unfinished, self.eos, self.pad)
                self.run.capture()
            except NoRoom:  # nothing has run yet; without a graph a step takes less
                self.counters["cuda_graphs: eager loop (out of memory)"] += 1
                self._without, self.chooses, self.counter = True, False, ""
            self._begun = True
            if self._without:
                self.run.cache.commit(self.length)
                return self.eager.step(tokens, unfinished)
        self.length += 1
        if self._generator is not None and self.chooses:
            self._offset = self._generator.get_offset()
        logits = self.run.step(None if self.chooses else tokens)
        self._events[self._launched % POSTS].record(torch.cuda.current_stream(logits.device))
        self._launched += 1
        return logits

    def take_back(self) -> None:
        """The last step does not stand: nor do the random numbers it drew."""
        if self._offset is not None and self._generator is not None:
            self._generator.set_offset(self._offset)

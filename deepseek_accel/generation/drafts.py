"""Drafts: what may come next, guessed. Whatever they guess, the text stays the target's; only the pace depends on it.

A draft sees the rows' tokens as lists on the host, left padding included, and how the call picks tokens. It proposes
up to counts[r] tokens for row r. Rows that are done have a count of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from .lines import Mixture
from .prefill import entry_sizes, prefill
from .ragged import RaggedRows
from .step import Stepper, head_step

LONGEST, SHORTEST = 5, 2
"""Tokens of the n-grams that a row is searched for, the longest first. One token alone repeats by chance too often."""
SELF_WINDOW = 1024
"""Keys that the target's own cheap steps see."""
CATCH_UP = 128
"""Tokens per row that join a draft's cache at a time."""

Pick = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""(logits [B, vocabulary], the index of the token to pick in each row) -> tokens [B], on the device."""


class Draft(Protocol):
    """What guesses during one call."""

    def propose(self, rows: list[list[int]], counts: list[int], pick: Pick) -> list[list[int]]:
        """At most counts[r] tokens to follow rows[r]."""

    def learn(self, hidden: torch.Tensor, counts: list[int], stand: list[int]) -> None:
        """The target ran: hidden [B, S, D] after its last layer, of which the last counts[r] columns are row r's and
        the first stand[r] of those stand."""


class NGram:
    """What followed the last tokens of a row when they stood in it before. No model, no memory on the device."""

    def __init__(self, first: list[int]) -> None:
        """first: where each row's text begins, behind its padding."""
        self._read = list(first)
        self._first = list(first)
        self._followed: list[list[dict[tuple[int, ...], int]]] = [
            [{} for _ in range(LONGEST + 1)] for _ in first
        ]

    def propose(self, rows: list[list[int]], counts: list[int], pick: Pick) -> list[list[int]]:
        return [self._follow(r, rows[r], count) if count else [] for r, count in enumerate(counts)]

    def learn(self, hidden: torch.Tensor, counts: list[int], stand: list[int]) -> None:
        pass

    def _follow(self, r: int, row: list[int], count: int) -> list[int]:
        known, first = self._followed[r], self._first[r]
        # an n-gram is known from the token behind it on, so that the last one of the row does not find itself
        for end in range(max(self._read[r], first + SHORTEST), len(row)):
            for size in range(SHORTEST, min(LONGEST, end - first) + 1):
                known[size][tuple(row[end - size : end])] = end
        self._read[r] = len(row)
        for size in range(min(LONGEST, len(row) - first), SHORTEST - 1, -1):
            at = known[size].get(tuple(row[len(row) - size :]))
            if at is not None:
                found = row[at : at + count]
                while len(found) < count:  # the match runs into the row's end: what repeats goes on repeating
                    found += found[: count - len(found)]
                return found
        return []


def chain(
    logits: torch.Tensor,
    rows: list[list[int]],
    counts: list[int],
    pick: Pick,
    step: Callable[[torch.Tensor, list[int]], torch.Tensor],
) -> list[list[int]]:
    """Guess one token after the other, each from the ones before. logits [B, vocabulary]: of the first.

    step: (tokens [B] just guessed, 1 for each row that goes on and else 0) -> logits [B, vocabulary].
    """
    columns: list[torch.Tensor] = []
    for i in range(max(counts)):
        if i:
            logits = step(columns[-1], [int(count > i) for count in counts])
        columns.append(pick(logits, [len(row) + i for row in rows]))
    guessed = torch.stack(columns, 1).tolist()  # the one time that the host waits
    return [tokens[:count] for tokens, count in zip(guessed, counts, strict=True)]


def right_aligned(lists: list[list[int]], device: torch.device) -> torch.Tensor:
    """[B, S] int64 tokens, shorter rows filled up on the left with their first token, empty ones with 0."""
    size = max(len(tokens) for tokens in lists)
    full = [[tokens[0] if tokens else 0] * (size - len(tokens)) + tokens for tokens in lists]
    return torch.tensor(full, device=device)


def catch_up(todo: list[int]) -> list[list[int]]:
    """How many of its `todo` tokens each row takes in each of several runs. All rows end with the last one."""
    runs = [[min(left, CATCH_UP) for left in todo]]
    while any(left := [have - sum(run[r] for run in runs) for r, have in enumerate(todo)]):
        runs.insert(0, [min(more, CATCH_UP) for more in left])
    return runs


class ModelDraft:
    """Another model on a cache of its own. It reads what the rows have become since it was asked last, then guesses."""

    def __init__(self, stepper: Stepper, cache: Any, input_ids: torch.Tensor, starts: list[int] | None) -> None:
        """cache: a new paged cache of the draft's. input_ids [B, T]: the prompt, starts its padding."""
        self.stepper, device = stepper, stepper.model.device
        batch = len(input_ids)
        first = torch.tensor(starts or [0] * batch, device=device)
        known = input_ids[:, :-1].to(device)  # the last token is read with what follows it
        if known.shape[1]:
            positions = (torch.arange(known.shape[1], device=device) - first[:, None]).clamp_min(0)
            prefill(stepper, known, cache, None if starts is None else first.int(), positions)
        else:
            sizes = [entry_sizes(layer.attention) for layer in stepper.model.layers]
            cache.open(batch, sizes, stepper.model.dtype, device, 1)
        self._rows = RaggedRows(stepper, cache, first, starts)
        self._guessed: list[list[int]] = [[] for _ in range(batch)]
        """Tokens behind each row's length whose entries are written too."""

    def propose(self, rows: list[list[int]], counts: list[int], pick: Pick) -> list[list[int]]:
        self._keep_what_came_true(rows)
        lengths, device = self._rows.lengths, self.stepper.model.device
        todo = [len(row) - have if count else 0 for row, have, count in zip(rows, lengths, counts, strict=True)]
        for run in catch_up(todo):
            new = [row[have : have + n] for row, have, n in zip(rows, lengths, run, strict=True)]
            hidden = self._rows.run(right_aligned(new, device), run)
            self._rows.lengths = lengths = [have + n for have, n in zip(lengths, run, strict=True)]

        def step(tokens: torch.Tensor, active: list[int]) -> torch.Tensor:
            hidden = self._rows.run(tokens[:, None], active)
            self._rows.lengths = [have + n for have, n in zip(self._rows.lengths, active, strict=True)]
            return head_step(self.stepper.model, hidden[:, -1])

        guessed = chain(head_step(self.stepper.model, hidden[:, -1].contiguous()), rows, counts, pick, step)
        self._rows.lengths = lengths
        self._guessed = [tokens[:-1] for tokens in guessed]
        return guessed

    def learn(self, hidden: torch.Tensor, counts: list[int], stand: list[int]) -> None:
        pass

    def _keep_what_came_true(self, rows: list[list[int]]) -> None:
        """Entries of guesses stay where the row has become what was guessed."""
        for r, guessed in enumerate(self._guessed):
            for token in guessed:
                have = self._rows.lengths[r]
                if have >= len(rows[r]) - 1 or rows[r][have] != token:
                    break
                self._rows.lengths[r] += 1
            guessed.clear()


class SelfDraft:
    """The target itself with fewer experts and a window over its keys. It writes where the target will write again:
    no memory, no cache, no prompt of its own."""

    def __init__(self, rows: RaggedRows, experts: int | None) -> None:
        """experts: how many each router chooses; None: half of what it chooses otherwise."""
        self._rows, stepper = rows, rows.stepper
        layers = []
        for layer in stepper.model.layers:
            if isinstance(layer.mlp, Mixture):
                rule = layer.mlp.rule
                fewer = max(1, rule.top_k // 2) if experts is None else min(experts, rule.top_k)
                layer = layer._replace(mlp=layer.mlp._replace(rule=replace(rule, top_k=fewer)))
            layers.append(layer)
        model = stepper.model._replace(layers=tuple(layers))
        self._cheap = Stepper(model, stepper.family, stepper.attention)

    def propose(self, rows: list[list[int]], counts: list[int], pick: Pick) -> list[list[int]]:
        lengths = self._rows.lengths
        pending = torch.tensor([row[-1] for row in rows], device=self._cheap.model.device)

        def step(tokens: torch.Tensor, active: list[int]) -> torch.Tensor:
            hidden = self._rows.run(tokens[:, None], active, self._cheap, SELF_WINDOW)
            self._rows.lengths = [have + n for have, n in zip(self._rows.lengths, active, strict=True)]
            return head_step(self._cheap.model, hidden[:, -1])

        try:
            return chain(step(pending, [int(count > 0) for count in counts]), rows, counts, pick, step)
        finally:
            self._rows.lengths = lengths

    def learn(self, hidden: torch.Tensor, counts: list[int], stand: list[int]) -> None:
        pass

"""Drafts: what may come next, guessed. Whatever they guess, the text stays the target's; only the pace depends on it.

A draft sees the rows' tokens as lists on the host, left padding included, and how the call picks tokens. It proposes
up to counts[r] tokens for row r. Rows that are done have a count of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from .graphs import StepGraphs
from .lines import Mixture
from .prefill import entry_sizes, prefill
from .ragged import RaggedRows
from .ragged_graphs import RaggedGraphs
from .step import Stepper

LONGEST, SHORTEST = 5, 2
"""Tokens of the n-grams that a row is searched for, the longest first. One token alone repeats by chance too often."""
SELF_WINDOW = 1024
"""Keys that the target's own cheap steps see."""
CATCH_UP = 128
"""Tokens per row that join a draft's cache at a time."""

Pick = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
"""(logits [N, vocabulary], the row of each, the index of the token to pick in it) -> tokens [N], on the device."""


class Draft(Protocol):
    """What guesses during one call."""

    def propose(self, texts: list[list[int]], counts: list[int], pick: Pick) -> list[list[int]]:
        """At most counts[r] tokens to follow texts[r]; some count is not 0."""

    def learn(self, hidden: torch.Tensor, rows: list[int], counts: list[int], stand: list[int]) -> None:
        """The target ran: hidden [R, S, D] after its last layer, of which the last counts[i] columns are of row
        rows[i], and the first stand[i] of those stand."""


class NGram:
    """What followed the last tokens of a row when they stood in it before. No model, no memory on the device."""

    def __init__(self, first: list[int]) -> None:
        """first: where each row's text begins, behind its padding."""
        self._read = list(first)
        self._first = list(first)
        self._followed: list[list[dict[tuple[int, ...], int]]] = [[{} for _ in range(LONGEST + 1)] for _ in first]

    def propose(self, texts: list[list[int]], counts: list[int], pick: Pick) -> list[list[int]]:
        return [self._follow(r, texts[r], count) if count else [] for r, count in enumerate(counts)]

    def learn(self, hidden: torch.Tensor, rows: list[int], counts: list[int], stand: list[int]) -> None:
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
    texts: list[list[int]],
    counts: list[int],
    pick: Pick,
    step: Callable[[torch.Tensor], torch.Tensor],
) -> list[list[int]]:
    """Guess one token after the other, each from the ones before. logits [R, vocabulary]: of the first, for the rows
    whose count is not 0; they all go on until the largest count. step: tokens [R] just guessed -> logits.
    """
    rows = [r for r, count in enumerate(counts) if count]
    columns: list[torch.Tensor] = []
    for i in range(max(counts)):
        if i:
            logits = step(columns[-1])
        columns.append(pick(logits, rows, [len(texts[r]) + i for r in rows]))
    guessed = torch.stack(columns, 1).tolist()  # the one time that the host waits
    found: list[list[int]] = [[] for _ in counts]
    for r, tokens in zip(rows, guessed, strict=True):
        found[r] = tokens[: counts[r]]
    return found


def right_aligned(lists: list[list[int]], device: torch.device) -> torch.Tensor:
    """[B, S] int64 tokens, shorter rows filled up on the left with their first token, empty ones with 0."""
    size = max(len(tokens) for tokens in lists)
    full = [[tokens[0] if tokens else 0] * (size - len(tokens)) + tokens for tokens in lists]
    return torch.tensor(full, device=device)


def catch_up(todo: list[int]) -> list[list[int]]:
    """How many of its `todo` tokens each row takes in each of several runs. Each row's last are in the last run."""
    runs = [[min(left, CATCH_UP) for left in todo]]
    while any(left := [have - sum(run[i] for run in runs) for i, have in enumerate(todo)]):
        runs.insert(0, [min(more, CATCH_UP) for more in left])
    return runs


class ModelDraft:
    """Another model on a cache of its own. It reads what the rows have become since it was asked last, then guesses."""

    def __init__(
        self, stepper: Stepper, cache: Any, input_ids: torch.Tensor, starts: list[int] | None,
        graphs: StepGraphs | None = None,
    ) -> None:  # fmt: skip
        """cache: a new paged cache of the draft's. input_ids [B, T]: the prompt, starts its padding. graphs: the
        draft's, with a lease on them."""
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
        self._ragged = RaggedRows(stepper, cache, first, starts)
        if graphs is not None:
            graphs._follow(stepper, cache)
            self._ragged.graphs[False] = RaggedGraphs(graphs, "draft", stepper, cache)
        self._guessed: list[list[int]] = [[] for _ in range(batch)]
        """Tokens behind each row's length whose entries are written too."""

    def propose(self, texts: list[list[int]], counts: list[int], pick: Pick) -> list[list[int]]:
        self._keep_what_came_true(texts)
        ragged, model = self._ragged, self.stepper.model
        rows = [r for r, count in enumerate(counts) if count]
        for run in catch_up([len(texts[r]) - ragged.lengths[r] for r in rows]):
            some = [(r, n) for r, n in zip(rows, run, strict=True) if n]
            which, new = [r for r, _ in some], [n for _, n in some]
            read = [texts[r][ragged.lengths[r] : ragged.lengths[r] + n] for r, n in some]
            _, logits = ragged.run(right_aligned(read, model.device), new, which)
            ragged.grow(which, new)
        known, ones = list(ragged.lengths), [1] * len(rows)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            _, logits = ragged.run(tokens[:, None], ones, rows)
            ragged.grow(rows, ones)
            return logits[:, -1]

        try:
            found = chain(logits[:, -1], texts, counts, pick, step)
        finally:
            ragged.lengths = known
        self._guessed = [tokens[:-1] for tokens in found]
        return found

    def learn(self, hidden: torch.Tensor, rows: list[int], counts: list[int], stand: list[int]) -> None:
        pass

    def _keep_what_came_true(self, texts: list[list[int]]) -> None:
        """Entries of guesses stay where the row has become what was guessed."""
        for r, guessed in enumerate(self._guessed):
            for token in guessed:
                have = self._ragged.lengths[r]
                if have >= len(texts[r]) - 1 or texts[r][have] != token:
                    break
                self._ragged.lengths[r] += 1
            guessed.clear()


class SelfDraft:
    """The target itself with half of its experts and a window over its keys. It writes where the target will write
    again: no memory, no cache, no prompt of its own."""

    def __init__(self, ragged: RaggedRows) -> None:
        self._ragged, stepper = ragged, ragged.stepper
        layers = []
        for layer in stepper.model.layers:
            if isinstance(layer.mlp, Mixture):
                rule = layer.mlp.rule
                layer = layer._replace(mlp=layer.mlp._replace(rule=replace(rule, top_k=max(1, rule.top_k // 2))))
            layers.append(layer)
        model = stepper.model._replace(layers=tuple(layers))
        ragged.cheap = Stepper(model, stepper.family, stepper.attention), SELF_WINDOW
        if False in ragged.graphs:
            ragged.graphs[True] = RaggedGraphs(ragged.graphs[False].graphs, "self", ragged.cheap[0], ragged.cache)

    def propose(self, texts: list[list[int]], counts: list[int], pick: Pick) -> list[list[int]]:
        ragged = self._ragged
        rows = [r for r, count in enumerate(counts) if count]
        known, ones = list(ragged.lengths), [1] * len(rows)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            _, logits = ragged.run(tokens[:, None], ones, rows, cheap=True)
            ragged.grow(rows, ones)
            return logits[:, -1]

        try:
            pending = torch.tensor([texts[r][-1] for r in rows], device=ragged.stepper.model.device)
            return chain(step(pending), texts, counts, pick, step)
        finally:
            ragged.lengths = known

    def learn(self, hidden: torch.Tensor, rows: list[int], counts: list[int], stand: list[int]) -> None:
        pass

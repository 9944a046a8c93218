"""How many tokens to draft: from what steps have cost so far, and how often guesses came true.

With a guess right with probability a, independently, a step that checks k guesses yields 1 + a + ... + a^k tokens
(arXiv 2211.17192, section 3.1). It costs verifying k + 1 tokens and guessing k. The k with the most tokens per second
is taken, which may be 0. Costs are measured where they are spent; what was never measured is read off the line through
what was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

MOST_DRAFTS = 8
KEPT = 9
"""Measurements of one kind that are kept."""
PRIOR, PRIOR_WEIGHT = 0.6, 8.0
"""What is believed of the acceptance before anything is known, and what weight in guesses that has."""
MEMORY = 64.0
"""Guesses that an estimate of the acceptance remembers."""
FIRST_PROBE, LAST_PROBE = 64, 512
"""After so many steps without a guess it is tried again whether guessing pays; twice as many after each vain try."""
MARGIN, ROWS_MARGIN = 1.05, 1.12
"""Guessing must promise to be so much faster than not: with one row, and with several, whose steps cost more once the
rows differ in length (6 % on the CPU, bundled model, 8 rows)."""
KEPT_CALLS = 3
"""Whole calls that are remembered, of each kind."""
LEAST_TOKENS = 16
"""From so many tokens on a call says how fast it was."""
LONGEST_REST = 4096
"""Tokens that calls are left to plain decoding after guessing was found slower again and again."""
SURE = 1.5
"""Where guessing seems so many times faster than the loop's own plain steps, it is not compared with plain calls."""
SLOWEST_SHARE = 0.75
"""How much the slowest of several rows counts: a call ends with it. That part of a step's time which rows that are done
no longer take is the others': 3.1 of 6.6 ms with 8 rows and the bundled model on the CPU, less where steps of few rows
read as many weights."""


class Costs:
    """Milliseconds by some size, measured. The first measurement of a size is dropped: things are loaded in it."""

    def __init__(self, growth: float, lowest: bool) -> None:
        """growth: how much of the first size's cost one more adds, where only one size was measured. lowest: count the
        least of the last few, since what disturbs a measurement adds to it, rather than their median."""
        self._growth, self._typical = growth, min if lowest else median
        self._seen: dict[int, deque[float]] = {}
        self._known: dict[int, float] = {}

    def add(self, size: int, ms: float) -> None:
        if size not in self._seen:
            self._seen[size] = deque(maxlen=KEPT)
        else:
            self._seen[size].append(ms)
            self._known[size] = float(self._typical(self._seen[size]))

    @property
    def num_sizes(self) -> int:
        return len(self._known)

    def of(self, size: int) -> float | None:
        known = self._known
        if not known or size in known:
            return known.get(size)
        below, above = [n for n in known if n < size], [n for n in known if n > size]
        if not below:
            return known[min(above)]  # less would be a guess in its favour
        a = max(below)
        if above:
            b = min(above)
            return known[a] + (known[b] - known[a]) * (size - a) / (b - a)
        b = min(below)
        slope = (known[a] - known[b]) / (a - b) if a != b else self._growth * known[a]
        return known[a] + max(slope, 0.0) * (size - a)


class Acceptance:
    """How often guesses come true whose predecessors did."""

    def __init__(self, rate: float = PRIOR) -> None:
        self._right, self._tried = rate * PRIOR_WEIGHT, PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return self._right / self._tried

    def learn(self, drafted: int, right: int) -> None:
        """Of `drafted` tokens of a row the first `right` stood. Those behind the first wrong one say nothing."""
        tried = min(drafted, right + 1)
        keep = min(1.0, MEMORY / (self._tried + tried))
        self._right, self._tried = (self._right + right) * keep, (self._tried + tried) * keep


def tokens_per_step(drafts: int, rates: Sequence[float]) -> float:
    """What counts of the tokens that a step gives a row, with each row's rate of right guesses."""
    by_row = [drafts + 1.0 if rate == 1 else (1 - rate ** (drafts + 1)) / (1 - rate) for rate in rates]
    return SLOWEST_SHARE * min(by_row) + (1 - SLOWEST_SHARE) * sum(by_row) / len(by_row)


@dataclass
class Calls:
    """How fast whole calls of some number of rows were, in ms per token of a row. The first of each kind is dropped."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))
    guessing: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_CALLS))
    num_plain: int = 0
    num_guessing: int = 0
    rest: int = 0
    """So many tokens are left to plain decoding before guessing is tried again."""
    next_rest: int = LAST_PROBE

    def add(self, guessed: bool, each: float) -> None:
        if guessed:
            if self.num_guessing:
                self.guessing.append(each)
            self.num_guessing += 1
            self._judge()
        else:
            if self.num_plain:
                self.plain.append(each)
            self.num_plain += 1

    def _judge(self) -> None:
        """After a call with guesses: if such calls are the slower ones, leave the next to plain decoding."""
        if self.guessing and self.plain:
            if median(self.guessing) > median(self.plain):
                self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, LONGEST_REST)
                self.guessing.clear()  # the next try is judged by itself
            else:
                self.next_rest = LAST_PROBE


class Pace:
    """What one optimized model has learned about speculating."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        """Of guesses that were made."""
        self.of_rows = Acceptance()
        """Where several rows run, of which one without a guess goes along as if it had had a wrong one."""
        self.costs: dict[int, tuple[Costs, Costs]] = {}
        """Of checking, by tokens per row, and of guessing, by guesses; for each number of rows that run."""
        self._idle, self._probe = 0, FIRST_PROBE
        self._ms = self._plain_ms = 0.0
        self._calls: dict[int, Calls] = {}
        self.tries = False

    def spend(self, rows: int, size: int, drafts: int, guessing_ms: float, checking_ms: float, tokens: float) -> None:
        """A step of `rows` rows and `size` tokens per row at most has given each row `tokens` on average."""
        verify, draft = self.costs.setdefault(rows, (Costs(0.1, True), Costs(0.5, False)))
        verify.add(size, checking_ms)
        if drafts:
            draft.add(drafts, guessing_ms)
        if (plain := verify.of(1)) is not None:
            self._ms, self._plain_ms = self._ms + guessing_ms + checking_ms, self._plain_ms + tokens * plain

    def _costs_of(self, rows: int) -> tuple[Costs, Costs] | None:
        """Those of the nearest number of rows that more than one size was measured with, else of this one."""
        known = [n for n, (verify, _) in self.costs.items() if verify.num_sizes > 1 and verify.of(1) is not None]
        if known:
            return self.costs[min(known, key=lambda n: abs(n - rows))]
        own = self.costs.get(rows)
        return None if own is None or own[0].of(1) is None else own

    def measured_speedup(self) -> float | None:
        """Over all steps: the time that plain steps would have taken for the same tokens, through that spent."""
        return self._plain_ms / self._ms if self._ms else None

    def speedup(self, drafts: int, rates: Sequence[float]) -> float:
        """How many times faster than without drafts, by the estimates, for rows of these rates. 1 if none are known."""
        costs = self._costs_of(len(rates))
        if not drafts or costs is None:
            return 1.0
        plain, verify = costs[0].of(1), costs[0].of(1 + drafts)
        if plain is None or verify is None:
            return 1.0
        return tokens_per_step(drafts, rates) * plain / (verify + (costs[1].of(drafts) or 0.0))

    def prior(self, rows: int) -> float:
        """The rate that rows of a new call are taken to have."""
        return (self.acceptance if rows == 1 else self.of_rows).rate

    def rests(self, rows: int) -> bool:
        """Whether a whole call of so many rows should be left to plain decoding: it was tried and does not pay, and it
        is not time to try again. The steps of such a call cost nothing but themselves."""
        calls = self._calls.get(rows)
        if calls is not None and calls.num_guessing:
            if calls.rest > 0:
                return True
            if not calls.plain and (self.measured_speedup() or 0.0) < SURE:
                return True  # the loop's own steps are dearer than plain decoding's, which has to be seen
        costs = self._costs_of(rows)
        if costs is None or costs[0].num_sizes < 2 or self._probe == FIRST_PROBE or self._idle + 1 >= self._probe:
            return False
        rates = [self.prior(rows)] * rows
        return self._best(rates, MOST_DRAFTS) == 0

    def called(self, rows: int, guessed: bool, ms: float, tokens: int) -> None:
        """A whole call has given each of its rows so many tokens in so long, the prompt not counted."""
        calls = self._calls.setdefault(rows, Calls())
        if tokens >= LEAST_TOKENS:
            calls.add(guessed, ms / tokens)
        if not guessed:
            self._idle += tokens
            calls.rest -= tokens

    def _best(self, rates: Sequence[float], most: int) -> int:
        """The number of drafts with the most tokens per second; 0 if that is not worth it."""
        speedups = [self.speedup(drafts, rates) for drafts in range(most + 1)]
        best = speedups.index(max(speedups))
        return best if speedups[best] >= (MARGIN if len(rates) == 1 else ROWS_MARGIN) else 0

    def choose(self, rates: Sequence[float], most: int = MOST_DRAFTS) -> int:
        """How many tokens to draft now for each of some rows. `tries` says whether that is only to learn."""
        self.tries = True
        costs = self._costs_of(len(rates))
        if costs is None:
            return 0
        if costs[0].num_sizes < 2:  # try a little before believing much
            return min(2, most)
        if best := self._best(rates, most):
            self._idle, self._probe, self.tries = 0, FIRST_PROBE, False
            return best
        self._idle += 1
        if self._idle < self._probe:
            return 0
        self._idle, self._probe = 0, min(2 * self._probe, LAST_PROBE)
        return min(2, most)

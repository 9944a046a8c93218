"""How many tokens to draft: from what steps have cost so far, and how often guesses came true.

With a guess right with probability a, independently, a step that checks k guesses yields 1 + a + ... + a^k tokens
(arXiv 2211.17192, section 3.1). It costs verifying k + 1 tokens and guessing k. The k with the most tokens per second
is taken, which may be 0. Costs are measured where they are spent, medians of the last few; what was never measured is
read off the line through what was.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MOST_DRAFTS = 8
KEPT = 9
"""Measurements of one kind that are kept."""
PRIOR, PRIOR_WEIGHT = 0.6, 8.0
"""What is believed of the acceptance before anything is known, and what weight in guesses that has."""
MEMORY = 64.0
"""Guesses that the estimate of the acceptance remembers."""
FIRST_PROBE, LAST_PROBE = 24, 192
"""After so many steps without a guess it is tried again whether guessing pays; twice as many after each vain try."""
MARGIN, ROWS_MARGIN = 1.03, 1.08
"""Guessing must promise to be so much faster than not: with one row, and with several, whose steps cost more once the
rows differ in length (6 % on the CPU, bundled model, 8 rows), and which end with the slowest."""


class Costs:
    """Milliseconds by some size, measured. The first measurement of a size is dropped: things are loaded in it."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}

    def add(self, size: int, ms: float) -> None:
        if size not in self._seen:
            self._seen[size] = deque(maxlen=KEPT)
        else:
            self._seen[size].append(ms)

    def of(self, size: int, growth: float) -> float | None:
        """Of `size`; growth: how much of the first size's cost one more adds, where only one size was measured."""
        known = {n: median(ms) for n, ms in self._seen.items() if ms}
        if not known or size in known:
            return known.get(size)
        below, above = [n for n in known if n < size], [n for n in known if n > size]
        if below and above:
            a, b = max(below), min(above)
            return known[a] + (known[b] - known[a]) * (size - a) / (b - a)
        if not below:
            return known[min(above)]  # less would be a guess in its favour
        a, b = max(below), min(below)
        slope = (known[a] - known[b]) / (a - b) if a != b else growth * known[a]
        return known[a] + max(slope, 0.0) * (size - a)


class Pace:
    """What is known about steps of one number of rows."""

    def __init__(self, batch: int = 1) -> None:
        self.verify, self.draft = Costs(), Costs()
        self._margin = MARGIN if batch == 1 else ROWS_MARGIN
        self._right, self._tried = PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT
        self._idle, self._probe = 0, FIRST_PROBE
        self._ms = self._tokens = 0.0

    @property
    def acceptance(self) -> float:
        """The estimated probability that a guess is right whose predecessors are."""
        return self._right / self._tried

    def begin(self) -> None:
        """A call begins: another text, so that what is believed of the acceptance is believed less."""
        self._idle = 0
        if self._tried > PRIOR_WEIGHT:
            self._right, self._tried = self.acceptance * PRIOR_WEIGHT, PRIOR_WEIGHT
        self._probe = FIRST_PROBE

    def learn(self, drafted: int, right: int) -> None:
        """Of `drafted` tokens of a row the first `right` stood. Those behind the first wrong one say nothing."""
        tried = min(drafted, right + 1)
        keep = min(1.0, MEMORY / (self._tried + tried))
        self._right, self._tried = (self._right + right) * keep, (self._tried + tried) * keep

    def spend(self, size: int, drafts: int, guessing_ms: float, checking_ms: float, tokens: float) -> None:
        """A step of `size` tokens per row at most has given each row `tokens` on average."""
        self.verify.add(size, checking_ms)
        if drafts:
            self.draft.add(drafts, guessing_ms)
        self._ms, self._tokens = self._ms + guessing_ms + checking_ms, self._tokens + tokens

    def measured_speedup(self) -> float:
        """Tokens a second over all steps, against plain steps of the measured cost. 1 where nothing is measured."""
        plain = self.verify.of(1, 0.1)
        return 1.0 if plain is None or not self._ms else self._tokens * plain / self._ms

    def speedup(self, drafts: int) -> float:
        """How many times more tokens a second than without drafts, by the estimates. 1 where nothing is measured."""
        plain, verify = self.verify.of(1, 0.1), self.verify.of(1 + drafts, 0.1)
        if not drafts or plain is None or verify is None:
            return 1.0
        draft = self.draft.of(drafts, 0.5) or 0.0
        tokens = sum(self.acceptance**i for i in range(drafts + 1))
        return tokens * plain / (verify + draft)

    def choose(self, most: int = MOST_DRAFTS) -> int:
        """How many tokens to draft now."""
        if self.verify.of(1, 0.1) is None:
            return 0  # two plain steps say what there is to gain from
        best = max(range(most + 1), key=self.speedup)
        if best and self.speedup(best) >= self._margin:
            self._idle, self._probe = 0, FIRST_PROBE
            return best
        self._idle += 1
        if self._idle < self._probe:
            return 0
        self._idle, self._probe = 0, min(2 * self._probe, LAST_PROBE)
        return min(2, most)

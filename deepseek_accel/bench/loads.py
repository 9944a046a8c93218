"""What is asked of an engine under load, and when: lengths of requests, and their arrivals. All of it is seeded.

"chat" draws lengths as in conversations of people with a chat model. Kwon et al., "Efficient Memory Management for
Large Language Model Serving with PagedAttention" (SOSP 2023, figure 11) give means for ShareGPT of 161.31 prompt
tokens and 337.99 answer tokens, and say no more of the shape than that its variance is high. Here both lengths are
log-normal, independent of each other, and clipped; the location is such that the mean *after* clipping is the published
one. The spreads SIGMA and the limits are choices of this bench, not published facts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import AccelError

FIXED, CHAT = "fixed", "chat"
CHAT_PROMPT_MEAN, CHAT_ANSWER_MEAN = 161.31, 337.99
PROMPT_SIGMA, ANSWER_SIGMA = 1.2, 0.9
"""Standard deviations of the logarithm of a length: 95 % of unclipped prompts lie within a factor of 11 of the median,
of answers within a factor of 6."""
CLIP_LOW, CLIP_HIGH = 4, 8.0
"""Lengths are at least CLIP_LOW tokens and at most CLIP_HIGH times the mean."""


@dataclass(frozen=True)
class Ask:
    """Tokens of one request."""

    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class LogNormal:
    """A clipped log-normal length, in tokens."""

    mean: float
    """After clipping."""
    sigma: float
    low: int
    high: int

    @classmethod
    def around(cls, mean: float, sigma: float) -> LogNormal:
        low = min(CLIP_LOW, max(1, int(mean)))
        return cls(mean, sigma, low, max(low + 1, round(CLIP_HIGH * mean)))

    @property
    def mu(self) -> float:
        """The mean of the logarithm before clipping, found by halving."""
        below, above = math.log(self.low) - 8 * self.sigma, math.log(self.high) + 8 * self.sigma
        for _ in range(80):
            middle = (below + above) / 2
            below, above = (middle, above) if self._clipped_mean(middle) < self.mean else (below, middle)
        return (below + above) / 2

    def _clipped_mean(self, mu: float) -> float:
        def under(x: float) -> float:
            return 0.5 * (1 + math.erf(x / math.sqrt(2)))

        low, high = ((math.log(limit) - mu) / self.sigma for limit in (self.low, self.high))
        inside = math.exp(mu + self.sigma**2 / 2) * (under(high - self.sigma) - under(low - self.sigma))
        return self.low * under(low) + inside + self.high * (1 - under(high))

    def draw(self, generator: random.Random, mu: float) -> int:
        return min(self.high, max(self.low, round(math.exp(generator.gauss(mu, self.sigma)))))


@dataclass(frozen=True)
class Mix:
    """Which lengths requests have."""

    kind: str
    prompt_tokens: float
    """Of every request, or the mean."""
    new_tokens: float

    @classmethod
    def named(cls, kind: str, prompt_tokens: int | None = None, new_tokens: int | None = None) -> Mix:
        """ "fixed" (1,024 and 128 unless given) or "chat" (the published means unless given)."""
        if kind not in (FIXED, CHAT):
            raise AccelError(f"no such mix: {kind!r}. Use {FIXED} or {CHAT}.")
        defaults: tuple[float, float] = (1024, 128) if kind == FIXED else (CHAT_PROMPT_MEAN, CHAT_ANSWER_MEAN)
        mix = cls(kind, prompt_tokens or defaults[0], new_tokens or defaults[1])
        if (prompt_tokens is not None and prompt_tokens < 1) or (new_tokens is not None and new_tokens < 1):
            raise AccelError("prompt tokens and new tokens must be 1 or more")
        if kind == CHAT and min(mix.prompt_tokens, mix.new_tokens) < 2 * CLIP_LOW:
            raise AccelError(f"the means of a {CHAT} mix must be {2 * CLIP_LOW} tokens or more")
        return mix

    def _lengths(self) -> tuple[LogNormal, LogNormal]:
        return (
            LogNormal.around(self.prompt_tokens, PROMPT_SIGMA),
            LogNormal.around(self.new_tokens, ANSWER_SIGMA),
        )

    def asks(self, count: int, seed: int) -> list[Ask]:
        if self.kind == FIXED:
            return [Ask(int(self.prompt_tokens), int(self.new_tokens))] * count
        generator = random.Random(f"asks {seed}")
        prompt, answer = self._lengths()
        prompt_mu, answer_mu = prompt.mu, answer.mu
        return [Ask(prompt.draw(generator, prompt_mu), answer.draw(generator, answer_mu)) for _ in range(count)]

    def longest(self) -> int:
        """No request holds more tokens than this."""
        if self.kind == FIXED:
            return int(self.prompt_tokens + self.new_tokens)
        return sum(length.high for length in self._lengths())

    def describe(self) -> dict[str, Any]:
        """Every parameter, for the file of a run."""
        facts: dict[str, Any] = {"kind": self.kind}
        if self.kind == FIXED:
            return facts | {"prompt_tokens": int(self.prompt_tokens), "new_tokens": int(self.new_tokens)}
        prompt, answer = self._lengths()
        return facts | {
            "prompt": asdict(prompt) | {"mu": prompt.mu},
            "answer": asdict(answer) | {"mu": answer.mu},
            "source": "means: Kwon et al., SOSP 2023, figure 11 (ShareGPT), unless given; spreads and limits: chosen",
        }


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` per second in the mean, each independent of the others."""
    if not rate > 0:
        raise AccelError(f"a rate is requests per second, above 0; got {rate:g}")
    generator = random.Random(f"arrivals {seed}")
    now, moments = 0.0, []
    for _ in range(count):
        now += generator.expovariate(rate)
        moments.append(now)
    return moments


def gathered(arrivals: Sequence[float], window: float) -> list[float]:
    """When each arrival is handed over if requests are gathered: a window opens with the first arrival after the last
    one closed, and `window` seconds later everything that came is handed over together."""
    closes, moments = -math.inf, []
    for moment in arrivals:
        if moment > closes:
            closes = moment + window
        moments.append(closes)
    return moments

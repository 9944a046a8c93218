"""The speculative loop: guess some tokens, check them all in one run of the target, keep those that it would have chosen.

Every token is the target's own choice for its place (the largest score, or drawn with that place's random numbers), so
the text is that of the plain loop. A guess only decides whether a choice can be made in the same run as the one before.
Rows accept different numbers of tokens; each goes on from its own end (`ragged.py`).
"""

from __future__ import annotations

import sys
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CacheFullError
from ..watch import count
from .decode import Loop, _Sampling
from .drafts import CATCH_UP, Draft, right_aligned
from .latency import MOST_DRAFTS, Pace
from .lines import Watched
from .noise import Noise
from .ragged import RaggedRows
from .step import Stepper, head_step

ROW_WISE = (
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
    "EpsilonLogitsWarper", "EtaLogitsWarper", "TopHLogitsWarper", "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "NoBadWordsLogitsProcessor", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "ExponentialDecayLengthPenalty",
    "SequenceBiasLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization",
)  # fmt: skip
"""transformers' processors that treat a row by its own tokens and scores alone, so that rows may come one by one."""
SCORES_ONLY = ROW_WISE[:4]


@dataclass
class Speculation:
    """What the loop of one optimized model needs to speculate."""

    source: Any
    """Makes the draft of a call: `begin(sampling, rows)`, see `draft_sources.py`."""
    num_draft_tokens: int | str
    counters: Counter[str]
    page_size: int
    """Of a draft's own cache."""
    paces: dict[int, Pace] = field(default_factory=dict)
    """By how many rows run together."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"paces": {}}

    def sampling(self, model: Any, stepper: Stepper, loop: Loop, *rest: Any) -> _Sampling:
        """What runs one call."""
        return _Speculating(model, stepper, loop, *rest, speculation=self)

    def pace(self, batch: int) -> Pace:
        return self.paces.setdefault(batch, Pace(batch))

    def facts(self) -> dict[str, Any]:
        """For the report."""
        c = self.counters
        steps, rows = c["speculative: steps"], c["speculative: rows in steps"]
        facts: dict[str, Any] = {}
        if rows:
            facts["tokens_per_step_and_row"] = round(c["speculative: tokens"] / rows, 2)
        if drafted := c["speculative: drafted tokens"]:
            facts["accepted_share_of_drafts"] = round(c["speculative: accepted tokens"] / drafted, 3)
        for batch, pace in sorted(self.paces.items()):
            plain = pace.verify.of(1, 0.1)
            if plain is None or not steps:
                continue
            best = max(range(MOST_DRAFTS + 1), key=pace.speedup)
            facts[f"batch_{batch}"] = (
                f"acceptance {pace.acceptance:.2f}, plain step {plain:.2f} ms, best with {best} drafts: predicted "
                f"{pace.speedup(best):.2f}x, measured over all steps {pace.measured_speedup():.2f}x"
            )
        return facts


@dataclass
class _Speculating(_Sampling):
    """One call of the loop, with drafts."""

    speculation: Speculation = None  # type: ignore[assignment]
    kept_hidden: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(first index, [B, S, D] after the last layer) of the prompt, where the draft wants to know."""

    def _run_prefill(
        self, input_ids: torch.Tensor, cache: Any, starts: torch.Tensor | None, positions: torch.Tensor | None,
        with_graphs: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        if not self.speculation.source.wants_hidden:
            return super()._run_prefill(input_ids, cache, starts, positions, with_graphs)
        from .prefill import prefill

        first, kept = cache.get_seq_length(), []
        logits = prefill(self.stepper, input_ids, cache, starts, positions, keep=kept)
        self.kept_hidden.append((first, kept[0]))
        return logits

    def _decode(
        self, input_ids: torch.Tensor, logits: torch.Tensor, positions: torch.Tensor, cache: Any,
        starts: list[int] | None,
    ) -> tuple[torch.Tensor, int]:  # fmt: skip
        self.kept_hidden = [(first, kept) for first, kept in self.kept_hidden[-1:] if len(kept) == len(input_ids)]
        reason = self._why_plain(input_ids, cache)
        if reason is None:
            try:
                begin = self.speculation.source.begin(self, input_ids, starts)
            except Watched as watched:
                reason = str(watched)
        if reason is not None:
            count(self.speculation.counters, f"speculative: plain loop ({reason})")
            return super()._decode(input_ids, logits, positions, cache, starts)
        count(self.speculation.counters, "speculative: loops")
        return _Speculated(self, input_ids, positions, cache, starts, begin).run(logits)

    def _why_plain(self, input_ids: torch.Tensor, cache: Any) -> str | None:
        """Why this call cannot speculate, or None."""
        from transformers.generation import stopping_criteria as known

        if cache.length != input_ids.shape[1]:
            return "the cache holds more or less than the prompt's tokens"
        if self.speculation.source.wants_hidden and not self.kept_hidden:
            return "hidden states of the prompt are not at hand"
        if len(input_ids) == 1:
            return None
        if any(type(p).__name__ not in ROW_WISE or not _is_stock(p) for p in self.processors):
            return "several rows, and a logits processor that may tell rows apart"
        simple = (known.MaxLengthCriteria, known.EosTokenCriteria, known.StopStringCriteria)
        if any(type(criterion) not in simple for criterion in self.criteria):
            return "several rows, and a stopping criterion that may tell rows apart"
        if not self._eos() and any(type(criterion) is known.StopStringCriteria for criterion in self.criteria):
            return "several rows, and stop strings without an end-of-sequence token"  # rows go on behind theirs
        return None

    @property
    def is_simple(self) -> bool:
        """Whether a token follows from its logits alone, and its end from the token."""
        scores_only = all(type(p).__name__ in SCORES_ONLY and _is_stock(p) for p in self.processors)
        return scores_only and self._ends_simply() and not self._keeps_scores()


def _is_stock(processor: Any) -> bool:
    return type(processor).__module__.startswith("transformers.generation")


class _Speculated:
    """The loop itself. T: tokens of the prompt."""

    def __init__(
        self, call: _Speculating, input_ids: torch.Tensor, positions: torch.Tensor, cache: Any,
        starts: list[int] | None, begin: Any,
    ) -> None:  # fmt: skip
        self.call, self.cache, self.input_ids = call, cache, input_ids
        self.counters = call.speculation.counters
        self.batch, self.prompt = input_ids.shape
        self.device = call.stepper.model.device
        self.tokens: list[list[int]] = input_ids.tolist()
        self.going = [True] * self.batch
        self.ragged = RaggedRows(call.stepper, cache, cache.length - positions, starts)
        self._begin_draft = begin
        self._draft: Draft | None = None
        self.runs = [True] * self.batch
        self.simple, self.samples = call.is_simple, call._samples()
        self.eos, self.pad = set(call._eos()), int(call._pad())
        self.fixed = call.speculation.num_draft_tokens
        self.noise = Noise(self.batch, len(call.stepper.model.head[0]), self.device) if self.samples else None
        self.streamed = self.prompt
        # whether somebody will see what plain decoding computes for rows that are done: their scores, and the cache
        self.follows = bool(call.config.return_dict_in_generate or not cache.may_reuse or call.reuse is not None)
        self.ids = input_ids if self.simple else input_ids.clone()
        if call.speculation.source.wants_hidden:  # it must not miss any
            self._draft = begin(self)

    def run(self, logits: torch.Tensor) -> tuple[torch.Tensor, int]:
        """logits [B, vocabulary] of the prompt's last token -> (all token ids, how many entries more stand)."""
        with torch.no_grad():
            self._accept(logits[:, None], [[] for _ in range(self.batch)], [1] * self.batch)
            self._stream()
            pace = self.call.speculation.pace(self.batch)
            pace.begin()
            while any(self.going) or (self.follows and any(self._behind())):
                self._step(pace)
                self._stream()
        if self.noise is not None:
            self.noise.rewind(max(map(len, self.tokens)) - self.prompt)
        longest = max(map(len, self.tokens))
        full = [row + [self.pad] * (longest - len(row)) for row in self.tokens]
        ids = torch.tensor([row[self.prompt :] for row in full], device=self.input_ids.device)
        return torch.cat((self.input_ids, ids), 1), min(self.ragged.lengths) - self.prompt

    def _behind(self) -> list[int]:
        """How many tokens each row that is done has less than the longest."""
        longest = max(map(len, self.tokens))
        return [0 if go else longest - len(row) for go, row in zip(self.going, self.tokens, strict=True)]

    def _step(self, pace: Pace) -> None:
        """Guess, run, choose."""
        begun = time.perf_counter()
        drafts = self._propose(pace)
        guessed = time.perf_counter()
        forced = self._pads_to_follow(1 + max(map(len, drafts)))
        new = [
            row[-1:] + guess + [self.pad] * (follow - 1) if go or follow else []
            for row, guess, follow, go in zip(self.tokens, drafts, forced, self.runs, strict=True)
        ]
        counts = [len(tokens) for tokens in new]
        hidden = self.ragged.run(right_aligned(new, self.device), counts)
        logits = head_step(self.call.stepper.model, hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        stand = self._accept(logits, drafts, counts)
        self.ragged.lengths = [have + n for have, n in zip(self.ragged.lengths, stand, strict=True)]
        if self._draft is not None:
            self._draft.learn(hidden, counts, stand)
        self.call._count(1, "layers: fused step", self.call._absorbed)
        self._note(pace, drafts, stand, max(counts), guessed - begun, time.perf_counter() - guessed)

    def _propose(self, pace: Pace) -> list[list[int]]:
        """Guesses for each row, and which rows run."""
        ahead = [len(row) - min(self._places()) for row in self.tokens]
        most = sys.maxsize if self.noise is None else self.noise.most_places - MOST_DRAFTS - 1
        self.runs = [go and far <= most for go, far in zip(self.going, ahead, strict=True)]
        wanted = pace.choose() if self.fixed == "auto" else int(self.fixed)
        counts = [
            min(wanted, self._room(len(row)) - 1) if runs else 0
            for row, runs in zip(self.tokens, self.runs, strict=True)
        ]
        if any(counts):
            try:
                self.ragged.reserve(max(len(row) + n for row, n in zip(self.tokens, counts, strict=True)))
            except CacheFullError:  # plain decoding may fit where guesses do not
                counts = [0] * self.batch
        if not any(counts):
            return [[] for _ in counts]
        if self._draft is None:
            self._draft = self._begin_draft(self)
        return self._draft.propose(self.tokens, counts, self._pick)

    def _places(self) -> list[int]:
        """The lengths of the rows that go on."""
        return [len(row) for row, go in zip(self.tokens, self.going, strict=True) if go] or [len(self.tokens[0])]

    def _pads_to_follow(self, size: int) -> list[int]:
        """How many tokens each row that is done takes in this run, to have what plain decoding gives it."""
        if not self.follows:
            return [0] * self.batch
        return [min(n, size if any(self.going) else CATCH_UP) for n in self._behind()]

    def _accept(self, logits: torch.Tensor, drafts: list[list[int]], counts: list[int]) -> list[int]:
        """logits [B, S, vocabulary]: take the tokens they choose, as long as guesses were right. How many, by row."""
        picks = self._pick_all(logits, counts) if self.simple else None
        stand = []
        for r, (draft, taken) in enumerate(zip(drafts, counts, strict=True)):
            first = logits.shape[1] - taken
            going, n = self.going[r], 0
            while n < taken:
                token = picks[r][first + n] if picks is not None else self._choose(r, logits[r, first + n])
                token = token if going else self.pad
                self._take(r, token)
                n += 1
                if going and self._ends(r, token):
                    self.going[r] = False
                    break
                if going and n <= len(draft) and draft[n - 1] != token:
                    break
            stand.append(n)
        if self.noise is not None:
            self.noise.forget(min(self._places()) - self.prompt)
        return stand

    def _take(self, r: int, token: int) -> None:
        self.tokens[r].append(token)
        if not self.simple:
            length = len(self.tokens[r])
            if length > self.ids.shape[1]:
                self.ids = torch.cat((self.ids, torch.zeros_like(self.ids)), 1)
            self.ids[r, length - 1] = token

    def _choose(self, r: int, logits: torch.Tensor) -> int:
        """The next token of row r from logits [vocabulary], by processors that see the row as it is."""
        call, place = self.call, len(self.tokens[r]) - self.prompt
        # processors that keep something by row number want all rows: others than r see its scores, and are ignored
        raw = logits.to(torch.float32).expand(self.batch, -1).clone()
        scores = call.processors(self.ids[:, : len(self.tokens[r])], raw)
        raw, scores = raw[r : r + 1], scores[r : r + 1]
        if call.config.return_dict_in_generate:
            for wanted, kept, value in (
                (call.config.output_scores, call.scores, scores),
                (call.config.output_logits, call.logits, raw),
            ):
                if wanted and place == len(kept):
                    kept.append(value if self.batch == 1 else value.expand(self.batch, -1).clone())
                elif wanted:
                    kept[place][r] = value[0]
        if self.noise is None:
            return int(scores.argmax())
        return int((scores.softmax(-1) / self.noise.at(place)[r]).argmax())

    def _row(self, r: int) -> torch.Tensor:
        """[1, length] token ids."""
        return self.ids[r : r + 1, : len(self.tokens[r])]

    def _ends(self, r: int, token: int) -> bool:
        """Whether this token is the row's last."""
        call, length = self.call, len(self.tokens[r])
        if token in self.eos or call._is_full(length):
            return True
        if call._ends_simply():
            return False
        keeps = call.config.return_dict_in_generate and call.config.output_scores
        return bool(call.criteria(self._row(r), tuple(call.scores) if keeps and self.batch == 1 else None))

    def _room(self, length: int) -> int:
        """How many more tokens a row of this length may have."""
        limits = [c.max_length - length for c in self.call.criteria if hasattr(c, "max_length")]
        return max(1, min(limits, default=sys.maxsize))

    def _pick_all(self, logits: torch.Tensor, counts: list[int]) -> list[list[int]]:
        """Of logits [B, S, vocabulary], by scores alone; in what fills rows up, anything."""
        size = logits.shape[1]
        lowest = min(self._places())
        indices = [
            max(lowest, len(row) + column - size + taken) if taken else lowest
            for row, taken in zip(self.tokens, counts, strict=True)
            for column in range(size)
        ]
        rows = [r for r in range(self.batch) for _ in range(size)]
        return self._pick_at(logits.flatten(0, 1), rows, indices).view(-1, size).tolist()

    def _pick(self, logits: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
        """A draft's tokens [B] of its logits [B, vocabulary], for places `indices` of the rows."""
        lowest = min(self._places())
        return self._pick_at(logits, range(self.batch), [max(lowest, index) for index in indices])

    def _pick_at(self, logits: torch.Tensor, rows: Sequence[int], indices: Sequence[int]) -> torch.Tensor:
        """Tokens [N] of logits [N, vocabulary], each of a row and an index in it."""
        scores = logits
        for processor in self.call.processors:
            if type(processor).__name__ in SCORES_ONLY:
                scores = processor(None, scores.float())
        if self.noise is None:
            return scores.argmax(-1)
        noise = torch.stack([self.noise.at(i - self.prompt)[r] for r, i in zip(rows, indices, strict=True)])
        return (scores.float().softmax(-1) / noise[:, : scores.shape[1]]).argmax(-1)

    def _stream(self) -> None:
        """What all rows have now goes to the streamer, a token of each row at a time."""
        if self.call.streamer is None:
            return
        longest = max(map(len, self.tokens))
        shown = min(self._places()) if any(self.going) else longest
        for at in range(self.streamed, shown):
            column = [row[at] if at < len(row) else self.pad for row in self.tokens]
            self.call.streamer.put(torch.tensor(column))
        self.streamed = max(self.streamed, shown)

    def _note(
        self, pace: Pace, drafts: list[list[int]], stand: list[int], size: int, guessing: float, checking: float
    ) -> None:
        counters, emitted = self.counters, 0
        for draft, n, runs in zip(drafts, stand, self.runs, strict=True):
            if not runs:
                continue
            emitted += n
            counters["speculative: rows in steps"] += 1
            if draft:
                right = min(len(draft), n - 1)
                pace.learn(min(len(draft), n), right)
                counters["speculative: drafted tokens"] += len(draft)
                counters["speculative: accepted tokens"] += right
        counters["speculative: steps"] += 1
        counters["speculative: tokens"] += emitted
        counters["speculative: steps without drafts"] += not any(drafts)
        if any(self.runs):
            pace.spend(size, max(map(len, drafts)), 1e3 * guessing, 1e3 * checking, emitted / sum(self.runs))

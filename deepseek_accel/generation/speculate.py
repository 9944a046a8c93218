"""The speculative loop: guess some tokens, check all in one run of the target, keep those that it would have chosen.

Every token is the target's own choice for its place (the largest score, or drawn with that place's random numbers), so
the text is that of the plain loop. A guess only decides whether a choice can be made in the same run as the one before.
Rows accept different numbers of tokens; each goes on from its own end (`ragged.py`).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CacheFullError
from ..watch import count
from .decode import Loop, _Sampling, why_no_graph
from .drafts import CATCH_UP, Draft, right_aligned
from .graphs import StepGraphs
from .latency import MOST_DRAFTS, Acceptance, Pace
from .lines import Watched
from .noise import Noise
from .ragged import RaggedRows
from .ragged_graphs import RaggedGraphs
from .step import Stepper

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
    pace: Pace = field(default_factory=Pace)
    loop_type: Any = None
    """What runs a call in place of `Speculated`, for measuring."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"pace": Pace()}  # a copy may run elsewhere

    def rests(self, rows: int) -> bool:
        """Whether a call of so many rows should not guess at all, by what has been learned."""
        return self.num_draft_tokens == "auto" and self.loop_type is None and self.pace.rests(rows)

    def sampling(self, model: Any, stepper: Stepper, loop: Loop, *rest: Any) -> _Sampling:
        """What runs one call."""
        call = _Speculating(model, stepper, loop, *rest)
        call.speculation = self
        return call

    def facts(self) -> dict[str, Any]:
        """For the report."""
        c, pace = self.counters, self.pace
        facts: dict[str, Any] = {}
        if rows := c["speculative: rows in steps"]:
            facts["tokens_per_step_and_row"] = round(c["speculative: tokens"] / rows, 2)
        if drafted := c["speculative: drafted tokens"]:
            facts["accepted_share_of_drafts"] = round(c["speculative: accepted tokens"] / drafted, 3)
            facts["acceptance_estimate"] = round(pace.acceptance.rate, 3)
        for number, (verify, draft) in sorted(pace.costs.items()):
            if (plain := verify.of(1)) is None:
                continue
            rates = [pace.acceptance.rate] * number
            best = max(range(MOST_DRAFTS + 1), key=lambda drafts: pace.speedup(drafts, rates))
            facts[f"with_{number}_row{'s' * (number > 1)}"] = (
                f"plain step {plain:.2f} ms, of 5 tokens {verify.of(5):.2f} ms, 4 guesses {draft.of(4) or 0:.2f} ms; "
                f"best with {best} guesses, predicted {pace.speedup(best, rates):.2f}x"
            )
        if (measured := pace.measured_speedup()) is not None:
            facts["measured_speed_up"] = f"{measured:.2f}x, all steps against plain steps of the measured cost"
        return facts


@dataclass
class _Speculating(_Sampling):
    """One call of the loop, with drafts."""

    speculation: Speculation = None  # type: ignore[assignment]
    kept_hidden: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(first index, [B, S, D] after the last layer) of the prompt, where the draft wants to know."""
    rests: bool = False
    """Whether the whole call is left to plain decoding, since guessing has not paid."""

    def run(self, input_ids: torch.Tensor, starts: list[int] | None, kwargs: dict[str, Any]) -> Any:
        self.rests = self.speculation.rests(len(input_ids))
        return super().run(input_ids, starts, kwargs)

    def _run_prefill(
        self, input_ids: torch.Tensor, cache: Any, starts: torch.Tensor | None, positions: torch.Tensor | None,
        with_graphs: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        if self.rests or not self.speculation.source.num_states:
            return super()._run_prefill(input_ids, cache, starts, positions, with_graphs)
        from .prefill import prefill

        states: list[torch.Tensor] = []
        wanted = self.speculation.source.num_states
        logits = prefill(self.stepper, input_ids, cache, starts, positions, states=states, num_states=wanted)
        self.kept_hidden.append((cache.length - states[0].shape[1], states[0]))
        return logits

    def _decode(
        self, input_ids: torch.Tensor, logits: torch.Tensor, positions: torch.Tensor, cache: Any,
        starts: list[int] | None,
    ) -> tuple[torch.Tensor, int]:  # fmt: skip
        if self.rests:
            count(self.speculation.counters, "speculative: calls without guesses (they have not paid)")
            return self._timed(
                False, input_ids, lambda: super(_Speculating, self)._decode(input_ids, logits, positions, cache, starts)
            )
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
        self.leases: list[StepGraphs] = []
        try:
            graphs = self.lease(self.model)
            if graphs is not None:
                graphs._follow(self.stepper, cache)
            loop_type = self.speculation.loop_type or Speculated
            loop = loop_type(self, input_ids, positions, cache, starts, begin, graphs)
            return self._timed(True, input_ids, lambda: loop.run(logits))
        finally:
            for leased in self.leases:
                leased.release(self.stepper.model.device)

    def _timed(
        self, guessed: bool, input_ids: torch.Tensor, decode: Callable[[], tuple[torch.Tensor, int]]
    ) -> tuple[torch.Tensor, int]:
        """What `decode` gives, and how long it took: for the next calls."""
        begun = time.perf_counter()
        ids, stands = decode()
        spent, tokens = time.perf_counter() - begun, ids.shape[1] - input_ids.shape[1]
        self.speculation.pace.called(len(input_ids), guessed, 1e3 * spent, tokens)
        return ids, stands

    def lease(self, model: Any) -> StepGraphs | None:
        """The graphs of this or of a draft model for this call, if there are any and nobody else uses them."""
        graphs: StepGraphs | None = vars(model).get("_accel_graphs")
        if graphs is None or why_no_graph(graphs, 1, self.stepper.model.device) is not None:
            return None
        self.leases.append(graphs)
        return graphs

    def _why_plain(self, input_ids: torch.Tensor, cache: Any) -> str | None:
        """Why this call cannot speculate, or None."""
        from transformers.generation import stopping_criteria as known

        if cache.length != input_ids.shape[1]:
            return "the cache holds more or less than the prompt's tokens"
        if self.speculation.source.num_states and not self.kept_hidden:
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


class Speculated:
    """The loop itself. T: tokens of the prompt."""

    def __init__(
        self, call: _Speculating, input_ids: torch.Tensor, positions: torch.Tensor, cache: Any,
        starts: list[int] | None, begin: Any, graphs: StepGraphs | None,
    ) -> None:  # fmt: skip
        self.call, self.cache, self.input_ids = call, cache, input_ids
        self.counters = call.speculation.counters
        self.batch, self.prompt = input_ids.shape
        self.device = call.stepper.model.device
        self.tokens: list[list[int]] = input_ids.tolist()
        self.going = [True] * self.batch
        self.ragged = RaggedRows(call.stepper, cache, cache.length - positions, starts)
        if graphs is not None:
            self.ragged.graphs[False] = RaggedGraphs(graphs, "verify", call.stepper, cache)
        self._begin_draft = begin
        self._draft: Draft | None = None
        self.runs = [True] * self.batch
        self.right: dict[int, int] = {}
        pace = call.speculation.pace
        self.rates = [Acceptance(pace.prior(self.batch)) for _ in range(self.batch)]
        self.simple, self.samples = call.is_simple, call._samples()
        self.eos, self.pad = set(call._eos()), int(call._pad())
        self.fixed = call.speculation.num_draft_tokens
        self.noise = Noise(self.batch, call.stepper.model.head[0].shape[0], self.device) if self.samples else None
        self.streamed = self.prompt
        # whether somebody will see what plain decoding computes for rows that are done: their scores, and the cache
        self.follows = bool(call.config.return_dict_in_generate or not cache.may_reuse or call.reuse is not None)
        self.ids = input_ids if self.simple else input_ids.clone()
        if call.speculation.source.num_states:  # it must not miss any
            self._draft = begin(self)

    def run(self, logits: torch.Tensor) -> tuple[torch.Tensor, int]:
        """logits [B, vocabulary] of the prompt's last token -> (all token ids, how many entries more stand)."""
        with torch.no_grad():
            self._accept(logits[:, None], list(range(self.batch)), [[] for _ in range(self.batch)], [1] * self.batch)
            self._stream()
            while any(self.going) or (self.follows and any(self._behind())):
                self._step()
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

    def _step(self) -> None:
        """Guess, run, choose."""
        begun = time.perf_counter()
        drafts = self._propose()
        guessed = time.perf_counter()
        pads = self._pads_to_follow(1 + max(map(len, drafts)))
        rows = [r for r in range(self.batch) if self.runs[r] or pads[r]]
        new = [self.tokens[r][-1:] + (drafts[r] if self.runs[r] else [self.pad] * (pads[r] - 1)) for r in rows]
        counts = [len(tokens) for tokens in new]
        hidden, logits = self.ragged.run(right_aligned(new, self.device), counts, rows, every=True)
        stand = self._accept(logits, rows, drafts, counts)
        self.ragged.grow(rows, stand)
        if self._draft is not None:
            self._draft.learn(hidden, rows, counts, stand)
        self.call._count(1, "layers: fused step", self.call._absorbed)
        emitted = {r: n for r, n in zip(rows, stand, strict=True) if self.runs[r]}
        if emitted:
            self._note(drafts, emitted, len(rows), max(counts), guessed - begun, time.perf_counter() - guessed)

    def _propose(self) -> list[list[int]]:
        """Guesses for each row, and which rows run."""
        ahead = [len(row) - min(self._places()) for row in self.tokens]
        most = sys.maxsize if self.noise is None else self.noise.most_places - MOST_DRAFTS - 1
        self.runs = [go and far <= most for go, far in zip(self.going, ahead, strict=True)]
        rates = [rate.rate for rate, runs in zip(self.rates, self.runs, strict=True) if runs]
        wanted = self.fixed if isinstance(self.fixed, int) else self.call.speculation.pace.choose(rates) if rates else 0
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

    def _accept(self, logits: torch.Tensor, rows: list[int], drafts: list[list[int]], counts: list[int]) -> list[int]:
        """Take the tokens that logits [R, S, vocabulary] choose, as long as guesses were right: how many, by row.

        drafts are of all rows, counts[i] are the columns of row rows[i].
        """
        picks = self._pick_all(logits, rows, counts) if self.simple else None
        self.right = {} if picks is None else self._right(picks, rows, drafts, counts)
        # a try to learn from should not leave several rows at different lengths, whose steps cost more
        level = self.right and self.batch > 1 and self.fixed == "auto" and self.call.speculation.pace.tries
        most = 1 + min(self.right.values()) if level else sys.maxsize
        stand = []
        for i, (r, taken) in enumerate(zip(rows, counts, strict=True)):
            first, draft = logits.shape[1] - taken, drafts[r]
            going, n = self.going[r], 0
            while n < taken and (n < most or not going):
                token = picks[i][first + n] if picks is not None else self._choose(r, logits[i, first + n])
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

    def _right(
        self, picks: list[list[int]], rows: list[int], drafts: list[list[int]], counts: list[int]
    ) -> dict[int, int]:
        """How many guesses of each row that goes on were right."""
        right = {}
        for pick, r, taken in zip(picks, rows, counts, strict=True):
            if self.going[r]:
                pairs = zip(pick[len(pick) - taken :], drafts[r], strict=False)
                right[r] = next((i for i, (a, b) in enumerate(pairs) if a != b), len(drafts[r]))
        return right

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

    def _pick_all(self, logits: torch.Tensor, rows: list[int], counts: list[int]) -> list[list[int]]:
        """Of logits [R, S, vocabulary], by scores alone; in what fills rows up, anything."""
        size = logits.shape[1]
        indices = [
            len(self.tokens[r]) + max(0, column - size + taken)
            for r, taken in zip(rows, counts, strict=True)
            for column in range(size)
        ]
        by_row = [r for r in rows for _ in range(size)]
        return self._pick(logits.flatten(0, 1), by_row, indices).view(-1, size).tolist()

    def _pick(self, logits: torch.Tensor, rows: Sequence[int], indices: Sequence[int]) -> torch.Tensor:
        """Tokens [N] of logits [N, vocabulary], each of a row and for an index in it."""
        scores = logits
        for processor in self.call.processors:
            if type(processor).__name__ in SCORES_ONLY:
                scores = processor(None, scores.float())
        if self.noise is None:
            return scores.argmax(-1)
        lowest = min(self._places())  # rows that are done pick nothing that counts
        places = [max(lowest, index) - self.prompt for index in indices]
        noise = torch.stack([self.noise.at(place)[r] for r, place in zip(rows, places, strict=True)])
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
        self, drafts: list[list[int]], emitted: dict[int, int], rows: int, size: int, guessing: float, checking: float
    ) -> None:
        """Count, and learn for the next step. emitted: new tokens of the rows that go on; times in seconds."""
        counters, pace, any_drafts = self.counters, self.call.speculation.pace, any(drafts)
        for r, n in emitted.items():
            if draft := drafts[r]:
                stood = min(len(draft), n - 1)
                right = self.right.get(r, stood)
                pace.acceptance.learn(len(draft), right)
                learned = len(draft), right
                counters["speculative: drafted tokens"] += len(draft)
                counters["speculative: accepted tokens"] += stood
            else:
                learned = 1, 0
            if any_drafts:
                self.rates[r].learn(*learned)
                if self.batch > 1:
                    pace.of_rows.learn(*learned)
        counters["speculative: rows in steps"] += len(emitted)
        counters["speculative: steps"] += 1
        counters["speculative: tokens"] += sum(emitted.values())
        counters["speculative: steps without drafts"] += not any_drafts
        tokens = sum(emitted.values()) / len(emitted)
        pace.spend(rows, size, max(map(len, drafts)), 1e3 * guessing, 1e3 * checking, tokens)

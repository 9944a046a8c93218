"""What forgetting costs in quality: perplexity, next-token agreement and retrieval, by policy and budget.

Perplexity: contexts of CONTEXT tokens of the held-out text. PREFILL of them are given in chunks of CHUNK, the rest one
by one; each of those is scored. The full cache sees the same tokens in the same calls. A budget of 50 % is CONTEXT / 2
tokens per sequence and layer, the mean over layers.

Retrieval: names of the held-out text that were last seen FAR tokens before or more. The prompt is CONTEXT tokens up to
the first token of the name; right is a greedy continuation that spells the rest. Asked is only what needs memory: names
that the full cache spells right, and does not from the last NEAR tokens alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..cache.eviction import POLICIES, Policy
from ..errors import AccelError
from ..models import heldout_documents, load_tiny
from ..versions import cache_argument
from .environment import dtype_name, environment, resolve_device, resolve_dtype
from .generate import applied, release
from .record import Keep, forget

CONTEXT, PREFILL, CHUNK = 2048, 1536, 512
TOGETHER = 20
"""Contexts in one batch."""
FULL = "full"
FAR, NEAR = 1088, 1024

Step = Callable[[str], None]


@dataclass
class Row:
    policy: str
    percent: int
    budget: int
    """Tokens per sequence, the mean over layers."""
    status: str = "ok"
    detail: str = ""
    perplexity: float | None = None
    change_percent: float | None = None
    """Of the perplexity against the full cache."""
    agreement_percent: float | None = None
    """How often the most likely token is the full cache's."""
    retrieved: int | None = None
    questions: int | None = None
    bytes_held: int | None = None
    """After the last token, of all contexts and layers, unfilled ends of pages included."""
    tokens_held: list[int] | None = None
    """Per sequence, by layer, of the last batch."""


@dataclass(frozen=True)
class Options:
    budgets: tuple[int, ...] = (100, 75, 50, 25)
    """In percent of CONTEXT."""
    policies: tuple[str, ...] = tuple(POLICIES)
    contexts: int = 20
    questions: int = 32
    model: str = "tiny"
    device: str = "auto"
    dtype: str | None = None

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.policies) - set(POLICIES)):
            raise AccelError(f"unknown policies {', '.join(unknown)}; known: {', '.join(POLICIES)}")
        if not self.budgets or any(not 5 <= budget <= 100 for budget in self.budgets):
            raise AccelError("budgets are percentages from 5 to 100")
        if self.contexts < 1 or self.questions < 0:
            raise AccelError("at least one context is needed, and no negative number of questions")
        if self.model != "tiny":
            raise AccelError("quality is measured on the bundled model, --model tiny: the text is one it has not seen")


@dataclass(frozen=True)
class Scores:
    """What one kind of cache gave."""

    losses: torch.Tensor
    """[contexts, scored tokens] fp32: -log of the probability of the true token."""
    best: torch.Tensor
    """[contexts, scored tokens]: the most likely token."""
    bytes_held: int
    tokens_held: list[int] | None


def policy_of(name: str, percent: int) -> Policy:
    """The policy `name` that holds `percent` of CONTEXT."""
    budget = CONTEXT * percent // 100
    made: Policy = POLICIES[name](recent=budget - 4) if name == "window" else POLICIES[name](budget=budget)
    return made


def contexts(tokenizer: Any, count: int) -> torch.Tensor:
    """[count, CONTEXT + 1] token ids of the held-out text, evenly spread over it."""
    ids = heldout_ids(tokenizer)
    last = len(ids) - CONTEXT - 1
    starts = [round(i * last / max(count - 1, 1)) for i in range(count)]
    return torch.tensor([ids[start : start + CONTEXT + 1] for start in starts])


def heldout_ids(tokenizer: Any) -> list[int]:
    """The held-out files one after the other, each between its begin and end tokens."""
    # the backend, since the tokenizer itself warns of texts longer than the model takes
    texts = [tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in heldout_documents()]
    return [token for ids in texts for token in (0, *ids, 1)]


@torch.no_grad()
def score(model: Any, make_cache: Callable[[], Any], ids: torch.Tensor, step: Callable[[int], None]) -> Scores:
    """Losses of the tokens behind PREFILL of ids [contexts, CONTEXT + 1], see the module."""
    losses, best, held, tokens_held = [], [], 0, None
    for batch in ids.split(TOGETHER):
        batch = batch.to(model.device)
        cache = make_cache()
        for begin in range(0, PREFILL, CHUNK):
            model(batch[:, begin : begin + CHUNK], **{cache_argument(): cache}, logits_to_keep=1)
        for at in range(PREFILL, CONTEXT):
            logits = model(batch[:, at : at + 1], **{cache_argument(): cache}).logits[:, -1].float()
            losses.append(F.cross_entropy(logits, batch[:, at + 1], reduction="none").cpu())
            best.append(logits.argmax(-1).cpu())
            step(len(batch))
        held += cache.bytes_held()
        tokens_held = getattr(cache, "tokens_held", None)
    steps = CONTEXT - PREFILL

    def by_context(columns: list[torch.Tensor]) -> torch.Tensor:
        batches = [torch.stack(columns[i : i + steps], 1) for i in range(0, len(columns), steps)]
        return torch.cat(batches)

    return Scores(by_context(losses), by_context(best), held, tokens_held)


@dataclass(frozen=True)
class Question:
    """A name's first token ends the prompt; the answer is the rest of the name."""

    prompt: list[int]
    answer: list[int]
    distance: int
    """Tokens since the name was last seen."""


def questions(tokenizer: Any) -> list[Question]:
    """Names of the held-out text, of several tokens, last seen FAR to CONTEXT tokens before, in CONTEXT tokens."""
    ids: list[int] = []
    found: list[tuple[int, int, int]] = []
    last: dict[str, int] = {}
    for text in heldout_documents():
        encoded = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        token_at = {at: i for i, (begin, end) in enumerate(encoded.offsets) for at in range(begin, end)}
        for name in re.finditer(r"[A-Za-z_]\w{5,}", text):
            first, end = token_at[name.start()], token_at[name.end() - 1] + 1
            if encoded.offsets[end - 1][1] != name.end():
                continue
            first, end = first + len(ids) + 1, end + len(ids) + 1
            distance = first - last.get(name.group(), first)
            last[name.group()] = first
            if end - first > 1 and FAR <= distance < CONTEXT - 64 and end >= CONTEXT:
                found.append((first, end, distance))
        ids += [0, *encoded.ids, 1]
    return [Question(ids[end - CONTEXT : first + 1], ids[first + 1 : end], far) for first, end, far in found]


@torch.no_grad()
def answers(model: Any, make_cache: Callable[[], Any], asked: Sequence[Question]) -> list[bool]:
    """Whether the greedy continuation of each prompt spells its answer. Given in chunks, as in `score`."""
    right = []
    for question in asked:
        cache, prompt = make_cache(), torch.tensor([question.prompt], device=model.device)
        body = prompt.shape[1] - 1
        for begin in range(0, body, CHUNK):
            model(prompt[:, begin : min(begin + CHUNK, body)], **{cache_argument(): cache}, logits_to_keep=1)
        token = prompt[:, body:]
        for expected in question.answer:
            token = model(token, **{cache_argument(): cache}).logits[:, -1:].argmax(-1)
            if token.item() != expected:
                right.append(False)
                break
        else:
            right.append(True)
    return right


def run(
    options: Options, step: Step = lambda text: None, text: torch.Tensor | None = None, keep: Keep = forget
) -> dict[str, Any]:
    """Measure every policy at every budget: {"environment": ..., "rows": [...]}, ready for JSON.

    text [contexts, CONTEXT + 1]: token ids to score, not the held-out text. keep: told the rows so far after each.
    """
    from ..cache import paged_cache
    from ..config import OptimizeConfig

    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    step("loading the bundled model")
    model, tokenizer = load_tiny(dtype=dtype, device=device)
    ids = contexts(tokenizer, options.contexts) if text is None else text
    asked: list[Question] = []
    rows: list[dict[str, Any]] = []
    result = {
        "bench": "quality",
        "model": options.model,
        "dtype": dtype_name(dtype),
        "contexts": len(ids),
        "context_tokens": CONTEXT,
        "prefill_tokens": PREFILL,
        "chunk_tokens": CHUNK,
        "environment": environment(device),
        "rows": rows,
    }
    full: Scores | None = None
    with applied(model, OptimizeConfig.lossless().to_dict()):
        for name, percent in variants(options):
            policy = None if name == FULL else policy_of(name, percent)
            row = Row(name, percent, CONTEXT if policy is None else policy.budget)

            def make(policy: Policy | None = policy) -> Any:
                return paged_cache(model, eviction=policy)

            step(f"{name} {percent} %")
            try:
                scores = score(model, make, ids, lambda count: None)
                if full is None:
                    full, asked = scores, known(model, make, tokenizer, options.questions)
                _fill(row, scores, full)
                if asked:
                    row.questions, row.retrieved = len(asked), sum(answers(model, make, asked))
            except Exception as error:  # whatever one variant does, the others are measured
                row.status = "error"
                row.detail = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
            rows.append(asdict(row))
            keep(result)
            if full is None:
                break
            release(device)
    return result


def variants(options: Options) -> Iterator[tuple[str, int]]:
    """(policy, percent), the full cache first."""
    yield FULL, 100
    for percent in options.budgets:
        for name in options.policies:
            if percent < 100:
                yield name, percent


def known(model: Any, make_cache: Callable[[], Any], tokenizer: Any, count: int) -> list[Question]:
    """Up to `count` questions that the full cache answers, and does not answer from the last NEAR tokens alone."""
    chosen: list[Question] = []
    for question in questions(tokenizer) if count else ():
        short = Question(question.prompt[-NEAR:], question.answer, question.distance)
        if answers(model, make_cache, [question]) == [True] and answers(model, make_cache, [short]) == [False]:
            chosen.append(question)
        if len(chosen) == count:
            break
    return chosen


def _fill(row: Row, scores: Scores, full: Scores) -> None:
    mean, reference = scores.losses.double().mean().item(), full.losses.double().mean().item()
    row.perplexity = math.exp(mean)
    row.change_percent = 100 * (math.exp(mean - reference) - 1)
    row.agreement_percent = 100 * (scores.best == full.best).double().mean().item()
    row.bytes_held, row.tokens_held = scores.bytes_held, scores.tokens_held


def exit_code(rows: Sequence[dict[str, Any]]) -> int:
    """1 if anything could not be measured, else 0."""
    return 0 if all(row["status"] == "ok" for row in rows) else 1

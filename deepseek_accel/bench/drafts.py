"""Drafts for a model, ranked: how often they are right, what a guess costs, and what that promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..api import optimize, restore
from ..config import OptimizeConfig
from ..errors import AccelError
from ..generation.latency import MOST_DRAFTS
from ..passes.speculative import DRAFTS, Speculative
from . import greedy
from .environment import environment, resolve_device, resolve_dtype
from .generate import release
from .shapes import TINY, Subject, load

TINY_DRAFT = "tiny-draft"
GUESSES = 4
PROMPT = 256
"""Tokens of each prompt."""
STEPS = 4
"""Of each draft."""

Step = Callable[[str], None]


def run(
    target: str, drafts: Sequence[str], text: str | None, prompts: int, new_tokens: int, device_name: str = "auto",
    dtype_name: str | None = None, step: Step = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """{"environment", "target", "tokens", "rows"}, the best draft first. What does not fit is a row that says why.

    step: told what is measured next.
    """
    if prompts < 1 or new_tokens < 2 * MOST_DRAFTS:
        raise AccelError(f"at least one prompt and {2 * MOST_DRAFTS} new tokens are needed to measure")
    check_target(target)
    device = resolve_device(device_name)
    dtype = resolve_dtype(dtype_name, device)
    step(f"loading {target}")
    subject = load(target, device, dtype)
    ids = text_ids(subject, target, text)
    starts = [i * (len(ids) - PROMPT) // prompts for i in range(prompts)]
    cut = [ids[None, start : start + PROMPT].to(device) for start in starts]
    rows = []
    for name in drafts:
        step(f"preparing {name}")
        row = _empty(name)
        try:
            row |= _measure(subject.model, name, cut, new_tokens, device, dtype, step)
        except AccelError as error:
            row["detail"] = str(error)
        release(device)
        rows.append(row)
    rows.sort(key=lambda row: -(row["predicted_speed_up"] or 0.0))
    return {"environment": environment(device), "target": target, "tokens": prompts * new_tokens, "rows": rows}


def _empty(name: str) -> dict[str, Any]:
    numbers = ("parameters", "guess_ms", "acceptance", "accepted_per_step", "best_drafts", "predicted_speed_up")
    return {"draft": name} | dict.fromkeys(numbers) | {"detail": ""}


def check_target(target: str) -> None:
    """Raise AccelError for a model that has nothing to say, before it is loaded."""
    if target != TINY and not Path(target).is_dir():
        raise AccelError(
            f"{target} has random weights, which no draft can guess; name a checkpoint directory or {TINY}"
        )


def text_ids(subject: Subject, target: str, text: str | None) -> torch.Tensor:
    """[T] of the text to go on from."""
    if text is None and subject.text_ids is not None:
        return subject.text_ids  # type: ignore[no-any-return]
    from transformers import AutoTokenizer

    from .. import models

    directory = models.path() if target == TINY else target
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    try:
        words = "\n".join(models.heldout_documents()) if text is None else Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AccelError(f"cannot read {text!r}: {error}") from error
    ids = torch.tensor(tokenizer(words, verbose=False).input_ids)
    if len(ids) <= PROMPT:
        raise AccelError(f"the text has {len(ids)} tokens; more than {PROMPT} are needed")
    return ids


def load_draft(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """What `Speculative` takes for a draft of this name: the name itself, or an optimized model."""
    if name in DRAFTS:
        return name
    if name == TINY_DRAFT:
        from .. import models

        draft, _ = models.load_tiny(models.TINY_DRAFT, dtype=dtype, device=device)
    else:
        draft = load(name, device, dtype).model
    return optimize(draft, OptimizeConfig(OptimizeConfig.lossless().passes, allow_skips=True))


def _measure(
    model: Any, name: str, prompts: list[torch.Tensor], new_tokens: int, device: torch.device, dtype: torch.dtype,
    step: Step,
) -> dict[str, Any]:  # fmt: skip
    lossless = OptimizeConfig.lossless().passes
    draft = load_draft(name, device, dtype)
    parameters = None if isinstance(draft, str) else sum(p.numel() for p in draft.parameters())
    optimize(model, OptimizeConfig((*lossless, Speculative(draft, GUESSES)), allow_skips=True))
    try:
        speculation: Any = vars(model)["_accel_speculation"]
        if name == "mtp":
            parameters = _size(speculation.source.mtp)
        for number in (1, GUESSES):
            step(f"{name}, {number} guess(es) a step")
            speculation.num_draft_tokens = number
            speculation.counters.clear()
            for prompt in prompts:
                greedy.generate(model, prompt, new_tokens)
        pace, counters = speculation.pace, dict(speculation.counters)
        step(f"{name}, none a step")
        speculation.source, speculation.num_draft_tokens = _Nothing(), 1
        for prompt in prompts[:2]:
            greedy.generate(model, prompt, new_tokens)
        rates = [pace.acceptance.rate]
        best = max(range(MOST_DRAFTS + 1), key=lambda drafts: pace.speedup(drafts, rates))
        rows = counters["speculative: rows in steps"]
        if not counters.get("speculative: drafted tokens"):
            raise AccelError("it guessed nothing in this text")
        guess = pace.costs[1][1].of(GUESSES)
        return {
            "parameters": parameters,
            "guess_ms": None if guess is None else guess / GUESSES,
            "acceptance": pace.acceptance.rate,
            "accepted_per_step": counters.get("speculative: accepted tokens", 0) / rows,
            "best_drafts": best,
            "predicted_speed_up": pace.speedup(best, rates),
        }
    finally:
        restore(model)


class _Nothing:
    """No guesses: what a plain step costs in this loop."""

    num_states = 0

    def begin(self, call: Any, input_ids: torch.Tensor, starts: list[int] | None) -> Any:
        return lambda loop: self

    def propose(self, texts: list[list[int]], counts: list[int], pick: Any) -> list[list[int]]:
        return [[] for _ in counts]

    def learn(self, hidden: torch.Tensor, rows: list[int], counts: list[int], stand: list[int]) -> None:
        pass


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(_size, value)) if isinstance(value, tuple) else 0

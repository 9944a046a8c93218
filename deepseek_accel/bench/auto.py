"""Whole calls that speculate with "auto" against plain ones: code, random tokens, several rows. Both take turns, since
what else the machine does must meet both; on one thread of a CPU their processor time counts."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..api import optimize, report, restore
from ..config import OptimizeConfig
from ..errors import AccelError
from ..passes.speculative import Speculative
from . import drafts as ranking
from .environment import dtype_name, environment, resolve_device, resolve_dtype
from .generate import release
from .greedy import endless
from .measure import synchronize
from .record import Keep, forget
from .shapes import load

CODE, RANDOM = "code", "random tokens"
PROMPT = 200
"""Tokens of each prompt."""
ROWS = 8
"""Of the text with several."""
TEMPERATURE = 1.5
"""At which what follows random tokens is drawn, so that it stays random."""
NUMBERS = ("dtype", "plain_ms", "auto_ms", "speed_up", "left_alone", "guesses", "equal", "detail")

Step = Callable[[str], None]


def run(
    target: str, drafts: Sequence[str], new_tokens: int, calls: int, device_name: str = "auto",
    dtype: str | None = None, step: Step = lambda text: None, keep: Keep = forget,
) -> dict[str, Any]:  # fmt: skip
    """{"bench", "environment", "target", "new_tokens", "calls", "clock", "rows"}: a row for each draft and text.

    calls: timed ones of each kind, after those that build. step: told what is measured next; keep: the rows so far. A
    draft that does not fit is a row that says why.
    """
    if calls < 1 or new_tokens < 16:
        raise AccelError("at least one call of 16 new tokens is needed: shorter ones say nothing")
    ranking.check_target(target)
    device = resolve_device(device_name)
    number = resolve_dtype(dtype, device)
    step(f"loading {target}")
    subject = load(target, device, number)
    model = subject.model
    texts = dict(_texts(ranking.text_ids(subject, target, None), len(model.get_input_embeddings().weight)))
    plain = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    lossless = OptimizeConfig.lossless().passes
    optimize(plain, OptimizeConfig(lossless, allow_skips=True))
    # Processor time leaves out what other programs take, but counts threads that only wait for each other.
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    rows: list[dict[str, Any]] = []
    result = {"bench": "auto", "environment": environment(device), "target": target, "new_tokens": new_tokens}
    result |= {"calls": calls, "clock": "processor" if alone else "wall", "rows": rows}
    for name in drafts:
        for text, ids in texts.items():
            step(f"{name}, {text}")
            row: dict[str, Any] = {"draft": name, "text": text, "rows": len(ids)} | dict.fromkeys(NUMBERS)
            try:
                # anew for each text, so that none profits from what was learned of another
                draft = ranking.load_draft(name, device, number)
                optimize(model, OptimizeConfig((*lossless, Speculative(draft, "auto")), allow_skips=True))
                try:
                    row |= _measure(plain, model, text, ids.to(device), new_tokens, calls, alone) | {"detail": ""}
                finally:
                    restore(model)
            except AccelError as error:
                row["detail"] = str(error)
            release(device)
            rows.append(row)
            keep(result)
    return result


def exit_code(result: dict[str, Any]) -> int:
    """3 if fp32 gave other tokens, 1 if nothing could be measured, else 0."""
    rows = [row for row in result["rows"] if row["equal"] is not None]
    if any(not row["equal"] and row["dtype"] == "float32" for row in rows):
        return 3
    return 0 if rows else 1


def _texts(ids: torch.Tensor, vocabulary: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Prompts [rows, PROMPT] by name."""
    if len(ids) < ROWS * PROMPT:
        raise AccelError(f"the text has {len(ids)} tokens; {ROWS * PROMPT} are needed")
    starts = [i * (len(ids) - PROMPT) // ROWS for i in range(ROWS)]
    code = torch.stack([ids[start : start + PROMPT] for start in starts])
    yield CODE, code[:1]
    yield RANDOM, torch.randint(vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    yield f"{ROWS} rows of {CODE}", code


def _measure(
    plain: Any, guessing: Any, text: str, ids: torch.Tensor, new_tokens: int, calls: int, alone: bool
) -> dict[str, Any]:
    sampling = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0} if text == RANDOM else {"do_sample": False}
    clock = time.process_time if alone else time.perf_counter

    def seconds(model: Any) -> tuple[float, torch.Tensor]:
        torch.manual_seed(0)
        synchronize(ids.device)
        begun = clock()
        with endless(model):
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **sampling)
        synchronize(ids.device)
        return clock() - begun, out

    for _ in range(2 if ids.is_cuda else 1):  # kernels, then graphs, which are recorded when met again
        seconds(plain), seconds(guessing)
    times: list[tuple[float, float]] = []
    equal = True
    for call in range(calls):
        turn = (plain, guessing) if call % 2 == 0 else (guessing, plain)  # who comes second finds caches warm
        found = {id(model): seconds(model) for model in turn}
        (ours, ids_of_plain), (theirs, ids_of_guessing) = found[id(plain)], found[id(guessing)]
        times.append((ours, theirs))
        equal = equal and torch.equal(ids_of_plain, ids_of_guessing)
    counters = report(guessing).counters
    return {
        "dtype": dtype_name(guessing.dtype),
        "plain_ms": 1e3 * statistics.fmean(each for each, _ in times),
        "auto_ms": 1e3 * statistics.fmean(each for _, each in times),
        "speed_up": sum(each for each, _ in times) / sum(each for _, each in times),
        "left_alone": counters.get("speculative: calls without guesses (they have not paid)", 0),
        "guesses": counters.get("speculative: drafted tokens", 0),
        "equal": equal,
    }

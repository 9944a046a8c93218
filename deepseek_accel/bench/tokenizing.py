"""What tokenising beside the steps gains: requests per second with the tokenizer ring, and in line with the steps."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..engine.ring import TokenizerRing
from ..errors import AccelError
from ..models import heldout_documents, load_tiny
from .environment import describe, environment, resolve_device
from .measure import synchronize
from .record import Keep, forget
from .tables import number, ratio, table

Step = Callable[[str], None]
WAITING, MODEL = "waiting", "bundled model"


@dataclass(frozen=True)
class Options:
    step_ms: tuple[float, ...] = (2.0, 5.0, 10.0, 20.0)
    """Steps of a device that the host waits for. The bundled model's real step is measured besides these."""
    batch: int = 8
    prompt_tokens: int = 1024
    batches: int = 40
    num_batches: int = 8
    """Of the ring."""
    repeats: int = 3
    device: str = "auto"

    def __post_init__(self) -> None:
        if min(self.batch, self.prompt_tokens, self.batches, self.num_batches, self.repeats) < 1:
            raise AccelError("batch, prompt tokens, batches, ring and repeats must be 1 or more")
        if not self.step_ms or min(self.step_ms) <= 0:
            raise AccelError(f"steps take more than 0 ms, got {self.step_ms}")


@dataclass
class Row:
    consumer: str
    """"waiting": the host sleeps, as it does while a device works. "bundled model": a forward of a token a row."""
    step_ms: float
    tokenise_ms: float
    """Of one batch, in the best run in line."""
    inline_requests_per_second: float = 0.0
    ring_requests_per_second: float = 0.0
    ratio: float | None = None
    overlap: float = 1.0
    """Gain of one batch at a time beside a step: their sum over the longer one. The ring has two workers."""
    status: str = "ok"
    detail: str = ""


def run(options: Options, step: Step = lambda text: None, keep: Keep = forget) -> dict[str, Any]:
    """Check that the ring gives the tokenizer's ids, then time both ways for every length of a step."""
    device = resolve_device(options.device)
    step("loading the bundled model")
    model, tokenizer = load_tiny(dtype=torch.float32, device=device)
    batches = texts(tokenizer, options)
    result: dict[str, Any] = {"environment": environment(device), "options": asdict(options), "rows": []}
    wanted = [tokenizer(batch)["input_ids"] for batch in batches]
    found = through_ring(tokenizer, batches, lambda ids: None, options, device)[1]
    wrong = "" if found == wanted else "the ring's ids differ from the tokenizer's"
    for consumer, step_ms, consume in consumers(model, options, device):
        step(f"{consumer}, {step_ms:.2f} ms a step")
        row = measure(tokenizer, batches, consume, options, device, Row(consumer, step_ms, 0.0), wrong)
        result["rows"].append(asdict(row))
        keep(result)
    return result


def texts(tokenizer: Any, options: Options) -> list[list[str]]:
    """Batches of different texts of `prompt_tokens` tokens or a few less each, cut from the held-out code."""
    ids = tokenizer("\n".join(heldout_documents()), add_special_tokens=False)["input_ids"]
    count, length = options.batch * options.batches, options.prompt_tokens
    if len(ids) <= length:
        raise AccelError(f"the held-out text has {len(ids):,} tokens; ask for fewer than that a prompt")
    starts = [i * 997 % (len(ids) - length) for i in range(count)]
    cut = [tokenizer.decode(ids[start : start + length]) for start in starts]
    return [cut[i : i + options.batch] for i in range(0, count, options.batch)]


def consumers(model: Any, options: Options, device: torch.device) -> Sequence[tuple[str, float, Callable[[Any], None]]]:
    """(name, ms a step, what consumes one batch of token tensors)."""

    def forward(tensors: Any) -> None:
        with torch.inference_mode():
            model(torch.stack([ids[-1:] for ids in tensors]))
        synchronize(device)

    def waiting(ms: float) -> Callable[[Any], None]:
        return lambda tensors: time.sleep(ms / 1e3)

    some = [torch.ones(1, dtype=torch.long, device=device)] * options.batch
    forward(some)
    times = []
    for _ in range(10):
        begun = time.perf_counter()
        forward(some)
        times.append(time.perf_counter() - begun)
    return [*((WAITING, ms, waiting(ms)) for ms in options.step_ms), (MODEL, min(times) * 1e3, forward)]


def measure(
    tokenizer: Any,
    batches: list[list[str]],
    consume: Callable[[Any], None],
    options: Options,
    device: torch.device,
    row: Row,
    wrong: str,
) -> Row:
    """The row with its times, one way and the other in turn, the best of each: what else the machine does only adds.

    A wrong result is not timed.
    """
    if wrong:
        row.status, row.detail = "wrong", wrong
        return row
    inline, ring = [], []
    for _ in range(options.repeats):
        inline.append(in_line(tokenizer, batches, consume, device))
        ring.append(through_ring(tokenizer, batches, consume, options, device)[0])
    requests = options.batch * len(batches)
    seconds, tokenising = min(inline)
    row.tokenise_ms = tokenising * 1e3 / len(batches)
    row.inline_requests_per_second = requests / seconds
    row.ring_requests_per_second = requests / min(ring)
    row.ratio = row.ring_requests_per_second / row.inline_requests_per_second
    row.overlap = (row.tokenise_ms + row.step_ms) / max(row.tokenise_ms, row.step_ms)
    return row


def in_line(
    tokenizer: Any, batches: list[list[str]], consume: Callable[[Any], None], device: torch.device
) -> tuple[float, float]:
    """Seconds for all batches, tokenised between the steps, and how many of them tokenising took."""
    spent, begun = 0.0, time.perf_counter()
    for batch in batches:
        start = time.perf_counter()
        tensors = [torch.tensor(ids).to(device) for ids in tokenizer(batch)["input_ids"]]
        spent += time.perf_counter() - start
        consume(tensors)
    return time.perf_counter() - begun, spent


def through_ring(
    tokenizer: Any, batches: list[list[str]], consume: Callable[[Any], None], options: Options, device: torch.device
) -> tuple[float, list[list[list[int]]]]:
    """Seconds for all batches, tokenised by a ring, and their ids. Starting the threads is not in the time."""
    done: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    found = []
    with TokenizerRing(tokenizer, options.num_batches, device) as ring:

        def submit() -> None:
            for batch in batches:
                ring.encode(batch, done.put)

        begun = time.perf_counter()
        producer = threading.Thread(target=submit)
        producer.start()
        for _ in batches:
            outcome = done.get()
            for each in outcome:
                if isinstance(each, Exception):
                    raise each
            consume([tokens.tensor() for tokens in outcome])
            found.append([tokens.ids for tokens in outcome])
        seconds = time.perf_counter() - begun
        producer.join()
    return seconds, found


def tokenizing_table(result: dict[str, Any]) -> Any:
    """One row per kind and length of a step."""
    options = result["options"]
    columns = [
        "while it tokenises",
        "step ms",
        "tokenise ms",
        "req/s in line",
        "req/s ring",
        "gain",
        "one at a time",
        "",
    ]
    rows = [
        [
            row["consumer"],
            *map(number, (row["step_ms"], row["tokenise_ms"])),
            *map(number, (row["inline_requests_per_second"], row["ring_requests_per_second"])),
            *map(ratio, (row["ratio"], row["overlap"])),
            row["detail"] if row["status"] == "ok" else f"{row['status']}: {row['detail']}",
        ]
        for row in result["rows"]
    ]
    what = f"batches of {options['batch']} texts of {options['prompt_tokens']} tokens, a step after each"
    title = f"{what}; a ring of {options['num_batches']}\n{describe(result['environment'])}"
    return table(title, columns, rows, left=1)


def exit_code(rows: Sequence[dict[str, Any]]) -> int:
    """3 if the ring gave wrong ids, else 0."""
    return 3 if any(row["status"] == "wrong" for row in rows) else 0

"""What leaving out experts costs: perplexity against mean experts a token, for rules that decide by different things.

Text for calibration and text that is scored are disjoint. Weights of what is kept stay as they are, unless a rule says
"renormalised".
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .. import api, families
from ..errors import AccelError
from ..gating.calibrate import calibrate_gates
from ..gating.sensitivity import GateSensitivity
from ..passes.adaptive_topk import AdaptiveTopK
from .environment import environment, resolve_device, resolve_dtype
from .shapes import SHAPES, TINY, load

TARGETS = (0.85, 0.75, 0.625, 0.5)
WINDOW = 512
"""Tokens that are scored together, the first of them without a loss."""
CALIBRATION_FILES = (
    "asyncio/base_futures.py",
    "asyncio/locks.py",
    "calendar.py",
    "compileall.py",
    "email/header.py",
    "encodings/cp1006.py",
    "encodings/cp1256.py",
    "encodings/mac_romanian.py",
    "html/parser.py",
    "json/decoder.py",
    "queue.py",
    "reprlib.py",
    "symtable.py",
    "textwrap.py",
)
"""Of Python's standard library: the kinds of file that the bundled held-out text is made of, and none of its files."""

RANDOM_TOKENS = (4, 1, 1024)
"""Pieces of random tokens that routers of random weights are calibrated on."""

CALIBRATING = ("gradients of the routing weights", "the regression", "its predictions")
"""The three passes of `calibrate_gates`."""

Step = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One rule at one target."""

    rule: str
    target: float
    experts: float
    """Mean experts a token kept, over all mixture layers, on the scored text."""
    perplexity: float
    loss_percent: float
    """How much larger than stock's the perplexity is."""


def calibration_texts() -> list[str]:
    """Those of `CALIBRATION_FILES` that this Python has."""
    root = Path(sysconfig.get_path("stdlib"))
    return [(root / name).read_text("utf-8") for name in CALIBRATION_FILES if (root / name).is_file()]


def windows(texts: Sequence[str], tokenizer: Any, size: int = WINDOW) -> torch.Tensor:
    """[N, size] token ids: each text cut into whole windows, its rest left out."""
    pieces = []
    for text in texts:
        ids = tokenizer(text, verbose=False).input_ids
        pieces += [ids[first : first + size] for first in range(0, len(ids) - size + 1, size)]
    if not pieces:
        raise AccelError(f"no text of at least {size} tokens to score")
    return torch.tensor(pieces)


@torch.no_grad()
def mean_loss(model: Any, rows: torch.Tensor, batch: int = 8) -> float:
    """Nats a token, over rows [N, S]."""
    total = 0.0
    for part in rows.split(batch):
        ids = part.to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        total += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
    return total / (len(rows) * (rows.shape[1] - 1))


@contextmanager
def changed_weights(model: Any, change: Callable[[int, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """`change(layer, weights [T, K])` instead of what each router says."""

    def hook_of(layer: int) -> Callable[..., Any]:
        return lambda gate, inputs, output: (output[0], change(layer, output[1]), *output[2:])

    blocks = families.find(model).moe(model)
    hooks = [block.gate.register_forward_hook(hook_of(number)) for number, (_, block) in enumerate(blocks)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def without_ranks(weights: torch.Tensor, ranks: range) -> torch.Tensor:
    """weights [T, K] with 0 for those of these ranks; the largest has rank 0."""
    order = weights.argsort(dim=-1, descending=True, stable=True)
    return weights.scatter(1, order[:, ranks.start : ranks.stop], 0.0)


def renormalized(kept: torch.Tensor, total: float) -> torch.Tensor:
    return kept * (total / kept.sum(-1, keepdim=True).clamp_min(1e-20))


@dataclass
class Scorer:
    """A model, the text it is scored on, and stock's loss there."""

    model: Any
    rows: torch.Tensor
    stock: float

    def row(self, rule: str, target: float, experts: float, loss: float) -> Row:
        return Row(rule, target, experts, math.exp(loss), 100 * math.expm1(loss - self.stock))

    def adaptive(self, rule: str, config: AdaptiveTopK, renormalize: float | None = None) -> Row:
        """renormalize: the sum that kept weights are brought to, or None."""
        api.optimize(self.model, (config,))
        try:
            if renormalize is None:
                loss = mean_loss(self.model, self.rows)
            else:
                total = renormalize
                with changed_weights(self.model, lambda _, weights: renormalized(weights, total)):
                    loss = mean_loss(self.model, self.rows)
            experts = api.report(self.model).gating["experts_per_token"]
        finally:
            api.restore(self.model)
        return self.row(rule, config.target, experts, loss)

    def static(self, kept: int, top_k: int) -> Row:
        with changed_weights(self.model, lambda _, weights: without_ranks(weights, range(kept, top_k))):
            loss = mean_loss(self.model, self.rows)
        return self.row("static", kept / top_k, float(kept), loss)


def quality(
    model: Any,
    sensitivity: GateSensitivity,
    rows: torch.Tensor,
    targets: Sequence[float] = TARGETS,
    step: Step = lambda text: None,
) -> list[Row]:
    """Every rule at every target; `model` is stock before and after."""
    step("stock")
    family = families.find(model)
    rule = family.router(family.moe(model)[0][1].gate)
    scorer = Scorer(model, rows, mean_loss(model, rows))
    result = [scorer.row("stock", 1.0, float(rule.top_k), scorer.stock)]
    for target in targets:
        for method in ("gradient", "threshold"):
            step(f"{method} {target}")
            result.append(scorer.adaptive(method, AdaptiveTopK(target, method, sensitivity)))
        if rule.normalize:
            step(f"gradient, renormalised {target}")
            config = AdaptiveTopK(target, "gradient", sensitivity)
            result.append(scorer.adaptive("gradient, renormalised", config, rule.scale))
    for kept in range(rule.top_k - 1, 0, -1):
        step(f"static {kept}")
        result.append(scorer.static(kept, rule.top_k))
    return result


def brute_force(
    model: Any, sensitivity: GateSensitivity, rows: torch.Tensor, step: Step = lambda text: None
) -> tuple[list[float], list[float]]:
    """(predicted, measured) change of the loss, in nats a token, of leaving out the expert of one rank in one layer.

    All pairs of layer and rank, layer by layer.
    """
    stock = mean_loss(model, rows)
    measured = []
    for layer in range(sensitivity.num_layers):
        step(f"leaving out each rank of layer {layer} of {sensitivity.num_layers}")
        for rank in range(sensitivity.top_k):

            def change(number: int, weights: torch.Tensor, layer: int = layer, rank: int = rank) -> torch.Tensor:
                return without_ranks(weights, range(rank, rank + 1)) if number == layer else weights

            with changed_weights(model, change):
                measured.append(mean_loss(model, rows) - stock)
    return (sensitivity.first + sensitivity.second).flatten().tolist(), measured


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Pearson's."""
    return float(torch.corrcoef(torch.tensor([one, other], dtype=torch.float64))[0, 1])


@dataclass(frozen=True)
class Options:
    """The arguments of `deepseek-accel bench gating`."""

    model: str = TINY
    targets: tuple[float, ...] = TARGETS
    sensitivity: str | None = None
    dtype: str | None = None
    device: str = "auto"
    brute_force: bool = False

    def __post_init__(self) -> None:
        for target in self.targets:
            AdaptiveTopK(target)  # says now, not after hours, what is wrong with one


def run(options: Options, step: Step = lambda text: None) -> dict[str, Any]:
    """Measure; returns {"environment", "rows", "calibration_tokens", "scored_tokens"}, ready for JSON.

    Raises AccelError if the model has no tokenizer or no routed experts.
    """
    from .. import models

    _need_text(options.model)
    device = resolve_device(options.device)
    step(f"loading {options.model}")
    subject = load(options.model, device, resolve_dtype(options.dtype, device))
    tokenizer = _tokenizer(options.model)
    if options.sensitivity is None:
        sensitivity = calibrated(subject.model, calibration_texts(), step, tokenizer)
    else:
        sensitivity = GateSensitivity.load(options.sensitivity)
    rows = windows(models.heldout_documents(), tokenizer)
    result: dict[str, Any] = {
        "environment": environment(device),
        "model": options.model,
        "calibration_tokens": sensitivity.tokens,
        "scored_tokens": rows.numel(),
        "rows": [asdict(row) for row in quality(subject.model, sensitivity, rows, options.targets, step)],
    }
    if options.brute_force:
        predicted, measured = brute_force(subject.model, sensitivity, rows, step)
        result["brute_force"] = {
            "predicted_nats": predicted,
            "measured_nats": measured,
            "correlation": correlation(predicted, measured),
        }
    return result


def calibrated(model: Any, data: Sequence[Any], step: Step, tokenizer: Any = None) -> GateSensitivity:
    """`calibrate_gates`, each of whose passes is a step."""

    def tell(done: int, total: int) -> None:
        number, begins = divmod(done * len(CALIBRATING), total)
        if not begins and done < total:
            step(f"calibrating: {CALIBRATING[number]}")

    tell(0, 1)
    return calibrate_gates(model, data, tokenizer=tokenizer, progress=tell)


def variants(model: Any, names: Sequence[str], others: Any) -> dict[str, Any]:
    """Configurations to time: those of `others` with AdaptiveTopK, calibrated on random tokens.

    names: targets, such as "0.75", or "0.75@8" with batch_budget 8, or "top1", "top2", ..., which keep so many experts
    of every token. Random weights have no text to calibrate on; on random tokens the targets are met for random
    prompts.
    Raises AccelError on another name, or if the model has no routed experts.
    """
    from ..config import OptimizeConfig

    family = families.find(model)
    blocks = family.moe(model)
    if not blocks:
        raise AccelError(f"{family.model_type} has no routed experts to leave out")
    top_k = family.router(blocks[0][1].gate).top_k
    chosen: dict[str, AdaptiveTopK] = {}
    for name in names:
        try:
            if name.startswith("top"):
                kept = int(name[3:])
                if not 1 <= kept <= top_k:
                    raise AccelError(f"{name} does not fit: the model chooses {top_k} experts of a token")
                chosen[name] = AdaptiveTopK(kept / top_k, min_experts=kept if kept < top_k else 1)
            else:
                target, _, budget = name.partition("@")
                chosen[f"target {name}"] = AdaptiveTopK(float(target), batch_budget=float(budget) if budget else None)
        except ValueError as error:
            raise AccelError(f"an adaptive variant is a target such as 0.75, or top1, top2; got {name!r}") from error
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, RANDOM_TOKENS, generator=generator)
    found = calibrate_gates(model, list(ids))
    result = {}
    for label, config in chosen.items():
        result[label] = OptimizeConfig((*others.passes, replace(config, sensitivity=found)), allow_skips=True)
    return result


def _need_text(name: str) -> None:
    if name in SHAPES:
        raise AccelError(f"{name} has random weights and no tokenizer, and routers are measured on text")


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    from .. import models

    directory = models.path() if name == TINY else Path(name)
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise AccelError(f"{name!r} has no tokenizer, and perplexity needs text") from error


def calibrate_directory(
    name: str, files: Sequence[str] | None, device: str, dtype: str | None, max_tokens: int, step: Step
) -> GateSensitivity:
    """`calibrate_gates` of a checkpoint directory, or "tiny", on text files; None: `calibration_texts`.

    At most max_tokens tokens are used, from the front of every file in turn. Raises AccelError on a file that cannot
    be read.
    """
    from ..gating.calibrate import MAX_TOKENS

    _need_text(name)
    where = resolve_device(device)
    step(f"loading {name}")
    model, tokenizer = load(name, where, resolve_dtype(dtype, where)).model, _tokenizer(name)
    try:
        texts = [Path(file).read_text("utf-8") for file in files] if files else calibration_texts()
    except (OSError, UnicodeDecodeError) as error:
        raise AccelError(f"cannot read the calibration text: {error}") from error
    pieces = [torch.tensor([tokenizer(text, verbose=False).input_ids]).split(MAX_TOKENS, dim=1) for text in texts]
    turns = max(map(len, pieces), default=0)
    ordered = [parts[turn] for turn in range(turns) for parts in pieces if turn < len(parts)]
    taken: list[torch.Tensor] = []
    for piece in ordered:
        room = max_tokens - sum(part.shape[1] for part in taken)
        if room < 2:
            break
        taken.append(piece[:, :room])
    return calibrated(model, taken, step)

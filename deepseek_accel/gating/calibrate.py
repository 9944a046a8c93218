"""Measure how much the loss feels each chosen expert of each token, and learn to predict it from what a router reads.

Three passes over the data through the unmodified model: one with gradients (of the routing weights alone), one that
gathers a regression, one that collects what the prediction says. Held meanwhile, for each mixture layer: D x D fp32 on
the model's device and 4 K numbers a token on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import families
from ..errors import PlanError
from .sensitivity import SAMPLED_TOKENS, GateSensitivity, fingerprint, routers

MAX_TOKENS = 1024
"""Longer texts are cut into pieces of so many tokens, which bounds what a backward pass holds."""
_FLOOR = 0.1
"""ln(g^2 / mean + floor) is what is regressed. Without a floor, tokens the loss hardly feels decide the fit: on the
bundled model 0.01 loses 4.7 % where 0.1 loses 3.4 % (target 0.625)."""
_RIDGE = 0.01
_PRIOR = 20.0
"""Pairs whose mean an expert's own mean is mixed with."""


class _Layer:
    """What is gathered about one mixture layer."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.ids: list[torch.Tensor] = []
        self.squares: list[torch.Tensor] = []
        self.products: list[torch.Tensor] = []
        self.feeling: list[torch.Tensor] = []
        self.gram: torch.Tensor | None = None
        self.moment: torch.Tensor | None = None
        self.seen = 0


def calibrate_gates(
    model: nn.Module,
    data: Iterable[Any],
    *,
    tokenizer: Any = None,
    max_tokens: int = MAX_TOKENS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> GateSensitivity:
    """Measure, on `data`, what `AdaptiveTopK(sensitivity=...)` needs to know about `model`'s routers.

    model: a loaded transformers model of a family with routed experts, not optimized. Its parameters, their `grad` and
        `requires_grad` are afterwards as they were.
    data: texts, or token tensors [1, T]. A few ten thousand tokens of what the model will be used for; the more unlike
        that they are, the further the mean number of experts is from the target.
    tokenizer: for texts; None is the one in the directory the model was loaded from.
    max_tokens: texts are cut into pieces of so many.
    progress: told (pieces done, pieces to do) of all three passes.

    Runs are repeatable. Raises UnsupportedModelError, or PlanError on a model or data that do not do.
    """
    inner = families.unwrap(model)
    family = families.find(inner)
    gates = routers(inner, family)
    if not gates:
        raise PlanError(f"{family.model_type} has no routed experts, so there is nothing to calibrate")
    if "_deepseek_accel" in vars(inner):
        raise PlanError("the model is optimized; call `restore(model)` first and calibrate what it was loaded as")
    pieces = list(_pieces(inner, data, tokenizer, max_tokens))
    if sum(piece.shape[1] for piece in pieces) < 2 * len(pieces) or not pieces:
        raise PlanError("the calibration data holds no text of two or more tokens")
    layers = [_Layer() for _ in gates]
    total = 3 * len(pieces)
    with _quiet(inner):
        for number, piece in enumerate(pieces):
            _gradients(inner, gates, layers, piece)
            progress(number + 1, total)
        means = [torch.cat(layer.squares).mean().clamp_min(1e-30) for layer in layers]
        for number, piece in enumerate(pieces):
            _forward(inner, gates, piece, lambda i, x: _gather(layers[i], x, means[i]))
            progress(len(pieces) + number + 1, total)
        solved = [_solve(layer) for layer in layers]
        slopes, shifts = [slope for slope, _ in solved], [shift for _, shift in solved]
        for number, piece in enumerate(pieces):
            _forward(inner, gates, piece, lambda i, x: layers[i].feeling.append((x.float() @ slopes[i]).cpu()))
            progress(2 * len(pieces) + number + 1, total)
    return _finish(fingerprint(inner, family), gates, layers, slopes, shifts)


def _pieces(model: Any, data: Iterable[Any], tokenizer: Any, max_tokens: int) -> Iterator[torch.Tensor]:
    """[1, at most max_tokens] token ids on the model's device."""
    if isinstance(data, (str, torch.Tensor)):
        raise PlanError("data must be a list of texts or of token tensors, not a single one")
    if max_tokens < 2:
        raise PlanError(f"max_tokens must be at least 2, got {max_tokens}")
    device = model.get_input_embeddings().weight.device
    device = torch.device("cpu") if device.type == "meta" else device  # offloaded: accelerate moves inputs
    for item in data:
        if isinstance(item, str):
            if tokenizer is None:
                tokenizer = _tokenizer_of(model)
            ids = torch.tensor([tokenizer(item, verbose=False).input_ids], dtype=torch.long)
        elif isinstance(item, torch.Tensor) and item.dim() == 2 and item.shape[0] == 1 and not item.is_floating_point():
            ids = item.long()
        else:
            shown = tuple(item.shape) if isinstance(item, torch.Tensor) else type(item).__name__
            raise PlanError(f"data must hold texts or token tensors [1, T], got {shown}")
        for piece in ids.split(max_tokens, dim=1):
            if piece.shape[1] > 1:
                yield piece.to(device)


def _tokenizer_of(model: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise PlanError(f"no tokenizer beside the model ({model.name_or_path!r}); pass `tokenizer=`") from error


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and no parameter that asks for a gradient; afterwards all as it was."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = [module for module in model.modules() if module.training]
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)
        for module in training:
            module.training = False
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        for module in training:
            module.training = True


def _gradients(model: Any, gates: Sequence[Any], layers: list[_Layer], ids: torch.Tensor) -> None:
    """One forward and backward pass. A zero added to the routing weights is what gradients are taken for."""
    found: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def add_zero(index: int) -> Callable[..., Any]:
        def hook(gate: Any, inputs: Any, output: Any) -> Any:
            logits, weights, chosen = output
            zero = torch.zeros_like(weights, requires_grad=True)
            found[index] = (zero, weights.detach(), chosen)
            return logits, weights + zero, chosen

        return hook

    hooks = [gate.register_forward_hook(add_zero(index)) for index, gate in enumerate(gates)]
    try:
        with torch.enable_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits.float(), ids[0, 1:].to(logits.device), reduction="sum")
            gradients = torch.autograd.grad(loss, [found[index][0] for index in range(len(gates))])
    finally:
        for hook in hooks:
            hook.remove()
    for index, gradient in enumerate(gradients):
        _, weights, chosen = found[index]
        gradient, weights = gradient.float().cpu(), weights.float().cpu()
        if not torch.isfinite(gradient).all():
            raise PlanError(f"the gradients of mixture layer {index} are not finite; load the model in bf16 or fp32")
        layer = layers[index]
        layer.weights.append(weights)
        layer.ids.append(chosen.cpu())
        layer.squares.append(gradient.square())
        layer.products.append(gradient * weights)


@torch.no_grad()
def _forward(model: Any, gates: Sequence[Any], ids: torch.Tensor, see: Callable[[int, torch.Tensor], None]) -> None:
    """`see(layer, what its router reads [T, D])` for every mixture layer of one forward pass."""

    def watch(index: int) -> Callable[..., None]:
        return lambda gate, inputs: see(index, inputs[0].detach().reshape(-1, inputs[0].shape[-1]))

    hooks = [gate.register_forward_pre_hook(watch(index)) for index, gate in enumerate(gates)]
    try:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()


def _gather(layer: _Layer, x: torch.Tensor, mean: torch.Tensor) -> None:
    """Add tokens x [T, D] to the regression of ln(g^2 / mean + floor), with a constant."""
    wide = torch.cat((x.float(), x.new_ones(len(x), 1, dtype=torch.float32)), 1)
    squares = layer.squares[layer.seen]
    layer.seen += 1
    aim = (squares.mean(1) / mean + _FLOOR).log().to(x.device)
    gram, moment = wide.T @ wide, wide.T @ aim
    layer.gram = gram if layer.gram is None else layer.gram.add_(gram)
    layer.moment = moment if layer.moment is None else layer.moment.add_(moment)


def _solve(layer: _Layer) -> tuple[torch.Tensor, float]:
    """Ridge regression: slope [D] fp32 on the layer's device, and the constant, which is not shrunk."""
    assert layer.gram is not None and layer.moment is not None
    gram, moment = layer.gram.double(), layer.moment.double()
    count = gram[-1, -1]
    center = gram[:-1, -1] / count
    covariance = gram[:-1, :-1] / count - center[:, None] * center
    ridge = _RIDGE * covariance.diagonal().mean().clamp_min(1e-12)
    covariance.diagonal().add_(ridge)
    middle = moment[-1] / count
    slope = torch.linalg.solve(covariance, moment[:-1] / count - center * middle)
    layer.gram = layer.moment = None
    return slope.float(), float(middle - center @ slope)


def _finish(
    name: str, gates: Sequence[Any], layers: Sequence[_Layer], slopes: Sequence[torch.Tensor], shifts: Sequence[float]
) -> GateSensitivity:
    """The prediction's means per expert, and some tokens to solve thresholds on."""
    parts: dict[str, list[torch.Tensor]] = {
        key: [] for key in ("first", "second", "slope", "offset", "feeling", "logs", "fixed")
    }
    for gate, layer, slope, shift in zip(gates, layers, slopes, shifts, strict=True):
        weights, ids = torch.cat(layer.weights), torch.cat(layer.ids)
        feeling = torch.cat(layer.feeling) + shift
        order = weights.argsort(dim=1, descending=True, stable=True)
        products = torch.cat(layer.products).gather(1, order)
        parts["first"].append(-products.mean(0))
        parts["second"].append(products.square().mean(0) / 2)
        rest = torch.cat(layer.squares) * (-feeling).exp()[:, None]
        sums, counts = (torch.zeros(gate.weight.shape[0], dtype=torch.float64) for _ in range(2))
        sums.index_add_(0, ids.flatten(), rest.flatten().double())
        counts.index_add_(0, ids.flatten(), torch.ones(ids.numel(), dtype=torch.float64))
        mean = ((sums + _PRIOR * rest.mean()) / (counts + _PRIOR)).clamp_min(1e-30)
        offset = (mean.log() + shift - math.log(2)).float()
        parts["slope"].append(slope.cpu())
        parts["offset"].append(offset)
        # a stride, so that every part of the data counts
        some = slice(None, None, -(-len(weights) // SAMPLED_TOKENS))
        logs = weights[some].log()
        parts["feeling"].append(feeling[some] - shift)
        parts["logs"].append(logs)
        parts["fixed"].append(2 * logs + offset[ids[some]])
    tokens = sum(len(weights) for weights in layers[0].weights)
    return GateSensitivity(name, tokens, **{key: torch.stack(values) for key, values in parts.items()})

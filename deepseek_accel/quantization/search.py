"""One layer's search: the column scales of its weights, then their codes, a few experts at a time.

Inputs of an expert are the tokens routed to it. An expert that met fewer than `MIN_TOKENS` is rounded to nearest, with
whole ranges and without feedback: what it would be fitted to is noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import GatedMLP
from .rounding import cost, per_column, round_for

ALPHAS = tuple(i / 10 for i in range(11))
MOST_EXPONENT = 8
"""Columns are scaled by 2^-8 to 2^8 at most."""
MIN_TOKENS = 32
SEARCHED_EXPERTS = 16
"""Of how many routed experts the search of the shared input scales sees the cost."""
CHUNK_BYTES = 2 << 30
"""About what the weights and inputs of one batch of experts may take."""
TOKENS_AT_ONCE = 4096
BINS = 16
"""Of the histograms that `weight_kl` compares, over 4 standard deviations to either side: as many as codes."""


@dataclass(frozen=True)
class Inputs:
    """What an MLP met: hidden [T, D], and of routed experts the choice [T, K] and weights [T, K] of the router."""

    hidden: Tensor
    chosen: Tensor | None = None
    weights: Tensor | None = None

    @property
    def count(self) -> int:
        return len(self.hidden)

    def of(self, expert: int) -> tuple[Tensor, Tensor | None]:
        """(hidden [t, D], weights [t]) of the tokens one expert met; all of them if there are no experts."""
        if self.chosen is None or self.weights is None:
            return self.hidden, None
        token, place = torch.where(self.chosen == expert)
        return self.hidden[token], self.weights[token, place].float()


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scales are rounded to: of fp32 models fp16, so that a checkpoint, whose scales are fp16, loses nothing."""
    return torch.float16 if dtype == torch.float32 else dtype


@dataclass
class Found:
    """Sums over the weights of a layer, in their original space."""

    signal: float = 0.0
    noise: float = 0.0
    experts: int = 0
    experts_hit: int = 0
    _counts: dict[str, Tensor] = field(default_factory=dict)
    _limit: float = 0.0

    def add(self, weight: Tensor, rounded: Tensor) -> None:
        self.signal += float(weight.double().square().sum())
        self.noise += float((weight.double() - rounded.double()).square().sum())
        self._limit = self._limit or 4 * float(weight.std()) or 1.0
        for key, values in (("before", weight), ("after", rounded)):
            counts = torch.histc(values.clamp(-self._limit, self._limit).cpu(), BINS, -self._limit, self._limit)
            self._counts[key] = self._counts.get(key, torch.zeros(BINS, dtype=torch.double)) + counts.double()

    def row(self) -> dict[str, Any]:
        """Signal-to-noise ratio in dB, and KL divergence in nats of the histograms."""
        p, q = ((c + 0.5) / (c + 0.5).sum() for c in (self._counts["before"], self._counts["after"]))
        ratio = torch.tensor(self.signal / max(self.noise, 1e-300), dtype=torch.double)
        return {
            "weight_snr_db": float(10 * torch.log10(ratio)),
            "weight_kl": float((p * (p / q).log()).sum()),
            "experts": self.experts,
            "experts_hit": self.experts_hit,
        }


def gram(hidden: Tensor, weights: Tensor | None = None) -> Tensor:
    """x^T x / T in fp32 of hidden [T, K], tokens weighted by weights [T]; zero if there is none."""
    total = torch.zeros(hidden.shape[1], hidden.shape[1], device=hidden.device)
    for start in range(0, len(hidden), TOKENS_AT_ONCE):
        x = hidden[start : start + TOKENS_AT_ONCE].float()
        if weights is not None:
            x = x * weights[start : start + TOKENS_AT_ONCE, None]
        total.addmm_(x.T, x)
    return total / max(1, len(hidden))


def candidates(activation: Tensor) -> list[tuple[float, Tensor]]:
    """mean|x| [K] -> distinct (alpha, int8 exponents [K]), the first all zero."""
    logs = activation.clamp_min(1e-5).log2()
    logs -= (logs.max() + logs.min()) / 2
    found: list[tuple[float, Tensor]] = []
    for alpha in ALPHAS:
        exponents = (alpha * logs).round().clamp(-MOST_EXPONENT, MOST_EXPONENT).to(torch.int8)
        if not any(torch.equal(exponents, known) for _, known in found):
            found.append((alpha, exponents))
    return found


def search_columns(
    mlps: Sequence[GatedMLP], weights: Mapping[str, Tensor], inputs: Mapping[str, Inputs], group_size: int
) -> tuple[float, Tensor]:
    """(alpha, int8 exponents [D]) for the columns of every weight that reads the block's input."""
    hidden = inputs[mlps[0].where].hidden
    total = torch.zeros(hidden.shape[1], device=hidden.device)
    for start in range(0, len(hidden), TOKENS_AT_ONCE):
        total += hidden[start : start + TOKENS_AT_ONCE].float().abs().sum(0)
    choices = candidates(total / len(hidden))
    if len(choices) == 1:
        return choices[0]
    costs = torch.zeros(len(choices), dtype=torch.double)
    for mlp in mlps:
        for weight, hessian in _readers(mlp, weights, inputs[mlp.where]):
            for i, (_, exponents) in enumerate(choices):
                columns = torch.exp2(exponents.float())[None]
                costs[i] += float(cost(weight, hessian, group_size, scale_dtype(hidden.dtype), columns))
    return choices[int(costs.argmin())]


def _readers(mlp: GatedMLP, weights: Mapping[str, Tensor], inputs: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
    """([1, N, D], [1, D, D]) of each weight that reads the input, H per token of the whole layer."""
    for name in mlp.inputs:
        if not mlp.routed:
            yield weights[name].float()[None], gram(inputs.hidden)[None]
            continue
        count = len(weights[name])
        for expert in range(0, count, -(-count // SEARCHED_EXPERTS)):
            hidden, share = inputs.of(expert)
            if len(hidden) >= MIN_TOKENS:
                hessian = gram(hidden, share) * (len(hidden) / inputs.count)
                yield weights[name][expert].float()[None], hessian[None]


def round_mlp(
    mlp: GatedMLP,
    weights: Mapping[str, Tensor],
    inputs: Inputs,
    columns: Tensor,
    group_size: int,
    feedback: bool,
    found: Found,
) -> dict[str, Tensor]:
    """Codes, scales, zeros and exponents of an MLP's weights, keyed as in a layer's file; codes one a byte.

    columns: int8 [D], exponents for the weights that read the input. Adds what it measures to `found`.
    """
    down = weights[mlp.down]
    experts = len(down) if mlp.routed else 1
    per_expert = 4 * (8 * 3 * down[0].numel() + 6 * inputs.hidden.shape[1] ** 2) if mlp.routed else CHUNK_BYTES
    step = max(1, CHUNK_BYTES // per_expert)
    pieces: list[dict[str, Tensor]] = []
    for start in range(0, experts, step):
        numbers = range(start, min(start + step, experts))
        pieces.append(_round_chunk(mlp, weights, inputs, numbers, columns, group_size, feedback, found))
    out = {key: torch.cat([piece[key] for piece in pieces]) for key in pieces[0]}
    rows = out.pop("down:columns")
    named: dict[str, Tensor] = {}
    width = down.shape[-1]
    for key, value in out.items():
        which, what = key.split(":")
        if which == "down":
            named[f"{mlp.down}:{what}"] = value if mlp.routed else value[0]
        elif mlp.routed:
            named[f"{mlp.inputs[0]}:{what}"] = value
        else:
            for name, half in zip(mlp.inputs, (value[0, :width], value[0, width:]), strict=True):
                named[f"{name}:{what}"] = half.contiguous()
    if bool(columns.any()):
        named |= {f"{name}:columns": columns for name in mlp.inputs}
    if bool(rows.any()):
        named[f"{mlp.down}:columns"] = rows if mlp.routed else rows[0]
        gate_up_rows = torch.cat((torch.zeros_like(rows), rows), -1)
        named[f"{mlp.inputs[-1]}:rows"] = gate_up_rows if mlp.routed else rows[0]
    return named


def _round_chunk(
    mlp: GatedMLP,
    weights: Mapping[str, Tensor],
    inputs: Inputs,
    numbers: range,
    columns: Tensor,
    group_size: int,
    feedback: bool,
    found: Found,
) -> dict[str, Tensor]:
    """The experts `numbers` of an MLP (or the one MLP): tensors [e, ...] of "gate_up" and "down"."""
    span = slice(numbers.start, numbers.stop)
    if mlp.routed:
        gate_up, down = weights[mlp.inputs[0]][span].float(), weights[mlp.down][span].float()
    else:
        gate_up, down = torch.cat([weights[n].float() for n in mlp.inputs])[None], weights[mlp.down].float()[None]
    dtype = scale_dtype(weights[mlp.down].dtype)
    tokens = [inputs.of(e) for e in numbers]
    trusted = torch.tensor([len(x) >= MIN_TOKENS for x, _ in tokens], device=down.device)
    if mlp.routed:
        found.experts += len(tokens)
        found.experts_hit += int(trusted.sum())
    stretch = torch.exp2(columns.float())
    rows = _search_rows(gate_up, down, tokens, trusted, group_size, dtype)
    shift = torch.cat((torch.zeros_like(rows), rows), -1).float().exp2()[..., None]
    hessian = torch.stack([gram(x) for x, _ in tokens]) / stretch / stretch[:, None]
    first = round_for(gate_up * stretch / shift, hessian, trusted, group_size, dtype, feedback)
    del hessian
    found.add(gate_up, _value(*first, group_size) * shift / stretch)
    rounded = _value(*first, group_size) / stretch  # reads x as it is, gives what down will read
    hessian = torch.stack([gram(_act(x, w), share) for (x, share), w in zip(tokens, rounded, strict=True)])
    second = round_for(down * rows.float().exp2()[:, None], hessian, trusted, group_size, dtype, feedback)
    found.add(down, _value(*second, group_size) / rows.float().exp2()[:, None])
    like = weights[mlp.down].dtype
    out = {"down:columns": rows}
    for which, (codes, scales, zeros) in (("gate_up", first), ("down", second)):
        out |= {f"{which}:codes": codes, f"{which}:scales": scales.to(like), f"{which}:zeros": zeros}
    return out


def _value(codes: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    size = codes.shape[-1]
    return (codes.float() - per_column(zeros, size, group_size)) * per_column(scales, size, group_size)


def _act(hidden: Tensor, gate_up: Tensor) -> Tensor:
    """hidden [t, D], gate_up [2 I, D] fp32 -> what the down projection reads, fp32 [t, I]."""
    parts = []
    for start in range(0, len(hidden), TOKENS_AT_ONCE):
        gate, up = F.linear(hidden[start : start + TOKENS_AT_ONCE].float(), gate_up).chunk(2, -1)
        parts.append(F.silu(gate) * up)
    return torch.cat(parts) if parts else hidden.new_zeros((0, len(gate_up) // 2), dtype=torch.float32)


def _search_rows(
    gate_up: Tensor, down: Tensor, tokens: list[Any], trusted: Tensor, group_size: int, dtype: torch.dtype
) -> Tensor:
    """int8 exponents [e, I] for the columns of each down projection; zero where not trusted."""
    rows = torch.zeros(down.shape[0], down.shape[2], dtype=torch.int8, device=down.device)
    for e, (hidden, share) in enumerate(tokens):
        if not trusted[e]:
            continue
        inner = _act(hidden, gate_up[e])
        choices = candidates(inner.abs().mean(0))
        if len(choices) == 1:
            continue
        hessian = gram(inner, share)[None]
        costs = [
            float(cost(down[e : e + 1], hessian, group_size, dtype, torch.exp2(exponents.float())[None]))
            for _, exponents in choices
        ]
        rows[e] = choices[costs.index(min(costs))][1]
    return rows

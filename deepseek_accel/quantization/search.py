"""One layer's search: the column scales of its weights, then their codes, a few experts at a time.

Inputs of an expert are the tokens routed to it. An expert that met fewer than `MIN_TOKENS` is rounded to nearest, with
whole ranges and without feedback: what it would be fitted to is noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import GatedMLP
from .rounding import per_column, round_for, scaled_values

ALPHAS = tuple(i / 10 for i in range(11))
MOST_EXPONENT = 8
"""Columns are scaled by 2^-8 to 2^8 at most."""
MIN_TOKENS = 32
SEARCHED_EXPERTS = 16
SEARCHED_TOKENS = 512
"""On how many routed experts, and about how many tokens of each, the scales that all share are tried."""
CHUNK_BYTES = 2 << 30
"""About what a batch of experts may take, with its inputs; as much as the layer's weights if that is more."""
TOKENS_AT_ONCE = 4096
SAMPLES = 1 << 20
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
            seen = values.reshape(-1)[:: max(1, values.numel() // SAMPLES)].clamp(-self._limit, self._limit).cpu()
            counts = torch.histc(seen, BINS, -self._limit, self._limit)
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


def exponents(activation: Tensor, alpha: float) -> Tensor:
    """mean|x| [..., K] -> int8 [..., K]: log2 of s = mean|x|^alpha, rounded; 0 for a usual input."""
    logs = activation.clamp_min(1e-5).log2()
    logs = logs - logs.median(-1, keepdim=True).values
    return (alpha * logs).round().clamp(-MOST_EXPONENT, MOST_EXPONENT).to(torch.int8)


def search_columns(
    mlps: Sequence[GatedMLP], weights: Mapping[str, Tensor], inputs: Mapping[str, Inputs], group_size: int
) -> tuple[float, Tensor]:
    """(alpha, int8 exponents [D]) for the columns of every weight that reads the block's input."""
    hidden = inputs[mlps[0].where].hidden
    if len(hidden) < MIN_TOKENS:
        return 0.0, torch.zeros(hidden.shape[1], dtype=torch.int8, device=hidden.device)
    total = torch.zeros(hidden.shape[1], device=hidden.device)
    for start in range(0, len(hidden), TOKENS_AT_ONCE):
        total += hidden[start : start + TOKENS_AT_ONCE].float().abs().sum(0)
    choices = [(alpha, exponents(total / len(hidden), alpha)) for alpha in ALPHAS]
    if not any(bool(columns.any()) for _, columns in choices):
        return choices[0]
    costs = torch.zeros(len(choices), dtype=torch.double)
    dtype = scale_dtype(hidden.dtype)
    for mlp in mlps:
        for expert in _searched(mlp, weights):
            x, share = inputs[mlp.where].of(expert)
            if len(x) < MIN_TOKENS:
                continue
            gate_up, down = (w[0] for w in _matrices(mlp, weights, slice(expert, expert + 1)))
            hessian = gram(x)[None]
            seen = slice(None, None, max(1, len(x) // SEARCHED_TOKENS))
            weight = 1.0 if share is None else share[seen, None]
            expected = F.linear(_act(x[seen], gate_up), down)
            for i, (_, columns) in enumerate(choices):
                rounded = scaled_values(gate_up[None], hessian, group_size, dtype, columns.float().exp2()[None])[0]
                error = (F.linear(_act(x[seen], rounded), down) - expected) * weight
                costs[i] += float(error.square().sum()) * len(x) / len(error)
    return choices[int(costs.argmin())]


def _searched(mlp: GatedMLP, weights: Mapping[str, Tensor]) -> range:
    """The experts whose outputs decide on the shared scales."""
    count = len(weights[mlp.down]) if mlp.routed else 1
    return range(0, count, -(-count // SEARCHED_EXPERTS))


def _matrices(mlp: GatedMLP, weights: Mapping[str, Tensor], experts: slice) -> tuple[Tensor, Tensor]:
    """(gate and up [e, 2 I, D], down [e, D, I]) of some experts, or of the one MLP, in fp32."""
    if mlp.routed:
        return weights[mlp.inputs[0]][experts].float(), weights[mlp.down][experts].float()
    return torch.cat([weights[name].float() for name in mlp.inputs])[None], weights[mlp.down].float()[None]


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
    step = max(1, max(CHUNK_BYTES, sum(weights[name].nbytes for name in mlp.names)) // per_expert)
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
    gate_up, down = _matrices(mlp, weights, slice(numbers.start, numbers.stop))
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
    known = trusted.nonzero()[:, 0].tolist()
    if not known:
        return rows
    inner = [(_act(tokens[e][0], gate_up[e]), tokens[e][1]) for e in known]
    activation = torch.stack([hidden.abs().mean(0) for hidden, _ in inner])
    hessian = torch.stack([gram(hidden, share) for hidden, share in inner])
    least = torch.full((len(known),), float("inf"), device=down.device)
    best = torch.zeros_like(rows[known])
    for alpha in ALPHAS:
        columns = exponents(activation, alpha)
        error = scaled_values(down[known], hessian, group_size, dtype, columns.float().exp2()) - down[known]
        found = ((error @ hessian) * error).sum((-1, -2))
        better = found < least
        least = torch.where(better, found, least)
        best = torch.where(better[:, None], columns, best)
    rows[known] = best
    return rows

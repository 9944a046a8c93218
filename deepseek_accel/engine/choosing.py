"""The next token of every row, each by its own rules, on the device.

A drawn token depends on the row's logits, its request's seed and how many tokens came before, not on who shares the
step: every draw has one number of its own, made of seed and place, and takes the token at which the sum of
probabilities passes it.

Letters: R rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..generation.upload import upload


class Sampling(NamedTuple):
    """How a request chooses. The names and meanings are transformers'."""

    do_sample: bool
    temperature: float = 1.0
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0


def sampling_of(processors: Any, do_sample: bool) -> Sampling | None:
    """The `Sampling` that does what these logits processors do, or None if they do more."""
    from transformers.generation import logits_process as known

    order = (known.TemperatureLogitsWarper, known.TopKLogitsWarper, known.TopPLogitsWarper, known.MinPLogitsWarper)
    names = ("temperature", "top_k", "top_p", "min_p")
    found: dict[str, Any] = {}
    last = -1
    for processor in processors:
        kind = type(processor)
        if kind not in order or order.index(kind) <= last or not do_sample:
            return None
        last = order.index(kind)
        if getattr(processor, "filter_value", -torch.inf) != -torch.inf:
            return None
        if kind is not known.TopKLogitsWarper and getattr(processor, "min_tokens_to_keep", 1) != 1:
            return None
        found[names[last]] = getattr(processor, names[last])
    return Sampling(do_sample, **found)


def number(seed: int, place: int) -> float:
    """In (0, 1), for the token `place` of a request with this seed."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed % (1 << 64), place), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> 11) + 0.5) / (1 << 53)


def choose(logits: Tensor, rules: list[Sampling], numbers: list[float]) -> Tensor:
    """logits [R, V] -> token ids [R] int64 on the same device. -1: the row's probabilities are not finite.

    numbers: of rows that draw, as `number` makes them; anything for others. The host waits for nothing.
    """
    if not any(rule.do_sample for rule in rules):
        return logits.argmax(-1)
    columns = [
        [rule.temperature if rule.do_sample else 1.0 for rule in rules],
        [float(rule.top_k) if 0 < rule.top_k < logits.shape[1] else float(logits.shape[1]) for rule in rules],
        [rule.top_p for rule in rules],
        [rule.min_p for rule in rules],
        numbers,
        [float(rule.do_sample) for rule in rules],
    ]
    numbers_of_rows = upload(columns, logits.device, torch.float64)
    temperature, top_k, top_p, min_p, drawn, draws = numbers_of_rows.unsqueeze(-1)
    scores = logits.float() / temperature.float()
    if any(rule.do_sample and (rule.top_k > 0 or rule.top_p < 1.0) for rule in rules):
        scores = narrow(scores, top_k.long(), top_p.float())
    if any(rule.do_sample and rule.min_p > 0.0 for rule in rules):
        probabilities = scores.softmax(-1)
        small = probabilities < min_p.float() * probabilities.amax(-1, keepdim=True)
        scores = scores.masked_fill(small & (min_p > 0), -torch.inf)
    sampled = draw_at(scores.softmax(-1), drawn)
    if all(rule.do_sample for rule in rules):
        return sampled
    return torch.where(draws[:, 0] > 0, sampled, logits.argmax(-1))


def narrow(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """scores [R, V] with -inf for all but each row's top_k [R, 1] largest, and of these for all but the likeliest that
    have top_p [R, 1] of their probability. As transformers' two warpers, one after the other."""
    ascending, order = scores.sort(-1)
    smallest = ascending.gather(1, scores.shape[1] - top_k)
    ascending = ascending.masked_fill(ascending < smallest, -torch.inf)
    behind = ascending.softmax(-1).cumsum(-1)
    removed = (behind <= 1 - top_p) & (top_p < 1)
    removed[:, -1] = False  # the likeliest stays
    ascending = ascending.masked_fill(removed, -torch.inf)
    return torch.empty_like(scores).scatter_(1, order, ascending)


def draw_at(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """The index [R] at which the running sum of probabilities [R, V] passes numbers [R, 1] times its end; -1 where
    that is not finite."""
    sums = probabilities.double().cumsum(-1)
    end = sums[:, -1:]
    index = torch.searchsorted(sums, numbers * end, right=True)
    return index[:, 0].clamp(max=probabilities.shape[1] - 1).where(end[:, 0].isfinite() & (end[:, 0] > 0), -1)


def choose_alone(processors: Any, ids: Tensor, logits: Tensor, do_sample: bool, drawn: float) -> Tensor:
    """The token [1] of one row by its own processors: ids [1, T] so far, logits [1, V]."""
    scores = processors(ids, logits.to(torch.float32, copy=True))
    if not do_sample:
        return torch.where(scores.isnan().any(-1), -1, scores.argmax(-1))
    return draw_at(scores.softmax(-1), upload([[drawn]], scores.device, torch.float64))

"""The shapes at which products with four-bit weights are measured, as in `op_cases`: groups of 128, bytes as packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..ops.experts import fused_experts_reference
from ..ops.int4 import Int4Weight, dequantize, quantize
from ..ops.int4_experts import int4_experts_reference, int4_mixture
from ..ops.int4_linear import int4_gated, int4_gated_reference, int4_linear, int4_linear_reference
from .op_cases import V2_LITE, V3, Case, Shape, choices, num_sets, randn

GROUP = 128


def _packed(device: torch.device, dtype: torch.dtype, *shape: int) -> Int4Weight:
    if len(shape) == 2:
        return quantize(randn(device, dtype, *shape, std=shape[-1] ** -0.5), GROUP)
    experts = [_packed(device, dtype, *shape[1:]) for _ in range(shape[0])]  # rounding all at once takes fp32 of all
    words, groups = (torch.stack([getattr(expert, name) for expert in experts]) for name in ("words", "groups"))
    return replace(experts[0], words=words, groups=groups)


def experts_case(
    device: torch.device, dtype: torch.dtype, *, tokens: int, experts: int, top_k: int, size: int, intermediate: int,
    shared: int,
) -> Case:  # fmt: skip
    """Routed experts, and `shared` ones of the same size that every token takes, with the residual."""
    gate_up = _packed(device, dtype, experts, 2 * intermediate, size)
    down = _packed(device, dtype, experts, size, intermediate)
    expert_bytes = (gate_up.nbytes + down.nbytes) / experts
    sets = min(16, num_sets(device, min(tokens * top_k, experts) * expert_bytes)) if tokens > 1 else experts // top_k
    wide = shared * intermediate
    # as many shared experts as sets that are hit one after the other before they come again: none is in the cache
    others = [
        (_packed(device, dtype, wide, size), _packed(device, dtype, wide, size), _packed(device, dtype, size, wide))
        for _ in range(num_sets(device, shared * expert_bytes) if shared else 0)
    ]
    inputs = [
        (randn(device, dtype, tokens, size), chosen, torch.rand(tokens, top_k, device=device).softmax(-1))
        for chosen in choices(device, sets, tokens, experts, top_k)
    ]
    residual = randn(device, dtype, tokens, size)

    def check() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        hidden, chosen, weights = inputs[0]
        exact = residual.double()
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).any(-1).nonzero()[:, 0]
            only = torch.where(chosen[rows] == expert, 0, 1)  # id 0 of a model of one expert; id 1 is dropped
            values = (dequantize(gate_up[expert], torch.float64)[None], dequantize(down[expert], torch.float64)[None])
            exact[rows] += fused_experts_reference(hidden[rows].double(), only, weights[rows].double(), *values)
        if others:
            gate, up, last = others[0]
            exact += F.linear(int4_gated_reference(hidden.double(), gate, up), dequantize(last, torch.float64))
        yield int4_mixture(hidden, chosen, weights, gate_up, down, others[0] if others else None, residual), exact

    hit = sum(len(chosen.unique()) for _, chosen, _ in inputs) / sets + shared
    calls: list[Callable[[], Any]] = [
        partial(int4_mixture, *values, gate_up, down, others[i % len(others)] if others else None, residual)
        for i, values in enumerate(inputs)
    ]
    reference = partial(int4_experts_reference, *inputs[0], gate_up, down) if device.type == "cpu" else None
    num_bytes = hit * expert_bytes + 3 * tokens * size * dtype.itemsize
    return Case(calls, check, reference, num_bytes, 6.0 * tokens * (top_k + shared) * size * intermediate)


def linear_case(device: torch.device, dtype: torch.dtype, *, tokens: int, size: int, count: int) -> Case:
    x, weight = randn(device, dtype, tokens, size), _packed(device, dtype, count, size)
    weights = [weight, *(_packed(device, dtype, count, size) for _ in range(num_sets(device, weight.nbytes) - 1))]

    def check() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield int4_linear(x, weight), int4_linear_reference(x.double(), weight)

    calls: list[Callable[[], Any]] = [partial(int4_linear, x, each) for each in weights]
    reference = partial(int4_linear_reference, x, weight) if device.type == "cpu" else None
    num_bytes = weight.nbytes + (size + count) * tokens * dtype.itemsize
    return Case(calls, check, reference, num_bytes, 2.0 * tokens * count * size)


def gated_case(device: torch.device, dtype: torch.dtype, *, tokens: int, size: int, count: int) -> Case:
    """Gate and up of an MLP, after a norm."""
    x, norm = randn(device, dtype, tokens, size), (1 + randn(device, dtype, size, std=0.1), 1e-6)
    gate, up = _packed(device, dtype, count, size), _packed(device, dtype, count, size)
    pairs = [(gate, up)]
    for _ in range(num_sets(device, 2 * gate.nbytes) - 1):
        pairs.append((_packed(device, dtype, count, size), _packed(device, dtype, count, size)))

    def check() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        wide = x.double()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm[1]) * norm[0].double()
        yield int4_gated(x, gate, up, norm), int4_gated_reference(normed, gate, up)

    calls: list[Callable[[], Any]] = [partial(int4_gated, x, *pair, norm) for pair in pairs]
    reference = partial(int4_gated_reference, x, gate, up) if device.type == "cpu" else None
    num_bytes = 2 * gate.nbytes + (size + count) * tokens * dtype.itemsize
    return Case(calls, check, reference, num_bytes, 4.0 * tokens * count * size)


LAYERS: dict[str, tuple[int, int, bool]] = {
    "LLM-7B gate and up": (4096, 11008, True),
    "LLM-7B down": (11008, 4096, False),
    "V2-Lite gate and up": (2048, 10944, True),
    "V2-Lite down": (10944, 2048, False),
    "V3 down": (18432, 7168, False),
}
"""size, count, whether it is gate and up"""


def gpu_shapes() -> list[Shape]:
    shapes = []
    for tokens in (1, 2, 4, 8, 32, 128, 512, 1024):
        build = partial(experts_case, tokens=tokens, shared=2, **V2_LITE)
        shapes.append(Shape("int4_experts", f"V2-Lite, {tokens} tokens", build))
    for tokens in (1, 8, 32):
        build = partial(experts_case, tokens=tokens, shared=1, **V3)
        shapes.append(Shape("int4_experts", f"V3, {tokens} tokens", build))
    for tokens in (1, 8, 32, 128, 4096):
        for name, (size, count, gated) in LAYERS.items():
            build = partial(gated_case if gated else linear_case, tokens=tokens, size=size, count=count)
            shapes.append(Shape("int4_linear", f"{name}, {tokens} tokens", build))
    return shapes


def cpu_shapes() -> list[Shape]:
    experts = partial(experts_case, experts=16, top_k=4, size=256, intermediate=128, shared=1)
    return [
        Shape("int4_experts", "16 and 1 shared of 256x128, 1 token", partial(experts, tokens=1)),
        Shape("int4_experts", "16 and 1 shared of 256x128, 8 tokens", partial(experts, tokens=8)),
        Shape("int4_linear", "256 to 512, 1 token", partial(linear_case, tokens=1, size=256, count=512)),
        Shape("int4_linear", "256 to 512, gated, 8 tokens", partial(gated_case, tokens=8, size=256, count=512)),
    ]


OPS = ("int4_experts", "int4_linear")

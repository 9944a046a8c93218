"""The shapes at which single ops are measured: rotating inputs, an exact result, the bytes and operations of a call.

A case has several input sets that together exceed the L2 cache; the first one is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..ops import fp8 as fp8_entries
from ..ops.experts import fused_experts, fused_experts_reference
from ..ops.gqa_attention import paged_gqa_attention, paged_gqa_attention_reference
from ..ops.mla_attention import latent_attention, latent_attention_reference
from ..ops.projection import gated_project, gated_project_reference, project, project_reference
from ..ops.rms_norm import rms_norm, rms_norm_reference
from ..ops.router import make_counters, norm_route, norm_route_reference, route, route_reference
from .measure import l2_bytes

PAGE_SIZE = 64
MAX_SETS = 256
REFERENCE_BYTES = 1 << 30
"""The torch reference is timed only if its inputs are at most this large."""


@dataclass
class Case:
    """One op at one shape."""

    calls: list[Callable[[], Any]]
    """The op on each input set."""
    check: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]
    """Pairs (result of the op on the first set, exact result)."""
    reference: Callable[[], Any] | None
    """The torch reference on the first set, or None where it is too slow or too large to time."""
    num_bytes: float
    """Read and written by one call, each once."""
    flops: float


@dataclass(frozen=True)
class Shape:
    """A case that is not built yet: inputs are made when its turn comes."""

    op: str
    name: str
    build: Callable[[torch.device, torch.dtype], Case]


def num_sets(device: torch.device, bytes_per_set: float) -> int:
    """How many input sets together exceed a GPU's L2 cache. On a CPU one, which the reference is timed on as well."""
    if device.type != "cuda":
        return 1
    return int(min(MAX_SETS, max(2, -(-4 * l2_bytes(device) // max(1, int(bytes_per_set))))))


def randn(device: torch.device, dtype: torch.dtype, *shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, std)


def _pages(device: torch.device, dtype: torch.dtype, sets: int, batch: int, length: int, width: int) -> dict[str, Any]:
    """storage, and a block table [sets, batch, pages] whose pages lie in random order."""
    per_row = -(-length // PAGE_SIZE)
    order = torch.randperm(sets * batch * per_row, device=device).view(sets, batch, per_row).to(torch.int32)
    return {
        "storage": randn(device, dtype, order.numel(), PAGE_SIZE, width),
        "tables": order,
        "lengths": torch.full((batch,), length, dtype=torch.int32, device=device),
    }


def _attention_case(
    batch: int,
    length: int,
    pages: dict[str, Any],
    queries: Sequence[tuple[torch.Tensor, ...]],
    op: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    scale: float,
    sizes: tuple[int, ...],
    flops: float,
    fp8: str | None = None,
    decode: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.double,
) -> Case:
    """One query per row over `length` paged keys. sizes: what the op takes after `scale`. decode: of FP8 entries."""
    storage, tables, lengths = pages["storage"], pages["tables"], pages["lengths"]

    def arguments(i: int) -> tuple[Any, ...]:
        return (*queries[i], storage, tables[i], lengths, length, scale, *sizes)

    row_bytes = length * storage.shape[2] * storage.element_size()
    query_bytes = sum(q.numel() * q.element_size() for q in queries[0])

    def check() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        out = op(*arguments(0), fp8=fp8)
        for row in range(batch):  # one by one: in float64 all of them might not fit
            used = tables[0, row].long()
            table = torch.arange(len(used), dtype=torch.int32, device=storage.device)[None]
            wide = [q[row : row + 1].double() for q in queries[0]]
            exact = reference(*wide, decode(storage[used]), table, lengths[row : row + 1], length, scale, *sizes)
            yield out[row : row + 1], exact

    cheap = batch * row_bytes <= REFERENCE_BYTES
    return Case(
        [partial(op, *arguments(i), fp8=fp8) for i in range(len(queries))],
        check,
        partial(reference, *arguments(0), fp8=fp8) if cheap else None,
        batch * row_bytes + 2 * query_bytes,
        flops,
    )


def latent_case(
    device: torch.device, dtype: torch.dtype, *, heads: int, batch: int, length: int, fp8: str | None = None
) -> Case:
    rank, rope = 512, 64
    width = rank + rope
    entry_bytes = fp8_entries.latent_bytes(rank, rope, dtype) if fp8 else width * dtype.itemsize
    sets = num_sets(device, batch * length * entry_bytes)
    queries = [
        (randn(device, dtype, batch, 1, heads, rank), randn(device, dtype, batch, 1, heads, rope)) for _ in range(sets)
    ]
    flops = 2.0 * batch * heads * length * (width + rank)
    pages = _pages(device, dtype, sets, batch, length, width)
    options: dict[str, Any] = {}
    if fp8 is not None:
        latent, k_rope = pages["storage"].split([rank, rope], -1)
        pages["storage"] = fp8_entries.encode_latents(latent, k_rope, fp8)
        form: dict[str, Any] = dict(kind=fp8, rank=rank, rope=rope, dtype=dtype, out_dtype=torch.float64)
        options = {"fp8": fp8, "decode": partial(fp8_entries.decode_latents, **form)}
    ops, scale = (latent_attention, latent_attention_reference), width**-0.5
    return _attention_case(batch, length, pages, queries, *ops, scale, (rank,), flops, **options)


def gqa_case(device: torch.device, dtype: torch.dtype, *, heads: int, kv_heads: int, batch: int, length: int) -> Case:
    dim = 128
    width = 2 * kv_heads * dim
    sets = num_sets(device, batch * length * width * dtype.itemsize)
    queries = [(randn(device, dtype, batch, 1, heads, dim),) for _ in range(sets)]
    flops = 4.0 * batch * heads * length * dim
    pages = _pages(device, dtype, sets, batch, length, width)
    sizes = (kv_heads, dim)
    return _attention_case(
        batch, length, pages, queries, paged_gqa_attention, paged_gqa_attention_reference, dim**-0.5, sizes, flops
    )


def choices(device: torch.device, sets: int, tokens: int, experts: int, top_k: int) -> list[torch.Tensor]:
    """Expert ids [tokens, top_k] of every set. For one token, sets that follow each other share no expert."""
    if tokens == 1:
        order = torch.randperm(experts, device=device)
        disjoint = experts // top_k
        return [order[i % disjoint * top_k :][:top_k][None].clone() for i in range(sets)]
    return [torch.rand(tokens, experts, device=device).topk(top_k, dim=-1).indices for _ in range(sets)]


def experts_case(
    device: torch.device, dtype: torch.dtype, *, tokens: int, experts: int, top_k: int, size: int, intermediate: int
) -> Case:
    gate_up = randn(device, dtype, experts, 2 * intermediate, size, std=size**-0.5)
    down = randn(device, dtype, experts, size, intermediate, std=intermediate**-0.5)
    expert_bytes = 3 * size * intermediate * dtype.itemsize
    sets = min(16, num_sets(device, min(tokens * top_k, experts) * expert_bytes)) if tokens > 1 else experts // top_k
    chosen_by_set = choices(device, sets, tokens, experts, top_k)
    inputs = [
        (randn(device, dtype, tokens, size), chosen, torch.rand(tokens, top_k, device=device).softmax(-1))
        for chosen in chosen_by_set
    ]

    def check() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        hidden, chosen, weights = inputs[0]
        exact = torch.zeros(tokens, size, dtype=torch.float64, device=device)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).any(-1).nonzero()[:, 0]
            only = torch.where(chosen[rows] == expert, 0, 1)  # id 0 of a model of one expert; id 1 is dropped
            wide = (gate_up[expert : expert + 1].double(), down[expert : expert + 1].double())
            exact[rows] += fused_experts_reference(hidden[rows].double(), only, weights[rows].double(), *wide)
        yield fused_experts(hidden, chosen, weights, gate_up, down), exact

    hit = sum(len(chosen.unique()) for chosen in chosen_by_set) / sets
    return Case(
        [partial(fused_experts, *values, gate_up, down) for values in inputs],
        check,
        partial(fused_experts_reference, *inputs[0], gate_up, down),
        hit * expert_bytes + 2 * tokens * size * dtype.itemsize,
        6.0 * tokens * top_k * size * intermediate,
    )


def router_case(device: torch.device, dtype: torch.dtype, *, tokens: int, experts: int, rule: dict[str, Any]) -> Case:
    sets = min(32, num_sets(device, tokens * experts * 4))
    logits = [randn(device, torch.float32, tokens, experts) for _ in range(sets)]
    bias = randn(device, torch.float32, experts, std=0.05) if rule["scoring"] == "sigmoid" else None

    def check() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        weights, indices = route(logits[0], bias, **rule)
        exact_weights, exact_indices = route_reference(logits[0], bias, **rule)
        yield weights, exact_weights.double()
        yield indices.double(), exact_indices.double()  # float64: must be equal

    num_bytes = tokens * (experts * 4 + rule["top_k"] * 12)
    calls: list[Callable[[], Any]] = [partial(route, x, bias, **rule) for x in logits]
    return Case(calls, check, partial(route_reference, logits[0], bias, **rule), num_bytes, 0.0)


def rms_norm_case(device: torch.device, dtype: torch.dtype, *, tokens: int, size: int) -> Case:
    num_bytes = 2 * tokens * size * dtype.itemsize
    inputs = [randn(device, dtype, tokens, size) for _ in range(num_sets(device, num_bytes))]
    weight = 1 + randn(device, dtype, size, std=0.1)

    def check() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        wide = inputs[0].double()
        exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        yield rms_norm(inputs[0], weight, 1e-6), exact

    calls: list[Callable[[], Any]] = [partial(rms_norm, x, weight, 1e-6) for x in inputs]
    return Case(calls, check, partial(rms_norm_reference, inputs[0], weight, 1e-6), num_bytes, 0.0)


def project_case(
    device: torch.device, dtype: torch.dtype, *, tokens: int, size: int, counts: tuple[int, ...], normed: bool
) -> Case:
    """Layers that share an input, after a norm; without a norm one layer and the residual."""
    weight_bytes = sum(counts) * size * dtype.itemsize
    sets = num_sets(device, weight_bytes)
    x, residual = randn(device, dtype, tokens, size), None if normed else randn(device, dtype, tokens, *counts)
    weights = [tuple(randn(device, dtype, count, size, std=size**-0.5) for count in counts) for _ in range(sets)]
    norm = (1 + randn(device, dtype, size, std=0.1), 1e-6) if normed else None

    def check() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        wide = tuple(weight.double() for weight in weights[0])
        wide_norm = None if norm is None else (norm[0].double(), norm[1])
        wide_residual = None if residual is None else residual.double()
        exact = project_reference(x.double(), wide, norm=wide_norm, residual=wide_residual)
        yield from zip(project(x, weights[0], norm=norm, residual=residual), exact, strict=True)

    calls: list[Callable[[], Any]] = [partial(project, x, w, norm=norm, residual=residual) for w in weights]
    reference = partial(project_reference, x, weights[0], norm=norm, residual=residual)
    outputs = tokens * sum(counts) * dtype.itemsize * (1 if normed else 2)
    num_bytes = weight_bytes + x.numel() * dtype.itemsize + outputs
    return Case(calls, check, reference, num_bytes, 2.0 * tokens * sum(counts) * size)


def gated_project_case(device: torch.device, dtype: torch.dtype, *, tokens: int, size: int, intermediate: int) -> Case:
    weight_bytes = 2 * intermediate * size * dtype.itemsize
    x, norm_weight = randn(device, dtype, tokens, size), 1 + randn(device, dtype, size, std=0.1)
    weights = [
        [randn(device, dtype, intermediate, size, std=size**-0.5) for _ in range(2)]
        for _ in range(num_sets(device, weight_bytes))
    ]

    def check() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        gate, up = weights[0]
        exact = gated_project_reference(x.double(), gate.double(), up.double(), norm=(norm_weight.double(), 1e-6))
        yield gated_project(x, gate, up, norm=(norm_weight, 1e-6)), exact

    calls: list[Callable[[], Any]] = [partial(gated_project, x, *pair, norm=(norm_weight, 1e-6)) for pair in weights]
    reference = partial(gated_project_reference, x, *weights[0], norm=(norm_weight, 1e-6))
    num_bytes = weight_bytes + tokens * (size + intermediate) * dtype.itemsize
    return Case(calls, check, reference, num_bytes, 4.0 * tokens * intermediate * size)


def norm_route_case(
    device: torch.device, dtype: torch.dtype, *, tokens: int, experts: int, size: int, rule: dict[str, Any]
) -> Case:
    weight_bytes = experts * size * dtype.itemsize
    x, norm_weight = randn(device, dtype, tokens, size), 1 + randn(device, dtype, size, std=0.1)
    gates = [randn(device, dtype, experts, size, std=size**-0.5) for _ in range(num_sets(device, weight_bytes))]
    bias = randn(device, torch.float32, experts, std=0.05) if rule["scoring"] == "sigmoid" else None
    counters = make_counters(device)

    def check() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # Sums in another order may swap experts of nearly equal logits, so weights are compared, which are in order.
        normed, weights, _ = norm_route(x, norm_weight, 1e-6, gates[0], bias, counters=counters, **rule)
        yield normed, rms_norm_reference(x.double(), norm_weight.double(), 1e-6)
        exact = norm_route_reference(x, norm_weight, 1e-6, gates[0], bias, **rule)
        yield weights.sort(-1).values, exact[1].sort(-1).values.double()

    calls: list[Callable[[], Any]] = [
        partial(norm_route, x, norm_weight, 1e-6, gate, bias, counters=counters, **rule) for gate in gates
    ]
    reference = partial(norm_route_reference, x, norm_weight, 1e-6, gates[0], bias, **rule)
    num_bytes = weight_bytes + tokens * (2 * size * dtype.itemsize + rule["top_k"] * 12)
    return Case(calls, check, reference, num_bytes, 2.0 * tokens * experts * size)


V2_LITE: dict[str, Any] = dict(experts=64, top_k=6, size=2048, intermediate=1408)
V3: dict[str, Any] = dict(experts=256, top_k=8, size=7168, intermediate=2048)
V2_LITE_RULE: dict[str, Any] = dict(top_k=6, scoring="softmax", group_score=None, normalize=False, scale=1.0)
V3_RULE: dict[str, Any] = dict(
    top_k=8, num_groups=8, topk_groups=4, scoring="sigmoid", group_score="top2", normalize=True, scale=2.5
)


LATENT_POINTS = {
    16: ((1, 1024), (1, 32768), (32, 1024), (32, 8192), (128, 1024), (128, 8192)),
    128: ((1, 32768), (32, 8192), (128, 8192)),
}
LAYERS: dict[str, tuple[int, tuple[int, ...], bool]] = {
    "V2-Lite q and kv_a": (2048, (3072, 576), True),
    "V2-Lite o": (2048, (2048,), False),
    "V2-Lite head": (2048, (102400,), True),
    "V3 q_a and kv_a": (7168, (1536, 576), True),
    "V3 o": (16384, (7168,), False),
    "LLM-7B q, k, v": (4096, (4096, 4096, 4096), True),
}
"""size, counts, normed of `project_case`"""
FP8_POINTS = ((16, 1, 32768), (16, 32, 8192), (128, 32, 8192))
"""heads, batch, length of latent attention over FP8 pages, to be held against the same over plain ones"""
GQA_HEADS = {"LLM-7B": (32, 32), "Qwen-7B": (28, 4), "Llama-70B": (64, 8)}
GQA_POINTS = ((1, 1024), (32, 1024), (32, 8192))


def gpu_shapes() -> list[Shape]:
    shapes = []
    for heads, points in LATENT_POINTS.items():
        for batch, length in points:
            build = partial(latent_case, heads=heads, batch=batch, length=length)
            shapes.append(Shape("latent_attention", f"{heads} heads, {batch}x{length}", build))
    for heads, batch, length in FP8_POINTS:
        for fp8 in fp8_entries.CODES:
            build = partial(latent_case, heads=heads, batch=batch, length=length, fp8=fp8)
            shapes.append(Shape("latent_attention", f"{heads} heads, {batch}x{length}, {fp8}", build))
    for name, (heads, kv_heads) in GQA_HEADS.items():
        for batch, length in GQA_POINTS:
            build = partial(gqa_case, heads=heads, kv_heads=kv_heads, batch=batch, length=length)
            shapes.append(Shape("gqa", f"{name} {heads}/{kv_heads}, {batch}x{length}", build))
    for tokens in (1, 8, 32, 128, 1024, 8192):
        shapes.append(Shape("experts", f"V2-Lite, {tokens} tokens", partial(experts_case, tokens=tokens, **V2_LITE)))
    for tokens in (1, 32, 128):
        shapes.append(Shape("experts", f"V3, {tokens} tokens", partial(experts_case, tokens=tokens, **V3)))
    for name, experts, rule in (("V2-Lite", 64, V2_LITE_RULE), ("V3", 256, V3_RULE)):
        for tokens in (1, 32, 128, 8192):
            build = partial(router_case, tokens=tokens, experts=experts, rule=rule)
            shapes.append(Shape("router", f"{name}, {tokens} tokens", build))
    for name, model, rule in (("V2-Lite", V2_LITE, V2_LITE_RULE), ("V3", V3, V3_RULE)):
        for tokens in (1, 8, 32, 128):
            build = partial(norm_route_case, tokens=tokens, experts=model["experts"], size=model["size"], rule=rule)
            shapes.append(Shape("norm_route", f"{name}, {tokens} tokens", build))
    for tokens in (1, 8, 32, 128):
        for name, (size, counts, normed) in LAYERS.items():
            build = partial(project_case, tokens=tokens, size=size, counts=counts, normed=normed)
            shapes.append(Shape("project", f"{name}, {tokens} tokens", build))
        for name, size, intermediate in (("V2-Lite", 2048, 10944), ("LLM-7B", 4096, 11008)):
            build = partial(gated_project_case, tokens=tokens, size=size, intermediate=intermediate)
            shapes.append(Shape("gated_project", f"{name}, {tokens} tokens", build))
    for tokens, size in ((1, 2048), (128, 2048), (8192, 2048), (1, 7168), (8192, 7168)):
        shapes.append(Shape("rms_norm", f"{tokens}x{size}", partial(rms_norm_case, tokens=tokens, size=size)))
    return shapes


def cpu_shapes() -> list[Shape]:
    """Small shapes that show that the torch implementations are right and how they compare with the references."""
    tiny: dict[str, Any] = dict(experts=16, top_k=4, size=256, intermediate=128)
    latent, gqa, experts = latent_case, partial(gqa_case, heads=8, kv_heads=2), partial(experts_case, **tiny)
    router, layer = partial(router_case, experts=64, rule=V2_LITE_RULE), partial(project_case, size=256)
    return [
        Shape("latent_attention", "16 heads, 1x256", partial(latent, heads=16, batch=1, length=256)),
        Shape("latent_attention", "16 heads, 4x256", partial(latent, heads=16, batch=4, length=256)),
        Shape("latent_attention", "16 heads, 1x256, e4m3", partial(latent, heads=16, batch=1, length=256, fp8="e4m3")),
        Shape("gqa", "8/2 heads, 1x256", partial(gqa, batch=1, length=256)),
        Shape("gqa", "8/2 heads, 4x256", partial(gqa, batch=4, length=256)),
        Shape("experts", "16 of 256x128, 1 token", partial(experts, tokens=1)),
        Shape("experts", "16 of 256x128, 64 tokens", partial(experts, tokens=64)),
        Shape("router", "V2-Lite, 1 token", partial(router, tokens=1)),
        Shape("router", "V2-Lite, 128 tokens", partial(router, tokens=128)),
        Shape(
            "norm_route",
            "64 x 256, 4 tokens",
            partial(norm_route_case, tokens=4, experts=64, size=256, rule=V2_LITE_RULE),
        ),
        Shape("project", "256 to 384 and 96, 1 token", partial(layer, tokens=1, counts=(384, 96), normed=True)),
        Shape("project", "256 to 256, 8 tokens", partial(layer, tokens=8, counts=(256,), normed=False)),
        Shape(
            "gated_project", "256 to 512, 1 token", partial(gated_project_case, tokens=1, size=256, intermediate=512)
        ),
        Shape("rms_norm", "1x2048", partial(rms_norm_case, tokens=1, size=2048)),
        Shape("rms_norm", "128x2048", partial(rms_norm_case, tokens=128, size=2048)),
    ]


OPS = ("latent_attention", "gqa", "experts", "router", "norm_route", "project", "gated_project", "rms_norm")

"""The least a decode step must read, and the experts it hits: the floor that times are held against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .. import families
from ..config import OptimizeConfig
from ..ops.int4 import Int4Weight
from ..passes.kv_cache import KVCache
from ..passes.mixed_precision import packed_bytes


def cache_of(config: Any) -> KVCache:
    """The cache of a configuration; the default one, which holds what stock's does, where it names none."""
    passes = () if config is None else OptimizeConfig.of(config).passes
    return next((p for p in passes if isinstance(p, KVCache)), KVCache())


@contextlib.contextmanager
def counted_experts(model: Any, batch: int) -> Iterator[list[int]]:
    """Distinct experts of every router call that routes one token per row, that is, of decode steps."""
    counts: list[int] = []

    def count(module: Any, inputs: Any, output: Any) -> None:
        indices = output[2]
        if indices.shape[0] == batch:
            counts.append(len(indices.unique()))

    blocks = families.find(model).moe(model)
    hooks = [block.gate.register_forward_hook(count) for _, block in blocks]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def expected_experts(model: Any, batch: int) -> float | None:
    """Distinct experts a step hits if its tokens choose independently and evenly; None without a mixture."""
    blocks = families.find(model).moe(model)
    if not blocks:
        return None
    config = model.config.get_text_config(decoder=True)
    experts = _expert_weights(blocks[0][1])[0].shape[0]
    return float(experts * (1 - (1 - config.num_experts_per_tok / experts) ** batch))


def _expert_weights(block: Any) -> list[Any]:
    """[E, ...] weights of a mixture's routed experts, packed ones in place of the parameters that they replace."""
    packed = [value for value in vars(block.experts).values() if isinstance(value, Int4Weight)]
    return packed + [weight for weight in block.experts.parameters() if weight.numel()]


def step_bytes(model: Any, batch: int, context: float, kv_bytes: float, experts: float | None) -> float:
    """Bytes a decode step must read: weights it touches, once, and every key and value."""
    family = families.find(model)
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    total = float(sum(p.nbytes for p in model.parameters()) + packed_bytes(model))
    total -= 0 if tied else embedding.numel() * embedding.element_size()
    for _, block in family.moe(model):
        weights = _expert_weights(block)
        size = sum(weight.nbytes for weight in weights)
        total -= size * (1 - (experts or 0.0) / weights[0].shape[0])
    return total + kv_bytes * len(family.layers(model)) * batch * context

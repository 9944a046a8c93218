"""Run decoding steps as a straight line of ops, in a loop of our own, and every RMSNorm as one.

On a paged cache `generate` reads the model as tensors and runs its steps without any module (`generation/`). A layer
called on its own, by another loop, does the same for itself. Anything else (gradients, hooks or adapters on a
projection, another cache, attention weights wanted) takes transformers' own code, and the report counts why.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..families.base import Family
from ..generation.batched import generate_batch
from ..generation.decode import Loop, generate
from ..generation.lines import Layer, Mixture, Watched, is_packed, read_layer
from ..generation.reach import Reach
from ..generation.step import Place, layer_step
from ..journal import forward_slot
from ..ops.choice import why_not_triton
from ..ops.rms_norm import rms_norm
from ..plan import Context, Edit, Note, Skip
from ..versions import cache_argument
from ..watch import count, needs_gradients, why_foreign
from .attention import why_expand, why_gather, why_stock
from .base import Pass


def norm_forward(norm: Any, hidden_states: torch.Tensor, counters: Counter[str]) -> torch.Tensor:
    """hidden_states [..., D] -> the same shape, normalised in fp32 and scaled by the norm's weight."""
    if torch.compiler.is_compiling() or needs_gradients(norm, hidden_states):
        count(counters, "layers: stock norm (gradients)")
        return type(norm).forward(norm, hidden_states)
    count(counters, "layers: fused norm")
    return rms_norm(hidden_states, norm.weight, norm.variance_epsilon)


class LayerStep:
    """The decoding step of single layers, inside the decoder's own forward.

    One object serves all layers of a model; what it remembers of a step, the layers of that step share.
    """

    def __init__(self, family: Family, counters: Counter[str]) -> None:
        self.family, self.counters, self.cache_name = family, counters, cache_argument()
        self._rotation: tuple[Any, tuple[Any, Any, Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_rotation": None}

    def rotation(self, attention: Any, embeddings: Any) -> tuple[Any, Any, Any]:
        """(layout, cos, sin) of this step's positions."""
        known = self._rotation
        if known is None or known[0] is not embeddings:
            known = self._rotation = (embeddings, self.family.rotation(attention, embeddings))
        return known[1]

    def __call__(
        self,
        line: Layer,
        attention: Any,
        hidden_states: torch.Tensor,
        cache: Any,
        mask: torch.Tensor | None,
        embeddings: Any,
    ) -> torch.Tensor:
        """hidden_states [B, S, D] -> the layer's output, the same shape. The new tokens are added to `cache`."""
        batch, num_queries, size = hidden_states.shape
        pages, slots = cache.layers[attention.layer_idx].append(batch, num_queries)
        reach = Reach.of_pages(pages, num_queries, pages.narrow(mask))
        place = Place((batch, num_queries), self.rotation(attention, embeddings), slots, reach)
        out = layer_step(line, hidden_states.reshape(-1, size), pages, place).view(hidden_states.shape)
        pages.settle(num_queries)
        return out


def layer_forward(layer: Any, hidden_states: torch.Tensor, *args: Any, step: LayerStep, **kwargs: Any) -> torch.Tensor:
    """hidden_states [B, S, D] -> the layer's output, the same shape."""
    reason = "positional arguments" if args else why_not_step(layer, hidden_states, step, kwargs)
    if reason is None:
        try:
            line = read_layer(layer, hidden_states, step.family, modules=True)
        except Watched as watched:
            reason = str(watched)
    if reason is not None:
        count(step.counters, f"layers: stock layer ({reason})")
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    count(step.counters, "layers: fused step")
    count(step.counters, "attention: absorbed" if step.family.attention == "mla" else "attention: paged")
    if is_packed(line):
        count(step.counters, "mixed_precision: packed layers")
    if isinstance(line.mlp, Mixture):
        count(step.counters, "experts: fused router")
        count(step.counters, "experts: fused")
    mask, embeddings = kwargs.get("attention_mask"), kwargs["position_embeddings"]
    return step(line, layer.self_attn, hidden_states, kwargs[step.cache_name], mask, embeddings)


def why_not_step(layer: Any, hidden_states: torch.Tensor, step: LayerStep, kwargs: dict[str, Any]) -> str | None:
    """Why this call takes the layer's own forward, or None if the straight line computes the same."""
    attention = layer.self_attn
    if needs_gradients(layer, hidden_states):
        return "gradients"
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(hidden_states.device.type):
        return "torch.compile or autocast"
    layers = getattr(kwargs.get(step.cache_name), "layers", ())
    held: Any = layers[attention.layer_idx] if attention.layer_idx < len(layers) else None
    if not hasattr(held, "append"):
        return "not a paged cache"
    if held.length == 0:
        return "prefill"
    if (held.num_heads, held.key_dim, held.value_dim) != entry_sizes(attention, step.family):
        return "the cache holds entries of another shape"
    if held.device != hidden_states.device or held.dtype != hidden_states.dtype:
        return "the cache is elsewhere or of another dtype"
    if hidden_states.dtype == torch.float64:
        return "float64"
    num_queries = hidden_states.shape[1]
    num_keys = held.get_mask_sizes(num_queries)[0]
    dropout = attention.attention_dropout if attention.training else 0.0
    seam, mask = getattr(attention, "_accel_attention", None), kwargs.get("attention_mask")
    if seam is None or why_foreign(attention) is not None:
        return "the attention's forward is not transformers' own"
    if reason := why_stock(attention, seam, hidden_states[:, None], num_keys, mask, dropout, kwargs):
        return reason
    if num_queries == 0:
        return "no tokens"
    if step.family.attention == "mla":
        return why_expand(attention, hidden_states, num_queries, num_keys)
    return why_gather(hidden_states[:, None])


def entry_sizes(attention: Any, family: Family) -> tuple[int, int, int]:
    """(heads, key size, value size) of what this attention stores for a token."""
    if family.attention == "mla":
        return 1, attention.kv_lora_rank, attention.qk_rope_head_dim
    heads = attention.config.num_key_value_heads
    return heads, attention.head_dim, attention.head_dim


class _Generate(partial):  # type: ignore[type-arg]
    """Our `generate` or `generate_batch` of a model, with the signature that callers and libraries look at."""

    @property
    def __signature__(self) -> inspect.Signature:
        model, _ = self.args
        return inspect.signature(partial(getattr(type(model), self.func.__name__), model))


@dataclass(frozen=True)
class FusedLayers(Pass):
    """Decoding steps in a straight line, and fused RMSNorm."""

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        for where, norm in family.norms(model):
            if (reason := why_foreign(norm)) is not None:
                yield Skip(where, reason)
                continue
            build = partial(partial, norm_forward, norm, counters=context.counters)
            yield Edit(norm, forward_slot(norm), build, where)
        why = why_not_triton(next(model.parameters()).device)
        yield Note(f"norms: {'one Triton kernel' if why is None else f'one torch call ({why})'}")
        if family.extra_cache:
            yield Note(f"decoding steps of {family.model_type} keep the layer's own forward")
        elif not (context.has("attention") and context.has("kv_cache")):
            yield Note("decoding steps keep the layer's own forward: that needs the attention and kv_cache passes")
        else:
            yield from self._steps(model, family, context)

    def _steps(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        step = LayerStep(family, context.counters)
        for i, layer in enumerate(family.layers(model)):
            if (reason := why_foreign(layer)) is not None:
                yield Skip(f"layers.{i}", reason)
                continue
            yield Edit(layer, forward_slot(layer), partial(partial, layer_forward, layer, step=step), f"layers.{i}")
        if not hasattr(model, "_prepare_cache_for_generation"):
            return
        loop = Loop(family, context.counters)
        yield Edit(model, "generate", partial(_Generate, generate, model, loop), "generate")
        if hasattr(model, "generate_batch"):
            yield Edit(model, "generate_batch", partial(_Generate, generate_batch, model, loop), "generate")


PASS = FusedLayers

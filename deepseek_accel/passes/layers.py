"""Run a decoding step of a layer as a straight line of ops, and every RMSNorm as one.

For latent attention on a paged cache the layer's `forward` becomes: norm, projections, one op that norms the latent,
rotates and writes the page, absorb, attend, project, output, residual and norm in one, mixture. Anything else
(prefill, gradients, hooks or adapters on a projection, another cache, attention weights wanted) takes the layer's own
forward, and the report counts why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..families.base import Family
from ..journal import forward_slot
from ..ops.choice import why_not_triton
from ..ops.experts import mixture
from ..ops.latent_write import latent_write
from ..ops.rms_norm import add_rms_norm, rms_norm
from ..plan import Context, Edit, Note, Skip
from ..versions import cache_argument
from .attention import absorbed_weights, attend_pages, is_plain, why_expand, why_stock
from .base import Pass, count, is_called, is_silu, needs_gradients, why_foreign
from .experts import choose_experts, experts_forward, gate_forward, why_stock_experts


def norm_forward(norm: Any, hidden_states: torch.Tensor, counters: Counter[str]) -> torch.Tensor:
    """hidden_states [..., D] -> the same shape, normalised in fp32 and scaled by the norm's weight."""
    if torch.compiler.is_compiling() or needs_gradients(norm, hidden_states):
        count(counters, "layers: stock norm (gradients)")
        return type(norm).forward(norm, hidden_states)
    count(counters, "layers: fused norm")
    return rms_norm(hidden_states, norm.weight, norm.variance_epsilon)


class LatentStep:
    """The decoding step of a layer with multi-head latent attention (arXiv 2405.04434, section 2.1).

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
        self, layer: Any, hidden_states: torch.Tensor, cache: Any, mask: torch.Tensor | None, embeddings: Any
    ) -> torch.Tensor:
        """hidden_states [B, S, D] -> the layer's output, the same shape. The new tokens are added to `cache`."""
        attention = layer.self_attn
        parts = attention._modules
        batch, num_queries, size = hidden_states.shape
        norm = layer.input_layernorm
        normed = rms_norm(hidden_states, norm.weight, norm.variance_epsilon)
        query = project_query(parts, normed).view(batch, num_queries, -1, attention.qk_head_dim)
        kv_a = parts["kv_a_proj_with_mqa"]
        compressed = F.linear(normed, kv_a.weight, kv_a.bias)
        layout, cos, sin = self.rotation(attention, embeddings)
        pages, slots = cache.layers[attention.layer_idx].append(batch, num_queries)
        norm = parts["kv_a_layernorm"]
        w_uk, w_uv = absorbed_weights(attention)
        q_latent, q_rope = latent_write(
            query, compressed, norm.weight, norm.variance_epsilon, cos, sin, layout, w_uk, pages.storage, slots
        )
        out = attend_pages(q_latent, q_rope, pages, attention.scaling, mask, w_uv)
        output = parts["o_proj"]
        out = F.linear(out.reshape(batch, num_queries, -1), output.weight, output.bias)
        norm = layer.post_attention_layernorm
        normed, hidden_states = add_rms_norm(out, hidden_states, norm.weight, norm.variance_epsilon)
        mlp = layer.mlp
        if (gate := mlp._modules.get("gate")) is None or not fuses_mixture(mlp, normed):
            return hidden_states + mlp(normed)
        count(self.counters, "experts: fused router")
        count(self.counters, "experts: fused")
        flat = normed.view(-1, size)
        _, weights, indices = choose_experts(gate, flat, self.family)
        experts, shared = mlp.experts, mlp.shared_experts._modules
        out = mixture(
            flat,
            indices,
            weights,
            experts.gate_up_proj,
            experts.down_proj,
            (shared["gate_proj"].weight, shared["up_proj"].weight, shared["down_proj"].weight),
            hidden_states.view(-1, size),
        )
        return out.view(batch, num_queries, size)


def layer_forward(layer: Any, hidden_states: torch.Tensor, *args: Any, step: LatentStep, **kwargs: Any) -> torch.Tensor:
    """hidden_states [B, S, D] -> the layer's output, the same shape."""
    reason = "positional arguments" if args else why_not_step(layer, hidden_states, step.cache_name, kwargs)
    if reason is not None:
        count(step.counters, f"layers: stock layer ({reason})")
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    count(step.counters, "layers: fused step")
    count(step.counters, "attention: absorbed")
    mask, embeddings = kwargs.get("attention_mask"), kwargs["position_embeddings"]
    return step(layer, hidden_states, kwargs[step.cache_name], mask, embeddings)


def project_query(parts: Any, normed: torch.Tensor) -> torch.Tensor:
    """normed [B, S, D] -> queries [B, S, H (N + R)], through the low-rank pair of projections if the model has one."""
    if (direct := parts.get("q_proj")) is not None:
        return F.linear(normed, direct.weight, direct.bias)
    down, norm, up = parts["q_a_proj"], parts["q_a_layernorm"], parts["q_b_proj"]
    low = rms_norm(F.linear(normed, down.weight, down.bias), norm.weight, norm.variance_epsilon)
    return F.linear(low, up.weight, up.bias)


def why_not_step(layer: Any, hidden_states: torch.Tensor, cache_name: str, kwargs: dict[str, Any]) -> str | None:
    """Why this call takes the layer's own forward, or None if the straight line computes the same."""
    attention = layer.self_attn
    if needs_gradients(layer, hidden_states):
        return "gradients"
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(hidden_states.device.type):
        return "torch.compile or autocast"
    layers = getattr(kwargs.get(cache_name), "layers", ())
    held: Any = layers[attention.layer_idx] if attention.layer_idx < len(layers) else None
    if not hasattr(held, "append"):
        return "not a paged cache"
    if held.length == 0:
        return "prefill"
    if (held.key_dim, held.value_dim) != (attention.kv_lora_rank, attention.qk_rope_head_dim):
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
    if num_queries == 0 or (reason := why_expand(attention, hidden_states, num_queries, num_keys)):
        return reason or "no tokens"
    return why_watched(layer, hidden_states)


LINEARS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")


def why_watched(layer: Any, like: torch.Tensor) -> str | None:
    """Why the modules inside the layer must be called one by one, or None if nobody would notice."""
    parts = layer.self_attn._modules
    for name in LINEARS:
        if (linear := parts.get(name)) is not None and not is_plain(linear, like):
            return "a projection is wrapped, quantized, hooked or elsewhere"
    around = layer._modules
    norms = (parts.get("q_a_layernorm"), parts["kv_a_layernorm"], around["input_layernorm"])
    for norm in (*norms, around["post_attention_layernorm"]):
        if norm is not None and (not is_ours(norm) or is_called(norm)):
            return "a norm is hooked, or its forward is not ours"
    return "hooks" if is_called(layer.self_attn) else None


def is_ours(norm: nn.Module) -> bool:
    """Whether the norm still runs `norm_forward`."""
    return getattr(vars(norm).get("forward"), "func", None) is norm_forward


def fuses_mixture(block: Any, like: torch.Tensor) -> bool:
    """Whether the whole mixture may run as one op: gate and experts run ours, and nobody watches what is inside."""
    parts = block._modules
    gate, experts, shared = parts["gate"], parts["experts"], parts.get("shared_experts")
    gate_call, experts_call = vars(gate).get("forward"), vars(experts).get("forward")
    if getattr(gate_call, "func", None) is not gate_forward or shared is None:
        return False
    if getattr(experts_call, "func", None) is not experts_forward or why_foreign(block) or why_foreign(shared):
        return False
    if why_stock_experts(experts, experts_call.keywords["implementation"], like) is not None:
        return False
    if gate._forward_hooks or any(map(is_called, (block, gate, experts, shared))):
        return False  # the hooks that record router logits count here, since they are not told apart by request
    inside = shared._modules
    if inside.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"} or not is_silu(inside["act_fn"]):
        return False
    linears: list[Any] = [inside[name] for name in ("gate_proj", "up_proj", "down_proj")]
    return all(is_plain(linear, like) and linear.bias is None for linear in linears)


@dataclass(frozen=True)
class FusedLayers(Pass):
    """The decoding step of a layer in a straight line, for latent attention; fused RMSNorm for every family."""

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        for where, norm in family.norms(model):
            if (reason := why_foreign(norm)) is not None:
                yield Skip(where, reason)
                continue
            build = partial(partial, norm_forward, norm, counters=context.counters)
            yield Edit(norm, forward_slot(norm), build, where)
        why = why_not_triton(next(model.parameters()).device)
        yield Note(f"norms: {'one Triton kernel' if why is None else f'one torch call ({why})'}")
        if family.attention != "mla" or family.extra_cache:
            yield Note(f"decoding steps of {family.model_type} keep the layer's own forward")
        elif not (context.has("attention") and context.has("kv_cache")):
            yield Note("decoding steps keep the layer's own forward: that needs the attention and kv_cache passes")
        else:
            step = LatentStep(family, context.counters)
            for i, layer in enumerate(family.layers(model)):
                if (reason := why_foreign(layer)) is not None:
                    yield Skip(f"layers.{i}", reason)
                    continue
                yield Edit(layer, forward_slot(layer), partial(partial, layer_forward, layer, step=step), f"layers.{i}")


PASS = FusedLayers

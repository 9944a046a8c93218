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
from ..ops.latent_write import latent_write
from ..ops.mla_attention import absorb_query, project_values
from ..ops.rms_norm import add_rms_norm, rms_norm
from ..plan import Context, Edit, Note, Skip
from ..versions import cache_argument
from .attention import absorbed_weights, attend_pages, has_listeners, is_plain, why_expand, why_stock
from .base import Pass, needs_gradients


def norm_forward(norm: Any, hidden_states: torch.Tensor, counters: Counter[str]) -> torch.Tensor:
    """hidden_states [..., D] -> the same shape, normalised in fp32 and scaled by the norm's weight."""
    if needs_gradients(norm, hidden_states):
        counters["layers: stock norm (gradients)"] += 1
        return type(norm).forward(norm, hidden_states)
    counters["layers: fused norm"] += 1
    return rms_norm(hidden_states, norm.weight, norm.variance_epsilon)


def layer_forward(
    layer: Any,
    hidden_states: torch.Tensor,
    *args: Any,
    family: Family,
    cache_name: str,
    counters: Counter[str],
    **kwargs: Any,
) -> torch.Tensor:
    """hidden_states [B, S, D] -> the layer's output, the same shape."""
    reason = "positional arguments" if args else why_not_fused(layer, hidden_states, cache_name, kwargs)
    if reason is not None:
        counters[f"layers: stock layer ({reason})"] += 1
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    counters["layers: fused step"] += 1
    counters["attention: absorbed"] += 1
    return latent_step(
        layer, hidden_states, kwargs[cache_name], kwargs.get("attention_mask"), kwargs["position_embeddings"], family
    )


def latent_step(
    layer: Any, hidden_states: torch.Tensor, cache: Any, mask: torch.Tensor | None, rotation: Any, family: Family
) -> torch.Tensor:
    """One decoding step of a layer with multi-head latent attention (arXiv 2405.04434, section 2.1)."""
    attention = layer.self_attn
    batch, num_queries, _ = hidden_states.shape
    normed = rms_norm(hidden_states, layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon)
    query = project_query(attention, normed).view(batch, num_queries, -1, attention.qk_head_dim)
    compressed = F.linear(normed, attention.kv_a_proj_with_mqa.weight, attention.kv_a_proj_with_mqa.bias)
    layout, cos, sin = family.rotation(attention, rotation)
    pages, slots = cache.layers[attention.layer_idx].append(batch, num_queries)
    norm = attention.kv_a_layernorm
    q_rope = latent_write(query, compressed, norm.weight, norm.variance_epsilon, cos, sin, layout, pages.storage, slots)
    w_uk, w_uv = absorbed_weights(attention)
    q_latent = absorb_query(query[..., : attention.qk_nope_head_dim].transpose(1, 2), w_uk)
    out = project_values(attend_pages(q_latent, q_rope, pages, attention.scaling, mask), w_uv)
    out = F.linear(out.reshape(batch, num_queries, -1), attention.o_proj.weight, attention.o_proj.bias)
    norm = layer.post_attention_layernorm
    normed, hidden_states = add_rms_norm(out, hidden_states, norm.weight, norm.variance_epsilon)
    return hidden_states + layer.mlp(normed)


def project_query(attention: Any, normed: torch.Tensor) -> torch.Tensor:
    """normed [B, S, D] -> queries [B, S, H (N + R)], through the low-rank pair of projections if the model has one."""
    if attention.q_lora_rank is None:
        return F.linear(normed, attention.q_proj.weight)
    down, norm, up = attention.q_a_proj, attention.q_a_layernorm, attention.q_b_proj
    return F.linear(rms_norm(F.linear(normed, down.weight, down.bias), norm.weight, norm.variance_epsilon), up.weight)


def why_not_fused(layer: Any, hidden_states: torch.Tensor, cache_name: str, kwargs: dict[str, Any]) -> str | None:
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
    if held.length == 0 or held.device != hidden_states.device or held.dtype != hidden_states.dtype:
        return "prefill" if held.length == 0 else "the cache is elsewhere or of another dtype"
    num_queries = hidden_states.shape[1]
    num_keys = held.get_mask_sizes(num_queries)[0]
    dropout = attention.attention_dropout if attention.training else 0.0
    seam, mask = attention._accel_attention, kwargs.get("attention_mask")
    if reason := why_stock(attention, seam, hidden_states[:, None], num_keys, mask, dropout, kwargs):
        return reason
    if num_queries == 0 or (reason := why_expand(attention, hidden_states, num_queries, num_keys)):
        return reason or "no tokens"
    for linear in linears(attention):
        if not is_plain(linear, hidden_states):
            return "a projection is wrapped, quantized, hooked or elsewhere"
    if has_hooks(attention) or any(has_hooks(norm) for norm in norms(layer)):
        return "hooks"
    return None


def linears(attention: Any) -> tuple[Any, ...]:
    query = (attention.q_proj,) if attention.q_lora_rank is None else (attention.q_a_proj, attention.q_b_proj)
    return (*query, attention.kv_a_proj_with_mqa, attention.o_proj)


def norms(layer: Any) -> tuple[Any, ...]:
    attention = layer.self_attn
    query = () if attention.q_lora_rank is None else (attention.q_a_layernorm,)
    return (layer.input_layernorm, layer.post_attention_layernorm, attention.kv_a_layernorm, *query)


def has_hooks(module: nn.Module) -> bool:
    """Whether someone listens to this module, so that it must be called."""
    return "_hf_hook" in vars(module) or bool(module._forward_pre_hooks) or has_listeners(module)


@dataclass(frozen=True)
class FusedLayers(Pass):
    """The decoding step of a layer in a straight line, for latent attention; fused RMSNorm for every family."""

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        for where, norm in family.norms(model):
            build = partial(partial, norm_forward, norm, counters=context.counters)
            yield Edit(norm, forward_slot(norm), build, where)
        why = why_not_triton(next(model.parameters()).device)
        yield Note(f"norms: {'one Triton kernel' if why is None else f'one torch call ({why})'}")
        if family.attention != "mla" or family.extra_cache:
            yield Note(f"decoding steps of {family.model_type} keep the layer's own forward")
        elif not (context.has("attention") and context.has("kv_cache")):
            yield Note("decoding steps keep the layer's own forward: that needs the attention and kv_cache passes")
        else:
            for i, layer in enumerate(family.layers(model)):
                build = partial(
                    partial,
                    layer_forward,
                    layer,
                    family=family,
                    cache_name=cache_argument(),
                    counters=context.counters,
                )
                yield Edit(layer, forward_slot(layer), build, f"layers.{i}")


PASS = FusedLayers

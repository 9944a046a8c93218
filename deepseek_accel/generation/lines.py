"""A model as its tensors and numbers, so that a step can run without its modules.

Reading fails with `Watched` where somebody would notice that a module is not called: hooks, adapters, quantized or
replaced parts. A line holds the model's own tensors, never copies: what is loaded into them is seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from ..families.base import Family, RouterRule
from ..journal import forward_slot
from ..ops.int4 import Int4Weight
from ..ops.projection import Weight
from ..watch import is_called, is_plain, is_silu, stands_in, why_foreign, why_replaced

Norm = tuple[torch.Tensor, float]


class Watched(Exception):
    """The reason why a module must be called."""


class Dense(NamedTuple):
    """down(silu(gate x) * (up x)): gate and up [I, D], down [D, I]."""

    gate: Weight
    up: Weight
    down: Weight


class Mixture(NamedTuple):
    """Routed experts gate_up [E, 2I, D] and down [E, D, I], and shared ones (gate, up, down) as one MLP, or None."""

    router: torch.Tensor
    bias: torch.Tensor | None
    rule: RouterRule
    gate_up: Weight
    down: Weight
    shared: tuple[Weight, Weight, Weight] | None


class LatentAttention(NamedTuple):
    """Multi-head latent attention. inputs: (q or q_a, kv_a), what reads the normalised hidden state."""

    inputs: tuple[Weight, ...]
    biases: tuple[torch.Tensor | None, ...]
    query_norm: Norm | None
    query_up: tuple[Weight, torch.Tensor | None] | None
    latent_norm: Norm
    w_kv: torch.Tensor
    """kv_b_proj [H (N + V), C]."""
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    output: tuple[Weight, torch.Tensor | None]
    scale: float
    head_dim: int
    """N + R."""


class GroupedAttention(NamedTuple):
    """Grouped-query attention. inputs: (q, k, v)."""

    inputs: tuple[Weight, ...]
    biases: tuple[torch.Tensor | None, ...]
    output: tuple[Weight, torch.Tensor | None]
    scale: float
    head_dim: int
    num_kv_heads: int


class Layer(NamedTuple):
    """One decoder layer. `mlp` may stay a module where only the caller's way of running it allows that."""

    norm: Norm
    attention: LatentAttention | GroupedAttention
    mlp_norm: Norm
    mlp: Dense | Mixture | nn.Module


def read_norm(norm: Any, like: torch.Tensor) -> Norm:
    if why_replaced(norm) or is_called(norm):
        raise Watched("a norm is hooked, or its forward is not ours")
    if norm.weight.device != like.device:
        raise Watched("a norm is elsewhere")
    return norm.weight, norm.variance_epsilon


def packed_weight(module: Any, name: str = "weight") -> Int4Weight | None:
    """What the mixed_precision pass has put in place of `module.<name>`, or None."""
    packed = vars(module).get(packed_name(name))
    return packed if isinstance(packed, Int4Weight) else None


def packed_name(name: str) -> str:
    """The attribute that holds the packed form of a module's parameter."""
    return f"_accel_{name}"


def read_linear(linear: Any, like: torch.Tensor) -> tuple[Weight, torch.Tensor | None]:
    """(weight, bias) of a linear layer of like's dtype and device: plain, or packed in four bits."""
    if (packed := packed_weight(linear)) is not None:
        if is_called(linear) or not stands_in(vars(linear).get(forward_slot(linear))):
            raise Watched("a projection is hooked")
        if packed.dtype != like.dtype or packed.device != like.device:
            raise Watched("a packed projection is elsewhere, or of another dtype")
        return packed, linear._parameters["bias"]
    if not is_plain(linear, like):
        raise Watched("a projection is wrapped, quantized, hooked or elsewhere")
    return linear._parameters["weight"], linear._parameters["bias"]


def read_latent_attention(attention: Any, like: torch.Tensor) -> LatentAttention:
    parts = attention._modules
    inputs = [read_linear(parts["q_proj" if "q_proj" in parts else "q_a_proj"], like)]
    inputs.append(read_linear(parts["kv_a_proj_with_mqa"], like))
    low_rank = "q_proj" not in parts
    w_kv, bias = read_linear(parts["kv_b_proj"], like)
    if bias is not None or not isinstance(w_kv, torch.Tensor):
        raise Watched("kv_b_proj has a bias, or is packed")
    w_uk, w_uv = absorbed_weights(attention)
    return LatentAttention(
        tuple(weight for weight, _ in inputs),
        tuple(bias for _, bias in inputs),
        read_norm(parts["q_a_layernorm"], like) if low_rank else None,
        read_linear(parts["q_b_proj"], like) if low_rank else None,
        read_norm(parts["kv_a_layernorm"], like),
        w_kv,
        w_uk,
        w_uv,
        read_linear(parts["o_proj"], like),
        attention.scaling,
        attention.qk_head_dim,
    )


def read_grouped_attention(attention: Any, like: torch.Tensor) -> GroupedAttention:
    parts = attention._modules
    inputs = [read_linear(parts[name], like) for name in ("q_proj", "k_proj", "v_proj")]
    return GroupedAttention(
        tuple(weight for weight, _ in inputs),
        tuple(bias for _, bias in inputs),
        read_linear(parts["o_proj"], like),
        attention.scaling,
        attention.head_dim,
        inputs[1][0].shape[0] // attention.head_dim,
    )


def absorbed_weights(attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """w_uk [H, N, C] and w_uv [H, V, C], views of kv_b_proj, whose rows are N for keys then V for values, by head."""
    n, v = attention.qk_nope_head_dim, attention.v_head_dim
    w_uk, w_uv = attention.kv_b_proj.weight.view(-1, n + v, attention.kv_lora_rank).split([n, v], dim=1)
    return w_uk, w_uv


def read_dense(mlp: Any, like: torch.Tensor) -> Dense:
    """A gated MLP without biases."""
    parts = mlp._modules
    if parts.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"} or why_foreign(mlp) or is_called(mlp):
        raise Watched("an MLP is hooked, or not transformers' own")
    if not is_silu(parts["act_fn"]):
        raise Watched("an activation is not plain SiLU")
    linears = [read_linear(parts[name], like) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(bias is not None for _, bias in linears):
        raise Watched("an MLP has biases")
    return Dense(*(weight for weight, _ in linears))


def read_mixture(block: Any, like: torch.Tensor, family: Family) -> Mixture:
    parts = block._modules
    gate, experts, shared = parts["gate"], parts["experts"], parts.get("shared_experts")
    experts_call = vars(experts).get(forward_slot(experts))
    if not (stands_in(vars(gate).get(forward_slot(gate))) and stands_in(experts_call)) or why_foreign(block):
        raise Watched("router or experts are not ours")
    if reason := why_stock_experts(experts, experts_call.keywords["implementation"], like):  # type: ignore[union-attr]
        raise Watched(f"experts: {reason}")
    # the hooks that record router logits count too, since they are not told apart by request
    if gate._forward_hooks or is_called(block) or is_called(gate) or is_called(experts):
        raise Watched("the mixture is hooked")
    if parts.keys() - {"gate", "experts", "shared_experts"}:
        raise Watched("the mixture has parts of its own")
    if {weight.device for weight in (gate.weight, experts.gate_up_proj, experts.down_proj)} != {like.device}:
        raise Watched("router or experts are elsewhere")
    bias = getattr(gate, "e_score_correction_bias", None)
    weights = tuple(read_dense(shared, like)) if shared is not None else None
    packed = packed_weight(experts, "gate_up_proj")
    if packed is not None and (packed.dtype != like.dtype or packed.device != like.device):
        raise Watched("packed experts are elsewhere, or of another dtype")
    return Mixture(
        gate.weight,
        bias,
        family.router(gate),
        packed or experts.gate_up_proj,
        packed_weight(experts, "down_proj") or experts.down_proj,
        weights,  # type: ignore[arg-type]
    )


def why_stock_experts(experts: Any, implementation: str | None, *inputs: torch.Tensor) -> str | None:
    """Why this call runs transformers' own experts, or None. `implementation` is what the config said at first."""
    if packed_weight(experts, "gate_up_proj") is not None:
        return None  # transformers' own have no weights left to run on
    if torch.compiler.is_compiling():
        return "torch.compile"
    if torch.is_grad_enabled() and (
        any(x.requires_grad for x in inputs) or any(p.requires_grad for p in experts.parameters())
    ):
        return "gradients"
    if experts.gate_up_proj.stride(-1) != 1 or experts.down_proj.stride(-1) != 1:
        return "weights stored transposed"
    if inputs[0].dtype != experts.gate_up_proj.dtype:
        return "mixed dtypes"
    if not is_silu(experts.act_fn) or "_apply_gate" in vars(experts):
        return "its activation is not plain SiLU"
    chosen = experts.config._experts_implementation
    # `generate` itself turns grouped_mm into batched_mm for decoding on a GPU; any other change is the user's
    if chosen != implementation and (implementation, chosen) != ("grouped_mm", "batched_mm"):
        return f"experts implementation {chosen} was chosen"
    return None


def is_packed(layer: Layer) -> bool:
    """Whether some of a layer's weights are packed in four bits."""
    return any(isinstance(value, Int4Weight) for part in (layer.attention, layer.mlp) for value in _parts(part))


def _parts(value: Any) -> Any:
    if isinstance(value, tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


def read_layer(layer: Any, like: torch.Tensor, family: Family, *, modules: bool = False) -> Layer:
    """One decoder layer. modules: leave an MLP that cannot be read as it is, to be called."""
    around = layer._modules
    attention = around["self_attn"]
    if is_called(attention):
        raise Watched("hooks")
    read = read_latent_attention if family.attention == "mla" else read_grouped_attention
    mlp: Any = around["mlp"]
    try:
        line = read_mixture(mlp, like, family) if "gate" in mlp._modules else read_dense(mlp, like)
    except Watched:
        if not modules:
            raise
        line = mlp
    return Layer(
        read_norm(around["input_layernorm"], like),
        read(attention, like),
        read_norm(around["post_attention_layernorm"], like),
        line,
    )


class Model(NamedTuple):
    """A whole causal language model."""

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: Norm
    head: tuple[Weight, torch.Tensor | None]
    rotary: Any
    """The model's own module: (hidden, position ids) -> position embeddings."""

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def identity(self) -> tuple[Any, ...]:
        """Changes whenever a tensor lies elsewhere or a number differs: what is captured in a graph is then stale."""
        return tuple(_leaves(self))


def _leaves(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
    elif isinstance(value, Int4Weight):
        yield value.shape, value.group_size
        yield from _leaves(value.tensors())
    elif isinstance(value, tuple):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, nn.Module):  # the rotary embedding, whose frequencies and scaling a graph keeps too
        yield id(value), getattr(value, "attention_scaling", None)
        yield from _leaves(tuple(value.buffers()))
    else:
        yield value


# Rotary embeddings of these kinds ask the host how long the longest row is, and change with it.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def read_model(model: Any, family: Family) -> Model:
    """The whole model, or `Watched`."""
    decoder: Any = family.decoder(model)
    embedding, rotary = decoder._modules.get("embed_tokens"), decoder._modules.get("rotary_emb")
    head = model._modules.get("lm_head")
    for module in (model, decoder, *decoder.layers):
        if why_replaced(module) or is_called(module):
            raise Watched(f"{type(module).__name__} is hooked, or its forward is not ours")
    if type(embedding) is not nn.Embedding or is_called(embedding) or why_foreign(embedding):
        raise Watched("the embedding is hooked or replaced")
    if embedding.max_norm is not None or embedding.weight.is_meta:
        raise Watched("the embedding is offloaded, or rescales its rows")
    if rotary is None or is_called(rotary) or why_foreign(rotary):
        raise Watched("the rotary embedding is hooked or replaced")
    if head is None:
        raise Watched("it has no lm_head")
    like = embedding.weight
    if like.dtype == torch.float64:
        raise Watched("float64")
    layers = []
    for layer in family.layers(model):
        attention: Any = layer.self_attn
        seam = getattr(attention, "_accel_attention", None)
        if seam is None or why_foreign(attention) is not None:
            raise Watched("the attention's forward is not transformers' own")
        implementation = seam.stock_implementation
        if implementation not in ("eager", "sdpa") and not implementation.startswith("flash_attention"):
            raise Watched(f"attention implementation {implementation} was chosen")
        if attention.training and attention.attention_dropout:
            raise Watched("dropout")
        if family.sliding_window(attention) is not None:
            raise Watched("sliding windows")
        layers.append(read_layer(layer, like, family))
    return Model(like, tuple(layers), read_norm(decoder.norm, like), read_linear(head, like), rotary)

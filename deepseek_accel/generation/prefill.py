"""The whole prompt through the whole model in a straight line, in pieces whose memory is bounded.

Nothing here calls a module's `forward` but the embedding and the rotary angles: weights are read where they are. The
caller has made sure that nobody watches or replaces what lies between (hooks, adapters, quantized projections), that
no gradient is wanted, and that all of the model is on one device.

Letters: B rows, S new tokens of a piece, T keys, H heads, N nope, R rope, C latent rank, V value, D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..families.base import Family
from ..ops.experts import fused_experts, mixture
from ..ops.latent_write import rotate
from ..ops.prefill_attention import Part, merge, prefill_attention
from ..ops.rms_norm import add_rms_norm, rms_norm
from ..ops.router import route

ACTIVATION_BYTES = 3 << 29  # 1.5 GiB
"""What a prefill may hold at a time besides weights, cache and what grows with the whole prompt (ids, angles)."""
MIN_TOKENS = 256
"""A piece is never smaller, whatever it takes: below, reading the weights costs more than computing."""


@dataclass(frozen=True)
class View:
    """A model and its family. `layers` are read once."""

    model: Any
    family: Family

    @functools.cached_property
    def decoder(self) -> Any:
        return self.family.decoder(self.model)

    @functools.cached_property
    def layers(self) -> list[Any]:
        return self.family.layers(self.model)


class Piece(NamedTuple):
    """Some rows' tokens that run through all layers together."""

    rows: slice
    tokens: slice
    """Counted from the first new token."""


class Span(NamedTuple):
    """Where a piece lies in the cache, and what its layers share."""

    rows: slice
    first: int
    """Tokens before the piece, in every row."""
    last: int
    """Tokens up to the piece's end."""
    slots: Tensor | slice
    """Where the piece's entries go in the flat pages: [rows * S] int64, row by row, or a range."""
    rotation: tuple[Any, Tensor, Tensor]
    """(layout, cos, sin) of the piece, cos and sin [1 or rows, S, R / 2]."""
    starts: Tensor | None
    """[rows] int32, the first token of each row that is no padding."""
    block: int
    """The most tokens, of all rows together, whose keys may be expanded at a time."""


def why_not_prefill(view: View) -> str | None:
    """Why this model's prompts must take another way, or None."""
    if view.family.extra_cache:
        return f"the cache also holds {view.family.extra_cache}"
    if any(view.family.sliding_window(layer.self_attn) is not None for layer in view.layers):
        return "sliding windows"
    return None


@torch.no_grad()
def prefill(
    view: View,
    input_ids: Tensor,
    cache: Any,
    starts: Tensor | None = None,
    position_ids: Tensor | None = None,
    activation_bytes: int = ACTIVATION_BYTES,
) -> Tensor:
    """Add the tokens input_ids [B, S] to `cache`, a `PagedCache`, and return the last one's logits [B, V].

    starts [B] int32 on the model's device: how many tokens at the beginning of each row, counted from the cache's
    first, are padding; None for none. position_ids [1 or B, S], or None to count on from the cache's length.
    activation_bytes bounds what is held at a time, see `tokens_per_piece`.

    Hidden states of padding stay finite, what the cache holds for it is never read. If this fails, the cache is as it
    was. Raises CacheFullError, and ValueError on a batch of another size than the cache holds.
    """
    batch, count = input_ids.shape
    past = cache.get_seq_length()
    if position_ids is None:
        position_ids = torch.arange(past, past + count, device=input_ids.device)[None]
    try:
        make_room(view, cache, batch, count)
        return _run(view, input_ids, cache, past, starts, position_ids, activation_bytes)
    except BaseException:
        take_back(cache, past)
        raise


def _run(
    view: View,
    input_ids: Tensor,
    cache: Any,
    past: int,
    starts: Tensor | None,
    position_ids: Tensor,
    activation_bytes: int,
) -> Tensor:
    decoder, (batch, count) = view.decoder, input_ids.shape
    embed, norm = decoder.embed_tokens, decoder.norm
    # For all pieces at once, since rotary types that depend on the longest position must see it.
    angles = decoder.rotary_emb(embed.weight[:1, None], position_ids)
    layout, cos, sin = rotation_of(view, angles)
    last_hidden = embed.weight.new_empty(batch, embed.weight.shape[1])
    block = tokens_per_piece(view, activation_bytes)
    for rows, tokens in pieces(batch, count, block):
        at = rows if cos.shape[0] > 1 else slice(None)
        span = Span(
            rows,
            past + tokens.start,
            past + tokens.stop,
            slots_of(cache.layers[0].pool, rows, past + tokens.start, past + tokens.stop),
            (layout, cos[at, tokens], sin[at, tokens]),
            None if starts is None else starts[rows],
            block,
        )
        hidden = F.embedding(input_ids[rows, tokens], embed.weight)
        ends = tokens.stop == count
        for layer in view.layers[:-1]:
            hidden = layer_step(view, layer, hidden, cache, span, activation_bytes)
        hidden = last_layer_step(view, view.layers[-1], hidden, cache, span, ends, activation_bytes)
        if ends:
            last_hidden[rows] = hidden[:, -1]
    head = view.model.lm_head
    return F.linear(rms_norm(last_hidden, norm.weight, norm.variance_epsilon), head.weight, head.bias)


# The cache


def make_room(view: View, cache: Any, batch: int, count: int) -> None:
    """Let every layer of `cache` hold `count` more tokens for each of `batch` rows; nothing is written yet.

    Raises as the layers' `update`, before anything but empty storages has been made.
    """
    weight = view.decoder.embed_tokens.weight
    for layer in view.layers:
        held = cache.layers[layer.self_attn.layer_idx]
        if not held.is_initialized:
            held._pools.check_new(weight.device, held.window, batch, count)
            heads, *sizes = entry_sizes(view, layer.self_attn)
            held.lazy_initialization(*(weight.new_empty(batch, heads, 0, size) for size in sizes))
    for layer in view.layers:
        cache.layers[layer.self_attn.layer_idx].append(batch, count)


def take_back(cache: Any, length: int) -> None:
    """Forget every token from `length` on."""
    if length == 0:
        cache.reset()
    elif (held := max(layer.length for layer in cache.layers)) > length:
        for layer in cache.layers:  # a failure may have left them at different lengths
            layer.length += held - layer.length
        cache.crop(length - held)


def entry_sizes(view: View, attention: Any) -> tuple[int, int, int]:
    """(heads, key size, value size) of what the cache holds for a token."""
    if view.family.attention == "mla":
        return 1, attention.kv_lora_rank, attention.qk_rope_head_dim
    heads = attention.k_proj.weight.shape[0] // attention.head_dim
    return heads, attention.head_dim, attention.head_dim


def slots_of(pool: Any, rows: slice, first: int, last: int) -> Tensor | slice:
    """Where the tokens [first, last) of `rows` lie in the flat pages."""
    if (run := pool.run(first, last)) is not None:
        return run
    positions = torch.arange(first - pool.offset, last - pool.offset, device=pool.device)
    pages = pool.block_table()[rows, positions // pool.page_size].long()
    return (pages * pool.page_size + positions % pool.page_size).flatten()


def write_entries(held: Any, slots: Tensor | slice, *columns: Tensor) -> None:
    """Store the columns [B, S, width] of each token's entry, side by side, in its page."""
    flat = held.pool.storages[held._layer].flatten(0, 1)
    if isinstance(slots, slice):
        begin = 0
        for part in columns:
            flat[slots, begin : begin + part.shape[-1]] = part[0]
            begin += part.shape[-1]
    else:
        flat.index_copy_(0, slots, torch.cat(columns, -1).flatten(0, 1).to(flat.dtype))


def read_entries(held: Any, rows: slice, first: int, last: int) -> Tensor:
    """The entries [rows, last - first, width] of the tokens [first, last): a view where they lie together."""
    pool, flat = held.pool, held.pool.storages[held._layer].flatten(0, 1)
    slots = slots_of(pool, rows, first, last)
    if isinstance(slots, slice):
        return flat[slots].unsqueeze(0)
    return flat[slots].view(-1, last - first, flat.shape[1])


# How a prompt is cut


def tokens_per_piece(view: View, activation_bytes: int) -> int:
    """The most tokens that run through the layers together: what a layer holds of them stays below the bound."""
    layer = view.layers[-1]
    return max(MIN_TOKENS, activation_bytes // attention_bytes_per_token(view, layer.self_attn))


def attention_bytes_per_token(view: View, attention: Any) -> int:
    """Of a token and a layer: the residual, its norm or what replaces it, projections, expanded keys, output.

    The keys count twice, once for a kernel that wants every head's key in one piece. The output counts as fp32 with a
    part beside it, which is what merging holds.
    """
    width = attention.o_proj.weight.element_size()
    size, value_heads = attention.o_proj.weight.shape
    if view.family.attention == "mla":
        heads = attention.kv_b_proj.weight.shape[0] // (attention.qk_nope_head_dim + attention.v_head_dim)
        query, entry = heads * attention.qk_head_dim, attention.kv_lora_rank + attention.qk_rope_head_dim
        expanded = attention.kv_b_proj.weight.shape[0] + query
    else:
        query, entry = attention.q_proj.weight.shape[0], 2 * attention.k_proj.weight.shape[0]
        expanded = 0
    return (3 * size + 2 * query + 2 * entry + expanded + value_heads) * width + 4 * value_heads


def mlp_bytes_per_token(mlp: Any) -> int:
    """Of a token and a layer's MLP or mixture, besides the residual and its norm."""
    gate = getattr(mlp, "gate", None)
    if gate is None:
        return 2 * mlp.gate_proj.weight.shape[0] * mlp.gate_proj.weight.element_size()
    down = mlp.experts.down_proj
    size, intermediate = down.shape[1:]
    top_k, shared = gate.top_k, getattr(mlp, "shared_experts", None)
    always = 0 if shared is None else mlp_bytes_per_token(shared)
    # the router reads the hidden state in fp32; each chosen expert has gate, up and their product, and its output
    return 4 * size + always + (top_k * (3 * intermediate + size) + 2 * size) * down.element_size()


def pieces(batch: int, count: int, block: int) -> Iterator[Piece]:
    """The prompt cut into pieces of at most `block` tokens, all about as large, rows before length.

    As many whole rows as fit run together; a row that does not fit alone is cut, and its keys are complete up to each
    piece when that runs.
    """
    for rows in even_slices(batch, max(1, block // count)):
        for tokens in even_slices(count, block):
            yield Piece(rows, tokens)


def even_slices(total: int, most: int) -> Iterator[slice]:
    """[0, total) in as few slices of at most `most` as it takes, of about one size."""
    size = -(-total // -(-total // most))
    for begin in range(0, total, size):
        yield slice(begin, min(begin + size, total))


# The layers


def rotation_of(view: View, angles: Any) -> tuple[Any, Tensor, Tensor]:
    """(layout, cos, sin) for `ops.latent_write.rotate` of what the decoder's rotary module returns."""
    if view.family.attention == "mla":
        return view.family.rotation(view.layers[0].self_attn, angles)
    cos, sin = angles
    half = cos.shape[-1] // 2
    return "halves", cos[..., :half], sin[..., :half]


def layer_step(view: View, layer: Any, hidden: Tensor, cache: Any, span: Span, activation_bytes: int) -> Tensor:
    """hidden [B, S, D] of a piece -> the layer's output, the same shape. The piece's entries are written."""
    norm = layer.input_layernorm
    normed = rms_norm(hidden, norm.weight, norm.variance_epsilon)
    held = cache.layers[layer.self_attn.layer_idx]
    attend = attend_latents if view.family.attention == "mla" else attend_grouped
    out = attend(layer.self_attn, normed, normed, held, span)
    return finish_layer(view, layer, out, hidden, activation_bytes)


def last_layer_step(
    view: View, layer: Any, hidden: Tensor, cache: Any, span: Span, ends: bool, activation_bytes: int
) -> Tensor:
    """As `layer_step`, but only the last token's output [B, 1, D], and that only if the prompt `ends` with the piece.

    Of all other tokens nothing but the entries is needed.
    """
    norm = layer.input_layernorm
    normed = rms_norm(hidden, norm.weight, norm.variance_epsilon)
    held = cache.layers[layer.self_attn.layer_idx]
    attend = attend_latents if view.family.attention == "mla" else attend_grouped
    if not ends:
        attend(layer.self_attn, normed[:, :0], normed, held, span)
        return hidden[:, :0]
    out = attend(layer.self_attn, normed[:, -1:], normed, held, span)
    return finish_layer(view, layer, out, hidden[:, -1:].contiguous(), activation_bytes)


def finish_layer(view: View, layer: Any, out: Tensor, hidden: Tensor, activation_bytes: int) -> Tensor:
    """Output projection of attention's out [B, S, H, V], residual, norm, and MLP or mixture in blocks of tokens."""
    batch, count, size = hidden.shape
    output = layer.self_attn.o_proj
    out = F.linear(out.reshape(batch * count, -1), output.weight, output.bias)
    norm = layer.post_attention_layernorm
    normed, hidden = add_rms_norm(out, hidden.reshape(-1, size), norm.weight, norm.variance_epsilon)
    del out
    block = max(MIN_TOKENS, activation_bytes // 2 // mlp_bytes_per_token(layer.mlp))
    compute = mlp_step if getattr(layer.mlp, "gate", None) is None else functools.partial(mixture_step, view)
    if len(normed) <= block:
        return compute(layer.mlp, normed, hidden).view(batch, count, size)
    for begin in range(0, len(normed), block):
        part = slice(begin, begin + block)
        hidden[part] = compute(layer.mlp, normed[part], hidden[part])
    return hidden.view(batch, count, size)


def mlp_step(mlp: Any, normed: Tensor, residual: Tensor) -> Tensor:
    """residual [T, D] + the gated MLP of normed [T, D]."""
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    active = F.silu(F.linear(normed, gate.weight, gate.bias), inplace=True)
    active.mul_(F.linear(normed, up.weight, up.bias))
    return F.linear(active, down.weight, down.bias).add_(residual)


def mixture_step(view: View, block: Any, normed: Tensor, residual: Tensor) -> Tensor:
    """residual [T, D] + the shared and the chosen experts of normed [T, D]."""
    gate, experts, shared = block.gate, block.experts, getattr(block, "shared_experts", None)
    bias = getattr(gate, "e_score_correction_bias", None)
    logits = router_logits(normed, gate.weight)
    weights, indices = route(logits, None if bias is None else bias.float(), **vars(view.family.router(gate)))
    chosen = (normed, indices, weights, experts.gate_up_proj, experts.down_proj)
    if shared is None:
        return fused_experts(*chosen).add_(residual)
    projections = (shared.gate_proj, shared.up_proj, shared.down_proj)
    if any(linear.bias is not None for linear in projections):
        return fused_experts(*chosen).add_(mlp_step(shared, normed, residual))
    gate_weight, up_weight, down_weight = (linear.weight for linear in projections)
    return mixture(*chosen, (gate_weight, up_weight, down_weight), residual)


def router_logits(normed: Tensor, weight: Tensor) -> Tensor:
    """Logits [T, E] in fp32. Products of two bf16 or fp16 numbers are exact in it: the tensor cores may take them."""
    if normed.is_cuda and normed.dtype == weight.dtype and normed.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(normed, weight.t(), out_dtype=torch.float32)
    return F.linear(normed.float(), weight.float())


# Attention


def attend_latents(attention: Any, queries: Tensor, normed: Tensor, held: Any, span: Span) -> Tensor:
    """Write the latents of normed [B, S, D], attend with `queries`, its last tokens: [B, S', H, V]."""
    layout, cos, sin = span.rotation
    rank, nope = attention.kv_lora_rank, attention.qk_nope_head_dim
    kv_a, norm = attention.kv_a_proj_with_mqa, attention.kv_a_layernorm
    latent, k_rope = F.linear(normed, kv_a.weight, kv_a.bias).split([rank, attention.qk_rope_head_dim], -1)
    latent = rms_norm(latent, norm.weight, norm.variance_epsilon)
    k_rope = rotate(k_rope, cos, sin, layout)
    write_entries(held, span.slots, latent, k_rope)
    count = queries.shape[1]
    if count == 0:
        return queries
    query = project_query(attention, queries).unflatten(-1, (-1, attention.qk_head_dim))
    cos, sin = (x[:, x.shape[1] - count :].unsqueeze(2) for x in (cos, sin))
    query[..., nope:] = rotate(query[..., nope:], cos, sin, layout)

    def part(latent: Tensor, k_rope: Tensor, first: int, causal: bool) -> Part:
        expand = attention.kv_b_proj
        both = F.linear(latent, expand.weight, expand.bias).unflatten(-1, (-1, nope + attention.v_head_dim))
        starts = None if span.starts is None else span.starts - first
        key, value = both.split([nope, attention.v_head_dim], -1)
        return prefill_attention(query, key, value, attention.scaling, k_shared=k_rope, causal=causal, starts=starts)

    def parts() -> Iterator[Part]:
        for first, last in earlier_blocks(span):
            entries = read_entries(held, span.rows, first, last)
            yield part(entries[..., :rank], entries[..., rank:], first, False)
        yield part(latent, k_rope, span.first, count > 1)

    return merge(parts())


def project_query(attention: Any, normed: Tensor) -> Tensor:
    """normed [B, S, D] -> queries [B, S, H (N + R)], through the low-rank pair of projections if the model has one."""
    parts = attention._modules
    if (direct := parts.get("q_proj")) is not None:
        return F.linear(normed, direct.weight, direct.bias)
    down, norm, up = parts["q_a_proj"], parts["q_a_layernorm"], parts["q_b_proj"]
    low = rms_norm(F.linear(normed, down.weight, down.bias), norm.weight, norm.variance_epsilon)
    return F.linear(low, up.weight, up.bias)


def attend_grouped(attention: Any, queries: Tensor, normed: Tensor, held: Any, span: Span) -> Tensor:
    """`attend_latents` for grouped-query attention."""
    layout, cos, sin = span.rotation
    width = attention.head_dim
    linears = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (
        F.linear(x, linear.weight, linear.bias).unflatten(-1, (-1, width))
        for x, linear in zip((queries, normed, normed), linears, strict=True)
    )
    count, heads = queries.shape[1], key.shape[2]
    key = rotate(key, cos.unsqueeze(2), sin.unsqueeze(2), layout)
    write_entries(held, span.slots, key.flatten(2), value.flatten(2))
    if count == 0:
        return queries
    cos, sin = (x[:, x.shape[1] - count :].unsqueeze(2) for x in (cos, sin))
    query = rotate(query, cos, sin, layout)

    def part(key: Tensor, value: Tensor, first: int, causal: bool) -> Part:
        starts = None if span.starts is None else span.starts - first
        return prefill_attention(query, key, value, attention.scaling, causal=causal, starts=starts)

    def parts() -> Iterator[Part]:
        for first, last in earlier_blocks(span):
            entries = read_entries(held, span.rows, first, last).unflatten(-1, (2, heads, width))
            yield part(entries[..., 0, :, :], entries[..., 1, :, :], first, False)
        yield part(key, value, span.first, count > 1)

    return merge(parts())


def earlier_blocks(span: Span) -> Iterator[tuple[int, int]]:
    """The keys before a piece, in blocks whose expansion takes no more than that of a piece."""
    block = max(1, span.block // (span.rows.stop - span.rows.start))
    for first in range(0, span.first, block):
        yield first, min(first + block, span.first)

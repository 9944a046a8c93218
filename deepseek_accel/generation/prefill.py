"""The whole prompt through the whole model in a straight line, in pieces whose memory is bounded.

Like a decoding step (`generation/step.py`) it reads tensors, not modules: `generation/lines.py` has made sure that
nobody watches or replaces what lies between. The caller wants no gradient, and all of the model is on one device.

Letters: B rows, S new tokens of a piece, T keys, H heads, N nope, R rope, C latent rank, V value, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.choice import uses_triton
from ..ops.entry_write import entry_write
from ..ops.experts import mixture
from ..ops.int4 import Int4Weight
from ..ops.int4_linear import int4_linear
from ..ops.mla_attention import absorb_query
from ..ops.prefill_attention import CUDNN_PIECE, Part, merge, prefill_attention
from ..ops.prefill_write import prefill_write
from ..ops.projection import Weight, gated_project, project
from ..ops.rms_norm import rms_norm
from ..ops.router import ONE_LAUNCH_TOKENS, norm_route, route_normed
from .lines import Dense, GroupedAttention, LatentAttention, Layer, Mixture, Norm
from .step import Stepper

ACTIVATION_BYTES = 3 << 29  # 1.5 GiB
"""What a prefill may hold at a time besides weights, cache and what grows with the whole prompt (ids, angles)."""
MIN_TOKENS = 256
"""A piece is never smaller, whatever it takes: below, reading the weights costs more than computing."""


class Piece(NamedTuple):
    """Some rows' tokens that run through all layers together."""

    rows: slice
    tokens: slice
    """Counted from the first new token."""


class Span(NamedTuple):
    """Where a piece lies in the cache, and what its layers share."""

    shape: tuple[int, int]
    """(rows, S)"""
    first: int
    """Tokens before the piece, in every row."""
    slots: Tensor
    """[rows * S] int64: where the piece's entries go in the flat pages, row by row."""
    own: slice | Tensor
    """The same as a range, if it is one."""
    earlier: list[tuple[int, int, slice | Tensor]]
    """Blocks of the keys before the piece: first, last, and where they lie in the flat pages."""
    rotation: tuple[Any, Tensor, Tensor]
    """(layout, cos, sin) of the piece, cos and sin [1 or rows, S, angles]."""
    starts: Tensor | None
    """[rows] int32, the first token of each row that is no padding."""
    live: Tensor | None = None
    """[1] int32: tokens from here on are idle, in a graph. None: none is."""
    counters: Tensor | None = None
    """The router's, in a graph; see `ops.router.norm_route`."""
    watched: slice | None = None
    """The rows of the piece, if a cache that evicts watches what their last queries attend to."""


@torch.no_grad()
def prefill(
    stepper: Stepper,
    input_ids: Tensor,
    cache: Any,
    starts: Tensor | None = None,
    position_ids: Tensor | None = None,
    activation_bytes: int = ACTIVATION_BYTES,
    instead: Callable[[Tensor, Tensor, list[Any], Tensor], Tensor] | None = None,
    states: list[Tensor] | None = None,
    num_states: int = 0,
) -> Tensor:
    """Add the tokens input_ids [B, S] to `cache`, a `PagedCache`, and return the last one's logits [B, V].

    starts [B] int32 on the model's device: how many tokens at the beginning of each row, counted from the cache's
    first, are padding; None for none. position_ids [1 or B, S], or None to count on from the cache's length.
    activation_bytes bounds what is held at a time, see `tokens_per_piece`. instead: what runs in place of the pieces,
    given (input_ids, position_ids, each layer's pages, slots); None: nothing. states: a list that the hidden states
    [B, n, D] after the last layer are added to, of the last n tokens: num_states, or as many as the last piece has.

    Hidden states of padding stay finite, what the cache holds for it is never read. If this fails, the cache is as it
    was. Raises CacheFullError, and ValueError on a batch of another size than the cache holds.
    """
    batch, count = input_ids.shape
    past = cache.get_seq_length()
    if position_ids is None:
        position_ids = torch.arange(past, past + count, device=input_ids.device)[None]
    try:
        model = stepper.model
        sizes = [entry_sizes(layer.attention) for layer in model.layers]
        cache.open(batch, sizes, model.dtype, model.device, count)
        if starts is not None and past == 0:
            cache.begin_padding(starts)
        held = [layer.append(batch, count) for layer in cache.layers]
        if instead is not None:
            return instead(input_ids, position_ids, [pages for pages, _ in held], held[0][1])
        return run_pieces(stepper, input_ids, held, starts, position_ids, activation_bytes, states, num_states)
    except BaseException:
        if past:
            cache.commit(past)
        else:
            cache.reset()
        raise


def run_pieces(
    stepper: Stepper,
    input_ids: Tensor,
    held: list[tuple[Any, Tensor]],
    starts: Tensor | None,
    position_ids: Tensor,
    activation_bytes: int,
    states: list[Tensor] | None = None,
    num_states: int = 0,
) -> Tensor:
    """`prefill` where room has been made: held are each layer's pages, with the new tokens counted in, and slots."""
    model, (batch, count) = stepper.model, input_ids.shape
    # For all pieces at once, since rotary types that depend on the longest position must see it.
    layout, cos, sin = stepper.rotation(model.embedding[:1, None], position_ids)
    last_hidden = model.embedding.new_empty(batch, model.embedding.shape[1])
    by_rows: list[Tensor] = []
    block = tokens_per_piece(model.layers[-1], activation_bytes)
    alone = held[0][0].is_alone
    for piece in pieces(batch, count, block):
        rows, tokens = piece
        at = rows if cos.shape[0] > 1 else slice(None)
        shape = (rows.stop - rows.start, tokens.stop - tokens.start)
        rotation = (layout, cos[at, tokens], sin[at, tokens])
        spans = [_span(*each, piece, count, starts, rotation, block) for each in (held if alone else held[:1])]
        spans = spans if alone else spans * len(held)
        hidden = F.embedding(input_ids[rows, tokens], model.embedding).view(-1, model.embedding.shape[1])
        for layer, (pages, _), span in zip(model.layers[:-1], held[:-1], spans[:-1], strict=True):
            hidden = layer_step(layer, hidden, pages, span, shape[1], activation_bytes)
        # Of the last layer nothing but the entries is needed, and the prompt's last token.
        wanted = 0 if tokens.stop < count else 1 if states is None else shape[1]
        hidden = layer_step(model.layers[-1], hidden, held[-1][0], spans[-1], wanted, activation_bytes)
        if wanted:
            hidden = hidden.view(shape[0], wanted, -1)
            last_hidden[rows] = hidden[:, -1]
            if states is not None:
                by_rows.append(hidden[:, -num_states:])
    if states is not None:
        states.append(torch.cat(by_rows))
    weight, bias = model.head
    if isinstance(weight, Int4Weight):
        return int4_linear(rms_norm(last_hidden, *model.norm), weight, bias)
    return F.linear(rms_norm(last_hidden, *model.norm), weight, bias)


def _span(
    pages: Any, slots: Tensor, piece: Piece, count: int, starts: Tensor | None, rotation: tuple[Any, Tensor, Tensor],
    block: int,
) -> Span:  # fmt: skip
    """Where `piece` of a call of `count` tokens per row lies in `pages`, in the slots that were taken for the call."""
    rows, tokens = piece
    shape = (rows.stop - rows.start, tokens.stop - tokens.start)
    first = pages.length - count + tokens.start
    where = slots.view(-1, count)[rows, tokens].reshape(-1)
    if pages.is_alone and starts is not None:
        starts = pages.index_of_first()
    return Span(
        shape,
        first,
        where,
        pages.pool.run(first, first + shape[1]) or where,
        list(earlier_blocks(pages.pool, rows, first, block)),
        rotation,
        None if starts is None else starts[rows],
        watched=rows if pages.watches and tokens.stop == count else None,
    )


# The cache


def entry_sizes(attention: LatentAttention | GroupedAttention) -> tuple[int, int, int]:
    """(heads, key size, value size) of what the cache holds for a token."""
    if isinstance(attention, LatentAttention):
        rank = attention.w_kv.shape[1]
        return 1, rank, attention.inputs[1].shape[0] - rank
    return attention.num_kv_heads, attention.head_dim, attention.head_dim


def earlier_blocks(pool: Any, rows: slice, count: int, most: int) -> Iterator[tuple[int, int, slice | Tensor]]:
    """The first `count` tokens of `rows` in blocks whose expansion takes no more than that of a piece of `most`."""
    size = max(1, most // (rows.stop - rows.start))
    if count > size >= CUDNN_PIECE:
        size = CUDNN_PIECE
    for first in range(0, count, size):
        last = min(first + size, count)
        where = pool.run(first, last)
        if where is None:
            positions = torch.arange(first, last, device=pool.device)
            pages = pool.block_table()[rows, positions // pool.page_size].long()
            where = (pages * pool.page_size + positions % pool.page_size).flatten()
        yield first, last, where


def read_entries(held: Any, where: slice | Tensor, rows: int) -> Tensor:
    """The entries [rows, tokens, width] that lie at `where`: a view where they lie together. FP8 ones are decoded."""
    entries: Tensor = held.format.decode(held.storage.flatten(0, 1)[where].unflatten(0, (rows, -1)))
    return entries


# How a prompt is cut


def tokens_per_piece(layer: Layer, activation_bytes: int) -> int:
    """The most tokens that run through the layers together: what a layer holds of them stays below the bound."""
    return max(MIN_TOKENS, activation_bytes // attention_bytes_per_token(layer.attention))


def attention_bytes_per_token(attention: LatentAttention | GroupedAttention) -> int:
    """Of a token and a layer: the residual, its norm or what replaces it, projections, expanded keys, output.

    The keys count twice, once for a kernel that wants every head's key in one piece. The output counts as fp32 with a
    part beside it, which is what merging holds.
    """
    size, value_heads = attention.output[0].shape
    width = attention.output[0].element_size()
    if isinstance(attention, LatentAttention):
        heads, entry = attention.w_uk.shape[0], attention.inputs[1].shape[0]
        query = heads * attention.head_dim
        expanded = attention.w_kv.shape[0] + query
    else:
        query, entry, expanded = attention.inputs[0].shape[0], 2 * attention.inputs[1].shape[0], 0
    return (3 * size + 2 * query + 2 * entry + expanded + value_heads) * width + 4 * value_heads


def mlp_bytes_per_token(layer: Layer) -> int:
    """Of a token and a layer's MLP or mixture, besides the residual and its norm."""
    mlp = layer.mlp
    if isinstance(mlp, Dense):
        return 3 * mlp.gate.shape[0] * mlp.gate.element_size()
    assert isinstance(mlp, Mixture)  # `read_model` leaves no module
    width = mlp.down.element_size()
    size, intermediate = mlp.down.shape[1:]
    always = 0 if mlp.shared is None else 3 * mlp.shared[0].shape[0] * width
    # kernels keep of gate, up and their product the last one only
    inner = 1 if uses_triton(mlp.down.device) else 3
    # the router may read the hidden state in fp32; each chosen expert has those, and its output
    return 4 * size + always + (mlp.rule.top_k * (inner * intermediate + size) + 2 * size) * width


def pieces(batch: int, count: int, block: int) -> Iterator[Piece]:
    """The prompt cut into pieces of at most `block` tokens, rows before length.

    As many whole rows as fit run together. A row that does not fit alone is cut, and its keys are complete up to each
    piece when that runs: in pieces of CUDNN_PIECE tokens and a rest if that fits, else of about one size.
    """
    for rows in even_slices(batch, max(1, block // count)):
        if count > block >= CUDNN_PIECE:
            cuts = [slice(begin, min(begin + CUDNN_PIECE, count)) for begin in range(0, count, CUDNN_PIECE)]
        else:
            cuts = list(even_slices(count, block))
        for tokens in cuts:
            yield Piece(rows, tokens)


def even_slices(total: int, most: int) -> Iterator[slice]:
    """[0, total) in as few slices of at most `most` as it takes, of about one size."""
    size = -(-total // -(-total // most))
    for begin in range(0, total, size):
        yield slice(begin, min(begin + size, total))


# The layers


def layer_step(layer: Layer, x: Tensor, held: Any, span: Span, wanted: int, activation_bytes: int) -> Tensor:
    """x [rows * S, D] of a piece, which is used up -> the layer's output for the last `wanted` tokens of each row.

    The entries of all of them are written.
    """
    attention = layer.attention
    if isinstance(attention, LatentAttention):
        out = attend_latents(attention, layer.norm, x, held, span, wanted)
    else:
        out = attend_grouped(attention, layer.norm, x, held, span, wanted)
    if wanted < span.shape[1]:
        # a copy: `mixture` wants its residual in one piece, and the rest of x can go
        x = x.view(*span.shape, -1)[:, span.shape[1] - wanted :].flatten(0, 1).contiguous()
        if wanted == 0:
            return x
    weight, bias = attention.output
    x = add_product(x, out.reshape(x.shape[0], -1), weight, bias)
    del out
    block = max(MIN_TOKENS, activation_bytes // 2 // mlp_bytes_per_token(layer))
    if len(x) <= block:
        return mlp_step(layer, x, span)
    for begin in range(0, len(x), block):
        part = slice(begin, begin + block)
        x[part] = mlp_step(layer, x[part], span)
    return x


def add_product(x: Tensor, y: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x + y weight^T + bias, in x. Without a bias the sum is rounded once, in the product's own launch."""
    if isinstance(weight, Int4Weight):
        return x.copy_(int4_linear(y, weight, bias, residual=x))
    if bias is not None:
        return x.add_(F.linear(y, weight, bias))
    return x.addmm_(y, weight.t())


def mlp_step(layer: Layer, x: Tensor, span: Span) -> Tensor:
    """x [T, D] + the MLP or mixture of its norm. x may be used up."""
    mlp = layer.mlp
    if isinstance(mlp, Dense):
        return add_product(x, gated_project(x, mlp.gate, mlp.up, norm=layer.mlp_norm), mlp.down, None)
    assert isinstance(mlp, Mixture)  # `read_model` leaves no module
    if len(x) <= ONE_LAUNCH_TOKENS:
        normed, weights, indices = norm_route(
            x,
            *layer.mlp_norm,
            mlp.router,
            mlp.bias,
            live=span.live,
            counters=span.counters,
            drop=mlp.drop,
            **vars(mlp.rule),
        )
    else:
        normed = rms_norm(x, *layer.mlp_norm)
        weights, indices = route_normed(normed, mlp.router, mlp.bias, live=span.live, drop=mlp.drop, **vars(mlp.rule))
    return mixture(normed, indices, weights, mlp.gate_up, mlp.down, mlp.shared, x)


# Attention


def attend_latents(attention: LatentAttention, norm: Norm, x: Tensor, held: Any, span: Span, wanted: int) -> Tensor:
    """Write the latents of the norm of x [rows * S, D], and attend with the last `wanted` tokens of each row.

    Returns [rows, wanted, H, V].
    """
    query, compressed = project(x, attention.inputs, attention.biases, norm=norm)
    if attention.query_up is not None:
        weight, bias = attention.query_up
        (query,) = project(query, (weight,), (bias,), norm=attention.query_norm)
    query = query.view(*span.shape, -1, attention.head_dim)
    compressed = compressed.view(*span.shape, -1)
    layout, cos, sin = span.rotation
    prefill_write(query, compressed, *attention.latent_norm, cos, sin, layout, held.storage, span.slots, fp8=held.fp8)
    rank, (nope, value_dim) = attention.w_kv.shape[1], (attention.w_uk.shape[1], attention.w_uv.shape[1])
    if span.watched is not None:
        last = query[:, -held.MOST_WATCHED :]
        absorbed = absorb_query(last[..., :nope].transpose(1, 2), attention.w_uk)
        held.watch_rows(torch.cat((absorbed, last[..., nope:]), -1), attention.scale, span.watched)
    query = query[:, span.shape[1] - wanted :]
    if wanted == 0:
        return query

    def part(entries: Tensor, first: int, causal: bool) -> Part:
        latent = entries.flatten(0, 1)[:, :rank]
        both = F.linear(latent, attention.w_kv).view(*entries.shape[:2], -1, nope + value_dim)
        starts = None if span.starts is None else span.starts - first
        key, value, k_rope = both[..., :nope], both[..., nope:], entries[..., rank:]
        return prefill_attention(query, key, value, attention.scale, k_shared=k_rope, causal=causal, starts=starts)

    def parts() -> Iterator[Part]:
        for first, _, where in span.earlier:
            yield part(read_entries(held, where, span.shape[0]), first, False)
        yield part(compressed, span.first, wanted > 1)

    return merge(parts())


def attend_grouped(attention: GroupedAttention, norm: Norm, x: Tensor, held: Any, span: Span, wanted: int) -> Tensor:
    """`attend_latents` for grouped-query attention. Keys and values are read from the pages, but those of the piece
    itself from a buffer where pages hold FP8."""
    parts_of = project(x, attention.inputs, attention.biases, norm=norm)
    query, key, value = (part.view(*span.shape, -1, attention.head_dim) for part in parts_of)
    _, cos, sin = span.rotation
    new = (query, key, value, cos, sin)
    if held.fp8 is None or wanted == 0:
        own, query = None, entry_write(*new, held.storage, span.slots, fp8=held.fp8)
    else:  # attention within the piece is over keys and values as computed
        entry_write(*new, held.storage, span.slots, fp8=held.fp8)
        own = x.new_empty(1, x.shape[0], 2 * key[0, 0].numel())
        query = entry_write(*new, own, torch.arange(x.shape[0], device=x.device))
    if span.watched is not None:
        held.watch_rows(query[:, -held.MOST_WATCHED :], attention.scale, span.watched)
    query = query[:, span.shape[1] - wanted :]
    del key, value, parts_of, new
    if wanted == 0:
        return query

    def part(entries: Tensor, first: int, causal: bool) -> Part:
        key, value = entries.unflatten(-1, (2, attention.num_kv_heads, attention.head_dim)).unbind(2)
        starts = None if span.starts is None else span.starts - first
        return prefill_attention(query, key, value, attention.scale, causal=causal, starts=starts)

    def parts() -> Iterator[Part]:
        for first, _, where in span.earlier:
            yield part(read_entries(held, where, span.shape[0]), first, False)
        latest = read_entries(held, span.own, span.shape[0]) if own is None else own.view(*span.shape, -1)
        yield part(latest, span.first, wanted > 1)

    return merge(parts())

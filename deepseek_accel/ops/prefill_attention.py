"""Attention of many new tokens over expanded keys and values, a part of the keys at a time.

A long prompt is attended in parts: each part gives the output over its keys and the log of its softmax denominator,
and `merge` weights the parts (online softmax, https://arxiv.org/abs/1805.02867). So neither a mask nor all expanded
keys are ever held. Letters: B batch, S queries, T keys, H query heads, G key heads, N key width without the shared
part, R width of the part of a key that all heads share (the rotary key of latent attention; 0 without), V value.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .choice import uses_triton


class Part(NamedTuple):
    """Attention over some of the keys."""

    out: Tensor
    """[B, S, H, V], weighted with the softmax over these keys alone; 0 where a query sees none of them."""
    lse: Tensor
    """[B, H, S] fp32, the natural logarithm of the softmax denominator; -inf where a query sees none."""


class Case(NamedTuple):
    queries: int
    keys: int
    heads: int = 4
    groups: int = 4
    nope: int = 16
    rope: int = 8
    value: int = 24
    causal: bool = True
    starts: tuple[int, ...] | None = None
    batch: int = 2


CASES = [
    Case(1, 1),  # one token: a single masked block with one key
    Case(33, 33),  # less than one block, odd
    Case(150, 150),  # several blocks of rows and keys: blocks that are all visible, on the diagonal, and none
    Case(5, 140, causal=False),  # fewer queries than keys, none hidden: a part that lies before the queries
    Case(140, 5, causal=False),  # fewer keys than queries
    Case(70, 70, heads=6, groups=2, rope=0, value=16),  # grouped-query attention: no shared part
    Case(40, 40, heads=1, groups=1, nope=40, rope=24, value=72),  # widths that are no power of two
    Case(70, 70, starts=(0, 69)),  # left padding: rows without a key stay 0, and one row has a single token
    Case(140, 140, starts=(64, 131)),  # a start at a block's edge and one inside the last block
    Case(9, 70, causal=False, starts=(75, -5)),  # padding that ends behind and before this part
    Case(9, 70, causal=False, starts=(70, 3)),  # a part whose keys are all padding for one row
]


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    k_shared: Tensor | None = None,
    causal: bool = True,
    starts: Tensor | None = None,
) -> Part:
    """Attention of query [B, S, H, N + R] over key [B, T, G, N] with k_shared [B, T, R], and value [B, T, G, V].

    Query head h reads key head h // (H / G); its last R columns meet k_shared, its first N the key's own. Query s of
    row b sees the keys t with starts[b] <= t, and t <= s if causal, which needs S = T. starts [B] int32 (below 0 as
    0), or None for 0 everywhere. Keys before the start are not used, be they NaN. All of one dtype,
    any strides but a unit last one. Scores and softmax in fp32. The result's `out` has query's dtype; the order of its
    memory is left open.
    Raises ValueError if shapes do not fit.
    """
    _check(query, key, value, k_shared, causal)
    if query.numel() == 0 or key.shape[1] == 0:
        out = query.new_zeros(*query.shape[:3], value.shape[3])
        return Part(out, query.new_full((query.shape[0], query.shape[2], query.shape[1]), -torch.inf).float())
    if not uses_triton(query.device) or query.dtype == torch.float64:
        return attend_by_row(query, key, value, scale, k_shared, causal, starts)
    if starts is None and takes_cudnn(query, key, value):
        return cudnn_attention(query, key, value, scale, k_shared, causal)
    return Part(*_kernel_launch()(query, key, value, scale, k_shared, causal, starts))


def _check(query: Tensor, key: Tensor, value: Tensor, k_shared: Tensor | None, causal: bool) -> None:
    batch, queries, heads, width = query.shape
    keys, groups = key.shape[1:3]
    shared = 0 if k_shared is None else k_shared.shape[-1]
    if (
        key.shape != (batch, keys, groups, width - shared)
        or value.shape[:3] != key.shape[:3]
        or (k_shared is not None and k_shared.shape != (batch, keys, shared))
        or heads % groups
    ):
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)} and shared keys "
            f"{None if k_shared is None else tuple(k_shared.shape)} do not fit together"
        )
    if causal and queries != keys:
        raise ValueError(f"causal attention needs as many keys as queries, got {keys} and {queries}")


@functools.cache
def _kernel_launch() -> Any:
    from ..kernels.prefill_attention import launch

    return launch


CUDNN_PIECE = 16384
"""cuDNN takes parts of one row with so many queries and keys, and no others: it plans anew for every shape.

On an H200 (V2-Lite, 16 heads) a plan costs 75 ms, the first of a process 0.8 s, while the saving against the Triton
kernel is 12% of attention: over 27 layers 1 ms for 8 x 1,024 tokens, 3 ms for 8,192, about 36 ms for 32,768. A plan for
the lengths of one prompt never pays off; two plans, that all long prompts share, do after a few of these. Long prompts
are therefore cut in pieces of this length, see `generation/prefill.py`.
"""


def takes_cudnn(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether cuDNN's kernel is the faster one here, and takes these sizes."""
    return (
        query.shape[1] == key.shape[1] == CUDNN_PIECE
        and query.shape[0] == 1
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device) >= (9, 0)
        and query.shape[3] % 8 == 0
        and value.shape[3] % 8 == 0
    )


def cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, k_shared: Tensor | None, causal: bool
) -> Part:
    """`prefill_attention` by cuDNN, for rows without padding. The shared part is copied behind each head's key."""
    query, key, value = (x.transpose(1, 2) for x in (query, whole_keys(key, k_shared), value))
    if (group := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return Part(result[0].transpose(1, 2), result[1].reshape(query.shape[:3]))


@functools.cache
def _parts_kernels() -> Any:
    from ..kernels import prefill_parts

    return prefill_parts


def whole_keys(key: Tensor, k_shared: Tensor | None) -> Tensor:
    """key [B, T, G, N] with the shared part [B, T, R] behind every head's own: [B, T, G, N + R]."""
    if k_shared is None:
        return key
    if uses_triton(key.device) and key.dtype != torch.float64:
        return _parts_kernels().launch_whole_keys(key, k_shared)
    return torch.cat((key, k_shared.unsqueeze(2).expand(*key.shape[:3], -1)), -1)


QUERY_BLOCK = 512


def attend_by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    k_shared: Tensor | None,
    causal: bool,
    starts: Tensor | None,
) -> Part:
    """`prefill_attention` in torch: rows without padding together, every other one from its first key on.

    A padded row's queries and keys both begin at its start, so that what is left is a smaller attention without
    padding, and no mask is needed.
    """
    firsts = [0] * query.shape[0] if starts is None else [min(max(s, 0), key.shape[1]) for s in starts.tolist()]
    if not any(firsts):
        return _attend(query, whole_keys(key, k_shared), value, scale, causal)
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    lse = torch.full((query.shape[0], query.shape[2], query.shape[1]), -torch.inf, device=query.device)
    lse = lse.to(torch.promote_types(query.dtype, torch.float32))
    for row, first in enumerate(firsts):
        if first == key.shape[1]:
            continue
        begin, one = (first if causal else 0), slice(row, row + 1)
        shared = None if k_shared is None else k_shared[one, first:]
        part = _attend(query[one, begin:], whole_keys(key[one, first:], shared), value[one, first:], scale, causal)
        out[one, begin:], lse[one, :, begin:] = part
    return Part(out, lse)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Part:
    """Attention where every row sees all its keys, or if causal those up to its own. All [B, S or T, heads, width]."""
    if query.device.type == "cpu" and query.dtype != torch.float16:
        return _attend_cpu(query, key, value, scale, causal)
    return prefill_attention_reference(query, key, value, scale, causal=causal)


def _attend_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Part:
    """torch's flash attention for CPUs. It wants values as wide as keys: zeros on the right change no other column."""
    width, value_width = query.shape[3], value.shape[3]
    wide = max(width, value_width)
    query, key, value = (
        (x if x.shape[3] == wide else F.pad(x, (0, wide - x.shape[3]))).transpose(1, 2) for x in (query, key, value)
    )
    if (group := query.shape[1] // key.shape[1]) > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return Part(out[..., :value_width].transpose(1, 2), lse)


def prefill_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    k_shared: Tensor | None = None,
    causal: bool = True,
    starts: Tensor | None = None,
) -> Part:
    """`prefill_attention` by its definition, `QUERY_BLOCK` queries at a time, in fp32 (fp64 for fp64 inputs)."""
    wide = torch.promote_types(query.dtype, torch.float32)
    batch, num_queries, heads, _ = query.shape
    num_keys, group = key.shape[1], heads // key.shape[2]
    position = torch.arange(num_keys, device=query.device)
    unused = None if starts is None else position < starts[:, None]  # [B, T]
    key, value = whole_keys(key, k_shared).to(wide), value.to(wide)
    if unused is not None:
        key, value = (x.masked_fill(unused[:, :, None, None], 0) for x in (key, value))
    key = key.repeat_interleave(group, 2).permute(0, 2, 3, 1)  # [B, H, N + R, T]
    value = value.repeat_interleave(group, 2).transpose(1, 2)  # [B, H, T, V]
    out = query.new_empty(batch, num_queries, heads, value.shape[3])
    lse = torch.empty(batch, heads, num_queries, dtype=wide, device=query.device)
    for begin in range(0, num_queries, QUERY_BLOCK):
        block = slice(begin, min(begin + QUERY_BLOCK, num_queries))
        scores = query[:, block].transpose(1, 2).to(wide) @ key * scale
        if unused is not None:
            scores = scores.masked_fill(unused[:, None, None], -torch.inf)
        if causal:
            scores = scores.masked_fill(position > position[block, None], -torch.inf)
        lse[:, :, block] = scores.logsumexp(-1)
        out[:, block] = (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2).to(query.dtype)
    return Part(out, lse)


def merge(parts: Any) -> Tensor:
    """The attention over all keys of an iterable of `Part`s, which together hold every key once: [B, S, H, V].

    One part is returned as it is; several are summed in fp32, in order, and two at a time are held. A query that sees
    no key in any part yields 0.
    """
    parts = iter(parts)
    total, lse = next(parts)
    dtype = total.dtype
    on_kernel = uses_triton(total.device) and dtype != torch.float64
    add = _parts_kernels().launch_merge if on_kernel else add_part_reference
    part = next(parts, None)
    while part is not None:
        following = next(parts, None)  # only the last sum is rounded to the result's dtype
        target = dtype if following is None else torch.promote_types(dtype, torch.float32)
        total, lse = add(total, lse, part.out, part.lse, target)
        part = following
    return total


def add_part_reference(
    total: Tensor, lse: Tensor, out: Tensor, other: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Two parts as one, out in `dtype`."""
    wide = torch.promote_types(total.dtype, torch.float32)
    together = torch.logaddexp(lse, other)
    merged = total.to(wide) * _shares(lse, together) + out.to(wide) * _shares(other, together)
    return merged.to(dtype), together


def _shares(lse: Tensor, together: Tensor) -> Tensor:
    """What part of the whole softmax a part holds, [B, S, H, 1]. Where the whole is empty, 0."""
    return torch.exp(lse - together).masked_fill(together == -torch.inf, 0).transpose(1, 2).unsqueeze(-1)


def case_inputs(case: Case, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of `prefill_attention`. Keys and values lie interleaved as `kv_b_proj` leaves them; NaN before
    a row's start."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    both = normal(case.batch, case.keys, case.groups, case.nope + case.value)
    shared = normal(case.batch, case.keys, case.rope + 3)[..., : case.rope] if case.rope else None
    query = normal(case.batch, case.queries, case.heads, case.nope + case.rope)
    starts = None
    if case.starts is not None:
        for row, start in enumerate(case.starts):
            both[row, : max(start, 0)] = torch.nan
            if shared is not None:
                shared[row, : max(start, 0)] = torch.nan
        starts = torch.tensor(case.starts, dtype=torch.int32, device=device)
    return {
        "query": query,
        "key": both[..., : case.nope],
        "value": both[..., case.nope :],
        "scale": (case.nope + case.rope) ** -0.5,
        "k_shared": shared,
        "causal": case.causal,
        "starts": starts,
    }

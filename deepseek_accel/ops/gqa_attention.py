"""Grouped-query attention over paged keys and values: pages, lengths and visibility as in `ops/mla_attention.py`.

An entry of the storage is [keys (G*D, head by head) | values (G*Dv, head by head)] of one token. Letters: B batch,
S queries, T keys, H query heads, G key heads, D head dim, Dv value dim, P page size.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepseek_accel.ops.choice import uses_triton
from deepseek_accel.ops.fp8 import decode_heads
from deepseek_accel.ops.key_mass import KeyScores
from deepseek_accel.ops.mla_attention import (
    compute_dtype,
    gather_entries,
    hidden_keys,
    key_spans,
    scatter_pages,
    softmax_weights,
    visibility_inputs,
)


def paged_gqa_attention(
    query: Tensor,
    storage: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    max_length: int,
    scale: float,
    num_kv_heads: int,
    value_dim: int,
    *,
    causal: bool = True,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    num_splits: int | None = None,
    address: Tensor | None = None,
    fp8: str | None = None,
    watch: KeyScores | None = None,
) -> Tensor:
    """Attention of query [B, S, H, D] over paged keys and values: [B, S, H, Dv] of query's dtype.

    Query head h reads key head h // (H / G). The query may have any strides but a unit last one. num_splits (for CUDA
    graphs `graph_splits` of `ops/mla_attention.py`), address, fp8 and watch: as
    there.
    """
    arguments = (query, storage, block_table, lengths, max_length, scale, num_kv_heads, value_dim)
    if not uses_triton(storage.device):
        return paged_gqa_attention_reference(*arguments, causal=causal, starts=starts, mask=mask, fp8=fp8)
    parts = {"num_splits": num_splits, "address": address, "fp8": fp8, "watch": watch}
    return _triton_launch()(*arguments, causal=causal, starts=starts, mask=mask, **parts)


@functools.cache
def _triton_launch() -> Any:
    from deepseek_accel.kernels.gqa_attention import launch

    return launch


def paged_gqa_attention_reference(
    query: Tensor,
    storage: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    max_length: int,
    scale: float,
    num_kv_heads: int,
    value_dim: int,
    *,
    causal: bool = True,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    fp8: str | None = None,
) -> Tensor:
    """`paged_gqa_attention` in plain torch, scores and softmax in fp32 (fp64 for fp64 inputs)."""
    batch, num_queries, heads, head_dim = query.shape
    group = heads // num_kv_heads
    spans = key_spans(lengths, starts)
    entries, first = gather_entries(storage, block_table, lengths, max_length, starts, spans)
    if fp8 is not None:
        keys, values = decode_heads(entries, fp8, num_kv_heads, head_dim, value_dim, compute_dtype(query))
    else:
        entries = entries.to(compute_dtype(entries))
        keys, values = entries.split((num_kv_heads * head_dim, num_kv_heads * value_dim), -1)
        keys, values = keys.unflatten(-1, (num_kv_heads, -1)), values.unflatten(-1, (num_kv_heads, -1))
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # [B, G, T, D], [B, G, T, Dv]
    # Rows of one key head together: [B, G, S * group, D].
    rows = query.to(keys.dtype).unflatten(2, (num_kv_heads, group)).transpose(1, 2).flatten(2, 3)
    scores = (rows @ keys.transpose(2, 3)).view(batch, num_kv_heads, num_queries, group, entries.shape[1])
    scores = scores.transpose(1, 2).flatten(2, 3)  # [B, S, H, T]
    hidden, bias = hidden_keys(lengths, first, num_queries, entries.shape[1], causal, starts, mask, spans)
    weights = softmax_weights(scores, scale, hidden, bias)
    weights = weights.unflatten(2, (num_kv_heads, group)).transpose(1, 2).flatten(2, 3)
    out = (weights @ values).view(batch, num_kv_heads, num_queries, group, value_dim)
    return out.transpose(1, 2).reshape(batch, num_queries, heads, value_dim).to(query.dtype)


class GroupedCase(NamedTuple):
    """A shape of `paged_gqa_attention` and what its rows look like."""

    lengths: tuple[int, ...]
    page_size: int
    queries: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int = 16
    starts: tuple[int, ...] | None = None
    mask: str | None = None
    causal: bool = True
    splits: int | None = None  # into how many parts the kernel cuts the keys


CASES = [
    # The shortest rows: an empty one among others, one key, a length just under the smallest tile.
    GroupedCase((0, 1, 7), 16),
    # Around a page: one key less, exactly full, one key more.
    GroupedCase((15, 16, 17, 33), 16, splits=2),
    # A page cut into blocks of keys, and more splits than some rows have blocks.
    GroupedCase((127, 129, 257, 8), 256, splits=4),
    # Pages of one block of keys.
    GroupedCase((63, 65, 31), 64, splits=2),
    # As many key heads as query heads: the offset of the values behind all keys (M05), value dim above head dim.
    GroupedCase((20, 37), 16, heads=4, kv_heads=4, head_dim=16, value_dim=48),
    # One key head for all.
    GroupedCase((20, 37), 16, heads=4, kv_heads=1),
    # One head at all: the tile is mostly padding.
    GroupedCase((33,), 16, heads=1, kv_heads=1),
    # Several queries: the causal limit differs by row of the tile; the first row is shorter than its queries.
    GroupedCase((3, 7, 33), 16, queries=7, splits=2),
    # More than one tile of rows for one key head, in a group that does not divide a tile.
    GroupedCase((65, 40), 16, queries=7, heads=24, kv_heads=2, splits=2),
    # Head dims that are no powers of two: padded columns must not leak into the neighbouring head.
    GroupedCase((31, 17), 16, heads=6, kv_heads=3, head_dim=24, value_dim=40),
    # Llama-3 8B's group and head dim.
    GroupedCase((130, 70), 64, heads=16, kv_heads=4, head_dim=128, value_dim=128, splits=2),
    # Every query sees every key.
    GroupedCase((17, 40), 16, queries=7, causal=False),
    # Left padding: whole pages before the start, a start inside a page, a start at the end (no key left).
    GroupedCase((70, 40, 33), 16, queries=2, starts=(35, 7, 33), splits=2),
    # A boolean mask that hides every key of one query.
    GroupedCase((33, 50), 16, queries=3, mask="bool", splits=2),
    # A floating mask, with its dtype's minimum, with left padding.
    GroupedCase((33, 50), 16, queries=3, mask="float", starts=(4, 0)),
]


def case_inputs(
    case: GroupedCase, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Keyword arguments of `paged_gqa_attention` for a case. Everything that must not matter is poison."""
    generator = torch.Generator().manual_seed(seed)
    batch, width = len(case.lengths), case.kv_heads * (case.head_dim + case.value_dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    # A query as the model has it: the transpose of [B, H, S, D], cut from a wider projection.
    query = normal(batch, case.heads, case.queries, case.head_dim + 8).transpose(1, 2)[..., : case.head_dim]
    storage, block_table = scatter_pages(
        normal(batch, max(case.lengths), width), case.lengths, case.page_size, seed, case.starts
    )
    return {
        "query": query,
        "storage": storage,
        "block_table": block_table,
        "lengths": torch.tensor(case.lengths, dtype=torch.int32, device=device),
        "max_length": max(case.lengths),
        "scale": case.head_dim**-0.5,
        "num_kv_heads": case.kv_heads,
        "value_dim": case.value_dim,
        "causal": case.causal,
        **visibility_inputs(case, dtype, device, generator),
    }

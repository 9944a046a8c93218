"""Multi-head latent attention in its absorbed form: queries meet the cached latents directly, keys are never expanded.

DeepSeek-V2 (https://arxiv.org/abs/2405.04434, section 2.1): with k_nope = latent w_uk^T and v = latent w_uv^T per head,

    q_nope . k_nope = (q_nope w_uk) . latent          `absorb_query`
    sum_t p_t v_t   = (sum_t p_t latent_t) w_uv^T     `project_values`

so attention runs over entries of C + R numbers per token, the same for all heads. Letters: B batch, S queries, T keys,
H heads, N nope, R rope, V value, C latent rank, P page size.

Paged keys, here and in `ops/gqa_attention.py`:
- storage [num_pages, P, width], contiguous; a latent entry is [latent (C) | rope key (R)]. P is a power of two >= 16.
- block_table [B, W] int32: a row's page ids in order. Past its last page it holds anything and is never followed.
- lengths [B] int32: the row's number of keys, 0 allowed. What a page holds past them is never used, be it NaN.
- max_length: at least every length, known without asking the device.
- num_splits: into how many parts a row's keys are cut at most, so that several processors share them; None: as suits
  max_length. A CUDA graph is captured with one number for all lengths: `graph_splits`. On GPUs only.
- fp8: "e4m3" or "e5m2" if the storage is uint8 and its entries are those of `ops/fp8.py`, with the rotary key in the
  queries' dtype; None for entries of the queries' dtype.
- address [1] int64, on the device: storage.data_ptr(), to be read when the kernel runs. `storage` then only tells dtype
  and page shape: a CUDA graph that was given it follows a pool whose storage moves. Multiple of 16. On GPUs only.

- watch: where a step of one query leaves what it attended to, see `KeyScores`. On GPUs only.

Query s of a row sees key t when starts <= t < length, and, if causal, t <= length - S + s (the queries are the row's
last S tokens), and the mask lets it. `mask` [B, 1, S, max_length] is boolean (True: visible) or floating (added to the
scaled scores; the dtype's minimum, or -inf, hides). A query that sees no key yields 0.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepseek_accel.ops.choice import uses_triton
from deepseek_accel.ops.fp8 import decode_latents
from deepseek_accel.ops.key_mass import KeyScores


def absorb_query(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """q_nope [B, H, S, N] with w_uk [H, N, C] into q_latent [B, S, H, C], a view laid out [H, B, S, C]."""
    batch, heads, num_queries, nope = q_nope.shape
    per_head = q_nope.transpose(0, 1).reshape(heads, batch * num_queries, nope)
    return torch.bmm(per_head, w_uk).view(heads, batch, num_queries, -1).permute(1, 2, 0, 3)


def project_values(out_latent: Tensor, w_uv: Tensor) -> Tensor:
    """out_latent [B, S, H, C] with w_uv [H, V, C] into [B, S, H, V], a view laid out [H, B, S, V]."""
    batch, num_queries, heads, rank = out_latent.shape
    per_head = out_latent.permute(2, 0, 1, 3).reshape(heads, batch * num_queries, rank)
    return torch.bmm(per_head, w_uv.transpose(1, 2)).view(heads, batch, num_queries, -1).permute(1, 2, 0, 3)


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    storage: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    max_length: int,
    scale: float,
    latent_rank: int,
    *,
    causal: bool = True,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    num_splits: int | None = None,
    address: Tensor | None = None,
    fp8: str | None = None,
    watch: KeyScores | None = None,
) -> Tensor:
    """Attention of q_latent [B, S, H, C] and q_rope [B, S, H, R] over paged latents (see the module): [B, S, H, C].

    The queries may have any strides but a unit last one. The output has q_latent's dtype; on a GPU its memory order is
    [H, B, S, C], so that `project_values` copies nothing. `scale` multiplies q . k.
    """
    arguments = (q_latent, q_rope, storage, block_table, lengths, max_length, scale, latent_rank)
    if not uses_triton(storage.device):
        return latent_attention_reference(*arguments, causal=causal, starts=starts, mask=mask, fp8=fp8)
    parts = {"num_splits": num_splits, "address": address, "fp8": fp8, "watch": watch}
    return _triton_launch()(*arguments, causal=causal, starts=starts, mask=mask, **parts)


# Up to this many (token, head) pairs the parts are projected as they are merged. Beyond, that every block of values
# reads all parts again costs more than a launch: torch multiplies then.
MAX_PROJECTED_ROWS = 512


def projected_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    storage: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    max_length: int,
    scale: float,
    w_uv: Tensor,
    *,
    causal: bool = True,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    num_splits: int | None = None,
    address: Tensor | None = None,
    fp8: str | None = None,
    watch: KeyScores | None = None,
) -> Tensor:
    """`project_values` of `latent_attention`: w_uv [H, V, C], result [B, S, H, V]. Two launches for few tokens."""
    arguments = (q_latent, q_rope, storage, block_table, lengths, max_length, scale, w_uv.shape[2])
    visible = {"causal": causal, "starts": starts, "mask": mask}
    if not uses_triton(storage.device):
        return project_values(latent_attention_reference(*arguments, **visible, fp8=fp8), w_uv)  # type: ignore[arg-type]
    parts = {"num_splits": num_splits, "address": address, "fp8": fp8, "watch": watch}
    if q_latent.shape[:3].numel() <= MAX_PROJECTED_ROWS:
        return _triton_launch()(*arguments, **visible, **parts, w_uv=w_uv)
    return project_values(_triton_launch()(*arguments, **visible, **parts), w_uv)


@functools.cache
def graph_splits(
    batch: int,
    num_heads: int,
    device: torch.device,
    num_kv_heads: int = 1,
    num_queries: int = 1,
    fp8: str | None = None,
) -> int:
    """`num_splits` for a CUDA graph of `batch` rows of `num_queries` each, for any lengths: a power of two.

    num_kv_heads: 1 for latent attention. At most one program per processor, for rows long enough to have that many
    parts; those of short rows end at once. More parts cost more in the merge than they gain, on an H200. Only programs
    that decode FP8 latents (`fp8`) for a few heads wait so long that two on a processor are worth it.
    """
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
    programs = batch * num_kv_heads * -(-(num_queries * num_heads // num_kv_heads) // 64)
    if fp8 is not None and batch >= 8 and num_kv_heads == 1 and num_queries * num_heads <= 16:
        processors *= 2
    return 1 << (min(128, max(1, processors // programs)).bit_length() - 1)


@functools.cache
def _triton_launch() -> Any:
    from deepseek_accel.kernels.mla_attention import launch

    return launch


def latent_attention_reference(
    q_latent: Tensor,
    q_rope: Tensor,
    storage: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    max_length: int,
    scale: float,
    latent_rank: int,
    *,
    causal: bool = True,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    fp8: str | None = None,
) -> Tensor:
    """`latent_attention` in plain torch, scores and softmax in fp32 (fp64 for fp64 inputs)."""
    batch, num_queries, heads, _ = q_latent.shape
    spans = key_spans(lengths, starts)
    entries, first = gather_entries(storage, block_table, lengths, max_length, starts, spans)
    if fp8 is not None:
        dtype = q_rope.dtype
        entries = decode_latents(entries, fp8, latent_rank, q_rope.shape[3], dtype, compute_dtype(q_rope))
    entries = entries.to(compute_dtype(entries))
    query = torch.cat((q_latent, q_rope), -1).to(entries.dtype).view(batch, num_queries * heads, -1)
    scores = torch.bmm(query, entries.transpose(1, 2)).view(batch, num_queries, heads, entries.shape[1])
    hidden, bias = hidden_keys(lengths, first, num_queries, entries.shape[1], causal, starts, mask, spans)
    weights = softmax_weights(scores, scale, hidden, bias)
    out = torch.bmm(weights.view(batch, num_queries * heads, entries.shape[1]), entries[..., :latent_rank])
    return out.view(batch, num_queries, heads, latent_rank).to(q_latent.dtype)


def dense_latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    indices: Tensor | None = None,
) -> Tensor:
    """`latent_attention` over contiguous latents [B, 1, T, C] and rope keys [B, 1, T, R], in plain torch: [B, S, H, C].

    causal: query s sees keys t <= T - S + s. indices [B, S, K]: only these keys are visible (an indexer's choice);
    negative ones are ignored. All of causal, indices and mask [B, 1, S, T] must let a key through.
    """
    batch, num_queries, heads, rank = q_latent.shape
    num_keys = latent.shape[2]
    dtype = compute_dtype(latent)
    keys, rope_keys = latent[:, 0].to(dtype), k_rope[:, 0].to(dtype)
    query, rope_query = (q.to(dtype).reshape(batch, num_queries * heads, -1) for q in (q_latent, q_rope))
    scores = torch.bmm(query, keys.transpose(1, 2))
    scores = torch.baddbmm(scores, rope_query, rope_keys.transpose(1, 2)).view(batch, num_queries, heads, num_keys)
    hidden, bias = _split_mask(mask)
    if causal and num_queries > 1:
        last = torch.arange(num_queries, device=latent.device) + (num_keys - num_queries)
        hidden = _either(hidden, torch.arange(num_keys, device=latent.device) > last[None, :, None])
    if indices is not None:
        # One column more than there are keys takes the ignored entries.
        columns = indices.long().masked_fill(indices < 0, num_keys)
        chosen = torch.zeros(batch, num_queries, num_keys + 1, dtype=torch.bool, device=latent.device)
        hidden = _either(hidden, ~chosen.scatter_(2, columns, True)[..., :num_keys])
    weights = softmax_weights(scores, scale, hidden, bias)
    out = torch.bmm(weights.view(batch, num_queries * heads, num_keys), keys)
    return out.view(batch, num_queries, heads, rank).to(q_latent.dtype)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class KeySpans(NamedTuple):
    """Where each row's keys begin and end, as numbers. On the CPU only: elsewhere asking would wait for the device."""

    starts: list[int]
    lengths: list[int]

    @property
    def first(self) -> int:
        return min(min(self.starts), self.last)

    @property
    def last(self) -> int:
        return max(self.lengths)

    @property
    def are_equal(self) -> bool:
        return min(self.lengths) == self.last and min(self.starts) == max(self.starts)


def key_spans(lengths: Tensor, starts: Tensor | None) -> KeySpans | None:
    if lengths.device.type != "cpu" or lengths.numel() == 0:
        return None
    ends: list[int] = lengths.tolist()
    return KeySpans([0] * len(ends) if starts is None else starts.tolist(), ends)


def gather_entries(
    storage: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    max_length: int,
    starts: Tensor | None,
    spans: KeySpans | None,
) -> tuple[Tensor, int]:
    """Copies the rows' pages into entries [B, T, width], 0 where a row has no key; also says which key is first."""
    page_size, width = storage.shape[1:]
    batch = block_table.shape[0]
    if spans is not None:
        first, last = spans.first, spans.last
        first_page, last_page = first // page_size, -(-last // page_size)
        pages = block_table[:, first_page:last_page]
        if not spans.are_equal:
            pages = _followable(pages, lengths, starts, page_size, first_page)
        entries = storage.index_select(0, pages.reshape(-1)).view(batch, pages.shape[1] * page_size, width)
        entries = entries[:, first - first_page * page_size : last - first_page * page_size]
        if not spans.are_equal:
            for row, (start, length) in enumerate(zip(*spans, strict=True)):
                entries[row, : max(start - first, 0)] = 0
                entries[row, max(length - first, 0) :] = 0
        return entries, first
    pages = _followable(block_table[:, : -(-max_length // page_size)], lengths, starts, page_size, 0)
    entries = storage.index_select(0, pages.reshape(-1)).view(batch, pages.shape[1] * page_size, width)[:, :max_length]
    positions = torch.arange(entries.shape[1], device=storage.device)
    present = positions < lengths[:, None]
    if starts is not None:
        present &= positions >= starts[:, None]
    return entries.masked_fill(~present[..., None], 0), 0


def _followable(pages: Tensor, lengths: Tensor, starts: Tensor | None, page_size: int, first_page: int) -> Tensor:
    """`pages` with 0 in place of every entry that holds none of its row's keys."""
    positions = (torch.arange(pages.shape[1], device=pages.device) + first_page) * page_size
    used = positions < lengths[:, None]
    if starts is not None:
        used &= positions + page_size > starts[:, None]
    return pages.masked_fill(~used, 0)


def hidden_keys(
    lengths: Tensor,
    first: int,
    num_queries: int,
    num_keys: int,
    causal: bool,
    starts: Tensor | None,
    mask: Tensor | None,
    spans: KeySpans | None,
) -> tuple[Tensor | None, Tensor | None]:
    """For keys first ... first + num_keys: which are hidden [B, S, T] (None: none is), and what is added to scores."""
    hidden, bias = _split_mask(None if mask is None else mask[..., first : first + num_keys])
    if spans is not None and spans.are_equal and (num_queries == 1 or not causal):
        return hidden, bias
    positions = torch.arange(first, first + num_keys, device=lengths.device)
    limits = lengths[:, None]
    if causal:
        limits = limits - num_queries + 1 + torch.arange(num_queries, device=lengths.device)
    outside = positions >= limits[..., None]
    if starts is not None:
        outside = outside | (positions < starts[:, None, None])
    return _either(hidden, outside), bias


def _split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A mask [B, 1, S, T] as (hidden [B, S, T], added [B, S, T]); None where it has no such part."""
    if mask is None:
        return None, None
    mask = mask[:, 0]
    return (~mask, None) if mask.dtype == torch.bool else (mask <= torch.finfo(mask.dtype).min, mask)


def _either(hidden: Tensor | None, more: Tensor) -> Tensor:
    return more if hidden is None else hidden | more


def softmax_weights(scores: Tensor, scale: float, hidden: Tensor | None, bias: Tensor | None) -> Tensor:
    """Softmax over the last axis of scores [B, S, H, T] * scale + bias [B, S, T], 0 where hidden. Changes `scores`."""
    scores = scores.mul_(scale) if not scores.requires_grad else scores * scale
    if bias is not None:
        scores = scores + bias[:, :, None]
    if hidden is None:
        return scores.softmax(-1)
    hidden = hidden[:, :, None]
    # The second fill is for queries that see nothing: their softmax is 0 / 0.
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0)


class LatentCase(NamedTuple):
    """A shape of `latent_attention` and what its rows look like."""

    lengths: tuple[int, ...]
    page_size: int
    queries: int = 1
    heads: int = 4
    rank: int = 64
    rope: int = 16
    nope: int = 24
    value: int = 40
    starts: tuple[int, ...] | None = None
    mask: str | None = None
    causal: bool = True
    splits: int | None = None  # into how many parts the kernel cuts the keys


CASES = [
    # The shortest rows: an empty one among others, one key, a length just under the smallest tile.
    LatentCase((0, 1, 7), 16),
    # Around a page of 16: one key less, exactly full, one key more (a page with a single key).
    LatentCase((15, 16, 17), 16, splits=2),
    # The same around a larger page, and a block of keys that is a part of a page.
    LatentCase((63, 64, 65, 127, 129), 64, splits=4),
    # A page larger than any block of keys: the offset inside the page advances.
    LatentCase((31, 33, 257, 8), 256, splits=2),
    # More splits than blocks: most programs have no work, and one row has none at all.
    LatentCase((257, 0, 2), 16, splits=16),
    # Splits do not divide the pages, and the parts number no power of two.
    LatentCase((129, 65), 16, splits=3),
    # Several queries: the causal limit differs by row of the tile; the first row is shorter than its queries.
    LatentCase((3, 7, 33), 16, queries=7),
    # Queries of one tile that end in different blocks of keys, with splits: a part can be empty for some of its rows.
    LatentCase((65, 130), 64, queries=7, heads=16, splits=4),
    # Every query sees every key (a prefix that is not causal).
    LatentCase((17, 40), 16, queries=7, causal=False),
    # One head: the tile is mostly padding.
    LatentCase((33,), 16, heads=1),
    # As many heads as DeepSeek-V3: two tiles of rows.
    LatentCase((33, 17), 16, heads=128),
    # A head count that is no power of two and does not divide a tile of rows.
    LatentCase((20, 45), 16, queries=3, heads=12),
    # Rank and rope that are no powers of two, rope below the smallest tile: padded columns must not leak.
    LatentCase((31, 17), 16, rank=96, rope=8, splits=2),
    # DeepSeek-V2-Lite itself.
    LatentCase((130, 70), 64, heads=16, rank=512, rope=64, nope=128, value=128, splits=2),
    # Left padding: whole pages before the start, a start inside a page, a start at the end (no key left).
    LatentCase((70, 40, 33), 16, queries=2, starts=(35, 7, 33), splits=2),
    # A boolean mask that hides every key of one query.
    LatentCase((33, 50), 16, queries=3, mask="bool", splits=2),
    # A floating mask, with its dtype's minimum, with left padding.
    LatentCase((33, 50), 16, queries=3, mask="float", starts=(4, 0)),
]


def case_inputs(
    case: LatentCase, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Keyword arguments of `latent_attention` for a case. All that must not matter is poison: see `scatter_pages`."""
    generator = torch.Generator().manual_seed(seed)
    batch, width = len(case.lengths), case.rank + case.rope

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    # Queries that are slices of one projection, as in the model: strides of neither a contiguous nor a permuted tensor.
    query = normal(batch, case.queries, case.heads, width + 8)
    storage, block_table = scatter_pages(
        normal(batch, max(case.lengths), width), case.lengths, case.page_size, seed, case.starts
    )
    return {
        "q_latent": query[..., : case.rank],
        "q_rope": query[..., case.rank : width],
        "storage": storage,
        "block_table": block_table,
        "lengths": torch.tensor(case.lengths, dtype=torch.int32, device=device),
        "max_length": max(case.lengths),
        "scale": width**-0.5,
        "latent_rank": case.rank,
        "causal": case.causal,
        **visibility_inputs(case, dtype, device, generator),
    }


def visibility_inputs(
    case: Any, dtype: torch.dtype, device: str | torch.device, generator: torch.Generator
) -> dict[str, Tensor | None]:
    """`starts` and `mask` of a case. The mask hides a third of the keys, and all keys of the first row's last query."""
    starts = None if case.starts is None else torch.tensor(case.starts, dtype=torch.int32, device=device)
    if case.mask is None:
        return {"starts": starts, "mask": None}
    shape = (len(case.lengths), 1, case.queries, max(case.lengths))
    visible = torch.rand(shape, generator=generator) > 1 / 3
    visible[0, :, -1] = False
    if case.mask == "bool":
        return {"starts": starts, "mask": visible.to(device)}
    bias = torch.randn(shape, generator=generator).to(dtype).masked_fill(~visible, torch.finfo(dtype).min)
    return {"starts": starts, "mask": bias.to(device)}


def scatter_pages(
    entries: Tensor, lengths: tuple[int, ...], page_size: int, seed: int, starts: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor]:
    """Entries [B, T, width] as (storage, block_table): pages in an order that depends on `seed`, the rest poison.

    NaN: unused pages, what a row's last page holds past its length, what lies before its start. Unused entries of the
    block table, and those of pages before a row's start, are 2147480000.
    """
    counts = [-(-length // page_size) for length in lengths]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    storage = entries.new_full((num_pages, page_size, entries.shape[2]), float("nan"))
    block_table = torch.full((len(lengths), max(counts) + 2), 2_147_480_000, dtype=torch.int32)
    for row, length in enumerate(lengths):
        start = 0 if starts is None else starts[row]
        for index in range(start // page_size, counts[row]):
            page = order.pop()
            first, last = max(index * page_size, start), min((index + 1) * page_size, length)
            block_table[row, index] = page
            storage[page, first - index * page_size : max(last, first) - index * page_size] = entries[row, first:last]
    return storage, block_table.to(entries.device)

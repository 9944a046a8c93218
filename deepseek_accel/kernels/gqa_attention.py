"""Grouped-query attention over paged keys and values, on a GPU.

The contract is in `ops/gqa_attention.py`. A program takes `BLOCK_ROWS` (query, head) pairs that share one key head, so
that head's part of a page is read once per row block.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from deepseek_accel.kernels import fp8 as fp8_numbers
from deepseek_accel.kernels import launching
from deepseek_accel.kernels.combine import (
    LOG2_E,
    Launch,
    LaunchOptions,
    choose_splits,
    combine_launch,
    compile_case,
    key_parts,
    launch_options,
    least_blocks,
    mask_arguments,
    masked_scores,
    num_processors,
    output_like,
    padded,
    parts_like,
    softmax_step,
    storage_pointer,
    store_rows,
    store_scores,
)
from deepseek_accel.kernels.entry_layout import EntryLayout, grouped_layout
from deepseek_accel.kernels.key_mass import key_mass_case, key_mass_launches, scores_room


@triton.jit(
    do_not_specialize=["num_queries", "max_length", "least_blocks", "table_stride", "raw_stride"],
    do_not_specialize_on_alignment=["address"],
)
def gqa_attention_kernel(
    query, storage, address, block_table, lengths, starts, mask, out, lse, raw, raw_stride,
    scale_log2, mask_floor, num_queries, max_length, least_blocks, table_stride,
    query_stride_b, query_stride_s, query_stride_h,
    mask_stride_b, mask_stride_s, mask_stride_t, out_stride_b, out_stride_s, out_stride_h,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_IS_BOOL: tl.constexpr, SPLIT: tl.constexpr, FP8: tl.constexpr,
    VALUES_AT: tl.constexpr, SCALES_AT: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """WIDTH, VALUES_AT: in elements of the storage. FP8: see `kernels/fp8.py`; an entry is then bytes, with scales at
    SCALES_AT, which are applied to scores and weights."""
    launching.launch_dependents(PDL)
    row_block = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    batch = tl.program_id(1).to(tl.int64)
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    position_in_queries = rows // GROUP
    head = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    live = position_in_queries < num_queries
    part_rows = (batch * num_queries + position_in_queries) * (KV_HEADS * GROUP) + head

    launching.wait(PDL)
    length = tl.load(lengths + batch)
    start = 0
    if starts is not None:
        start = tl.load(starts + batch)
    first, last, part_blocks = key_parts(
        length, start, num_queries, row_block, tl.num_programs(2), least_blocks, GROUP, BLOCK_ROWS, BLOCK_KEYS, CAUSAL
    )
    first += tl.program_id(2) * part_blocks
    last = tl.minimum(first + part_blocks, last)
    if SPLIT and first >= last:
        return
    storage = storage_pointer(storage, address)
    if FP8:
        scales = (storage + SCALES_AT).to(tl.pointer_type(tl.float32)) + kv_head
    limits = tl.zeros((BLOCK_ROWS,), tl.int32) + length
    if CAUSAL:
        limits = length - num_queries + position_in_queries + 1

    columns = tl.arange(0, BLOCK_DIM)
    value_columns = tl.arange(0, BLOCK_VALUE)
    offsets = tl.arange(0, BLOCK_KEYS)
    position_in_queries = position_in_queries.to(tl.int64)
    query_rows = query + batch * query_stride_b + position_in_queries * query_stride_s + head * query_stride_h
    queries = tl.load(
        query_rows[:, None] + columns[None, :], mask=live[:, None] & (columns < HEAD_DIM)[None, :], other=0.0
    )
    mask_offsets = batch * mask_stride_b + position_in_queries * mask_stride_s
    table_row = block_table + batch * table_stride
    storage += kv_head * HEAD_DIM
    value_offset = VALUES_AT + kv_head * (VALUE_DIM - HEAD_DIM)

    row_max = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_ROWS,), tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_VALUE), tl.float32)
    # The page id of the next block is carried: loaded inside the block, it would cost the pipeline one of its buffers.
    next_page = tl.load(table_row + first * BLOCK_KEYS // PAGE_SIZE, mask=first < last, other=0)
    for block in tl.range(first, last, num_stages=STAGES):
        page = next_page.to(tl.int64)
        next_page = tl.load(table_row + (block + 1) * BLOCK_KEYS // PAGE_SIZE, mask=block + 1 < last, other=0)
        position = block * BLOCK_KEYS
        keys = position + offsets
        present = (keys >= start) & (keys < length)
        places = position % PAGE_SIZE + offsets
        entries = storage + page * (PAGE_SIZE * WIDTH) + places[:, None] * WIDTH
        key_present = present[:, None]
        if BLOCK_DIM != HEAD_DIM:
            key_present = key_present & (columns < HEAD_DIM)[None, :]
        value_present = present[:, None]
        if BLOCK_VALUE != VALUE_DIM:
            value_present = value_present & (value_columns < VALUE_DIM)[None, :]
        if FP8:
            key_codes = tl.load(entries + columns[None, :], mask=key_present, other=0)
            value_codes = tl.load(entries + value_offset + value_columns[None, :], mask=value_present, other=0)
            scale_places = scales + page * (PAGE_SIZE * (WIDTH // 4)) + places * (WIDTH // 4)
            key_scale = tl.load(scale_places, mask=present, other=0.0)
            value_scale = tl.load(scale_places + KV_HEADS, mask=present, other=0.0)
            key_block = fp8_numbers.decode(key_codes, queries.dtype, FP8, BLOCK_ROWS >= 64)
            value_block = fp8_numbers.decode(value_codes, queries.dtype, FP8, BLOCK_ROWS >= 64)
            scores = tl.dot(queries, tl.trans(key_block), input_precision="ieee") * key_scale[None, :]
        else:
            key_block = tl.load(entries + columns[None, :], mask=key_present, other=0.0)
            value_block = tl.load(entries + value_offset + value_columns[None, :], mask=value_present, other=0.0)
            scores = tl.dot(queries, tl.trans(key_block), input_precision="ieee")
        scores = masked_scores(
            scores * scale_log2, keys, present, limits, mask, mask_offsets, mask_stride_t, mask_floor, max_length, live,
            MASK_IS_BOOL,
        )  # fmt: skip
        if raw is not None:
            store_scores(scores, raw, part_rows, raw_stride, keys, present, live)
        weights, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum)
        if FP8:
            weights *= fp8_numbers.lifted(value_scale, FP8)[None, :]
        total = tl.dot(weights.to(value_block.dtype), value_block, total * rescale[:, None], input_precision="ieee")

    if FP8:
        total = fp8_numbers.lowered(total, FP8)
    out_offsets = batch * out_stride_b + position_in_queries * out_stride_s + head * out_stride_h
    store_rows(total, row_max, row_sum, out, out_offsets, lse, part_rows, value_columns, live, VALUE_DIM, SPLIT)


def plan(
    query: torch.Tensor,
    storage: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    max_length: int,
    scale: float,
    num_kv_heads: int,
    value_dim: int,
    *,
    causal: bool = True,
    starts: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    num_splits: int | None = None,
    address: torch.Tensor | None = None,
    least: int | None = None,
    capability: tuple[int, int] | None = None,
    options: LaunchOptions | None = None,
    pdl: bool | None = None,
    fp8: str | None = None,
    watch: Any = None,
) -> tuple[torch.Tensor, list[Launch]]:
    """The output (not yet written) and the launches that write it.

    least: instead of `least_blocks`. watch: `ops.key_mass.KeyScores`, for one query.
    """
    batch, num_queries, heads, head_dim = query.shape
    group, page_size, width = heads // num_kv_heads, storage.shape[1], padded(head_dim) + padded(value_dim)
    plain = EntryLayout(num_kv_heads * head_dim, 0, num_kv_heads * (head_dim + value_dim))
    layout = grouped_layout(num_kv_heads, head_dim, value_dim) if fp8 else plain
    options = options or launch_options(
        capability or storage.device,
        num_queries * group,
        page_size,
        width,
        padded(value_dim),
        query.element_size(),
        fp8_width=width if fp8 else 0,
    )
    programs = triton.cdiv(num_queries * group, options.block_rows) * num_kv_heads
    if num_splits is None:
        max_blocks = triton.cdiv(max_length, options.block_keys)
        num_splits = choose_splits(programs * batch, max_blocks, 2 * num_processors(storage.device))
    out = output_like(query, value_dim)
    split = num_splits > 1 or watch is not None
    parts, lse = parts_like(query, num_splits, value_dim) if split else (out, None)
    raw = None
    if watch is not None:
        raw, lse = scores_room(query, lse, watch)
    arguments = {
        "query": query,
        "storage": storage,
        "address": address,
        "block_table": block_table,
        "lengths": lengths,
        "starts": starts,
        "out": parts,
        "lse": lse,
        "raw": raw,
        "raw_stride": 0 if raw is None else raw.shape[1],
        "scale_log2": scale * LOG2_E,
        "num_queries": num_queries,
        "max_length": max_length,
        "least_blocks": least or least_blocks(programs * batch, 2 * num_processors(storage.device)),
        "table_stride": block_table.stride(0),
        "query_stride_b": query.stride(0),
        "query_stride_s": query.stride(1),
        "query_stride_h": query.stride(2),
        "out_stride_b": out.stride(0),
        "out_stride_s": out.stride(1),
        "out_stride_h": out.stride(2),
        "KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_DIM": padded(head_dim),
        "BLOCK_VALUE": padded(value_dim),
        "PAGE_SIZE": page_size,
        "BLOCK_ROWS": options.block_rows,
        "BLOCK_KEYS": options.block_keys,
        "STAGES": options.num_stages,
        "CAUSAL": causal,
        "SPLIT": split,
        "FP8": fp8_numbers.VARIANTS[fp8],
        "VALUES_AT": layout.second,
        "SCALES_AT": layout.scales,
        "WIDTH": layout.width,
        "PDL": launching.uses_pdl(storage.device) if pdl is None else pdl,
        **mask_arguments(mask),
    }
    launches = [
        Launch(gqa_attention_kernel, (programs, batch, num_splits), arguments, options.num_warps, options.num_stages)
    ]
    if lse is not None:
        launches.append(combine_launch(arguments, group, out))
    if watch is not None:
        launches += key_mass_launches(arguments, watch, heads, group)
    return out, launches


def launch(*arguments: Any, **options: Any) -> torch.Tensor:
    """`plan` carried out: same arguments, returns the output [B, S, H, Dv] of `query`'s dtype."""
    out, launches = plan(*arguments, **options)
    if out.numel():
        for step in launches:
            step.run()
    return out


def compile_cases() -> list[tuple[str, Any, dict, dict, dict]]:
    """Llama-3 8B (head dim 128, group 4), decode and drafted tokens, and Qwen2-like 64-wide heads, FP8."""
    cases = []
    variants = (  # group, head_dim, queries, page_size, num_splits, mask, dtype, what else: a graph, FP8
        (4, 128, 1, 64, 4, None, torch.bfloat16, ""),
        (4, 128, 1, 64, 4, None, torch.bfloat16, "graph"),
        (1, 128, 1, 64, 1, None, torch.bfloat16, "graph"),
        (4, 128, 1, 16, 1, None, torch.float16, ""),
        (4, 128, 16, 64, 1, torch.bool, torch.bfloat16, ""),
        (7, 64, 1, 64, 4, torch.bfloat16, torch.bfloat16, ""),
        (4, 128, 1, 64, 4, None, torch.float32, ""),
        (4, 128, 1, 64, 4, None, torch.bfloat16, "graph e4m3"),
        (4, 128, 1, 64, 4, None, torch.bfloat16, "graph watch"),
        (4, 128, 16, 64, 1, torch.bool, torch.bfloat16, "e5m2"),
        (7, 64, 1, 16, 4, None, torch.float16, "e4m3"),
    )
    for group, head_dim, queries, page_size, num_splits, mask_dtype, dtype, extra in variants:
        graph = "graph" in extra
        fp8 = next((kind for kind in ("e4m3", "e5m2") if kind in extra), None)
        meta = {"dtype": dtype, "device": "meta"}
        index = {"dtype": torch.int32, "device": "meta"}
        for capability in (80, 89, 90, 100):
            _, launches = plan(
                torch.empty(2, queries, 8 * group, head_dim, **meta),
                torch.empty(64, page_size, 16 * head_dim + 64, dtype=torch.uint8, device="meta")
                if fp8
                else torch.empty(64, page_size, 16 * head_dim, **meta),
                torch.empty(2, 32, **index),
                torch.empty(2, **index),
                1024,
                0.1,
                8,
                head_dim,
                starts=torch.empty(2, **index) if mask_dtype or graph else None,
                mask=torch.empty(2, 1, queries, 1024, dtype=mask_dtype, device="meta") if mask_dtype else None,
                num_splits=num_splits,
                address=torch.empty(1, dtype=torch.int64, device="meta") if graph else None,
                capability=divmod(capability, 10),
                pdl=graph and capability >= 90,
                fp8=fp8,
                watch=key_mass_case(2, 1024, graph) if "watch" in extra else None,
            )
            kind = str(dtype).removeprefix("torch.") + " mask" * bool(mask_dtype)
            name = f"gqa D{head_dim} group{group} S{queries} P{page_size} splits{num_splits} {kind} {extra}"
            cases.append(compile_case(name.strip(), launches[0], capability))
            if len(launches) > 1:
                cases.append(compile_case(f"combine of {name}".strip(), launches[1], capability))
    return cases

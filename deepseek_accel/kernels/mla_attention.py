"""Attention over a paged cache of latents, on a GPU: every head reads the same entry, as key and (its latent) as value.

The contract is in `ops/mla_attention.py`. A program takes `BLOCK_ROWS` (query, head) pairs of one sequence and part of
its keys, so a page is read once per row block.
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
    capability_of,
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
from deepseek_accel.kernels.combine_project import combine_project_launch
from deepseek_accel.kernels.entry_layout import EntryLayout, latent_layout
from deepseek_accel.kernels.key_mass import key_mass_case, key_mass_launches, scores_room


@triton.jit(
    do_not_specialize=["num_queries", "max_length", "least_blocks", "table_stride", "raw_stride"],
    do_not_specialize_on_alignment=["address"],
)
def mla_attention_kernel(
    q_latent, q_rope, storage, address, block_table, lengths, starts, mask, out, lse, raw, raw_stride,
    scale_log2, mask_floor, num_queries, max_length, least_blocks, table_stride,
    latent_stride_b, latent_stride_s, latent_stride_h, rope_stride_b, rope_stride_s, rope_stride_h,
    mask_stride_b, mask_stride_s, mask_stride_t, out_stride_b, out_stride_s, out_stride_h,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, STAGES: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_IS_BOOL: tl.constexpr, SPLIT: tl.constexpr, FP8: tl.constexpr, HALF: tl.constexpr,
    NATIVE: tl.constexpr, ROPE_AT: tl.constexpr, SCALE_AT: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """WIDTH: of an entry in elements of the storage. FP8: see `kernels/fp8.py`; an entry is then bytes, with the rotary
    key from ROPE_AT on and the scale at SCALE_AT. The scale is applied to scores and weights, which are fewer than the
    latent's numbers. HALF: bf16 queries meet latents as fp16 numbers, which GPUs with FP8 conversions (NATIVE) make in
    a fifth of the instructions; latents come out of a norm, so that weights times scales stay within fp16's range."""
    launching.launch_dependents(PDL)
    row_block = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    query = rows // HEADS
    head = (rows % HEADS).to(tl.int64)
    live = query < num_queries
    part_rows = batch * num_queries * HEADS + rows

    launching.wait(PDL)
    length = tl.load(lengths + batch)
    start = 0
    if starts is not None:
        start = tl.load(starts + batch)
    first, last, part_blocks = key_parts(
        length, start, num_queries, row_block, tl.num_programs(2), least_blocks, HEADS, BLOCK_ROWS, BLOCK_KEYS, CAUSAL
    )
    first += tl.program_id(2) * part_blocks
    last = tl.minimum(first + part_blocks, last)
    if SPLIT and first >= last:
        return
    storage = storage_pointer(storage, address)
    if FP8:
        ROPE_WIDTH: tl.constexpr = WIDTH * 8 // q_rope.dtype.element_ty.primitive_bitwidth
        ropes = (storage + ROPE_AT).to(tl.pointer_type(q_rope.dtype.element_ty))
        scales = (storage + SCALE_AT).to(tl.pointer_type(tl.float32))
    limits = tl.zeros((BLOCK_ROWS,), tl.int32) + length
    if CAUSAL:
        limits = length - num_queries + query + 1

    columns = tl.arange(0, BLOCK_RANK)
    rope_columns = tl.arange(0, BLOCK_ROPE)
    offsets = tl.arange(0, BLOCK_KEYS)
    query = query.to(tl.int64)
    latent_rows = q_latent + batch * latent_stride_b + query * latent_stride_s + head * latent_stride_h
    rope_rows = q_rope + batch * rope_stride_b + query * rope_stride_s + head * rope_stride_h
    query_latent = tl.load(
        latent_rows[:, None] + columns[None, :], mask=live[:, None] & (columns < RANK)[None, :], other=0.0
    )
    query_rope = tl.load(
        rope_rows[:, None] + rope_columns[None, :], mask=live[:, None] & (rope_columns < ROPE)[None, :], other=0.0
    )
    if HALF:
        query_latent, query_scale = fp8_numbers.halved(query_latent)
    mask_offsets = batch * mask_stride_b + query * mask_stride_s
    table_row = block_table + batch * table_stride

    row_max = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_ROWS,), tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_RANK), tl.float32)
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
        latent_present = present[:, None]
        if BLOCK_RANK != RANK:
            latent_present = latent_present & (columns < RANK)[None, :]
        rope_present = present[:, None]
        if BLOCK_ROPE != ROPE:
            rope_present = rope_present & (rope_columns < ROPE)[None, :]
        if FP8:
            codes = tl.load(entries + columns[None, :], mask=latent_present, other=0)
            rope_entries = ropes + page * (PAGE_SIZE * ROPE_WIDTH) + places[:, None] * ROPE_WIDTH
            rope = tl.load(rope_entries + rope_columns[None, :], mask=rope_present, other=0.0)
            scale_places = scales + page * (PAGE_SIZE * (WIDTH // 4)) + places * (WIDTH // 4)
            key_scale = tl.load(scale_places, mask=present, other=0.0)
            latent = fp8_numbers.decode(codes, query_latent.dtype, FP8, BLOCK_ROWS >= 64, NATIVE)
            scores = tl.dot(query_latent, tl.trans(latent), input_precision="ieee") * key_scale[None, :]
            if HALF:
                scores *= query_scale[:, None]
        else:
            latent = tl.load(entries + columns[None, :], mask=latent_present, other=0.0)
            rope = tl.load(entries + RANK + rope_columns[None, :], mask=rope_present, other=0.0)
            scores = tl.dot(query_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(query_rope, tl.trans(rope), scores, input_precision="ieee")
        scores = masked_scores(
            scores * scale_log2, keys, present, limits, mask, mask_offsets, mask_stride_t, mask_floor, max_length, live,
            MASK_IS_BOOL,
        )  # fmt: skip
        if raw is not None:
            store_scores(scores, raw, part_rows, raw_stride, keys, present, live)
        weights, rescale, row_max, row_sum = softmax_step(scores, row_max, row_sum)
        if FP8:
            weights *= fp8_numbers.lifted(key_scale, FP8)[None, :]
        total = tl.dot(weights.to(latent.dtype), latent, total * rescale[:, None], input_precision="ieee")

    if FP8:
        total = fp8_numbers.lowered(total, FP8)
    out_offsets = batch * out_stride_b + query * out_stride_s + head * out_stride_h
    store_rows(total, row_max, row_sum, out, out_offsets, lse, part_rows, columns, live, RANK, SPLIT)


def plan(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    storage: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    max_length: int,
    scale: float,
    latent_rank: int,
    *,
    causal: bool = True,
    starts: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    w_uv: torch.Tensor | None = None,
    num_splits: int | None = None,
    address: torch.Tensor | None = None,
    least: int | None = None,
    capability: tuple[int, int] | None = None,
    options: LaunchOptions | None = None,
    pdl: bool | None = None,
    fp8: str | None = None,
    watch: Any = None,
) -> tuple[torch.Tensor, list[Launch]]:
    """The output (not yet written) and the launches that write it. watch: `ops.key_mass.KeyScores`, for one query.

    With w_uv [H, V, C] the output is [B, S, H, V], projected as it is merged. least: instead of `least_blocks`.
    """
    batch, num_queries, heads, _ = q_latent.shape
    page_size, rope = storage.shape[1], q_rope.shape[3]
    num_rows, width = num_queries * heads, padded(latent_rank) + padded(rope)
    number_bytes = q_latent.element_size()
    layout = latent_layout(latent_rank, rope, number_bytes) if fp8 else EntryLayout(0, 0, latent_rank + rope)
    options = options or launch_options(
        capability or storage.device,
        num_rows,
        page_size,
        width,
        padded(latent_rank),
        number_bytes,
        fp8_width=padded(latent_rank) if fp8 else 0,
        crowded=fp8 is not None and _is_crowded(batch, num_splits, max_length, num_processors(storage.device)),
    )
    if watch is not None and options.block_rows >= 64:  # what is left behind takes shared memory and registers
        options = options._replace(block_keys=max(16, options.block_keys // 2))
    # not large row blocks, whose products read codes from registers (H200, 128 heads: 381 us became 537)
    native = fp8 is not None and options.block_rows < 64
    native = native and fp8_numbers.has_conversions(capability or capability_of(storage.device))
    row_blocks = triton.cdiv(num_rows, options.block_rows)
    if num_splits is None:
        max_blocks = triton.cdiv(max_length, options.block_keys)
        num_splits = choose_splits(row_blocks * batch, max_blocks, num_processors(storage.device))
    split = num_splits > 1 or w_uv is not None or watch is not None
    out = (
        output_like(q_latent, latent_rank)
        if w_uv is None
        else q_latent.new_empty(batch, num_queries, heads, w_uv.shape[1])
    )
    parts, lse = parts_like(q_latent, num_splits, latent_rank) if split else (out, None)
    raw = None
    if watch is not None:
        raw, lse = scores_room(q_latent, lse, watch)
    arguments = {
        "q_latent": q_latent,
        "q_rope": q_rope,
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
        "least_blocks": least or least_blocks(row_blocks * batch, num_processors(storage.device)),
        "table_stride": block_table.stride(0),
        "latent_stride_b": q_latent.stride(0),
        "latent_stride_s": q_latent.stride(1),
        "latent_stride_h": q_latent.stride(2),
        "rope_stride_b": q_rope.stride(0),
        "rope_stride_s": q_rope.stride(1),
        "rope_stride_h": q_rope.stride(2),
        "out_stride_b": out.stride(0),
        "out_stride_s": out.stride(1),
        "out_stride_h": out.stride(2),
        "HEADS": heads,
        "RANK": latent_rank,
        "ROPE": rope,
        "BLOCK_RANK": padded(latent_rank),
        "BLOCK_ROPE": padded(rope),
        "PAGE_SIZE": page_size,
        "BLOCK_ROWS": options.block_rows,
        "BLOCK_KEYS": options.block_keys,
        "STAGES": options.num_stages,
        "CAUSAL": causal,
        "SPLIT": split,
        "FP8": fp8_numbers.VARIANTS[fp8],
        "HALF": native and q_latent.dtype == torch.bfloat16,
        "NATIVE": native,
        "ROPE_AT": layout.second,
        "SCALE_AT": layout.scales,
        "WIDTH": layout.width,
        "PDL": launching.uses_pdl(storage.device) if pdl is None else pdl,
        **mask_arguments(mask),
    }
    grid = (row_blocks, batch, num_splits)
    launches = [Launch(mla_attention_kernel, grid, arguments, options.num_warps, options.num_stages)]
    if w_uv is not None:
        launches.append(combine_project_launch(arguments, w_uv, out))
    elif split:
        launches.append(combine_launch(arguments, heads, out))
    if watch is not None:
        launches += key_mass_launches(arguments, watch, heads, heads)
    return out, launches


def _is_crowded(batch: int, num_splits: int | None, max_length: int, processors: int) -> bool:
    """Whether there are more programs than processors, if all rows of a sequence are in one block."""
    return batch * (num_splits or choose_splits(batch, triton.cdiv(max_length, 64), processors)) > processors


def launch(*arguments: Any, **options: Any) -> torch.Tensor:
    """`plan` carried out: same arguments, returns the output [B, S, H, C] of `q_latent`'s dtype."""
    out, launches = plan(*arguments, **options)
    if out.numel():
        for step in launches:
            step.run()
    return out


def compile_cases() -> list[tuple[str, Any, dict, dict, dict]]:
    """DeepSeek-V2-Lite (16 heads) and V3 (128), decode and five drafted tokens, with and without a mask, FP8."""
    cases = []
    variants = (  # heads, queries, page_size, num_splits, mask, dtype, what else: a graph, or what entries are made of
        (16, 1, 64, 4, None, torch.bfloat16, ""),
        (16, 1, 64, 4, None, torch.bfloat16, "graph"),
        (16, 1, 64, 1, None, torch.bfloat16, "graph"),
        (16, 6, 64, 1, torch.bool, torch.bfloat16, ""),
        (16, 1, 16, 4, None, torch.float16, ""),
        (128, 1, 64, 4, None, torch.bfloat16, "graph"),
        (128, 1, 64, 1, torch.bfloat16, torch.bfloat16, ""),
        (16, 1, 64, 4, None, torch.float32, ""),
        (16, 1, 64, 4, None, torch.bfloat16, "graph e4m3"),
        (16, 1, 64, 4, None, torch.bfloat16, "e5m2"),
        (16, 1, 64, 8, None, torch.bfloat16, "graph e4m3"),  # more programs than processors, which are eight here
        (16, 2, 64, 8, None, torch.float16, "graph e5m2"),
        (16, 6, 16, 1, torch.bool, torch.float16, "e4m3"),
        (128, 1, 64, 4, None, torch.bfloat16, "graph e4m3"),
        (16, 1, 64, 4, None, torch.bfloat16, "graph watch"),
        (128, 1, 64, 4, None, torch.bfloat16, "graph watch"),
        (128, 1, 64, 1, torch.bfloat16, torch.bfloat16, "e5m2"),
    )
    for heads, queries, page_size, num_splits, mask_dtype, dtype, extra in variants:
        graph = "graph" in extra
        fp8 = next((kind for kind in ("e4m3", "e5m2") if kind in extra), None)
        meta = {"dtype": dtype, "device": "meta"}
        index = {"dtype": torch.int32, "device": "meta"}
        for capability in (80, 89, 90, 100):
            _, launches = plan(
                torch.empty(2, queries, heads, 512, **meta),
                torch.empty(2, queries, heads, 64, **meta),
                torch.empty(64, page_size, 656, dtype=torch.uint8, device="meta")
                if fp8
                else torch.empty(64, page_size, 576, **meta),
                torch.empty(2, 32, **index),
                torch.empty(2, **index),
                1024,
                0.1,
                512,
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
            name = f"mla H{heads} S{queries} P{page_size} splits{num_splits} {kind} {extra}"
            case = compile_case(name.strip(), launches[0], capability)
            if fp8 and launches[0].arguments["BLOCK_ROWS"] > 16:
                case[-1]["max_spill_bytes"] = 1024  # Triton 3.9; 272 with 3.6
            cases.append(case)
            if len(launches) > 1:
                cases.append(compile_case(f"combine of {name}".strip(), launches[1], capability))
    return cases

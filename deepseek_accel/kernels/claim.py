"""Room for one more token per row and layer of a cache that evicts, in one launch. Contract: `ops/claim.py`."""

from typing import Any

import torch
import triton
import triton.language as tl

from . import launching

BLOCK, NUM_WARPS = 4096, 16
"""Entries that a program looks at at once: it waits for memory once for each so many."""


@triton.jit(do_not_specialize=["num_rows", "room", "table_stride"])
def claim_kernel(
    scores,  # [L, B, R]
    positions,  # [L, B, R]
    held,  # [L, B]
    seen,  # [L, B]
    limits,  # [L]
    protected,  # [L]
    live,  # [1]
    block_tables,  # [L, B, W]
    first_positions,  # [B]
    slots,  # [L, B]
    rotary,  # [B]
    num_rows,
    room,
    table_stride,
    SINKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launching.launch_dependents(PDL)
    row, layer = tl.program_id(0), tl.program_id(1)
    own = layer.to(tl.int64) * num_rows + row
    launching.wait(PDL)
    if row >= tl.load(live):
        tl.store(slots + own, tl.full((), -1, tl.int64))
        if layer == 0:
            tl.store(rotary + row, tl.full((), 0, tl.int64))
        return
    count, new = tl.load(held + own), tl.load(seen + own)
    scores += own * room
    positions += own * room
    index = count
    if count >= tl.load(limits + layer):
        newest = new + 1 - tl.load(protected + layer)
        offsets = tl.arange(0, BLOCK)
        last = 2147483647
        best_score = tl.full((BLOCK,), float("inf"), tl.float32)
        best_position = tl.full((BLOCK,), last, tl.int32)
        best_index = tl.zeros((BLOCK,), tl.int32)
        for begin in range(0, count, BLOCK):
            place = begin + offsets
            inside = place < count
            position = tl.load(positions + place, mask=inside, other=last)
            score = tl.load(scores + place, mask=inside, other=float("inf"))
            score = tl.where(score == score, score, 0.0)  # NaN is no reason to stay
            may_go = inside & (position >= SINKS) & (position < newest)
            better = may_go & ((score < best_score) | ((score == best_score) & (position < best_position)))
            best_score = tl.where(better, score, best_score)
            best_position = tl.where(better, position, best_position)
            best_index = tl.where(better, place, best_index)
        lowest = tl.min(best_score, 0)
        oldest = tl.min(tl.where(best_score == lowest, best_position, last), 0)
        index = tl.max(tl.where((best_score == lowest) & (best_position == oldest), best_index, 0), 0)
    else:
        tl.store(held + own, count + 1)
    tl.store(scores + index, 0.0)
    tl.store(positions + index, new)
    page = tl.load(block_tables + own * table_stride + index // PAGE_SIZE).to(tl.int64)
    tl.store(slots + own, page * PAGE_SIZE + index % PAGE_SIZE)
    tl.store(seen + own, new + 1)
    if layer == 0:
        tl.store(rotary + row, (new - tl.load(first_positions + row)).to(tl.int64))


def launch(
    scores: torch.Tensor,
    positions: torch.Tensor,
    held: torch.Tensor,
    seen: torch.Tensor,
    limits: torch.Tensor,
    protected: torch.Tensor,
    live: torch.Tensor,
    block_tables: torch.Tensor,
    page_size: int,
    sinks: int,
    first_positions: torch.Tensor,
    slots: torch.Tensor,
    rotary: torch.Tensor,
) -> None:
    """`ops.claim.claim`. All of `scores`, `positions` and `block_tables` contiguous."""
    num_layers, num_rows, room = scores.shape
    if scores.numel() == 0:
        return
    pdl = launching.uses_pdl(scores.device)
    tensors = (scores, positions, held, seen, limits, protected, live, block_tables, first_positions, slots, rotary)
    launching.launch(
        claim_kernel,
        (num_rows, num_layers),
        (*tensors, num_rows, room, block_tables.stride(1)),
        (sinks, page_size, BLOCK, pdl),
        num_warps=NUM_WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )


def compile_cases() -> list[tuple[Any, ...]]:
    """(name, kernel, signature, constexprs, options), with and without dependent launch."""
    signature = {"scores": "*fp32"} | dict.fromkeys(
        ("positions", "held", "seen", "limits", "protected", "live", "block_tables", "first_positions"), "*i32"
    )
    signature |= {"slots": "*i64", "rotary": "*i64", "num_rows": "i32", "room": "i32", "table_stride": "i32"}
    cases = []
    for pdl, only in ((False, {}), (True, {"capability": 90}), (True, {"capability": 100})):
        fixed = {"SINKS": 4, "PAGE_SIZE": 64, "BLOCK": BLOCK, "PDL": pdl}
        kinds = signature | dict.fromkeys(fixed, "constexpr")
        cases.append(
            (f"claim{'-pdl' * pdl}", claim_kernel, kinds, fixed, {"num_warps": NUM_WARPS, "num_stages": 2} | only)
        )
    return cases

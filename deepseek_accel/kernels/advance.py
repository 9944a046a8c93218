"""One more token per row: slot, position and length, in one small program."""

from typing import Any

import torch
import triton
import triton.language as tl

from . import launching


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def advance_kernel(
    lengths,  # [B]
    live,  # [1]
    block_table,  # [B, W]
    first_position,  # [B]
    slots,  # [B]
    positions,  # [B]
    num_rows,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launching.launch_dependents(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    launching.wait(PDL)
    is_live = exists & (row < tl.load(live))
    held = tl.load(lengths + row, mask=is_live, other=0)
    entry = block_table + row.to(tl.int64) * table_stride + held // PAGE_SIZE
    page = tl.load(entry, mask=is_live, other=0).to(tl.int64)
    first = tl.load(first_position + row, mask=is_live, other=0)
    tl.store(slots + row, tl.where(is_live, page * PAGE_SIZE + held % PAGE_SIZE, -1), mask=exists)
    tl.store(positions + row, tl.maximum(held - first, 0).to(tl.int64), mask=exists)
    tl.store(lengths + row, held + 1, mask=is_live)


def launch(
    lengths: torch.Tensor,
    live: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    first_position: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """`ops.advance.advance`."""
    num_rows = len(lengths)
    if num_rows == 0:
        return
    block = min(triton.next_power_of_2(num_rows), 128)
    pdl = launching.uses_pdl(lengths.device)
    launching.launch(
        advance_kernel,
        (triton.cdiv(num_rows, block),),
        (lengths, live, block_table, first_position, slots, positions, num_rows, block_table.stride(0)),
        (page_size, block, pdl),
        num_warps=1,
        **({"launch_pdl": True} if pdl else {}),
    )


def compile_cases() -> list[tuple[Any, ...]]:
    """(name, kernel, signature, constexprs, options): one row, and many."""
    pointers = dict.fromkeys(("lengths", "live", "block_table", "first_position"), "*i32")
    signature = pointers | {"slots": "*i64", "positions": "*i64", "num_rows": "i32", "table_stride": "i32"}
    cases = []
    for block in (1, 128):
        for pdl, only in ((False, {}), (True, {"capability": 90}), (True, {"capability": 100})):
            fixed = {"PAGE_SIZE": 64, "BLOCK": block, "PDL": pdl}
            kinds = signature | dict.fromkeys(fixed, "constexpr")
            name = f"advance-{block}{'-pdl' * pdl}"
            cases.append((name, advance_kernel, kinds, fixed, {"num_warps": 1, "num_stages": 1} | only))
    return cases

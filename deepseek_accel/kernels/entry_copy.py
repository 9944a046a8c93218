"""Entries to their slots in pages that are found when the kernel runs. The contract is in `ops/entry_copy.py`."""

from typing import Any

import torch
import triton
import triton.language as tl

from . import launching
from .combine import aligned, storage_pointer

BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["address"])
def entry_copy_kernel(
    entries,  # [T, WIDTH], contiguous
    storage,  # [tokens, WIDTH]
    address,
    slots,  # [T]; a negative one is not written
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launching.launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    launching.wait(PDL)
    storage = storage_pointer(storage, address)
    slot = tl.load(slots + token)
    inside = column < tl.where(slot >= 0, WIDTH, 0)
    tl.store(storage + slot * WIDTH + column, tl.load(entries + token * WIDTH + column, mask=inside), mask=inside)


def launch(
    entries: torch.Tensor, storage: torch.Tensor, slots: torch.Tensor, address: torch.Tensor | None = None
) -> None:
    """`ops.entry_copy.entry_copy`."""
    num_tokens, width = entries.shape
    if num_tokens == 0:
        return
    if entries.dtype == torch.uint8 and width % 4 == 0:  # four bytes at a time
        entries, storage, width = entries.view(torch.int32), storage.view(torch.int32), width // 4
    block = min(triton.next_power_of_2(width), BLOCK)
    pdl = launching.uses_pdl(entries.device)
    launching.launch(
        entry_copy_kernel,
        (num_tokens, -(-width // block)),
        (entries, storage, address, slots),
        (width, block, pdl),
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


def compile_cases() -> list[tuple[Any, ...]]:
    """V2-Lite and LLM-7B in bf16, with and without dependent launch."""
    names = entry_copy_kernel.arg_names
    cases = []
    for name, width in (("v2-lite", 576), ("llm-7b", 8192)):
        for pdl, only in ((False, {}), (True, {"capability": 90}), (True, {"capability": 100})):
            fixed = {"WIDTH": width, "BLOCK": min(triton.next_power_of_2(width), BLOCK), "PDL": pdl}
            signature = {"entries": "*bf16", "storage": "*bf16", "address": "*i64", "slots": "*i64"}
            attrs = aligned(names, signature)
            options = {"num_warps": 4, "num_stages": 3, "attrs": attrs} | only
            kinds = signature | dict.fromkeys(fixed, "constexpr")
            cases.append((f"entry_copy-{name}{'-pdl' * pdl}", entry_copy_kernel, kinds, fixed, options))
    return cases

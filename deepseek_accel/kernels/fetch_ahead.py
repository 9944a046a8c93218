"""Bulk prefetches into the L2 (PTX ISA, "cp.async.bulk.prefetch"): a few warps ask for megabytes and are done.

The contract is in `ops/fetch_ahead.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from . import launching

PIECE = 4096  # bytes of one request, as in the instruction below
LANES = 32


@triton.jit(do_not_specialize=["bytes0", "bytes1", "bytes2", "bytes3"])
def fetch_ahead_kernel(
    weight0,
    weight1,
    weight2,
    weight3,
    bytes0,  # of each weight, from its beginning; a multiple of PIECE
    bytes1,
    bytes2,
    bytes3,
    PIECE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Program (i, w) asks for pieces LANES * i and on of weight w. Lanes beyond its end ask for its last piece."""
    which = tl.program_id(1)
    base, size = weight0.to(tl.int64), bytes0
    if which == 1:
        base, size = weight1.to(tl.int64), bytes1
    if which == 2:
        base, size = weight2.to(tl.int64), bytes2
    if which == 3:
        base, size = weight3.to(tl.int64), bytes3
    begin = tl.program_id(0) * LANES * PIECE
    if begin < size:
        address = base + tl.minimum(begin + tl.arange(0, LANES) * PIECE, size - PIECE)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 4096; mov.u32 $0, 0;", "=r,l", [address], tl.int32, False, 1
        )


def launch(weights: Sequence[torch.Tensor], room: int) -> None:
    """`ops.fetch_ahead.fetch_ahead`."""
    chosen: list[tuple[torch.Tensor, int]] = []
    for weight in weights:
        size = min(weight.numel() * weight.element_size(), room) // PIECE * PIECE
        if size and weight.data_ptr() % 16 == 0:
            chosen.append((weight, size))
            room -= size
    if not chosen:
        return
    unused = [(chosen[0][0], 0)] * (4 - len(chosen))
    tensors, sizes = zip(*chosen, *unused, strict=True)
    grid = (-(-max(sizes) // (LANES * PIECE)), len(chosen))
    launching.launch(fetch_ahead_kernel, grid, (*tensors, *sizes), (PIECE, LANES), num_warps=1)


def compile_cases() -> list[tuple[Any, ...]]:
    names = fetch_ahead_kernel.arg_names
    types = {name: "*bf16" if name.startswith("weight") else "i32" for name in names[:8]}
    kinds = types | {"PIECE": "constexpr", "LANES": "constexpr"}
    fixed = {"PIECE": PIECE, "LANES": LANES}
    return [
        ("fetch_ahead", fetch_ahead_kernel, kinds, fixed, {"num_warps": 1, "num_stages": 3, "capability": capability})
        for capability in (90, 100)
    ]

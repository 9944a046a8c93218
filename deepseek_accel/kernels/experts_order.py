"""Pairs of token and expert in order of their expert, cut into tiles, and the sum over a token's experts: what comes
before and after products that work tile by tile.

A token's experts are the K chosen ones and then the shared ones, which are experts E, E + 1, ... with weights of their
own; so a pair is numbered token * (K + SHARED) + slot.
"""

import torch
import triton
import triton.language as tl

from . import launching
from .launching import launch_dependents, wait

ROW_TILES = 8
"""Row tiles that run beside each other, so that they share a block of weights in the L2."""


@triton.jit
def _expert_of(indices, pair, present, E: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr):
    """The expert of each numbered pair; what is not there or was dropped has one that does not exist."""
    token, slot = pair // (K + SHARED), pair % (K + SHARED)
    chosen = tl.load(indices + token * K + slot, mask=present & (slot < K), other=-1)
    chosen = tl.where((chosen < 0) | (chosen >= E), -1, chosen).to(tl.int32)
    return tl.where(present & (slot >= K), E + slot - K, chosen)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_kernel(
    indices,  # [T * K]
    order,  # [pairs] int32: pairs sorted by expert, in each expert by number; dropped ones are left out
    tiles,  # [3, num_tiles] int32: expert or -1, first row in `order`, row after the last
    num_pairs,  # T * (K + SHARED)
    num_tiles,
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per expert. Tile numbers need no word between programs: expert e starts at first row // BLOCK_M + e,
    which leaves each expert enough tiles, and at most one too many. Loops are `while`: the interpreter of Triton 3.6
    cannot take a range whose end is an argument."""
    launch_dependents(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    wait(PDL)
    start = 0
    while start < num_pairs:
        ids = _expert_of(indices, start + lane, lane < num_pairs - start, E, K, SHARED)
        lower += ((ids >= 0) & (ids < expert)).to(tl.int32)
        equal += (ids == expert).to(tl.int32)
        start += BLOCK
    first = tl.sum(lower, 0)
    count = tl.sum(equal, 0)

    place = first
    start = 0
    while start < num_pairs:
        ids = _expert_of(indices, start + lane, lane < num_pairs - start, E, K, SHARED)
        mine = ids == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + place + rank - 1, start + lane, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)
        start += BLOCK

    tile = first // BLOCK_M + expert
    end = (first + count) // BLOCK_M + expert + 1
    if expert == E + SHARED - 1:
        end = num_tiles
    start = tile
    while start < end:
        number = start + lane
        row = first + (number - tile) * BLOCK_M
        used = row < first + count
        here = number < end
        tl.store(tiles + number, tl.where(used, expert, -1), mask=here)
        tl.store(tiles + num_tiles + number, row, mask=here)
        tl.store(tiles + 2 * num_tiles + number, tl.minimum(row + BLOCK_M, first + count), mask=here)
        start += BLOCK


@triton.jit
def tile_of_program(num_tiles, N_TILES: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles at a time share the weights that they read through the L2 cache."""
    program = tl.program_id(0)
    group = program // (GROUP * N_TILES)
    first = group * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    inner = program - first * N_TILES
    return first + inner % size, inner // size


@triton.jit
def combine_kernel(
    outputs,  # [T * (K + SHARED), D], contiguous; rows of dropped pairs hold anything
    indices,  # [T * K]
    weights,  # [T * K]
    residual,  # [T, D], contiguous; used if ADD
    out,  # [T, D], contiguous
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    ADD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = columns < D
    total = tl.zeros([BLOCK_D], tl.float32)
    wait(PDL)
    row = outputs + token * (K + SHARED) * D + columns
    for k in tl.static_range(K):
        expert = tl.load(indices + token * K + k)
        valid = (expert >= 0) & (expert < E)
        weight = tl.load(weights + token * K + k, mask=valid, other=0.0).to(tl.float32)
        total += weight * tl.load(row + k * D, mask=columns < tl.where(valid, D, 0), other=0.0).to(tl.float32)
    for s in tl.static_range(SHARED):
        total += tl.load(row + (K + s) * D, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual + token * D + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * D + columns, total.to(out.dtype.element_ty), mask=mask)


def launch_sort(
    indices: torch.Tensor, num_experts: int, num_shared: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`order` [pairs] and `tiles` [3, num_tiles] of `sort_kernel` for indices [T, K], contiguous, in tiles of `rows`.
    There are as many tiles as could be needed."""
    num_tokens, top_k = indices.shape
    num_pairs = num_tokens * (top_k + num_shared)
    num_tiles = num_pairs // rows + num_experts + num_shared
    order = torch.empty(num_pairs, dtype=torch.int32, device=indices.device)
    tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=indices.device)
    block = min(4096, max(256, triton.next_power_of_2(num_pairs)))
    pdl = launching.uses_pdl(indices.device)
    launching.launch(
        sort_kernel,
        (num_experts + num_shared,),
        (indices, order, tiles, num_pairs, num_tiles),
        (num_experts, top_k, num_shared, rows, block, pdl),
        num_warps=8 if block > 1024 else 4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return order, tiles


def launch_combine(
    outputs: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    num_experts: int,
    num_shared: int,
) -> None:
    """Every pair's outputs [pairs, D] into out [T, D], on residual."""
    (num_tokens, top_k), size = indices.shape, out.shape[1]
    block_d = min(triton.next_power_of_2(size), 1024)
    pdl = launching.uses_pdl(out.device)
    launching.launch(
        combine_kernel,
        (num_tokens, -(-size // block_d)),
        (outputs, indices, weights, out if residual is None else residual, out),
        (num_experts, top_k, num_shared, residual is not None, size, block_d, pdl),
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) for V2-Lite and V3 in bf16, with and without shared experts."""
    types = dict.fromkeys(("outputs", "residual", "out"), "*bf16") | dict.fromkeys(("order", "tiles"), "*i32")
    types |= {"weights": "*fp32", "indices": "*i64", "num_pairs": "i32", "num_tiles": "i32"}
    cases = []
    for model, experts, top_k, size in (("v2-lite", 64, 6, 2048), ("v3", 256, 8, 7168)):
        for shared in (0, 2 if model == "v2-lite" else 1):
            sizes = {"E": experts, "K": top_k, "SHARED": shared}
            for capability in (80, 89, 90, 100):
                for kernel, stem, blocks, warps in (
                    (sort_kernel, "sort", {"BLOCK_M": 128, "BLOCK": 4096}, 8),
                    (combine_kernel, "combine", {"ADD": shared > 0, "D": size, "BLOCK_D": 1024}, 4),
                ):
                    arguments = kernel.arg_names
                    aligned = [argument for argument in arguments if types.get(argument, "")[:1] == "*"]
                    attrs = {(arguments.index(argument),): [["tt.divisibility", 16]] for argument in aligned}
                    signature = {argument: types.get(argument, "constexpr") for argument in arguments}
                    options = {"num_warps": warps, "num_stages": 3, "capability": capability, "attrs": attrs}
                    constants = sizes | blocks | {"PDL": capability >= 90}
                    cases.append((f"{stem}-{model}-{shared}", kernel, signature, constants, options))
    return cases

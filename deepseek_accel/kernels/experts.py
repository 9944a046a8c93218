"""The routed experts. Two launches where few tokens meet many experts, four elsewhere; the host never waits.

Few pairs of token and expert (decode): each pair reads its expert's rows once, as dot products without tensor cores.
  1. `pair_gate_up_kernel`  silu(gate) * up of every pair
  2. `pair_down_kernel`     for each token and block of columns the weighted sum over its K experts, in order
Otherwise pairs are sorted by expert and go through tensor cores tile by tile:
  1. `sort_kernel`          pairs in order of their expert, and which expert and rows each tile has
  2. `tile_gate_up_kernel`  silu(gate) * up of every pair, in sorted order
  3. `tile_down_kernel`     outputs of every pair, in the original order
  4. `combine_kernel`       the weighted sum over K, in order

Both ways are in one file, long as it is, since they are two ways to compute one contract, that of
`ops.experts.fused_experts`, and `launch` chooses between them.

Address arithmetic is in int64: pairs x sizes and expert x sizes pass 2^31 for V3.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import launching

GROUP = 8  # row tiles that run beside each other, so that they share a block of weights in the L2


@triton.jit
def _silu(value):
    return value / (1.0 + tl.exp(-value))


@triton.jit
def _short_chain(sums, part, step):
    """Every fourth step moves `part` to `sums`. In fp32 one long chain of additions loses what shorter ones keep."""
    if step % 4 == 3:
        sums += part
        part = tl.zeros_like(part)
    return sums, part


@triton.jit
def pair_gate_up_kernel(
    hidden,  # [T, D]
    indices,  # [T * K]
    gate_up,  # [E, 2I, D]
    shared_gate,  # [SHARED * I, D], contiguous; used if SHARED
    shared_up,
    active,  # [T * (K + SHARED), I], contiguous
    hidden_stride,
    expert_stride,
    row_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,  # the shared experts count as this many experts of size I, chosen by every token
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pair = tl.program_id(1).to(tl.int64)
    token, slot = pair // (K + SHARED), pair % (K + SHARED)
    rows = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    columns = tl.arange(0, BLOCK_D)
    x = hidden + token * hidden_stride + columns
    routed = slot < K
    expert = tl.load(indices + token * K + slot, mask=routed, other=0).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return  # pair_down_kernel does not read this row
    if routed:
        gate_rows = gate_up + expert * expert_stride + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
        up_rows = gate_rows + tl.full([], I, tl.int64) * row_stride
    else:
        shared_rows = ((slot - K) * I + rows)[:, None] * D + columns[None, :]
        gate_rows, up_rows = shared_gate + shared_rows, shared_up + shared_rows
    inside = rows[:, None] < I
    gate = tl.zeros([BLOCK_I], tl.float32)
    up = tl.zeros([BLOCK_I], tl.float32)
    for start in range(0, D, BLOCK_D):
        in_row = columns < D - start
        mask = inside & in_row[None, :]
        value = tl.load(x + start, mask=in_row, other=0.0).to(tl.float32)[None, :]
        gate_weight = tl.load(gate_rows + start, mask=mask, other=0.0)
        up_weight = tl.load(up_rows + start, mask=mask, other=0.0)
        gate += tl.sum(gate_weight.to(tl.float32) * value, 1)
        up += tl.sum(up_weight.to(tl.float32) * value, 1)
    tl.store(active + pair * I + rows, (_silu(gate) * up).to(active.dtype.element_ty), mask=rows < I)


@triton.jit
def pair_down_kernel(
    active,  # [T * (K + SHARED), I], contiguous
    indices,  # [T * K]
    weights,  # [T * K]
    down,  # [E, D, I]
    shared_down,  # [D, SHARED * I], contiguous; used if SHARED
    residual,  # [T, D], contiguous; used if ADD
    out,  # [T, D], contiguous
    expert_stride,
    row_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    ADD: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_I)
    offsets = rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    inside = rows[:, None] < D
    total = tl.zeros([BLOCK_D], tl.float32)
    row = active + token * (K + SHARED) * I
    for k in range(K):
        pair = token * K + k
        expert = tl.load(indices + pair).to(tl.int64)
        valid = (expert >= 0) & (expert < E)
        weight = tl.load(weights + pair, mask=valid, other=0.0).to(tl.float32)
        expert = tl.where(valid, expert, 0)
        output = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, I, BLOCK_I):
            in_row = columns < tl.where(valid, I - start, 0)
            value = tl.load(row + k * I + start + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
            matrix = tl.load(down + expert * expert_stride + offsets + start, mask=inside & in_row[None, :], other=0.0)
            output += tl.sum(matrix.to(tl.float32) * value, 1)
        total += weight * output
    shared_offsets = rows.to(tl.int64)[:, None] * (SHARED * I) + columns[None, :]
    for start in range(0, SHARED * I, BLOCK_I):
        in_row = columns < SHARED * I - start
        value = tl.load(row + K * I + start + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
        matrix = tl.load(shared_down + shared_offsets + start, mask=inside & in_row[None, :], other=0.0)
        total += tl.sum(matrix.to(tl.float32) * value, 1)
    if ADD:
        total += tl.load(residual + token * D + rows, mask=rows < D, other=0.0).to(tl.float32)
    tl.store(out + token * D + rows, total.to(out.dtype.element_ty), mask=rows < D)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def sort_kernel(
    indices,  # [pairs]
    order,  # [pairs] int32: pairs sorted by expert, in each expert by number; dropped ones are left out
    tiles,  # [3, num_tiles] int32: expert or -1, first row in `order`, row after the last
    num_pairs,
    num_tiles,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per expert. Tile numbers need no word between programs: expert e starts at first row // BLOCK_M + e,
    which leaves each expert enough tiles, and at most one too many. Loops are `while`: the interpreter of Triton 3.6
    cannot take a range whose end is an argument."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < num_pairs:
        ids = tl.load(indices + start + lane, mask=lane < num_pairs - start, other=-1)
        lower += ((ids >= 0) & (ids < expert)).to(tl.int32)
        equal += (ids == expert).to(tl.int32)
        start += BLOCK
    first = tl.sum(lower, 0)
    count = tl.sum(equal, 0)

    place = first
    start = 0
    while start < num_pairs:
        ids = tl.load(indices + start + lane, mask=lane < num_pairs - start, other=-1)
        mine = ids == expert
        rank = tl.cumsum(mine.to(tl.int32), 0)
        tl.store(order + place + rank - 1, start + lane, mask=mine)
        place += tl.sum(mine.to(tl.int32), 0)
        start += BLOCK

    tile = first // BLOCK_M + expert
    end = (first + count) // BLOCK_M + expert + 1
    if expert == E - 1:
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
def _tile_of_program(num_tiles, N_TILES: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles at a time share the weights that they read through the L2 cache."""
    program = tl.program_id(0)
    group = program // (GROUP * N_TILES)
    first = group * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    inner = program - first * N_TILES
    return first + inner % size, inner // size


@triton.jit(do_not_specialize=["num_tiles"])
def tile_gate_up_kernel(
    hidden,  # [T, D]
    order,  # [pairs]
    tiles,  # [3, num_tiles]
    gate_up,  # [E, 2I, D]
    active,  # [pairs, I], contiguous, sorted
    hidden_stride,
    expert_stride,
    row_stride,
    num_tiles,
    K: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    EVEN: tl.constexpr = D % BLOCK_K == 0
    tile, column = _tile_of_program(num_tiles, (I + BLOCK_N - 1) // BLOCK_N, GROUP)
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert < 0:
        return
    sorted_row = tl.load(tiles + num_tiles + tile) + tl.arange(0, BLOCK_M)
    used = sorted_row < tl.load(tiles + 2 * num_tiles + tile)
    token = (tl.load(order + sorted_row, mask=used, other=0) // K).to(tl.int64)
    outer = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outer < I
    # Columns past the last read the last: what they compute is not stored, and a load without a mask is faster.
    safe = tl.where(inside, outer, I - 1).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    x = hidden + token[:, None] * hidden_stride + inner[None, :]
    gate_rows = gate_up + expert * expert_stride + safe[None, :] * row_stride + inner[:, None]
    up_rows = gate_rows + tl.full([], I, tl.int64) * row_stride
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate_sum, up_sum = gate, up
    for start in range(0, D, BLOCK_K):
        if EVEN:
            value = tl.load(x, mask=used[:, None], other=0.0)
            gate_weight = tl.load(gate_rows)
            up_weight = tl.load(up_rows)
        else:
            in_row = inner < D - start
            value = tl.load(x, mask=used[:, None] & in_row[None, :], other=0.0)
            gate_weight = tl.load(gate_rows, mask=in_row[:, None], other=0.0)
            up_weight = tl.load(up_rows, mask=in_row[:, None], other=0.0)
        gate = tl.dot(value, gate_weight, gate, input_precision=PRECISION)
        up = tl.dot(value, up_weight, up, input_precision=PRECISION)
        if PRECISION == "ieee":
            gate_sum, gate = _short_chain(gate_sum, gate, start // BLOCK_K)
            up_sum, up = _short_chain(up_sum, up, start // BLOCK_K)
        x += BLOCK_K
        gate_rows += BLOCK_K
        up_rows += BLOCK_K
    if PRECISION == "ieee":
        gate, up = gate_sum + gate, up_sum + up
    pointers = active + sorted_row.to(tl.int64)[:, None] * I + outer[None, :]
    tl.store(pointers, (_silu(gate) * up).to(active.dtype.element_ty), mask=used[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def tile_down_kernel(
    active,  # [pairs, I], contiguous, sorted
    order,  # [pairs]
    tiles,  # [3, num_tiles]
    down,  # [E, D, I]
    outputs,  # [pairs, D], contiguous, in the original order
    expert_stride,
    row_stride,
    num_tiles,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    EVEN: tl.constexpr = I % BLOCK_K == 0
    tile, column = _tile_of_program(num_tiles, (D + BLOCK_N - 1) // BLOCK_N, GROUP)
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert < 0:
        return
    sorted_row = tl.load(tiles + num_tiles + tile) + tl.arange(0, BLOCK_M)
    used = sorted_row < tl.load(tiles + 2 * num_tiles + tile)
    pair = tl.load(order + sorted_row, mask=used, other=0).to(tl.int64)
    outer = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outer < D
    safe = tl.where(inside, outer, D - 1).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    x = active + sorted_row.to(tl.int64)[:, None] * I + inner[None, :]
    rows = down + expert * expert_stride + safe[None, :] * row_stride + inner[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total_sum = total
    for start in range(0, I, BLOCK_K):
        if EVEN:
            value = tl.load(x, mask=used[:, None], other=0.0)
            weight = tl.load(rows)
        else:
            in_row = inner < I - start
            value = tl.load(x, mask=used[:, None] & in_row[None, :], other=0.0)
            weight = tl.load(rows, mask=in_row[:, None], other=0.0)
        total = tl.dot(value, weight, total, input_precision=PRECISION)
        if PRECISION == "ieee":
            total_sum, total = _short_chain(total_sum, total, start // BLOCK_K)
        x += BLOCK_K
        rows += BLOCK_K
    if PRECISION == "ieee":
        total += total_sum
    pointers = outputs + pair[:, None] * D + outer[None, :]
    tl.store(pointers, total.to(outputs.dtype.element_ty), mask=used[:, None] & inside[None, :])


@triton.jit
def combine_kernel(
    outputs,  # [T * K, D], contiguous; rows of dropped pairs hold anything
    indices,  # [T * K]
    weights,  # [T * K]
    out,  # [T, D], contiguous
    E: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = columns < D
    total = tl.zeros([BLOCK_D], tl.float32)
    for k in range(K):
        pair = token * K + k
        expert = tl.load(indices + pair)
        valid = (expert >= 0) & (expert < E)
        weight = tl.load(weights + pair, mask=valid, other=0.0).to(tl.float32)
        total += weight * tl.load(outputs + pair * D + columns, mask=columns < tl.where(valid, D, 0), other=0.0).to(
            tl.float32
        )
    tl.store(out + token * D + columns, total.to(out.dtype.element_ty), mask=mask)


class Tile(NamedTuple):
    """Sizes of a tiled matmul: rows, output columns (of gate and of up each), inner, and how it is compiled."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


def _shared_bytes(tile: Tile, matrices: int, element_bytes: int, capability: tuple[int, int]) -> int:
    """Triton holds a buffer per stage where tensor cores read shared memory themselves (9.0 on), else one less."""
    buffers = tile.stages if capability >= (9, 0) and capability[0] < 12 else tile.stages - 1
    return (tile.rows + matrices * tile.columns) * tile.inner * element_bytes * buffers


def _shared_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that one program may take."""
    if capability in ((8, 0), (8, 7)):
        return 163 * 1024
    return 227 * 1024 if capability[0] in (9, 10) else 99 * 1024


def choose_tiles(rows_per_expert: float, element_bytes: int, capability: tuple[int, int]) -> tuple[Tile, Tile]:
    """Tiles of the gate-up and the down matmul: as many rows as an expert has, up to 128. Both have the same rows.

    With few rows the weights are what is read, so a tile is narrow, several fit on a multiprocessor and loads run far
    ahead. fp32 has no tensor core path of full precision: small tiles, whose operands fit in registers.
    """
    if element_bytes == 4:
        gate_up = down = Tile(16 if rows_per_expert <= 16 else 32, 32, 32, 4, 2)
    elif rows_per_expert <= 10:
        gate_up, down = Tile(16, 64, 64, 4, 4), Tile(16, 128, 64, 4, 4)
    elif rows_per_expert <= 24:
        gate_up, down = Tile(32, 64, 64, 4, 4), Tile(32, 128, 64, 4, 4)
    elif rows_per_expert <= 64:
        gate_up, down = Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4)
    else:
        gate_up, down = Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)
    limit = _shared_limit(capability) - 1024  # what the tile's own reductions and barriers take
    fitting = []
    for tile, matrices in ((gate_up, 2), (down, 1)):
        while tile.stages > 2 and _shared_bytes(tile, matrices, element_bytes, capability) > limit:
            tile = tile._replace(stages=tile.stages - 1)
        fitting.append(tile)
    return fitting[0], fitting[1]


def _reads_by_pair(num_pairs: int, top_k: int, num_experts: int) -> bool:
    """Whether few enough pairs share an expert that each may read its expert alone."""
    return num_pairs == top_k or 2 * num_pairs <= num_experts


def takes_shared(num_pairs: int, top_k: int, num_experts: int, intermediate: int, shared: int) -> bool:
    """Whether `launch` computes shared experts of size `shared` along with the routed ones."""
    return _reads_by_pair(num_pairs, top_k, num_experts) and shared % intermediate == 0


def launch(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.experts.fused_experts`; `shared` and `residual` are added only where `takes_shared` says so."""
    num_tokens, top_k = indices.shape
    num_experts, size, _ = down.shape
    if gate_up.stride(-1) != 1 or down.stride(-1) != 1:
        raise ValueError("gate_up and down must have unit last stride")
    out = torch.empty(num_tokens, size, dtype=hidden.dtype, device=hidden.device)
    if out.numel() == 0:
        return out
    if hidden.stride(-1) != 1:
        hidden = hidden.contiguous()
    by_pair = _reads_by_pair(num_tokens * top_k, top_k, num_experts)
    if by_pair:
        _launch_by_pair(hidden, indices.contiguous(), weights.contiguous(), gate_up, down, out, shared, residual)
    else:
        _launch_by_tile(hidden, indices.contiguous(), weights.contiguous(), gate_up, down, out)
    return out


def _launch_by_pair(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    residual: torch.Tensor | None,
) -> None:
    num_tokens, top_k = indices.shape
    num_experts, size, intermediate = down.shape
    # where there is no shared expert, any pointer will do: the kernels do not read it
    shared_gate, shared_up, shared_down = (gate_up, gate_up, down) if shared is None else shared
    num_shared = 0 if shared is None else shared_gate.shape[0] // intermediate
    active = hidden.new_empty(num_tokens * (top_k + num_shared), intermediate)
    blocks = _pair_blocks(size, intermediate)
    sizes = (num_experts, top_k, num_shared)
    launching.launch(
        pair_gate_up_kernel,
        (-(-intermediate // blocks[0]), num_tokens * (top_k + num_shared)),
        (
            hidden,
            indices,
            gate_up,
            shared_gate,
            shared_up,
            active,
            hidden.stride(0),
            gate_up.stride(0),
            gate_up.stride(1),
        ),
        (*sizes, size, intermediate, blocks[0], blocks[1]),
        num_warps=4,
    )
    launching.launch(
        pair_down_kernel,
        (-(-size // blocks[2]), num_tokens),
        (
            active,
            indices,
            weights,
            down,
            shared_down,
            out if residual is None else residual,
            out,
            down.stride(0),
            down.stride(1),
        ),
        (*sizes, residual is not None, size, intermediate, blocks[2], blocks[3]),
        num_warps=4,
    )


@functools.cache
def _pair_blocks(size: int, intermediate: int) -> tuple[int, int, int, int]:
    """(rows, columns) of one program of `pair_gate_up_kernel`, then of `pair_down_kernel`."""
    return 4, min(triton.next_power_of_2(size), 1024), 4, min(triton.next_power_of_2(intermediate), 2048)


def _launch_by_tile(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
) -> None:
    num_tokens, top_k = indices.shape
    num_experts, size, intermediate = down.shape
    num_pairs = num_tokens * top_k
    element_bytes = hidden.element_size()
    capability = torch.cuda.get_device_capability(hidden.device) if hidden.is_cuda else (8, 0)
    first, second = choose_tiles(num_pairs / num_experts, element_bytes, capability)
    num_tiles = num_pairs // first.rows + num_experts
    precision = "ieee" if element_bytes == 4 else "tf32"
    order = torch.empty(num_pairs, dtype=torch.int32, device=hidden.device)
    tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=hidden.device)
    active = hidden.new_empty(num_pairs, intermediate)
    outputs = hidden.new_empty(num_pairs, size)
    block = min(4096, max(256, triton.next_power_of_2(num_pairs)))
    launching.launch(
        sort_kernel,
        (num_experts,),
        (indices, order, tiles, num_pairs, num_tiles),
        (num_experts, first.rows, block),
        num_warps=8 if block > 1024 else 4,
    )
    launching.launch(
        tile_gate_up_kernel,
        (num_tiles * -(-intermediate // first.columns),),
        (
            hidden,
            order,
            tiles,
            gate_up,
            active,
            hidden.stride(0),
            gate_up.stride(0),
            gate_up.stride(1),
            num_tiles,
        ),
        (top_k, size, intermediate, first.rows, first.columns, first.inner, GROUP, precision),
        num_warps=first.warps,
        num_stages=first.stages,
    )
    launching.launch(
        tile_down_kernel,
        (num_tiles * -(-size // second.columns),),
        (active, order, tiles, down, outputs, down.stride(0), down.stride(1), num_tiles),
        (size, intermediate, second.rows, second.columns, second.inner, GROUP, precision),
        num_warps=second.warps,
        num_stages=second.stages,
    )
    block_d = min(triton.next_power_of_2(size), 1024)
    launching.launch(
        combine_kernel,
        (num_tokens, -(-size // block_d)),
        (outputs, indices, weights, out),
        (num_experts, top_k, size, block_d),
        num_warps=4,
    )


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of every kernel and tile in bf16, for V2-Lite and V3.

    `attrs` say what launches find: pointers and strides are multiples of 16. Each GPU has its own tiles.
    """
    types = {
        **dict.fromkeys(("hidden", "gate_up", "down", "active", "outputs", "out", "residual"), "*bf16"),
        **dict.fromkeys(("shared_gate", "shared_up", "shared_down"), "*bf16"),
        **{"weights": "*fp32", "indices": "*i64", "order": "*i32", "tiles": "*i32"},
        **dict.fromkeys(("hidden_stride", "expert_stride", "row_stride", "num_pairs", "num_tiles"), "i32"),
    }
    cases = []

    def add(name: str, kernel: triton.JITFunction, constants: dict, **options: object) -> None:
        arguments = kernel.arg_names
        aligned = [name for name in arguments if types.get(name, "")[:1] == "*" or name.endswith("_stride")]
        options["attrs"] = {(arguments.index(name),): [["tt.divisibility", 16]] for name in aligned}
        signature = {argument: types.get(argument, "constexpr") for argument in arguments}
        constants = {name: value for name, value in constants.items() if name in arguments}
        cases.append((name, kernel, signature, constants, options))

    for model, experts, top_k, size, intermediate in (("v2-lite", 64, 6, 2048, 1408), ("v3", 256, 8, 7168, 2048)):
        sizes = {"E": experts, "K": top_k, "D": size, "I": intermediate}
        plain = {"num_warps": 4, "num_stages": 3}
        for shared in (0, 2 if model == "v2-lite" else 1):
            fixed = {**sizes, "SHARED": shared, "ADD": shared > 0}
            add(
                f"pair_gate_up-{model}-{shared}", pair_gate_up_kernel, {**fixed, "BLOCK_I": 4, "BLOCK_D": 1024}, **plain
            )
            add(f"pair_down-{model}-{shared}", pair_down_kernel, {**fixed, "BLOCK_D": 4, "BLOCK_I": 2048}, **plain)
        add(f"combine-{model}", combine_kernel, {**sizes, "BLOCK_D": 1024}, **plain)
        add(f"sort-{model}", sort_kernel, {**sizes, "BLOCK_M": 128, "BLOCK": 4096}, num_warps=8, num_stages=3)
        for rows in (8, 24, 64, 128):
            for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
                tiles = choose_tiles(rows, 2, capability)
                for tile, stem, kernel in zip(
                    tiles, ("tile_gate_up", "tile_down"), (tile_gate_up_kernel, tile_down_kernel), strict=True
                ):
                    blocks = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.inner}
                    add(
                        f"{stem}-{model}-{rows}",
                        kernel,
                        {**sizes, **blocks, "GROUP": GROUP, "PRECISION": "tf32"},
                        num_warps=tile.warps,
                        num_stages=tile.stages,
                        capability=10 * capability[0] + capability[1],
                    )
    return cases

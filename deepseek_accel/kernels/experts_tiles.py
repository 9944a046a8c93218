"""Experts for many tokens: pairs of token and expert sorted by expert, then tensor cores tile by tile.

  1. `launch_sort`          pairs in order of their expert, and which expert and rows each tile has
  2. `tile_gate_up_kernel`  silu(gate) * up of every pair, in sorted order
  3. `tile_down_kernel`     outputs of every pair, in the original order
  4. `launch_combine`       the weighted sum over a token's experts, in order, and the residual

The first and the last are in `experts_order.py`.

With few rows per expert the weights are what is read. Then a tile holds all rows of an expert, and weights are the
first operand of the product (SWAP): tensor cores from Hopper on take at least 64 rows there, straight from shared
memory, but any multiple of 8 columns, so that few tokens waste little.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import launching
from .experts_order import ROW_TILES, launch_combine, launch_sort, tile_of_program
from .experts_pairs import silu
from .launching import launch_dependents, wait


@triton.jit
def _short_chain(sums, part, step):
    """Every fourth step moves `part` to `sums`. In fp32 one long chain of additions loses what shorter ones keep."""
    if step % 4 == 3:
        sums += part
        part = tl.zeros_like(part)
    return sums, part


@triton.jit(do_not_specialize=["num_tiles"])
def tile_gate_up_kernel(
    hidden,  # [T, D]
    order,  # [pairs]
    tiles,  # [3, num_tiles]
    gate_up,  # [E, 2I, D]
    shared_gate,  # [SHARED * I, D], contiguous; used if SHARED
    shared_up,
    active,  # [pairs, I], contiguous, sorted
    hidden_stride,
    expert_stride,
    row_stride,
    num_tiles,
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    EVEN: tl.constexpr = D % BLOCK_K == 0
    tile, column = tile_of_program(num_tiles, (I + BLOCK_N - 1) // BLOCK_N, GROUP)
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert < 0:
        return
    sorted_row = tl.load(tiles + num_tiles + tile) + tl.arange(0, BLOCK_M)
    used = sorted_row < tl.load(tiles + 2 * num_tiles + tile)
    token = (tl.load(order + sorted_row, mask=used, other=0) // (K + SHARED)).to(tl.int64)
    outer = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outer < I
    # Columns past the last read the last: what they compute is not stored, and a load without a mask is faster.
    safe = tl.where(inside, outer, I - 1).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    x = hidden + token[:, None] * hidden_stride + inner[None, :]
    gate_base, up_base, stride = gate_up + expert * expert_stride, gate_up + expert * expert_stride, row_stride
    up_base += tl.full([], I, tl.int64) * row_stride
    if SHARED:  # noqa: SIM102, one is known when it compiles
        if expert >= E:
            gate_base, up_base = shared_gate + (expert - E) * I * D, shared_up + (expert - E) * I * D
            stride = D
    gate_rows = gate_base + safe[:, None] * stride + inner[None, :]
    up_rows = up_base + safe[:, None] * stride + inner[None, :]
    if SWAP:  # noqa: SIM108
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros_like(gate)
    gate_sum, up_sum = gate, up
    for start in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        if EVEN:
            value = tl.load(x + start, mask=used[:, None], other=0.0)
            gate_weight = tl.load(gate_rows + start)
            up_weight = tl.load(up_rows + start)
        else:
            in_row = inner < D - start
            value = tl.load(x + start, mask=used[:, None] & in_row[None, :], other=0.0)
            gate_weight = tl.load(gate_rows + start, mask=in_row[None, :], other=0.0)
            up_weight = tl.load(up_rows + start, mask=in_row[None, :], other=0.0)
        if SWAP:
            gate = tl.dot(gate_weight, tl.trans(value), gate, input_precision=PRECISION)
            up = tl.dot(up_weight, tl.trans(value), up, input_precision=PRECISION)
        else:
            gate = tl.dot(value, tl.trans(gate_weight), gate, input_precision=PRECISION)
            up = tl.dot(value, tl.trans(up_weight), up, input_precision=PRECISION)
        if PRECISION == "ieee":
            gate_sum, gate = _short_chain(gate_sum, gate, start // BLOCK_K)
            up_sum, up = _short_chain(up_sum, up, start // BLOCK_K)
    if PRECISION == "ieee":
        gate, up = gate_sum + gate, up_sum + up
    result = (silu(gate) * up).to(active.dtype.element_ty)
    if SWAP:
        pointers = active + sorted_row.to(tl.int64)[None, :] * I + outer[:, None]
        tl.store(pointers, result, mask=used[None, :] & inside[:, None])
    else:
        pointers = active + sorted_row.to(tl.int64)[:, None] * I + outer[None, :]
        tl.store(pointers, result, mask=used[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_tiles"])
def tile_down_kernel(
    active,  # [pairs, I], contiguous, sorted
    order,  # [pairs]
    tiles,  # [3, num_tiles]
    down,  # [E, D, I]
    shared_down,  # [D, SHARED * I], contiguous; used if SHARED
    outputs,  # [pairs, D], contiguous, in the original order
    expert_stride,
    row_stride,
    num_tiles,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    EVEN: tl.constexpr = I % BLOCK_K == 0
    tile, column = tile_of_program(num_tiles, (D + BLOCK_N - 1) // BLOCK_N, GROUP)
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
    base, stride = down + expert * expert_stride, row_stride
    if SHARED:  # noqa: SIM102, one is known when it compiles
        if expert >= E:
            base, stride = shared_down + (expert - E) * I, SHARED * I
    rows = base + safe[:, None] * stride + inner[None, :]
    if SWAP:  # noqa: SIM108
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total_sum = total
    for start in tl.range(0, I, BLOCK_K, num_stages=STAGES):
        if EVEN:
            value = tl.load(x + start, mask=used[:, None], other=0.0)
            weight = tl.load(rows + start)
        else:
            in_row = inner < I - start
            value = tl.load(x + start, mask=used[:, None] & in_row[None, :], other=0.0)
            weight = tl.load(rows + start, mask=in_row[None, :], other=0.0)
        if SWAP:
            total = tl.dot(weight, tl.trans(value), total, input_precision=PRECISION)
        else:
            total = tl.dot(value, tl.trans(weight), total, input_precision=PRECISION)
        if PRECISION == "ieee":
            total_sum, total = _short_chain(total_sum, total, start // BLOCK_K)
    if PRECISION == "ieee":
        total += total_sum
    result = total.to(outputs.dtype.element_ty)
    if SWAP:
        pointers = outputs + pair[None, :] * D + outer[:, None]
        tl.store(pointers, result, mask=used[None, :] & inside[:, None])
    else:
        pointers = outputs + pair[:, None] * D + outer[None, :]
        tl.store(pointers, result, mask=used[:, None] & inside[None, :])


class Tile(NamedTuple):
    """Sizes of a tiled matmul: rows, output columns (of gate and of up each), inner, and how it is compiled."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    swap: bool = False


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

    With few rows the weights are what is read: the whole inner dimension streams through deep buffers. fp32 has no
    tensor core path of full precision: small tiles, whose operands fit in registers. Measured on an H200, V2-Lite with
    shared experts, in us, and the least that reading at 4.26 TB/s takes: 8 tokens 153 of 150, 32 tokens 258 of 258, 512
    tokens 329 and 1,024 tokens 409 of 268; 8,192 tokens 497 TFLOP/s. At 128 tokens these two tiles were not measured
    together: with the same gate-up tile and a narrower down tile 284 of 268.
    """
    swaps = capability >= (9, 0)
    if element_bytes == 4:
        gate_up = down = Tile(16 if rows_per_expert <= 16 else 32, 32, 32, 4, 2)
    elif rows_per_expert <= 8:
        gate_up, down = Tile(16, 64, 128, 4, 3, swaps), Tile(16, 64, 128, 4, 4, swaps)
    elif rows_per_expert <= 24:
        gate_up, down = Tile(32, 64, 64, 4, 4, swaps), Tile(32, 128, 64, 4, 4, swaps)
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


def launch(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    residual: torch.Tensor | None,
    tiles: tuple[Tile, Tile] | None = None,
) -> None:
    """Into out [T, D]; the rest as in `ops.experts.mixture`, indices and weights contiguous."""
    num_tokens, top_k = indices.shape
    num_experts, size, intermediate = down.shape
    shared_gate, shared_up, shared_down = (gate_up, gate_up, down) if shared is None else shared
    num_shared = 0 if shared is None else shared_gate.shape[0] // intermediate
    element_bytes = hidden.element_size()
    capability = torch.cuda.get_device_capability(hidden.device) if hidden.is_cuda else (8, 0)
    first, second = tiles or choose_tiles(num_tokens * top_k / num_experts, element_bytes, capability)
    precision = "ieee" if element_bytes == 4 else "tf32"
    pdl = launching.uses_pdl(hidden.device)
    dependent = {"launch_pdl": True} if pdl else {}
    order, plan = launch_sort(indices, num_experts, num_shared, first.rows)
    num_pairs, num_tiles = len(order), plan.shape[1]
    active = hidden.new_empty(num_pairs, intermediate)
    outputs = hidden.new_empty(num_pairs, size)
    sizes = (num_shared, size, intermediate)
    launching.launch(
        tile_gate_up_kernel,
        (num_tiles * -(-intermediate // first.columns),),
        (
            hidden,
            order,
            plan,
            gate_up,
            shared_gate,
            shared_up,
            active,
            hidden.stride(0),
            gate_up.stride(0),
            gate_up.stride(1),
            num_tiles,
        ),
        (num_experts, top_k, *sizes, *_constants(first, precision), pdl),
        num_warps=first.warps,
        **dependent,
    )
    launching.launch(
        tile_down_kernel,
        (num_tiles * -(-size // second.columns),),
        (active, order, plan, down, shared_down, outputs, down.stride(0), down.stride(1), num_tiles),
        (num_experts, *sizes, *_constants(second, precision), pdl),
        num_warps=second.warps,
        **dependent,
    )
    launch_combine(outputs, indices, weights, residual, out, num_experts, num_shared)


def _constants(tile: Tile, precision: str) -> tuple[object, ...]:
    return (tile.rows, tile.columns, tile.inner, tile.stages, tile.swap, ROW_TILES, precision)


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) for V2-Lite and V3 in bf16, with and without shared experts."""
    types = {
        **dict.fromkeys(("hidden", "gate_up", "down", "active", "outputs"), "*bf16"),
        **dict.fromkeys(("shared_gate", "shared_up", "shared_down"), "*bf16"),
        **dict.fromkeys(("order", "tiles"), "*i32"),
        **dict.fromkeys(("hidden_stride", "expert_stride", "row_stride", "num_tiles"), "i32"),
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
        for shared in (0, 2 if model == "v2-lite" else 1):
            sizes = {"E": experts, "K": top_k, "D": size, "I": intermediate, "SHARED": shared}
            for capability in (80, 89, 90, 100):
                options = {"num_stages": 3, "capability": capability}
                fixed = sizes | {"GROUP": ROW_TILES, "PRECISION": "tf32", "PDL": capability >= 90}
                name = f"{model}-{shared}"
                for rows in (1, 8, 24, 64, 128):
                    tiles = choose_tiles(rows, 2, divmod(capability, 10))
                    for tile, stem, kernel in zip(
                        tiles, ("tile_gate_up", "tile_down"), (tile_gate_up_kernel, tile_down_kernel), strict=True
                    ):
                        blocks = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.inner}
                        blocks |= {"STAGES": tile.stages, "SWAP": tile.swap}
                        add(f"{stem}-{name}-{rows}", kernel, fixed | blocks, num_warps=tile.warps, **options)
    return cases

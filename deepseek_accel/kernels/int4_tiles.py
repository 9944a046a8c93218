"""Four-bit weights through tensor cores, tile by tile: dense layers, and experts sorted as in `experts_tiles.py`.

One kernel serves three products: gate and up of experts, down of experts, and dense weights (FORM). Codes become 16-bit
weights in registers, to the bit those of `ops.int4.dequantize`, so each weight is unpacked once for all rows of a tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import choices, launching
from .experts_pairs import silu
from .experts_tiles import GROUP as ROW_TILES
from .experts_tiles import _tile_of_program, combine_kernel, sort_kernel
from .int4 import group_words, weight_tile, words_of_group
from .launching import launch_dependents, wait

DENSE, GATE_UP, DOWN = 0, 1, 2


@triton.jit
def _load_tile(words, groups, start, D: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr):
    """Codes [N, BLOCK_K / 8] and groups [N, 1] of inputs start to start + BLOCK_K, which are in one group."""
    if D % BLOCK_K == 0:
        codes = tl.load(words + start // 8)
    else:
        WORDS: tl.constexpr = (D + 31) // 32 * 4
        word = tl.arange(0, BLOCK_K // 8)[None, :]
        codes = tl.load(words + start // 8, mask=word < WORDS - start // 8, other=0)
    return codes, tl.load(groups + start // GROUP)


@triton.jit
def _product(weight, value, total, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    if SWAP:
        return tl.dot(weight, tl.trans(value), total, input_precision=PRECISION)
    else:
        return tl.dot(value, tl.trans(weight), total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def int4_tiles_kernel(
    x,  # hidden [T, D], or active [pairs, D] for DOWN; rows contiguous
    order,  # [pairs], as are `tiles` not used if DENSE
    tiles,  # [3, num_tiles]
    words,  # [E, N, WORDS], [E, 2N, WORDS] for GATE_UP, or [N, WORDS]; contiguous, as are all that follow
    groups,
    more_words,  # the shared experts' (gate's), or the up weight of a gated DENSE
    more_groups,
    up_words,  # the shared experts' up, for GATE_UP
    up_groups,
    bias,  # [N], used if BIAS
    residual,  # [T, N], used if ADD
    out,  # [rows of the tiles, N]: sorted for GATE_UP, in the original order for DOWN
    x_stride,
    num_rows,
    num_tiles,
    FORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    E: tl.constexpr,
    SLOTS: tl.constexpr,  # pairs of a token
    SHARED: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    wait(PDL)
    WORDS: tl.constexpr = (D + 31) // 32 * 4
    G: tl.constexpr = (D + GROUP - 1) // GROUP
    dtype: tl.constexpr = x.dtype.element_ty
    tile, column = _tile_of_program(num_tiles, (N + BLOCK_N - 1) // BLOCK_N, ROW_TILES)
    outer = column * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the last read the last: what they compute is not stored, and a load without a mask is faster.
    safe = tl.minimum(outer, N - 1).to(tl.int64)[:, None]
    width, scales_width = WORDS, G
    if FORM == 0:
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        used = row < num_rows
        source = row.to(tl.int64)
        target = source
        first, scales = words, groups
        if GATED:
            second, second_scales = more_words, more_groups
    else:
        expert = tl.load(tiles + tile).to(tl.int64)
        if expert < 0:
            return
        row = tl.load(tiles + num_tiles + tile) + tl.arange(0, BLOCK_M)
        used = row < tl.load(tiles + 2 * num_tiles + tile)
        pair = tl.load(order + row, mask=used, other=0).to(tl.int64)
        if FORM == 1:
            source, target = pair // SLOTS, row.to(tl.int64)
            first, scales = words + expert * (2 * N) * WORDS, groups + expert * (2 * N) * G
            second = first + tl.full([], N, tl.int64) * WORDS
            second_scales = scales + tl.full([], N, tl.int64) * G
            if SHARED:  # noqa: SIM102, one is known when it compiles
                if expert >= E:
                    first, scales = more_words + (expert - E) * N * WORDS, more_groups + (expert - E) * N * G
                    second, second_scales = up_words + (expert - E) * N * WORDS, up_groups + (expert - E) * N * G
        else:
            source, target = row.to(tl.int64), pair
            first, scales = words + expert * N * WORDS, groups + expert * N * G
            if SHARED:  # noqa: SIM102
                if expert >= E:  # columns of one weight [N, SHARED * D]: D is a multiple of GROUP then
                    first, scales = more_words + (expert - E) * (D // 8), more_groups + (expert - E) * (D // GROUP)
                    width, scales_width = SHARED * WORDS, SHARED * G

    inner = tl.arange(0, BLOCK_K)
    values = x + source[:, None] * x_stride + inner[None, :]
    rows = first + safe * width + tl.arange(0, BLOCK_K // 8)[None, :]
    row_scales = scales + safe * scales_width
    if GATED:
        other_rows = second + safe * width + tl.arange(0, BLOCK_K // 8)[None, :]
        other_scales = second_scales + safe * scales_width
    if SWAP:  # noqa: SIM108
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    other = total
    for start in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        if D % BLOCK_K == 0:
            value = tl.load(values + start, mask=used[:, None], other=0.0)
        else:
            value = tl.load(values + start, mask=used[:, None] & (inner < D - start)[None, :], other=0.0)
        codes, scale = _load_tile(rows, row_scales, start, D, GROUP, BLOCK_K)
        if GATED:
            more_codes, more_scale = _load_tile(other_rows, other_scales, start, D, GROUP, BLOCK_K)
        total = _product(weight_tile(codes, scale, dtype, False), value, total, SWAP, PRECISION)
        if GATED:
            other = _product(weight_tile(more_codes, more_scale, dtype, False), value, other, SWAP, PRECISION)
    if GATED:
        total = silu(total) * other
    if not SWAP:
        total = tl.trans(total)
    inside = (outer < N)[:, None] & used[None, :]
    place = target[None, :] * N + outer[:, None]
    if BIAS:
        total += tl.load(bias + outer, mask=outer < N, other=0.0).to(tl.float32)[:, None]
    if ADD:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


class Tile(NamedTuple):
    """Rows, output columns (of gate and of up each), inner at most, and how it is compiled."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    swap: bool = False


@choices.by_device
def choose_tile(capability: tuple[int, int], rows: int, gated: bool, itemsize: int) -> Tile:
    """`rows`: what a tile should hold, of those that `rows_of_tile` gives; experts' two products have the same.

    Measured on an H200 in bf16, groups of 128, V2-Lite with shared experts, us: 8 tokens 112, 32 tokens 192, 128 tokens
    245, 512 tokens 319, 1,024 tokens 487, 2,048 tokens 933; 16-bit experts 146, 264, 297, 337, 415, 713. Their bytes
    take 43 to 72 us: what limits is unpacking. V3, 8 tokens: 798 of 322. The packing serves `int4_pairs.py`; with one
    that put neighbours into one word and weights first (`swap`), tiles took 116, 178, 212 and, at 1,024, 464 us, but
    one token 47 instead of 25.
    """
    if itemsize == 4:
        return Tile(min(rows, 32), 32, 32, 4, 2)
    if rows <= 16:
        return Tile(16, 64, 64, 4, 4)
    if rows <= 64:
        return Tile(64, 64, 64, 4, 4) if gated else Tile(64, 128, 64, 8, 3)
    return Tile(128, 64, 64, 4, 4) if gated else Tile(128, 128, 64, 8, 4)


def rows_of_tile(rows: float, itemsize: int) -> int:
    """For `choose_tile`: where so many rows share a weight. At 12 rows an expert (V2-Lite, 128 tokens) tiles of 16 were
    faster than of 32; between 12 and 48 nothing was measured."""
    if rows <= 16:
        return 16
    if itemsize == 4:
        return 32
    return 64 if rows <= 64 else 128


def _constants(tile: Tile, group_size: int, precision: str) -> tuple[object, ...]:
    inner = 8 * words_of_group(group_size, tile.inner // 8)
    return (group_size, tile.rows, tile.columns, inner, tile.stages, tile.swap, ROW_TILES, precision)


Packed = tuple[torch.Tensor, torch.Tensor]
"""Words and groups of an `ops.int4.Int4Weight`."""


def launch_dense(
    x: torch.Tensor,
    weight: Packed,
    other: Packed | None,
    group_size: int,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] -> [T, N], or with `other` silu(x weight^T) * (x other^T); T not 0."""
    num_tokens, size = x.shape
    count = weight[0].shape[0]
    out = torch.empty(num_tokens, count, dtype=x.dtype, device=x.device)
    gated, itemsize = other is not None, x.element_size()
    tile = tile or choose_tile(x.device, rows_of_tile(num_tokens, itemsize), gated, itemsize)
    second = weight if other is None else other
    num_tiles = -(-num_tokens // tile.rows)
    pdl = launching.uses_pdl(x.device)
    launching.launch(
        int4_tiles_kernel,
        (num_tiles * -(-count // tile.columns),),
        (
            x,
            weight[0],
            weight[0],
            weight[0],
            group_words(weight[1]),
            second[0],
            group_words(second[1]),
            second[0],
            group_words(second[1]),
            x if bias is None else bias,
            x if residual is None else residual.contiguous(),
            out,
            x.stride(0),
            num_tokens,
            num_tiles,
        ),
        (
            DENSE,
            gated,
            bias is not None,
            residual is not None,
            1,
            1,
            0,
            size,
            count,
            *_constants(tile, group_size, "ieee" if itemsize == 4 else "tf32"),
            pdl,
        ),
        num_warps=tile.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def launch_experts(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Packed,
    down: Packed,
    out: torch.Tensor,
    shared: tuple[Packed, Packed, Packed] | None,
    residual: torch.Tensor | None,
    intermediate: int,
    group_size: int,
    tiles: tuple[Tile, Tile] | None = None,
) -> None:
    """Into out [T, D]; the rest as in `ops.int4_experts.int4_mixture`, indices and weights contiguous. With shared
    experts `intermediate` is a multiple of the group size."""
    num_tokens, top_k = indices.shape
    num_experts, size = down[0].shape[:2]
    gate, up, shared_down = (gate_up, gate_up, down) if shared is None else shared
    num_shared = 0 if shared is None else gate[0].shape[0] // intermediate
    slots = top_k + num_shared
    num_pairs = num_tokens * slots
    itemsize = hidden.element_size()
    if tiles is None:
        rows = rows_of_tile(num_tokens * top_k / num_experts, itemsize)
        tiles = tuple(choose_tile(hidden.device, rows, gated, itemsize) for gated in (True, False))  # type: ignore[assignment]
        assert tiles is not None
    first, second = tiles
    num_tiles = num_pairs // first.rows + num_experts + num_shared
    precision = "ieee" if itemsize == 4 else "tf32"
    pdl = launching.uses_pdl(hidden.device)
    dependent = {"launch_pdl": True} if pdl else {}
    order = torch.empty(num_pairs, dtype=torch.int32, device=hidden.device)
    plan = torch.empty(3, num_tiles, dtype=torch.int32, device=hidden.device)
    active = hidden.new_empty(num_pairs, intermediate)
    outputs = hidden.new_empty(num_pairs, size)
    block = min(4096, max(256, triton.next_power_of_2(num_pairs)))
    launching.launch(
        sort_kernel,
        (num_experts + num_shared,),
        (indices, order, plan, num_pairs, num_tiles),
        (num_experts, top_k, num_shared, first.rows, block, pdl),
        num_warps=8 if block > 1024 else 4,
        **dependent,
    )
    gate_up_weights = (gate_up[0], group_words(gate_up[1]), gate[0], group_words(gate[1]), up[0], group_words(up[1]))
    down_weights = (down[0], group_words(down[1]), *(shared_down[0], group_words(shared_down[1])) * 2)
    for form, x, packed, target, inner, columns, tile in (
        (GATE_UP, hidden, gate_up_weights, active, size, intermediate, first),
        (DOWN, active, down_weights, outputs, intermediate, size, second),
    ):
        launching.launch(
            int4_tiles_kernel,
            (num_tiles * -(-columns // tile.columns),),
            (x, order, plan, *packed, target, target, target, x.stride(0), num_pairs, num_tiles),
            (
                form,
                form == GATE_UP,
                False,
                False,
                num_experts,
                slots,
                num_shared,
                inner,
                columns,
                *_constants(tile, group_size, precision),
                pdl,
            ),
            num_warps=tile.warps,
            **dependent,
        )
    block_d = min(triton.next_power_of_2(size), 1024)
    launching.launch(
        combine_kernel,
        (num_tokens, -(-size // block_d)),
        (outputs, indices, weights, out if residual is None else residual, out),
        (num_experts, top_k, num_shared, residual is not None, size, block_d, pdl),
        num_warps=4,
        **dependent,
    )


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) for V2-Lite in bf16: experts and its dense MLP."""
    numbers = ("x", "bias", "residual", "out")
    packed = ("words", "groups", "more_words", "more_groups", "up_words", "up_groups")
    types = dict.fromkeys(numbers, "*bf16") | dict.fromkeys((*packed, "order", "tiles"), "*i32")
    types |= dict.fromkeys(("x_stride", "num_rows", "num_tiles"), "i32")
    arguments = int4_tiles_kernel.arg_names
    signature = {argument: types.get(argument, "constexpr") for argument in arguments}
    aligned = [argument for argument in arguments if types.get(argument, "")[:1] == "*" or argument == "x_stride"]
    attrs = {(arguments.index(argument),): [["tt.divisibility", 16]] for argument in aligned}
    cases = []
    for form, name, size, count, rows in (
        (GATE_UP, "gate_up", 2048, 1408, (16, 128)),
        (DOWN, "down", 1408, 2048, (16, 64)),
        (DENSE, "dense", 10944, 2048, (16,)),
    ):
        for capability in (80, 90, 100):
            for number in rows:
                gated = form == GATE_UP
                tile = choose_tile((capability // 10, capability % 10), number, gated, 2)
                names = arguments[arguments.index("FORM") :]
                shared = 0 if form == DENSE else 2
                values = (form, gated, False, form == DENSE, 64, 6 + shared, shared, size, count)
                values = (*values, *_constants(tile, 128, "tf32"), capability >= 90)
                options = {"num_warps": tile.warps, "num_stages": 3, "capability": capability, "attrs": attrs}
                fixed = dict(zip(names, values, strict=True))
                cases.append((f"int4_{name}-{number}", int4_tiles_kernel, signature, fixed, options))
    return cases

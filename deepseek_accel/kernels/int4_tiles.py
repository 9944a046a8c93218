"""Four-bit weights through tensor cores, tile by tile: dense layers, and experts sorted as in `experts_tiles.py`.

One kernel serves three products: gate and up of experts, down of experts, and dense weights (FORM). Codes become 16-bit
weights in registers, to the bit those of `ops.int4.dequantize`, so each weight is unpacked once for all rows of a tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import choices, launching
from .experts_order import ROW_TILES, tile_of_program
from .experts_pairs import silu
from .int4 import Packed, weight_tile, words_of_group
from .int4_forms import DENSE, DOWN, GATE_UP, Product, compile_signature, dense_product, weights_of_expert
from .int4_forms import launch_experts as launch_mixture
from .launching import launch_dependents, wait


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
    tile, column = tile_of_program(num_tiles, (N + BLOCK_N - 1) // BLOCK_N, ROW_TILES)
    outer = column * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows past the last read the last: what they compute is not stored, and a load without a mask is faster.
    safe = tl.minimum(outer, N - 1).to(tl.int64)[:, None]
    if FORM == 0:
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        used = row < num_rows
        source = row.to(tl.int64)
        target = source
        first, scales, second, second_scales = words, groups, more_words, more_groups
        width, scales_width = WORDS, G
    else:
        expert = tl.load(tiles + tile).to(tl.int64)
        if expert < 0:
            return
        row = tl.load(tiles + num_tiles + tile) + tl.arange(0, BLOCK_M)
        used = row < tl.load(tiles + 2 * num_tiles + tile)
        pair = tl.load(order + row, mask=used, other=0).to(tl.int64)
        if FORM == 1:
            source, target = pair // SLOTS, row.to(tl.int64)
        else:
            source, target = row.to(tl.int64), pair
        first, scales, second, second_scales, width, scales_width = weights_of_expert(
            words, groups, more_words, more_groups, up_words, up_groups, expert, FORM, E, SHARED, WORDS, G, N, 1
        )

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


def _launch(product: Product, group_size: int, tile: Tile) -> None:
    precision = "ieee" if product.x.element_size() == 4 else "tf32"
    pdl = launching.uses_pdl(product.x.device)
    launching.launch(
        int4_tiles_kernel,
        (product.num_tiles * -(-product.count // tile.columns),),
        product.arguments(),
        (*product.constants(), *_constants(tile, group_size, precision), pdl),
        num_warps=tile.warps,
        **({"launch_pdl": True} if pdl else {}),
    )


def _constants(tile: Tile, group_size: int, precision: str) -> tuple[object, ...]:
    inner = 8 * words_of_group(group_size, tile.inner // 8)
    return (group_size, tile.rows, tile.columns, inner, tile.stages, tile.swap, ROW_TILES, precision)


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
    gated, itemsize = other is not None, x.element_size()
    tile = tile or choose_tile(x.device, rows_of_tile(len(x), itemsize), gated, itemsize)
    product = dense_product(x, weight, other, bias, residual, tile.rows)
    _launch(product, group_size, tile)
    return product.out


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
    """As `int4_forms.launch_experts`. With shared experts `intermediate` is a multiple of the group size."""
    num_tokens, top_k = indices.shape
    num_experts, itemsize = len(down[0]), hidden.element_size()
    rows = rows_of_tile(num_tokens * top_k / num_experts, itemsize)
    gate_up_tile, down_tile = tiles or [choose_tile(hidden.device, rows, gated, itemsize) for gated in (True, False)]

    def launch(product: Product) -> None:
        _launch(product, group_size, gate_up_tile if product.form == GATE_UP else down_tile)

    launch_mixture(
        hidden, indices, weights, gate_up, down, out, shared, residual, intermediate, gate_up_tile.rows, launch
    )


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) for V2-Lite in bf16: experts and its dense MLP."""
    arguments = int4_tiles_kernel.arg_names
    signature, attrs = compile_signature(int4_tiles_kernel)
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

"""Four-bit weights times few tokens on tensor cores, straight from the registers that they were loaded into.

One instruction (`int4_fragments.py`; compute capability 8.0 on) multiplies 16 rows of weights with 8 tokens over 16
inputs. Which 16 inputs it takes is free. So a lane reads 16 bytes, 32 codes, of each of its two rows, the four lanes of
a row together a group of 128, and uses them up in eight instructions. Of what is added up only the last sum goes
through shared memory.

Two codes become two 16-bit numbers by one shift and one logical operation: with the upper bits of 128 in bf16, 1024 in
fp16, a code is the number 128 + code. Scale, zero and what was added apply to the sums of a group, in fp32:

    scale * (sum x (c + code) - (c + zero) * sum x)

where the sums of x are one more product, with ones. So a weight costs about two instructions, where `int4_dots.py`
needs three and a half, and 8 tokens cost what one does.

A step's weights, 128 inputs of the rows, are asked for one or two steps ahead, inputs of up to 8 tokens one step;
`upper_bits` sees to it that the compiler leaves them there.

Every tensor is one number per lane, [32 * warps]: then no layout but the plain one exists, and lanes are where the
instruction wants them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import choices, launching
from .experts_order import ROW_TILES, tile_of_program
from .experts_pairs import silu
from .int4 import Packed
from .int4_forms import (
    DENSE,
    DOWN,
    GATE_UP,
    PAIRS,
    SEVERAL,
    Product,
    compile_signature,
    dense_product,
    weights_of_expert,
)
from .int4_forms import launch_experts as launch_mixture
from .int4_fragments import (
    add_group,
    gather,
    load_inputs_of,
    load_rows,
    pair_inputs,
    place_upper_bits,
    token_sums,
    upper_bits,
)
from .launching import launch_dependents, wait

TOKENS = 8
"""Of one instruction."""


@triton.jit
def _fetch(
    step, lane, low, high, next_low, next_high, words, groups, more_words, more_groups, apart, groups_apart,
    D: tl.constexpr, GROUP: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """What a warp computes with at `step` [L], 128 inputs: the lane's chunk of 32, whether it is there, and codes and
    groups of each lane's two rows, and of two more if TWO. The rest as in `load_rows`."""
    inside = step < (D + 127) // 128
    chunk = step * 4 + lane % 4
    present = chunk < D // 32
    group = step // (GROUP // 128)
    a0, a1, a2, a3, a4, a5 = load_rows(words, groups, apart, groups_apart, low, high, chunk, group, present, inside)
    b0, b1, b2, b3, b4, b5 = a0, a1, a2, a3, a4, a5
    if TWO:
        b0, b1, b2, b3, b4, b5 = load_rows(
            more_words, more_groups, apart, groups_apart, next_low, next_high, chunk, group, present, inside
        )
    return chunk, present, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def int4_mma_kernel(
    x,  # hidden [T, D], or active [pairs, D] for DOWN; rows contiguous, of 16 bytes' alignment
    order,  # [pairs], as are `tiles` used by GATE_UP and DOWN; the indices [T * K] for PAIRS
    tiles,  # [3, num_tiles]
    words,  # [E, N, WORDS], [E, 2N, WORDS] for GATE_UP and PAIRS, or [N, WORDS]; contiguous, as are all that follow
    groups,
    more_words,  # the shared experts' (gate's), the up weight of a gated DENSE, or the second of SEVERAL
    more_groups,
    up_words,  # the shared experts' up, for GATE_UP and PAIRS, or the third of SEVERAL
    up_groups,
    bias,  # [N], used if BIAS
    residual,  # [T, N], used if ADD
    out,  # [rows of the tiles, N]: sorted for GATE_UP, in the original order for DOWN; of SEVERAL one after the other
    x_stride,
    num_rows,
    num_tiles,
    more_bias,  # of the second and the third of SEVERAL, if BIAS has the second and the third bit
    up_bias,
    FORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    E: tl.constexpr,  # of SEVERAL these three are the rows of the weights
    SLOTS: tl.constexpr,  # pairs of a token
    SHARED: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,  # of 8 tokens: 1 or 2
    ROWS: tl.constexpr,  # 16 or 32; 16 if GATED
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,  # 1 or 2
    ROW_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has ROWS rows of weights, or 16 of gate and 16 of up, and 8 or 16 tokens; its warps share the groups.
    Weights of DEPTH steps are on their way while one is computed with, and inputs of 8 tokens of one step."""
    launch_dependents(PDL)
    TWO: tl.constexpr = GATED or ROWS == 32
    BLOCK_M: tl.constexpr = 8 * TILES
    C0: tl.constexpr = (E + ROWS - 1) // ROWS
    C1: tl.constexpr = (SLOTS + ROWS - 1) // ROWS
    C2: tl.constexpr = (SHARED + ROWS - 1) // ROWS
    COLUMNS: tl.constexpr = C0 + C1 + C2 if FORM == 3 else (N + ROWS - 1) // ROWS
    STEPS: tl.constexpr = (D + 127) // 128
    WORDS: tl.constexpr = D // 8
    G: tl.constexpr = (D + GROUP - 1) // GROUP
    dtype: tl.constexpr = x.dtype.element_ty
    lanes = tl.arange(0, 32 * WARPS)
    lane, warp = lanes % 32, lanes // 32
    place = place_upper_bits(lanes, dtype)
    first_words, first_groups = words.to(tl.int64), groups.to(tl.int64)
    second_words, second_groups = more_words.to(tl.int64), more_groups.to(tl.int64)
    token = lane // 4
    tile, column = tile_of_program(num_tiles, COLUMNS, ROW_TILES)
    count = N
    bias_rows = N
    if FORM == 3:
        is_first, is_third = column < C0, column >= C0 + C1
        first_words = tl.where(is_first, first_words, tl.where(is_third, up_words.to(tl.int64), second_words))
        first_groups = tl.where(is_first, first_groups, tl.where(is_third, up_groups.to(tl.int64), second_groups))
        count = tl.where(is_first, E, tl.where(is_third, SHARED, SLOTS))
        out += tl.where(is_first, 0, tl.where(is_third, E + SLOTS, E)).to(tl.int64) * num_rows
        column -= tl.where(is_first, 0, tl.where(is_third, C0 + C1, C0))
        if BIAS:
            second = tl.where(is_third, up_bias.to(tl.int64), more_bias.to(tl.int64))
            bias = tl.where(is_first, bias.to(tl.int64), second).to(bias.dtype)
            has_bias = tl.where(is_first, BIAS & 1, tl.where(is_third, BIAS & 4, BIAS & 2))
            bias_rows = tl.where(has_bias != 0, count, 0)
    if FORM == 0 or FORM == 3:
        end = num_rows
        begin = tile * BLOCK_M
        source = (begin + token).to(tl.int64)
        later = source + 8
        width, groups_width = WORDS, G
    else:
        if FORM == 4:
            begin, end = tile, tile + 1
            slot = tile % SLOTS
            if slot < SHARED:
                expert = (E + slot).to(tl.int64)
            else:
                wait(PDL)
                expert = tl.load(order + tile // SLOTS * (SLOTS - SHARED) + slot - SHARED).to(tl.int64)
                if (expert < 0) | (expert >= E):
                    return  # int4_mma_down_kernel does not read this row
        else:
            wait(PDL)
            expert = tl.load(tiles + tile).to(tl.int64)
            if expert < 0:
                return
            begin = tl.load(tiles + num_tiles + tile)
            end = tl.load(tiles + 2 * num_tiles + tile)
        if FORM == 1:
            source = tl.load(order + begin + token, mask=begin + token < end, other=0).to(tl.int64) // SLOTS
            later = tl.load(order + begin + 8 + token, mask=begin + 8 + token < end, other=0).to(tl.int64)
            later = later // SLOTS
        elif FORM == 4:
            source = tl.zeros([32 * WARPS], tl.int64) + tile // SLOTS
            later = source
        else:
            source = (begin + token).to(tl.int64)
            later = source + 8
        first_words, first_groups, second_words, second_groups, width, groups_width = weights_of_expert(
            first_words, first_groups, second_words, second_groups, up_words.to(tl.int64), up_groups.to(tl.int64),
            expert, 1 if FORM == 4 else FORM, E, SHARED, WORDS, G, N, 4,
        )  # fmt: skip

    # What rows past the last would compute is not stored, so they are not read.
    row = column * ROWS + lane // 4
    low, high, next_low, next_high = row < count, row + 8 < count, row + 16 < count, row + 24 < count
    apart, groups_apart = tl.full([], 32, tl.int64) * width, tl.full([], 32, tl.int64) * groups_width
    first_words += row.to(tl.int64) * (width * 4)
    first_groups += row.to(tl.int64) * (groups_width * 4)
    if GATED:
        next_low, next_high = low, high
        second_words += row.to(tl.int64) * (width * 4)
        second_groups += row.to(tl.int64) * (groups_width * 4)
    else:
        second_words, second_groups = first_words + 2 * apart, first_groups + 2 * groups_apart
    inputs = x.to(tl.int64) + source * x_stride * 2
    late_inputs = x.to(tl.int64) + later * x_stride * 2
    used, late_used = begin + token < end, begin + 8 + token < end

    t0 = tl.zeros([32 * WARPS], tl.float32)
    t1, t2, t3, u0, u1, u2, u3 = t0, t0, t0, t0, t0, t0, t0
    v0, v1, v2, v3, w0, w1, w2, w3 = t0, t0, t0, t0, t0, t0, t0, t0
    chunk, present, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5 = _fetch(
        warp, lane, low, high, next_low, next_high, first_words, first_groups, second_words, second_groups, apart,
        groups_apart, D, GROUP, TWO,
    )  # fmt: skip
    if DEPTH == 2:
        next_chunk, next_present, c0, c1, c2, c3, c4, c5, d0, d1, d2, d3, d4, d5 = _fetch(
            WARPS + warp, lane, low, high, next_low, next_high, first_words, first_groups, second_words, second_groups,
            apart, groups_apart, D, GROUP, TWO,
        )  # fmt: skip
    wait(PDL)
    # Inputs of 16 tokens would take more registers than there are.
    EARLY: tl.constexpr = TILES == 1
    # As many steps as weights are moved on, or fewer registers.
    UNROLL: tl.constexpr = DEPTH + 1 if EARLY or ROWS == 32 else 1
    if EARLY:
        x0, x1, x2, x3, x4, x5, x6, x7 = load_inputs_of(inputs + chunk * 64, present & used)
    for step in tl.range(0, (STEPS + WARPS - 1) // WARPS, loop_unroll_factor=UNROLL):
        last_chunk, last_present, e0, e1, e2, e3, e4, e5, f0, f1, f2, f3, f4, f5 = _fetch(
            (step + DEPTH) * WARPS + warp, lane, low, high, next_low, next_high, first_words, first_groups,
            second_words, second_groups, apart, groups_apart, D, GROUP, TWO,
        )  # fmt: skip
        if EARLY:
            follows = chunk + 4 * WARPS
            z0, z1, z2, z3, z4, z5, z6, z7 = load_inputs_of(inputs + follows * 64, (follows < D // 32) & used)
        upper = upper_bits(place)
        if not EARLY:
            x0, x1, x2, x3, x4, x5, x6, x7 = load_inputs_of(inputs + chunk * 64, present & used)
        x0, x1, x2, x3, x4, x5, x6, x7 = pair_inputs(x0, x1, x2, x3, x4, x5, x6, x7)
        s0, s1 = token_sums(x0, x1, x2, x3, x4, x5, x6, x7, dtype)
        t0, t1, t2, t3 = add_group(
            t0, t1, t2, t3, upper, a0, a1, a2, a3, a4, a5, x0, x1, x2, x3, x4, x5, x6, x7, s0, s1, 1.0, dtype
        )  # fmt: skip
        if TWO:
            u0, u1, u2, u3 = add_group(
                u0, u1, u2, u3, upper, b0, b1, b2, b3, b4, b5, x0, x1, x2, x3, x4, x5, x6, x7, s0, s1, 1.0, dtype
            )  # fmt: skip
        if TILES == 2:
            y0, y1, y2, y3, y4, y5, y6, y7 = load_inputs_of(late_inputs + chunk * 64, present & late_used)
            y0, y1, y2, y3, y4, y5, y6, y7 = pair_inputs(y0, y1, y2, y3, y4, y5, y6, y7)
            s0, s1 = token_sums(y0, y1, y2, y3, y4, y5, y6, y7, dtype)
            v0, v1, v2, v3 = add_group(
                v0, v1, v2, v3, upper, a0, a1, a2, a3, a4, a5, y0, y1, y2, y3, y4, y5, y6, y7, s0, s1, 1.0, dtype
            )  # fmt: skip
            if TWO:
                w0, w1, w2, w3 = add_group(
                    w0, w1, w2, w3, upper, b0, b1, b2, b3, b4, b5, y0, y1, y2, y3, y4, y5, y6, y7, s0, s1, 1.0, dtype
                )  # fmt: skip
        if EARLY:
            x0, x1, x2, x3, x4, x5, x6, x7 = z0, z1, z2, z3, z4, z5, z6, z7
        if DEPTH == 2:
            chunk, present = next_chunk, next_present
            a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5 = c0, c1, c2, c3, c4, c5, d0, d1, d2, d3, d4, d5
            next_chunk, next_present = last_chunk, last_present
            c0, c1, c2, c3, c4, c5, d0, d1, d2, d3, d4, d5 = e0, e1, e2, e3, e4, e5, f0, f1, f2, f3, f4, f5
        else:
            chunk, present = last_chunk, last_present
            a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5 = e0, e1, e2, e3, e4, e5, f0, f1, f2, f3, f4, f5

    first, second = gather(t0, t1, t2, t3, WARPS), gather(u0, u1, u2, u3, WARPS)
    first_row = column * ROWS
    store_tile(
        first, second, first_row, begin, end, order, bias, bias_rows, residual, out, count, FORM, GATED, BIAS, ADD, TWO
    )
    if TILES == 2:
        first, second = gather(v0, v1, v2, v3, WARPS), gather(w0, w1, w2, w3, WARPS)
        begin += 8
        store_tile(
            first, second, first_row, begin, end, order, bias, bias_rows, residual, out, count, FORM, GATED, BIAS, ADD,
            TWO,
        )  # fmt: skip


@triton.jit
def store_tile(
    result, more, first_row, begin, end, order, bias, bias_rows, residual, out, count,
    FORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Sums as `gather` gives them, of 8 tokens from `begin` on, to where they belong. more: of the second weight if
    GATED, else of the next 16 rows if TWO. count: rows of the weight; bias_rows: of its bias, 0 if it has none."""
    lane, place = tl.arange(0, 32)[:, None], tl.arange(0, 4)[None, :]
    row = first_row + lane // 4 + place % 2 * 8
    token = begin + lane % 4 * 2 + place // 2
    used = token < end
    target = token.to(tl.int64)
    if FORM == 2:
        target = tl.load(order + token, mask=used, other=0).to(tl.int64)
    if GATED:
        _store_rows(silu(result) * more, row, target, used, bias, bias_rows, residual, out, count, BIAS, ADD)
    else:
        _store_rows(result, row, target, used, bias, bias_rows, residual, out, count, BIAS, ADD)
        if TWO:
            _store_rows(more, row + 16, target, used, bias, bias_rows, residual, out, count, BIAS, ADD)


@triton.jit
def _store_rows(
    values, row, target, used, bias, bias_rows, residual, out, count, BIAS: tl.constexpr, ADD: tl.constexpr
):  # fmt: skip
    inside = used & (row < count)
    if BIAS:
        values += tl.load(bias + row, mask=row < bias_rows, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + target * count + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + target * count + row, values.to(out.dtype.element_ty), mask=inside)


class Program(NamedTuple):
    """Warps that share the inputs of a row; rows of a weight, 16 or 32 (a gated product always has 16 of each); and
    how many steps weights are asked for ahead, 1 or 2."""

    warps: int
    rows: int = 32
    depth: int = 1


@choices.by_device
def choose_program(capability: tuple[int, int], form: int, steps: int, count: int, gated: bool, tiles: int) -> Program:
    """steps: of 128 inputs; count: of a weight's rows, of SEVERAL in all; tiles: of 8 tokens, 1 or 2.

    Measured on an H200 in bf16, groups of 128, us, best of 2 to 16 warps, 16 and 32 rows and both depths, for 1 and 8
    tokens, and before inputs and weights were asked for ahead (`upper_bits`) in parentheses: 4,096 x 4,096 6.0 and 7.3
    (9.7, 10.5), 11,008 x 4,096 11.2 and 13.1 (15.6, 15.8), 10,944 x 2,048 7.2 and 8.4 (14.2, 14.6), 18,432 x 7,168 26
    and 29 (33, 36), 2,048 x 2,048 3.7 and 4.6 (6.3, 6.7); gate and up of 4,096 x 11,008 18.6 and 20.2 (21.6, 25.0), of
    2,048 x 10,944 9.8 and 10.7 (10.3, 14.5); q, k and v of 4,096 x 4,096 11.0 (12.5), 2,048 x (3,072 + 576) 4.3 (6.8).
    V2-Lite's experts with shared ones, 8 tokens 78 with one warp, 80 with two (90), 32 tokens 122 and 134 (153); V3's,
    8 tokens 609 and 515. Two steps ahead only pay where all programs run at once.

    16 and 32 tokens, 4 warps of 16 rows: 4,096 x 4,096 16 and 16, 11,008 x 4,096 34 and 36, 10,944 x 2,048 30 and 33;
    8 warps of 32 rows, 16 tokens with a loop that was not unrolled: 13 and 24, 23 and 37, 22 and 20. 18,432 x 7,168, 32
    tokens: 109, with 4 warps of 32 rows 80.
    """
    most = triton.next_power_of_2(steps)
    if form in (GATE_UP, DOWN):
        return Program(1 if steps <= 16 else 2, 16 if gated else 32)
    if form == PAIRS and steps > 32:
        return Program(4, 16)
    if gated:
        return Program(min(2, most), 16)
    columns = -(-count // 16)
    if columns >= 448 and form != SEVERAL:
        return Program(min(4, most), 32, 2 if tiles == 1 else 1)
    if tiles == 2:
        return Program(8, 32) if steps > 32 else Program(min(4, most), 16)
    warps = 8 if steps > 32 else 4 if columns <= 396 else 2
    at_once = {8: 132, 4: 396, 2: 924}[warps]  # on an H200, as many registers as they take
    return Program(min(warps, most), 16, 2 if columns <= at_once else 1)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] with rows that begin at multiples of 16 bytes, as they are read."""
    return x.clone(memory_format=torch.contiguous_format) if x.stride(0) % 8 or x.data_ptr() % 16 else x


def _columns(product: Product, rows: int) -> int:
    """Programs of one tile of tokens, of so many rows of a weight."""
    counts = product.experts if product.form == SEVERAL else (product.count,)
    return sum(-(-count // rows) for count in counts)


def launch_product(
    product: Product,
    group_size: int,
    tiles: int,
    program: Program | None = None,
    biases: tuple[torch.Tensor | None, ...] = (),
) -> None:
    """tiles: of 8 tokens, in a program; biases: of SEVERAL weights."""
    x, steps = product.x, -(-product.size // 128)
    count = sum(product.experts) if product.form == SEVERAL else product.count
    warps, rows, depth = program or choose_program(x.device, product.form, steps, count, product.gated, tiles)
    rows = 16 if product.gated else rows
    pdl = launching.uses_pdl(x.device)
    arguments, (form, gated, has_bias, *rest) = product.arguments(), product.constants()
    if biases:
        has_bias = sum(1 << i for i, bias in enumerate(biases) if bias is not None)
    more_biases = [x if bias is None else bias for bias in (*biases[1:], None, None)[:2]]
    launching.launch(
        int4_mma_kernel,
        (_columns(product, rows) * product.num_tiles,),
        (*arguments, *more_biases),
        (form, gated, has_bias, *rest, group_size, tiles, rows, warps, depth, ROW_TILES, pdl),
        num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )


def launch_dense(
    x: torch.Tensor,
    weight: Packed,
    other: Packed | None,
    group_size: int,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    program: Program | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] -> [T, N], or with `other` silu(x weight^T) * (x other^T); T not 0."""
    tiles = 1 if len(x) <= TOKENS else 2
    product = dense_product(aligned(x), weight, other, bias, residual, TOKENS * tiles)
    launch_product(product, group_size, tiles, program)
    return product.out


def launch_several(
    x: torch.Tensor,
    weights: tuple[Packed, ...],
    group_size: int,
    biases: tuple[torch.Tensor | None, ...],
    program: Program | None = None,
) -> tuple[torch.Tensor, ...]:
    """x [T, K] times each of two or three weights [N_i, K], plus biases: [T, N_i] of each. T not 0."""
    tiles = 1 if len(x) <= TOKENS else 2
    num_tokens, counts = len(x), [words.shape[0] for words, _ in weights]
    out = torch.empty(num_tokens, sum(counts), dtype=x.dtype, device=x.device)
    first, second, *third = weights
    product = Product(
        SEVERAL, aligned(x), (first, second, third[0] if third else second), out, False, num_tokens,
        -(-num_tokens // (TOKENS * tiles)), (*counts, 0)[:3], bias=biases[0],
    )  # fmt: skip
    launch_product(product, group_size, tiles, program, biases)
    parts = out.view(-1).split([num_tokens * count for count in counts])
    return tuple(part.view(num_tokens, count) for part, count in zip(parts, counts, strict=True))


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
    programs: tuple[Program | None, Program | None] = (None, None),
) -> None:
    """As `int4_forms.launch_experts`, in tiles of 8; with up to 4 rows an expert tiles of 16 were slower."""

    def launch(product: Product) -> None:
        launch_product(product, group_size, 1, programs[product.form == DOWN])

    hidden = aligned(hidden)
    launch_mixture(hidden, indices, weights, gate_up, down, out, shared, residual, intermediate, TOKENS, launch)


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) in bf16: experts of V2-Lite and V3, V2-Lite's dense MLP, q, k and
    v of Qwen2-7B, the same and the head of LLM-7B."""
    arguments = int4_mma_kernel.arg_names
    signature, attrs = compile_signature(int4_mma_kernel)
    cases = []
    for form, name, size, count, experts, tokens in (
        (GATE_UP, "gate_up", 2048, 1408, (64, 8, 2), (1,)),
        (DOWN, "down", 1408, 2048, (64, 8, 2), (1,)),
        (GATE_UP, "gate_up-v3", 7168, 2048, (256, 9, 1), (1,)),
        (PAIRS, "pairs", 2048, 1408, (64, 8, 2), (1,)),
        (PAIRS, "pairs-v3", 7168, 2048, (256, 9, 1), (1,)),
        (PAIRS, "pairs-routed-alone", 2048, 1408, (64, 6, 0), (1,)),
        (DENSE, "dense-gated", 2048, 10944, (1, 1, 0), (1, 2)),
        (DENSE, "dense", 10944, 2048, (1, 1, 0), (1, 2)),
        (DENSE, "head", 4096, 102400, (1, 1, 0), (1,)),
        (SEVERAL, "several", 3584, 4608, (3584, 512, 512), (1, 2)),
        (SEVERAL, "several-7b", 4096, 12288, (4096, 4096, 4096), (1,)),
    ):
        gated = form in (GATE_UP, PAIRS) or "gated" in name
        has_bias = 7 if form == SEVERAL else False
        types = signature | ({"order": "*i64"} if form == PAIRS else {})
        for capability in (80, 90, 100):
            for tiles in tokens:
                where = (capability // 10, capability % 10)
                warps, rows, depth = choose_program(where, form, -(-size // 128), count, gated, tiles)
                values = (form, gated, has_bias, name == "dense", *experts, size, count, 128, tiles, rows, warps, depth)
                names = arguments[arguments.index("FORM") :]
                fixed = dict(zip(names, (*values, ROW_TILES, capability >= 90), strict=True))
                options = {"num_warps": warps, "num_stages": 3, "capability": capability, "attrs": attrs}
                cases.append((f"int4_mma_{name}-{tiles}", int4_mma_kernel, types, fixed, options))
    return cases

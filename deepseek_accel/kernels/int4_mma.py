"""Four-bit weights times few tokens on tensor cores, straight from the registers that they were loaded into.

`mma.sync.m16n8k16` (PTX ISA; compute capability 8.0 on) multiplies 16 rows of weights with 8 tokens over 16 inputs. Of
its first operand lane l holds rows l / 4 and l / 4 + 8, at four inputs that its l % 4 decides; of the second, the token
l / 4 at the same inputs. Which 16 inputs one instruction takes is free. So a lane reads 16 bytes, 32 codes,
of each of its two rows, the four lanes of a row together a group of 128, and uses them up in eight instructions.
Nothing goes through shared memory but the last sum.

Two codes become two 16-bit numbers by one shift and one logical operation: with the upper bits of 128 in bf16, 1024 in
fp16, a code is the number 128 + code. Scale, zero and what was added apply to the sums of a group, in fp32:

    scale * (sum x (c + code) - (c + zero) * sum x)

where the sums of x are one more product, with ones. So a weight costs about one instruction, a third of what
`int4_dots.py` needs, and 8 tokens cost what one does.

Every tensor is one number per lane, [32 * warps]: then no layout but the plain one exists, and lanes are where the
instruction wants them. In Triton's interpreter the same lanes are multiplied by definition.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import choices, launching
from .experts_pairs import silu
from .experts_tiles import GROUP as ROW_TILES
from .experts_tiles import _tile_of_program, combine_kernel, sort_kernel
from .int4 import INTERPRETED, group_words, split_groups
from .launching import launch_dependents, wait

DENSE, GATE_UP, DOWN, PAIR_GATE_UP, PAIR_DOWN = range(5)
TOKENS = 8
"""Of one instruction."""


def _product(kind: str, base: int) -> tl.constexpr:
    """PTX: four words (as two 64-bit numbers) of the lower row, four of the upper, 16 pairs of inputs (as eight) ->
    the four sums of a lane. Two chains of instructions, so that they wait for each other half as long."""
    lines = ["{ .reg .b32 a<4>, l<4>, h<4>, x<16>; .reg .f32 c<8>;"]
    lines += [f"mov.f32 c{i}, 0f00000000;" for i in range(8)]
    for i in range(2):
        lines += [f"mov.b64 {{l{2 * i}, l{2 * i + 1}}}, ${4 + i};", f"mov.b64 {{h{2 * i}, h{2 * i + 1}}}, ${6 + i};"]
    lines += [f"mov.b64 {{x{2 * i}, x{2 * i + 1}}}, ${8 + i};" for i in range(8)]
    for word in range(4):
        for place in (0, 2):
            for number, (row, shift) in enumerate((row, shift) for shift in (0, 1) for row in "lh"):
                source = f"{row}{word}"
                if place + shift:
                    lines.append(f"shr.b32 a{number}, {source}, {4 * (place + shift)};")
                    source = f"a{number}"
                lines.append(f"lop3.b32 a{number}, {source}, 0x000F000F, {base:#x}, 0xEA;")
            first, chain = 4 * place + 2 * word, ", ".join(f"c{2 * place + i}" for i in range(4))
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{{chain}}}, {{a0, a1, a2, a3}}, "
                f"{{x{first}, x{first + 1}}}, {{{chain}}};"
            )
    lines += [f"add.f32 ${i}, c{i}, c{i + 4};" for i in range(4)]
    return tl.constexpr(" ".join([*lines, "}"]))


def _sums(kind: str, one: int) -> tl.constexpr:
    """PTX: 16 pairs of inputs -> the sums of x of a lane's two tokens."""
    lines = ["{ .reg .b32 a, x<16>; .reg .f32 c<4>;", f"mov.b32 a, {one:#x};"]
    lines += [f"mov.f32 c{i}, 0f00000000;" for i in range(4)]
    lines += [f"mov.b64 {{x{2 * i}, x{2 * i + 1}}}, ${2 + i};" for i in range(8)]
    for i in range(0, 16, 2):
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{c0, c1, c2, c3}}, {{a, a, a, a}}, "
            f"{{x{i}, x{i + 1}}}, {{c0, c1, c2, c3}};"
        )
    return tl.constexpr(" ".join([*lines, "mov.f32 $0, c0; mov.f32 $1, c1; }"]))


def _pairs() -> tl.constexpr:
    """PTX: 32 neighbouring 16-bit inputs, as eight 64-bit numbers -> the pairs (j, j + 16), which is how two codes of a
    word lie; two pairs, of places 2 q and 2 q + 1 of word w, are number 4 q + w, what one instruction takes."""
    lines = ["{ .reg .b32 r<16>, p<16>;"]
    lines += [f"mov.b64 {{r{2 * i}, r{2 * i + 1}}}, ${8 + i};" for i in range(8)]
    for i in range(8):
        lines += [f"prmt.b32 p{2 * i}, r{i}, r{i + 8}, 0x5410;", f"prmt.b32 p{2 * i + 1}, r{i}, r{i + 8}, 0x7632;"]
    for q in range(2):
        lines += [f"mov.b64 ${4 * q + w}, {{p{8 * q + w}, p{8 * q + w + 4}}};" for w in range(4)]
    return tl.constexpr(" ".join([*lines, "}"]))


BF16_PRODUCT, FP16_PRODUCT = _product("bf16", 0x43004300), _product("f16", 0x64006400)
BF16_SUMS, FP16_SUMS = _sums("bf16", 0x3F803F80), _sums("f16", 0x3C003C00)
PAIRS = _pairs()
PRODUCT_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 4 + ["l"] * 12))
SUMS_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 2 + ["l"] * 8))
PAIRS_CONSTRAINTS = tl.constexpr(",".join(["=l"] * 8 + ["l"] * 8))
LOAD_WEIGHTS = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b64 $0, 0; mov.b64 $1, 0; "
    "@p ld.global.nc.L1::no_allocate.v2.b64 {$0, $1}, [$2]; }"
)
LOAD_INPUTS = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $9, 0; "
    + " ".join(f"mov.b64 ${i}, 0;" for i in range(8))
    + " "
    + " ".join(f"@p ld.global.v2.b64 {{${2 * i}, ${2 * i + 1}}}, [$8 + {16 * i}];" for i in range(4))
    + " }"
)
LOAD_INPUTS_CONSTRAINTS = tl.constexpr(",".join(["=&l"] * 8 + ["l", "r"]))


@triton.jit
def _load_words(address, present):
    """int64 addresses [L] of 16 bytes of codes -> their lower and upper half, int64; 0, and unread, if not present."""
    if INTERPRETED:
        pointer = address.to(tl.pointer_type(tl.int64))
        return tl.load(pointer, mask=present, other=0), tl.load(pointer + 1, mask=present, other=0)
    else:
        return tl.inline_asm_elementwise(
            LOAD_WEIGHTS, "=&l,=&l,l,r", [address, present.to(tl.int32)], (tl.int64, tl.int64), False, 1
        )


@triton.jit
def _load_inputs(address, valid):
    """int64 addresses [L] of 32 inputs of 16 bits -> eight int64 [L], 0 where not `valid`."""
    if INTERPRETED:
        pointer = address.to(tl.pointer_type(tl.int64))
        x0 = tl.load(pointer, mask=valid, other=0)
        x1 = tl.load(pointer + 1, mask=valid, other=0)
        x2 = tl.load(pointer + 2, mask=valid, other=0)
        x3 = tl.load(pointer + 3, mask=valid, other=0)
        x4 = tl.load(pointer + 4, mask=valid, other=0)
        x5 = tl.load(pointer + 5, mask=valid, other=0)
        x6 = tl.load(pointer + 6, mask=valid, other=0)
        x7 = tl.load(pointer + 7, mask=valid, other=0)
        return x0, x1, x2, x3, x4, x5, x6, x7
    else:
        return tl.inline_asm_elementwise(
            LOAD_INPUTS, LOAD_INPUTS_CONSTRAINTS, [address, valid.to(tl.int32)], (tl.int64,) * 8, False, 1
        )


@triton.jit
def _paired(x0, x1, x2, x3, x4, x5, x6, x7):
    """`_load_inputs` as `_multiply` takes them: in pairs that lie as two codes of a word do."""
    if INTERPRETED:
        return x0, x1, x2, x3, x4, x5, x6, x7
    else:
        return tl.inline_asm_elementwise(
            PAIRS, PAIRS_CONSTRAINTS, [x0, x1, x2, x3, x4, x5, x6, x7], (tl.int64,) * 8, True, 1
        )


@triton.jit
def _codes(lower, upper):
    """[L] int64 twice -> the 32 codes of each lane [L, 32], fp32. For the interpreter."""
    place = tl.arange(0, 32)[None, :]
    both = tl.where(place % 4 < 2, lower[:, None], upper[:, None])
    return ((both >> (place % 2 * 32 + place // 4 * 4)) & 15).to(tl.float32)


@triton.jit
def _numbers(x0, x1, x2, x3, x4, x5, x6, x7, dtype: tl.constexpr):
    """The 32 inputs of each lane [L, 32], fp32. For the interpreter."""
    place = tl.arange(0, 32)[None, :]
    low = tl.where(place < 4, x0[:, None], tl.where(place < 8, x1[:, None], x2[:, None]))
    low = tl.where(place < 12, low, tl.where(place < 16, x3[:, None], x4[:, None]))
    high = tl.where(place < 24, x5[:, None], tl.where(place < 28, x6[:, None], x7[:, None]))
    bits = (tl.where(place < 20, low, high) >> (place % 4 * 16)) & 0xFFFF
    return bits.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _by_definition(rows, numbers):
    """[L, 32] of rows and of tokens -> the two sums of each lane, [L]. For the interpreter."""
    L: tl.constexpr = rows.shape[0]
    left = tl.reshape(rows, [L // 32, 8, 1, 128])
    right = tl.reshape(numbers, [L // 32, 1, 8, 128])
    first, second = tl.split(tl.reshape(tl.sum(left * right, 3), [L // 32, 8, 4, 2]))
    return tl.reshape(first, [L]), tl.reshape(second, [L])


@triton.jit
def _multiply(low0, low1, high0, high1, x0, x1, x2, x3, x4, x5, x6, x7, dtype: tl.constexpr):
    """Codes of two rows of a lane, with what `_added` says on them, times tokens: rows l / 4 and l / 4 + 8, tokens
    2 (l % 4) and the next: (lower first, lower second, upper first, upper second), [L] fp32 each."""
    if INTERPRETED:
        numbers = _numbers(x0, x1, x2, x3, x4, x5, x6, x7, dtype)
        a, b = _by_definition(_codes(low0, low1), numbers)
        c, d = _by_definition(_codes(high0, high1), numbers)
        return a, b, c, d
    else:
        PRODUCT: tl.constexpr = BF16_PRODUCT if dtype == tl.bfloat16 else FP16_PRODUCT
        return tl.inline_asm_elementwise(
            PRODUCT,
            PRODUCT_CONSTRAINTS,
            [low0, low1, high0, high1, x0, x1, x2, x3, x4, x5, x6, x7],
            (tl.float32,) * 4,
            True,
            1,
        )


@triton.jit
def _token_sums(x0, x1, x2, x3, x4, x5, x6, x7, dtype: tl.constexpr):
    """Sums of x over the group of a lane's two tokens, [L] fp32 each."""
    if INTERPRETED:
        numbers = _numbers(x0, x1, x2, x3, x4, x5, x6, x7, dtype)
        return _by_definition(tl.full(numbers.shape, 1.0, tl.float32), numbers)
    else:
        SUMS: tl.constexpr = BF16_SUMS if dtype == tl.bfloat16 else FP16_SUMS
        return tl.inline_asm_elementwise(
            SUMS, SUMS_CONSTRAINTS, [x0, x1, x2, x3, x4, x5, x6, x7], (tl.float32,) * 2, True, 1
        )


@triton.jit
def _added(dtype: tl.constexpr):
    """What `_multiply` adds to codes."""
    if INTERPRETED:
        return 0.0
    elif dtype == tl.bfloat16:
        return 128.0
    else:
        return 1024.0


@triton.jit
def _add_group(
    t0, t1, t2, t3, low0, low1, high0, high1, low_group, high_group, x0, x1, x2, x3, x4, x5, x6, x7, sum0, sum1,
    factor, dtype: tl.constexpr,
):  # fmt: skip
    """The four sums of a lane with a group's products added, times `factor` [L]."""
    p0, p1, p2, p3 = _multiply(low0, low1, high0, high1, x0, x1, x2, x3, x4, x5, x6, x7, dtype)
    low_scale, low_zero = split_groups(low_group, dtype)
    high_scale, high_zero = split_groups(high_group, dtype)
    low_zero, high_zero = low_zero + _added(dtype), high_zero + _added(dtype)
    low_scale, high_scale = low_scale * factor, high_scale * factor
    t0 += low_scale * (p0 - low_zero * sum0)
    t1 += low_scale * (p1 - low_zero * sum1)
    t2 += high_scale * (p2 - high_zero * sum0)
    t3 += high_scale * (p3 - high_zero * sum1)
    return t0, t1, t2, t3


@triton.jit
def _gather(t0, t1, t2, t3, WARPS: tl.constexpr):
    """Four sums of a lane, of each warp [32 * WARPS] -> [32, 4], added up: lower first, upper first, lower second,
    upper second."""
    four = tl.reshape(tl.join(tl.join(t0, t1), tl.join(t2, t3)), [WARPS, 32, 4])
    return tl.sum(four, 0)


@triton.jit
def _load_rows(words, groups, row_low, row_high, width, scales_width, chunk, group, present, inside):
    """Codes and groups at one place of each lane's two rows. words, groups: int64 addresses. present: whether the
    lane's chunk is there; inside: whether the group is, whose sums a lane may hold without a chunk of it."""
    low0, low1 = _load_words(words + (row_low * width + chunk * 4) * 4, present)
    high0, high1 = _load_words(words + (row_high * width + chunk * 4) * 4, present)
    low_at = (groups + (row_low * scales_width + group) * 4).to(tl.pointer_type(tl.int32))
    high_at = (groups + (row_high * scales_width + group) * 4).to(tl.pointer_type(tl.int32))
    low_group, high_group = tl.load(low_at, mask=inside, other=0), tl.load(high_at, mask=inside, other=0)
    return low0, low1, high0, high1, low_group, high_group


@triton.jit
def _fetch(
    position, lane, low, high, next_low, next_high, indices, weights, words, groups, more_words, more_groups,
    width, scales_width, FORM: tl.constexpr, GATED: tl.constexpr, E: tl.constexpr, SHARED: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """What a warp computes with at `position` [L], one of COUNT: offset of the inputs, factor, whether it is any, and
    codes and groups of each lane's two times two rows. Beyond the end, and of experts that were dropped, it is none:
    nothing is read, and the scale is 0.

    words, groups: addresses of the rows; of all experts' for PAIR_DOWN, more_* of the shared ones' there, and of the
    second rows if GATED.
    """
    STEPS: tl.constexpr = (D + 127) // 128
    G: tl.constexpr = (D + GROUP - 1) // GROUP
    inside = position < COUNT
    position = tl.minimum(position, COUNT - 1)
    slot, step = position // STEPS, position % STEPS
    chunk = step * 4 + lane % 4
    present = chunk < D // 32
    chunk = tl.minimum(chunk, D // 32 - 1)
    group = step // (GROUP // 128)
    factor = tl.full(position.shape, 1.0, tl.float32)
    offset = chunk * 32
    if FORM == 4:
        offset += slot * D
        shared = slot < SHARED
        expert = tl.load(indices + slot - SHARED, mask=slot >= SHARED, other=0).to(tl.int64)
        there = (expert >= 0) & (expert < E)
        factor = tl.load(weights + slot - SHARED, mask=(slot >= SHARED) & there, other=0.0).to(tl.float32)
        factor = tl.where(shared, 1.0, factor)
        expert = tl.where(there, expert, 0)
        # What an expert that was dropped would read, it never wrote.
        inside = inside & (shared | there)
        if SHARED:
            words = tl.where(shared, more_words + slot * (D // 2), words + expert * (N * (D // 2)))
            groups = tl.where(shared, more_groups + slot * (G * 4), groups + expert * (N * (G * 4)))
            width = tl.where(shared, SHARED * (D // 8), D // 8)
            scales_width = tl.where(shared, SHARED * G, G)
        else:
            words, groups = words + expert * (N * (D // 2)), groups + expert * (N * (G * 4))
    valid = inside & present
    a0, a1, a2, a3, a4, a5 = _load_rows(words, groups, low, high, width, scales_width, chunk, group, valid, inside)
    if GATED:
        b0, b1, b2, b3, b4, b5 = _load_rows(
            more_words, more_groups, low, high, width, scales_width, chunk, group, valid, inside
        )
    else:
        b0, b1, b2, b3, b4, b5 = _load_rows(
            words, groups, next_low, next_high, width, scales_width, chunk, group, valid, inside
        )
    return offset, factor, valid, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def int4_mma_kernel(
    x,  # hidden [T, D], or active [pairs, D] for DOWN and PAIR_DOWN; rows contiguous, of 16 bytes' alignment
    indices,  # [K] of the one token, used by the PAIR forms
    weights,  # [K], used by PAIR_DOWN
    order,  # [pairs], as are `tiles` used by GATE_UP and DOWN
    tiles,  # [3, num_tiles]
    words,  # [E, N, WORDS], [E, 2N, WORDS] for the GATE_UP forms, or [N, WORDS]; contiguous, as are all that follow
    groups,
    more_words,  # the shared experts' (gate's), or the up weight of a gated DENSE
    more_groups,
    up_words,  # the shared experts' up, for the GATE_UP forms
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
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,  # of 8 tokens: 1 or 2
    WARPS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has 32 rows of weights, or 16 of gate and 16 of up, and 8 or 16 tokens; its warps share the groups."""
    launch_dependents(PDL)
    ROWS: tl.constexpr = 16 if GATED else 32
    BLOCK_M: tl.constexpr = 8 * TILES
    COLUMNS: tl.constexpr = (N + ROWS - 1) // ROWS
    STEPS: tl.constexpr = (D + 127) // 128
    COUNT: tl.constexpr = STEPS * (SHARED + TOP_K) if FORM == 4 else STEPS
    WORDS: tl.constexpr = D // 8
    G: tl.constexpr = (D + GROUP - 1) // GROUP
    dtype: tl.constexpr = x.dtype.element_ty
    lanes = tl.arange(0, 32 * WARPS)
    lane, warp = lanes % 32, lanes // 32
    first_words, first_groups = words.to(tl.int64), groups.to(tl.int64)
    second_words, second_groups = more_words.to(tl.int64), more_groups.to(tl.int64)
    token = lane // 4
    if FORM == 0:
        tile, column = _tile_of_program(num_tiles, COLUMNS, ROW_TILES)
        end = num_rows
        begin = tile * BLOCK_M
        source = (begin + token).to(tl.int64)
        later = source + 8
    elif FORM == 1 or FORM == 2:
        tile, column = _tile_of_program(num_tiles, COLUMNS, ROW_TILES)
        wait(PDL)
        expert = tl.load(tiles + tile).to(tl.int64)
        if expert < 0:
            return
        begin = tl.load(tiles + num_tiles + tile)
        end = tl.load(tiles + 2 * num_tiles + tile)
        if FORM == 1:
            source = tl.load(order + begin + token, mask=begin + token < end, other=0).to(tl.int64) // (SHARED + TOP_K)
            later = tl.load(order + begin + 8 + token, mask=begin + 8 + token < end, other=0).to(tl.int64)
            later = later // (SHARED + TOP_K)
        else:
            source = (begin + token).to(tl.int64)
            later = source + 8
    else:
        column, tile = tl.program_id(0), tl.program_id(1)
        begin, end = tile * 0, tile * 0 + 1
        source, later = token.to(tl.int64), token.to(tl.int64)
        expert = tile.to(tl.int64) - SHARED
        if FORM == 3:
            if tile < SHARED:
                expert = E + tile.to(tl.int64)
            else:
                wait(PDL)
                expert = tl.load(indices + tile - SHARED).to(tl.int64)
                if (expert < 0) | (expert >= E):
                    return  # PAIR_DOWN does not read this row
        else:
            wait(PDL)
    more_base, more_scales = second_words, second_groups
    if FORM == 1 or FORM == 3:
        more_base = first_words + (expert * (2 * N) + N) * (WORDS * 4)
        more_scales = first_groups + (expert * (2 * N) + N) * (G * 4)
        first_words += expert * (2 * N) * (WORDS * 4)
        first_groups += expert * (2 * N) * (G * 4)
        if SHARED:  # noqa: SIM102, one is known when it compiles
            if expert >= E:
                first_words = second_words + (expert - E) * N * (WORDS * 4)
                first_groups = second_groups + (expert - E) * N * (G * 4)
                more_base = up_words.to(tl.int64) + (expert - E) * N * (WORDS * 4)
                more_scales = up_groups.to(tl.int64) + (expert - E) * N * (G * 4)
    width, scales_width = WORDS, G
    if FORM == 2:
        first_words += expert * N * (WORDS * 4)
        first_groups += expert * N * (G * 4)
        if SHARED:  # noqa: SIM102
            if expert >= E:  # columns of one weight [N, SHARED * D]
                first_words = second_words + (expert - E) * (WORDS * 4)
                first_groups = second_groups + (expert - E) * (G * 4)
                width, scales_width = SHARED * WORDS, SHARED * G

    # Rows past the last read the last: what they compute is not stored.
    row = column * ROWS + lane // 4
    low, high = tl.minimum(row, N - 1).to(tl.int64), tl.minimum(row + 8, N - 1).to(tl.int64)
    if GATED:
        next_low, next_high = low, high
    else:
        next_low, next_high = tl.minimum(row + 16, N - 1).to(tl.int64), tl.minimum(row + 24, N - 1).to(tl.int64)
    inputs = x.to(tl.int64) + source * x_stride * 2
    late_inputs = x.to(tl.int64) + later * x_stride * 2
    used, late_used = begin + token < end, begin + 8 + token < end

    t0 = tl.zeros([32 * WARPS], tl.float32)
    t1, t2, t3, u0, u1, u2, u3 = t0, t0, t0, t0, t0, t0, t0
    v0, v1, v2, v3, w0, w1, w2, w3 = t0, t0, t0, t0, t0, t0, t0, t0
    offset, factor, valid, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5 = _fetch(
        warp, lane, low, high, next_low, next_high, indices, weights, first_words, first_groups, more_base,
        more_scales, width, scales_width, FORM, GATED, E, SHARED, D, N, GROUP, COUNT,
    )  # fmt: skip
    wait(PDL)
    x0, x1, x2, x3, x4, x5, x6, x7 = _load_inputs(inputs + offset * 2, valid & used)
    if TILES == 2:
        y0, y1, y2, y3, y4, y5, y6, y7 = _load_inputs(late_inputs + offset * 2, valid & late_used)
    for step in tl.range(0, (COUNT + WARPS - 1) // WARPS, loop_unroll_factor=2):
        # all of the next step is on its way while this one is computed
        offset, next_factor, valid, c0, c1, c2, c3, c4, c5, d0, d1, d2, d3, d4, d5 = _fetch(
            (step + 1) * WARPS + warp, lane, low, high, next_low, next_high, indices, weights, first_words,
            first_groups, more_base, more_scales, width, scales_width, FORM, GATED, E, SHARED, D, N, GROUP, COUNT,
        )  # fmt: skip
        n0, n1, n2, n3, n4, n5, n6, n7 = _load_inputs(inputs + offset * 2, valid & used)
        x0, x1, x2, x3, x4, x5, x6, x7 = _paired(x0, x1, x2, x3, x4, x5, x6, x7)
        s0, s1 = _token_sums(x0, x1, x2, x3, x4, x5, x6, x7, dtype)
        t0, t1, t2, t3 = _add_group(
            t0, t1, t2, t3, a0, a1, a2, a3, a4, a5, x0, x1, x2, x3, x4, x5, x6, x7, s0, s1, factor, dtype
        )  # fmt: skip
        u0, u1, u2, u3 = _add_group(
            u0, u1, u2, u3, b0, b1, b2, b3, b4, b5, x0, x1, x2, x3, x4, x5, x6, x7, s0, s1, factor, dtype
        )  # fmt: skip
        x0, x1, x2, x3, x4, x5, x6, x7 = n0, n1, n2, n3, n4, n5, n6, n7
        if TILES == 2:
            n0, n1, n2, n3, n4, n5, n6, n7 = _load_inputs(late_inputs + offset * 2, valid & late_used)
            y0, y1, y2, y3, y4, y5, y6, y7 = _paired(y0, y1, y2, y3, y4, y5, y6, y7)
            s0, s1 = _token_sums(y0, y1, y2, y3, y4, y5, y6, y7, dtype)
            v0, v1, v2, v3 = _add_group(
                v0, v1, v2, v3, a0, a1, a2, a3, a4, a5, y0, y1, y2, y3, y4, y5, y6, y7, s0, s1, factor, dtype
            )  # fmt: skip
            w0, w1, w2, w3 = _add_group(
                w0, w1, w2, w3, b0, b1, b2, b3, b4, b5, y0, y1, y2, y3, y4, y5, y6, y7, s0, s1, factor, dtype
            )  # fmt: skip
            y0, y1, y2, y3, y4, y5, y6, y7 = n0, n1, n2, n3, n4, n5, n6, n7
        factor = next_factor
        a0, a1, a2, a3, a4, a5 = c0, c1, c2, c3, c4, c5
        b0, b1, b2, b3, b4, b5 = d0, d1, d2, d3, d4, d5

    first, second = _gather(t0, t1, t2, t3, WARPS), _gather(u0, u1, u2, u3, WARPS)
    _store_tile(first, second, column * ROWS, begin, end, order, bias, residual, out, FORM, GATED, BIAS, ADD, N)
    if TILES == 2:
        first, second = _gather(v0, v1, v2, v3, WARPS), _gather(w0, w1, w2, w3, WARPS)
        _store_tile(first, second, column * ROWS, begin + 8, end, order, bias, residual, out, FORM, GATED, BIAS, ADD, N)


@triton.jit
def _store_tile(
    result, more, first_row, begin, end, order, bias, residual, out,
    FORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Sums as `_gather` gives them, of 8 tokens from `begin` on, to where they belong."""
    lane, place = tl.arange(0, 32)[:, None], tl.arange(0, 4)[None, :]
    row = first_row + lane // 4 + place % 2 * 8
    token = begin + lane % 4 * 2 + place // 2
    used = token < end
    target = token.to(tl.int64)
    if FORM == 2:
        target = tl.load(order + token, mask=used, other=0).to(tl.int64)
    elif FORM == 3:
        target += tl.program_id(1)
    if GATED:
        _store_rows(silu(result) * more, row, target, used, bias, residual, out, BIAS, ADD, N)
    else:
        _store_rows(result, row, target, used, bias, residual, out, BIAS, ADD, N)
        _store_rows(more, row + 16, target, used, bias, residual, out, BIAS, ADD, N)


@triton.jit
def _store_rows(values, row, target, used, bias, residual, out, BIAS: tl.constexpr, ADD: tl.constexpr, N: tl.constexpr):
    inside = used & (row < N)
    if BIAS:
        values += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + target * N + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + target * N + row, values.to(out.dtype.element_ty), mask=inside)


class Program(NamedTuple):
    """Warps that share the groups of a row; each has the program's rows."""

    warps: int


@choices.by_device
def choose_program(capability: tuple[int, int], positions: int, programs: int) -> Program:
    """positions: groups of a row, over all experts of a PAIR_DOWN. programs: that there are, at least."""
    warps = 4
    while warps < 16 and programs * warps < 1024 and warps * 2 <= positions:
        warps *= 2
    return Program(min(warps, triton.next_power_of_2(positions)))


Packed = tuple[torch.Tensor, torch.Tensor]
"""Words and groups of an `ops.int4.Int4Weight`."""


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] with rows that begin at multiples of 16 bytes, as they are read."""
    return x.clone(memory_format=torch.contiguous_format) if x.stride(0) % 8 or x.data_ptr() % 16 else x


def launch_product(
    form: int,
    x: torch.Tensor,
    weights: tuple[Packed, Packed, Packed],
    out: torch.Tensor,
    *,
    size: int,
    count: int,
    group_size: int,
    gated: bool,
    tiles: int,
    num_rows: int,
    num_tiles: int,
    experts: tuple[int, int, int] = (1, 1, 0),
    chosen: tuple[torch.Tensor, torch.Tensor] | None = None,
    sorted_rows: tuple[torch.Tensor, torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    program: Program | None = None,
) -> None:
    """One form of the kernel. weights: `words`, `more_words` and `up_words` with their groups; experts: E, K, SHARED;
    chosen: `indices` and `weights`; sorted_rows: `order` and `tiles`."""
    first, second, third = weights
    rows = 16 if gated else 32
    columns = -(-count // rows)
    steps = -(-size // 128) * (experts[1] + experts[2] if form == PAIR_DOWN else 1)
    program = program or choose_program(x.device, steps, columns * num_tiles)
    pairs = form in (PAIR_GATE_UP, PAIR_DOWN)
    pdl = launching.uses_pdl(x.device)
    launching.launch(
        int4_mma_kernel,
        (columns, num_tiles) if pairs else (columns * num_tiles,),
        (
            x,
            *(chosen or (first[0], x)),
            *(sorted_rows or (first[0], first[0])),
            first[0],
            group_words(first[1]),
            second[0],
            group_words(second[1]),
            third[0],
            group_words(third[1]),
            x if bias is None else bias,
            x if residual is None else residual,
            out,
            x.stride(0),
            num_rows,
            num_tiles,
        ),
        (
            form,
            gated,
            bias is not None,
            residual is not None,
            *experts,
            size,
            count,
            group_size,
            tiles,
            program.warps,
            ROW_TILES,
            pdl,
        ),
        num_warps=program.warps,
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
    tiles: int = 1,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] -> [T, N], or with `other` silu(x weight^T) * (x other^T); T not 0."""
    x = _aligned(x)
    num_tokens, size = x.shape
    count = weight[0].shape[0]
    out = torch.empty(num_tokens, count, dtype=x.dtype, device=x.device)
    second = weight if other is None else other
    launch_product(
        DENSE, x, (weight, second, second), out, size=size, count=count, group_size=group_size,
        gated=other is not None, tiles=tiles, num_rows=num_tokens, num_tiles=-(-num_tokens // (TOKENS * tiles)),
        bias=bias, residual=None if residual is None else residual.contiguous(), program=program,
    )  # fmt: skip
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
    tiles: int = 1,
    programs: tuple[Program | None, Program | None] = (None, None),
) -> None:
    """Into out [T, D]; the rest as in `ops.int4_experts.int4_mixture`, indices and weights contiguous.

    One token: a program for each of its experts, and a sum over all of them in another. More: pairs sorted by expert,
    in tiles of 8 or 16.
    """
    hidden = _aligned(hidden)
    num_tokens, top_k = indices.shape
    num_experts, size = down[0].shape[:2]
    gate, up, shared_down = (gate_up, gate_up, down) if shared is None else shared
    num_shared = 0 if shared is None else gate[0].shape[0] // intermediate
    experts = (num_experts, top_k, num_shared)
    num_pairs = num_tokens * (top_k + num_shared)
    active = hidden.new_empty(num_pairs, intermediate)
    first = dict(size=size, count=intermediate, gated=True, program=programs[0])
    second = dict(size=intermediate, count=size, gated=False, program=programs[1])
    both = dict(group_size=group_size, experts=experts, tiles=tiles, num_rows=num_pairs)
    if num_tokens == 1:
        chosen = (indices, weights)
        launch_product(
            PAIR_GATE_UP, hidden, (gate_up, gate, up), active, chosen=chosen, num_tiles=num_pairs, **first, **both
        )  # fmt: skip
        launch_product(
            PAIR_DOWN, active, (down, shared_down, shared_down), out, chosen=chosen, num_tiles=1, residual=residual,
            **second, **both,
        )  # fmt: skip
        return
    num_tiles = num_pairs // (TOKENS * tiles) + num_experts + num_shared
    order = torch.empty(num_pairs, dtype=torch.int32, device=hidden.device)
    plan = torch.empty(3, num_tiles, dtype=torch.int32, device=hidden.device)
    outputs = hidden.new_empty(num_pairs, size)
    pdl = launching.uses_pdl(hidden.device)
    dependent = {"launch_pdl": True} if pdl else {}
    block = min(4096, max(256, triton.next_power_of_2(num_pairs)))
    launching.launch(
        sort_kernel,
        (num_experts + num_shared,),
        (indices, order, plan, num_pairs, num_tiles),
        (*experts, TOKENS * tiles, block, pdl),
        num_warps=8 if block > 1024 else 4,
        **dependent,
    )
    rows = (order, plan)
    launch_product(
        GATE_UP, hidden, (gate_up, gate, up), active, sorted_rows=rows, num_tiles=num_tiles, **first, **both
    )  # fmt: skip
    launch_product(
        DOWN, active, (down, shared_down, shared_down), outputs, sorted_rows=rows, num_tiles=num_tiles, **second, **both
    )  # fmt: skip
    block_d = min(triton.next_power_of_2(size), 1024)
    launching.launch(
        combine_kernel,
        (num_tokens, -(-size // block_d)),
        (outputs, indices, weights, out if residual is None else residual, out),
        (*experts, residual is not None, size, block_d, pdl),
        num_warps=4,
        **dependent,
    )


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) for V2-Lite in bf16: experts and its dense MLP."""
    numbers = ("x", "bias", "residual", "out")
    packed = ("words", "groups", "more_words", "more_groups", "up_words", "up_groups")
    types = dict.fromkeys(numbers, "*bf16") | dict.fromkeys((*packed, "order", "tiles"), "*i32")
    types |= {"indices": "*i64", "weights": "*fp32"} | dict.fromkeys(("x_stride", "num_rows", "num_tiles"), "i32")
    arguments = int4_mma_kernel.arg_names
    signature = {argument: types.get(argument, "constexpr") for argument in arguments}
    aligned = [argument for argument in arguments if types.get(argument, "")[:1] == "*" or argument == "x_stride"]
    attrs = {(arguments.index(argument),): [["tt.divisibility", 16]] for argument in aligned}
    cases = []
    for form, name, size, count, tokens in (
        (PAIR_GATE_UP, "pair_gate_up", 2048, 1408, (1,)),
        (PAIR_DOWN, "pair_down", 1408, 2048, (1,)),
        (GATE_UP, "gate_up", 2048, 1408, (1, 2)),
        (DOWN, "down", 1408, 2048, (1, 2)),
        (DENSE, "dense", 10944, 2048, (1, 2)),
    ):
        for capability in (80, 90, 100):
            for tiles in tokens:
                gated = form in (GATE_UP, PAIR_GATE_UP)
                steps = -(-size // 128) * (8 if form == PAIR_DOWN else 1)
                program = choose_program((capability // 10, capability % 10), steps, 512 if gated else 64)
                shared = 0 if form == DENSE else 2
                values = (form, gated, False, form == DENSE, 64, 6, shared, size, count, 128, tiles, program.warps)
                names = arguments[arguments.index("FORM") :]
                fixed = dict(zip(names, (*values, ROW_TILES, capability >= 90), strict=True))
                options = {"num_warps": program.warps, "num_stages": 3, "capability": capability, "attrs": attrs}
                cases.append((f"int4_mma_{name}-{tiles}", int4_mma_kernel, signature, fixed, options))
    return cases

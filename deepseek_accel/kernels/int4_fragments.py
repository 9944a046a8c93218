"""Four-bit weights and tokens as operands of `mma.sync.m16n8k16`, and what it gives: the lanes of `int4_mma.py`.

PTX ISA, "mma.m16n8k16": of the first operand lane l holds rows l / 4 and l / 4 + 8, of the second token l / 4, both at
inputs that its l % 4 decides; of the result rows l / 4 and l / 4 + 8 of tokens 2 (l % 4) and the next. Every tensor
is one number per lane, [L] with L = 32 * warps. In Triton's interpreter the same lanes are multiplied by definition.
"""

import triton
import triton.language as tl

from .int4 import INTERPRETED, split_groups


def _multiply_add(kind: str, chain: int, rows: str, pair: int, other: int) -> str:
    """PTX: a product of four registers of rows with two of tokens, added to one chain of sums."""
    sums = ", ".join(f"c{chain * 4 + i}" for i in range(4))
    operands = f"{{{sums}}}, {{{rows}}}, {{x{pair}, x{other}}}, {{{sums}}};"
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {operands}"


# Half of the products are one chain and half another, added at the end: each waits for the one before it.


def _product(kind: str) -> tl.constexpr:
    """PTX: `upper_bits`, four words (as two 64-bit numbers) of the lower row, four of the upper, 16 pairs of inputs
    (as eight) -> the four sums of a lane."""
    lines = ["{ .reg .b32 a<4>, l<4>, h<4>, x<16>; .reg .f32 c<8>;"]
    lines += [f"mov.f32 c{i}, 0f00000000;" for i in range(8)]
    for i in range(2):
        lines += [f"mov.b64 {{l{2 * i}, l{2 * i + 1}}}, ${5 + i};", f"mov.b64 {{h{2 * i}, h{2 * i + 1}}}, ${7 + i};"]
    lines += [f"mov.b64 {{x{2 * i}, x{2 * i + 1}}}, ${9 + i};" for i in range(8)]
    for word in range(4):
        for place in (0, 2):
            for number, (row, shift) in enumerate((row, shift) for shift in (0, 1) for row in "lh"):
                source = f"{row}{word}"
                if place + shift:
                    lines.append(f"shr.b32 a{number}, {source}, {4 * (place + shift)};")
                    source = f"a{number}"
                lines.append(f"lop3.b32 a{number}, {source}, 0x000F000F, $4, 0xEA;")
            first = 4 * place + word
            lines.append(_multiply_add(kind, place // 2, "a0, a1, a2, a3", first, first + 4))
    lines += [f"add.f32 ${i}, c{i}, c{i + 4};" for i in range(4)]
    return tl.constexpr(" ".join([*lines, "}"]))


def _sums(kind: str, one: int) -> tl.constexpr:
    """PTX: 16 pairs of inputs -> the sums of x of a lane's two tokens."""
    lines = ["{ .reg .b32 a, x<16>; .reg .f32 c<8>;", f"mov.b32 a, {one:#x};"]
    lines += [f"mov.f32 c{i}, 0f00000000;" for i in range(8)]
    lines += [f"mov.b64 {{x{2 * i}, x{2 * i + 1}}}, ${2 + i};" for i in range(8)]
    lines += [_multiply_add(kind, i // 2 % 2, "a, a, a, a", i, i + 1) for i in range(0, 16, 2)]
    return tl.constexpr(" ".join([*lines, "add.f32 $0, c0, c4; add.f32 $1, c1, c5; }"]))


def _pairs() -> tl.constexpr:
    """PTX: 32 neighbouring 16-bit inputs, as eight 64-bit numbers -> the pairs (j, j + 16), which is how two codes of a
    word lie, as eight numbers of two pairs each."""
    lines = ["{ .reg .b32 r<16>, a, b;"]
    lines += [f"mov.b64 {{r{2 * i}, r{2 * i + 1}}}, ${8 + i};" for i in range(8)]
    for i in range(8):
        lines += [f"prmt.b32 a, r{i}, r{i + 8}, 0x5410;", f"prmt.b32 b, r{i}, r{i + 8}, 0x7632;"]
        lines.append(f"mov.b64 ${i}, {{a, b}};")
    return tl.constexpr(" ".join([*lines, "}"]))


BF16_PRODUCT, FP16_PRODUCT = _product("bf16"), _product("f16")
BF16_SUMS, FP16_SUMS = _sums("bf16", 0x3F803F80), _sums("f16", 0x3C003C00)
PAIRS = _pairs()
PRODUCT_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 4 + ["r"] + ["l"] * 12))
SUMS_CONSTRAINTS = tl.constexpr(",".join(["=f"] * 2 + ["l"] * 8))
PAIRS_CONSTRAINTS = tl.constexpr(",".join(["=l"] * 8 + ["l"] * 8))
LOAD_WEIGHTS = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b64 $0, 0; mov.b64 $1, 0; "
    "@p ld.global.L1::no_allocate.v2.b64 {$0, $1}, [$2]; }"
)
LOAD_INPUTS = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $9, 0; "
    + " ".join(f"mov.b64 ${i}, 0;" for i in range(8))
    + " "
    + " ".join(f"@p ld.global.v2.b64 {{${2 * i}, ${2 * i + 1}}}, [$8 + {16 * i}];" for i in range(4))
    + " }"
)
PLACE_BITS = tl.constexpr("{ .shared .align 4 .b32 upper_bits; mov.u32 $0, upper_bits; st.shared.b32 [$0], $1; }")
READ_BITS = tl.constexpr("bar.warp.sync 0xffffffff; ld.shared.b32 $0, [$1];")
LOAD_INPUTS_CONSTRAINTS = tl.constexpr(",".join(["=&l"] * 8 + ["l", "r"]))


@triton.jit
def place_upper_bits(lanes, dtype: tl.constexpr):
    """Once in a kernel, lanes [L] int32: where `upper_bits` reads."""
    if INTERPRETED:
        return lanes
    else:
        BITS: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
        bits = tl.full(lanes.shape, BITS, tl.int32)
        return tl.inline_asm_elementwise(PLACE_BITS, "=&r,r", [bits], tl.int32, False, 1)


@triton.jit
def upper_bits(place):
    """The bits above a code that make it a number, [L]: of 128 in bf16, of 1024 in fp16.

    They are known, but ptxas must not know them: it moves loads down to where they are used, behind the products
    before, and then every step waits for the memory. From shared memory, behind a barrier of the warp, these bits come
    after all loads that are asked for above, and every product needs them.
    """
    if INTERPRETED:
        return place
    else:
        return tl.inline_asm_elementwise(READ_BITS, "=r,r", [place], tl.int32, False, 1)


@triton.jit
def load_words_of(address, present):
    """int64 addresses [L] of 16 bytes of codes -> their lower and upper half, int64; 0, and unread, if not present."""
    if INTERPRETED:
        pointer = address.to(tl.pointer_type(tl.int64))
        return tl.load(pointer, mask=present, other=0), tl.load(pointer + 1, mask=present, other=0)
    else:
        return tl.inline_asm_elementwise(
            LOAD_WEIGHTS, "=&l,=&l,l,r", [address, present.to(tl.int32)], (tl.int64, tl.int64), False, 1
        )


@triton.jit
def load_inputs_of(address, valid):
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
def pair_inputs(x0, x1, x2, x3, x4, x5, x6, x7):
    """Inputs as `load_inputs_of` gives them, in the order of `_multiply`."""
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
def _multiply(upper, low0, low1, high0, high1, x0, x1, x2, x3, x4, x5, x6, x7, dtype: tl.constexpr):
    """Codes of two rows of a lane, with what `_added` says on them (`upper_bits`), times tokens: rows l / 4 and
    l / 4 + 8, tokens 2 (l % 4) and the next: (lower first, lower second, upper first, upper second), [L] fp32 each."""
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
            [upper, low0, low1, high0, high1, x0, x1, x2, x3, x4, x5, x6, x7],
            (tl.float32,) * 4,
            True,
            1,
        )


@triton.jit
def token_sums(x0, x1, x2, x3, x4, x5, x6, x7, dtype: tl.constexpr):
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
def add_group(
    t0, t1, t2, t3, upper, low0, low1, high0, high1, low_group, high_group, x0, x1, x2, x3, x4, x5, x6, x7, sum0, sum1,
    factor, dtype: tl.constexpr,
):  # fmt: skip
    """The four sums of a lane with a group's products, times `factor`, added."""
    p0, p1, p2, p3 = _multiply(upper, low0, low1, high0, high1, x0, x1, x2, x3, x4, x5, x6, x7, dtype)
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
def load_rows(words, groups, apart, groups_apart, low, high, chunk, group, present, inside):
    """Codes and groups at one place of each lane's two rows: (lower half, upper half) of the lower row's codes, those
    of the upper row, both groups.

    words, groups: int64 addresses of the lower row's; the upper row's are `apart` and `groups_apart` bytes on. low,
    high: whether the rows are there; present: whether the lane's chunk of 32 is; inside: whether the group is, whose
    sums a lane may hold without a chunk of it. What is not there is not read, and its scale is 0.
    """
    words += chunk * 16
    low0, low1 = load_words_of(words, present & low)
    high0, high1 = load_words_of(words + apart, present & high)
    groups += group * 4
    low_group = tl.load(groups.to(tl.pointer_type(tl.int32)), mask=inside & low, other=0)
    high_group = tl.load((groups + groups_apart).to(tl.pointer_type(tl.int32)), mask=inside & high, other=0)
    return low0, low1, high0, high1, low_group, high_group


@triton.jit
def gather(t0, t1, t2, t3, WARPS: tl.constexpr):
    """Four sums of a lane, of each warp [32 * WARPS] -> [32, 4], added up: lower first, upper first, lower second,
    upper second."""
    four = tl.reshape(tl.join(tl.join(t0, t1), tl.join(t2, t3)), [WARPS, 32, 4])
    return tl.sum(four, 0)

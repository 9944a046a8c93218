"""Four-bit weights inside kernels: words and groups as numbers. The layout is defined in `ops/int4.py`.

Two ways, by what is done with the numbers:

- `group_dots`, for dot products of one token. A code moved to the top of an fp32 mantissa is the number 16 + code, one
  place further down it is 256 + code; so two codes cost one shift and two logical operations. What was added is taken
  from the sum of a group: `scale * (sum x (code + c) - sum c x - zero * sum x)`, where the sums of x are taken once for
  many rows. The multiplication costs nothing more than the one of the dot product.
- `weight_tile`, for tensor cores. Two codes of neighbouring words are two 16-bit numbers at once: 128 + code in bf16,
  1024 + code in fp16. Taking off 128 + zero is exact, and multiplying by the scale rounds once: the tile holds the bits
  of `ops.int4.dequantize`.
"""

import torch
import triton
import triton.language as tl

from . import launching
from .launching import launch_dependents, wait

CHUNK = 32
"""Inputs in 16 bytes of codes, which one thread reads; groups are multiples of it."""


def _unpack(kind: str, base: int, one: int) -> tl.constexpr:
    """PTX: two words, twice two equal numbers to add and twice two equal scales -> for each of the eight places a pair
    of 16-bit numbers: (code + base + what is added) * scale. Adding -0 changes nothing."""
    lines = ["{ .reg .b32 a, b, t, o, z;", "prmt.b32 a, $8, $9, 0x5410;", "prmt.b32 b, $8, $9, 0x7632;"]
    lines += [f"mov.b32 o, {one:#x};", "mov.b32 z, 0x80008000;"]
    for place in range(8):
        half = "a" if place < 4 else "b"
        lines += [f"shr.b32 t, {half}, {place % 4 * 4};", f"lop3.b32 t, t, 0x000F000F, {base:#x}, 0xEA;"]
        lines += [f"fma.rn.{kind} t, t, o, $10;", f"fma.rn.{kind} ${place}, t, $12, z;"]
    return tl.constexpr(" ".join([*lines, "}"]))


BF16_WORDS = _unpack("bf16x2", 0x43004300, 0x3F803F80)
FP16_WORDS = _unpack("f16x2", 0x64006400, 0x3C003C00)
CONSTRAINTS = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 6))
UPPER = tl.constexpr("lop3.b32 $0, $1, 0x780000, 0x41800000, 0xEA;")
LOWER = tl.constexpr("lop3.b32 $0, $1, 0x78000, 0x43800000, 0xEA;")
SIGNS = tl.constexpr(0x80008000 - (1 << 32))


@triton.jit
def _low(words):
    return (words & 0xFFFF).to(tl.int16)


@triton.jit
def _high(words):
    return ((words >> 16) & 0xFFFF).to(tl.int16)


@triton.jit
def _two(pairs, dtype: tl.constexpr):
    """The lower and the upper halves of int32 as numbers of `dtype`, in fp32."""
    if dtype == tl.bfloat16:
        return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = _low(pairs).to(dtype, bitcast=True), _high(pairs).to(dtype, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def split_groups(groups, dtype: tl.constexpr):
    """(scale, zero) in fp32 of groups as `group_words` gives them."""
    if dtype == tl.float32:
        scale = (groups & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        zero = (groups >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        scale, zero = _two(groups, dtype)
    return scale, zero


INTERPRETED = tl.constexpr(not isinstance(split_groups, triton.JITFunction))


@triton.jit
def _in_order(p0, p1, p2, p3, p4, p5, p6, p7):
    """Eight tensors [N, W], of the places in each word, as one [N, 8 W] in the order of inputs."""
    N: tl.constexpr = p0.shape[0]
    W: tl.constexpr = p0.shape[1]
    first = tl.join(tl.join(p0, p4), tl.join(p2, p6))
    second = tl.join(tl.join(p1, p5), tl.join(p3, p7))
    places = tl.reshape(tl.join(first, second), [N, W // 4, 4, 8])  # [N, chunk, word, place]
    return tl.reshape(tl.permute(places, [0, 1, 3, 2]), [N, W * 8])


@triton.jit
def _code(words, place: tl.constexpr):
    return ((words >> (4 * place)) & 15).to(tl.float32)


@triton.jit
def _shifted(words, place: tl.constexpr):
    """The code at `place`, an odd one, in bits 19 to 22, the one before in 15 to 18."""
    if 4 * place > 19:
        return words >> (4 * place - 19)
    else:
        return words << (19 - 4 * place)


@triton.jit
def _lift(words, PTX: tl.constexpr, mask: tl.constexpr, number: tl.constexpr):
    """The fp32 number whose bits are words & mask | number. In assembly it is one instruction, else the compiler
    prefers two."""
    if INTERPRETED:  # noqa: SIM108, one is known when it compiles
        bits = (words & mask) | number
    else:
        bits = tl.inline_asm_elementwise(PTX, "=r,r", [words], tl.int32, True, 1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _upper(words):
    return _lift(words, UPPER, 0x780000, 0x41800000)  # 16 + code


@triton.jit
def _lower(words):
    return _lift(words, LOWER, 0x78000, 0x43800000)  # 256 + code


@triton.jit
def load_inputs(x, start, size, K: tl.constexpr, BLOCK_W: tl.constexpr, CHECK: tl.constexpr):
    """The inputs of words `start` to start + BLOCK_W of x [K], in fp32, 0 from K on: eight tensors [1, BLOCK_W], of the
    places in a word. CHECK: 0 from `size` on.

    With BLOCK_W four times the threads of a program, loads of inputs and of words are laid out alike: nothing goes
    through shared memory.
    """
    word = start + tl.arange(0, BLOCK_W)[None, :]
    place = word // 4 * 32 + word % 4
    MASK: tl.constexpr = CHECK or K % (BLOCK_W * 8) != 0
    x0 = _load_input(x, place, size, MASK)
    x1 = _load_input(x, place + 4, size, MASK)
    x2 = _load_input(x, place + 8, size, MASK)
    x3 = _load_input(x, place + 12, size, MASK)
    x4 = _load_input(x, place + 16, size, MASK)
    x5 = _load_input(x, place + 20, size, MASK)
    x6 = _load_input(x, place + 24, size, MASK)
    x7 = _load_input(x, place + 28, size, MASK)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _load_input(x, place, size, MASK: tl.constexpr):
    if MASK:
        return tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
    else:
        return tl.load(x + place).to(tl.float32)


@triton.jit
def word_dots(words, x0, x1, x2, x3, x4, x5, x6, x7, EXACT: tl.constexpr):
    """int32 [N, W] and `load_inputs` -> fp32 [N, W]: of each word the products of codes and inputs, added up.

    To codes in even places 256 is added, in odd ones 16; not if EXACT, which is for fp32 models, whose sums must not
    lose bits to that.
    """
    if EXACT:
        total = _code(words, 0) * x0
        total += _code(words, 1) * x1
        total += _code(words, 2) * x2
        total += _code(words, 3) * x3
        total += _code(words, 4) * x4
        total += _code(words, 5) * x5
        total += _code(words, 6) * x6
        total += _code(words, 7) * x7
    else:
        a, b, c, d = _shifted(words, 1), _shifted(words, 3), _shifted(words, 5), _shifted(words, 7)
        total = _lower(a) * x0
        total += _upper(a) * x1
        total += _lower(b) * x2
        total += _upper(b) * x3
        total += _lower(c) * x4
        total += _upper(c) * x5
        total += _lower(d) * x6
        total += _upper(d) * x7
    return total


@triton.jit
def input_sums(x0, x1, x2, x3, x4, x5, x6, x7, EXACT: tl.constexpr):
    """Of `load_inputs`: sums of 32 neighbours, and what `word_dots` adds to their products; fp32 [1, W / 4]."""
    even, odd = (x0 + x2) + (x4 + x6), (x1 + x3) + (x5 + x7)
    sums = _chunk_sums(even + odd)
    if EXACT:
        return sums, tl.zeros_like(sums)
    else:
        return sums, _chunk_sums(256.0 * even + 16.0 * odd)


@triton.jit
def _chunk_sums(values):
    """[N, W] -> [N, W / 4]: sums of four neighbours, which one thread holds."""
    return tl.sum(tl.reshape(values, [values.shape[0], values.shape[1] // 4, 4]), 2)


@triton.jit
def group_dots(words, groups, x0, x1, x2, x3, x4, x5, x6, x7, sums, added, dtype: tl.constexpr):
    """words [N, W], groups [N, W / 4] of each chunk, `load_inputs` and `input_sums` -> [N, W / 4] fp32."""
    scale, zero = split_groups(groups, dtype)
    dots = word_dots(words, x0, x1, x2, x3, x4, x5, x6, x7, dtype == tl.float32)
    return scale * (_chunk_sums(dots) - (zero * sums + added))


@triton.jit
def weight_tile(words, groups, dtype: tl.constexpr, PURE: tl.constexpr):
    """words [N, W] and groups [N, 1], of one group -> the weights [N, 8 W] in `dtype`, to the bit.

    PURE: as in `kernels/fp8.py`.
    """
    if INTERPRETED or dtype == tl.float32:
        scale, zero = split_groups(groups, dtype)
        codes = _in_order(
            _code(words, 0),
            _code(words, 1),
            _code(words, 2),
            _code(words, 3),
            _code(words, 4),
            _code(words, 5),
            _code(words, 6),
            _code(words, 7),
        )
        return ((codes - zero) * scale).to(dtype)
    else:
        low = groups & 0xFFFF
        scales = low | (low << 16)
        if dtype == tl.bfloat16:
            zero = ((groups & -65536).to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True)
            zeros = ((zero >> 16) & 0xFFFF) | zero | SIGNS
        else:
            zero = _high(groups).to(tl.float16, bitcast=True) + 1024.0
            half = zero.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            zeros = half | (half << 16) | SIGNS
        # The last assembly does nothing. Triton 3.6 to 3.9 fail where a reshaped tile goes to shared memory as it is.
        if dtype == tl.bfloat16:
            p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
                BF16_WORDS, CONSTRAINTS, [words, zeros, scales], (tl.bfloat16,) * 8, PURE, 2
            )
            tile = _in_order(p0, p1, p2, p3, p4, p5, p6, p7)
            return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tl.bfloat16, PURE, 2)
        else:
            p0, p1, p2, p3, p4, p5, p6, p7 = tl.inline_asm_elementwise(
                FP16_WORDS, CONSTRAINTS, [words, zeros, scales], (tl.float16,) * 8, PURE, 2
            )
            tile = _in_order(p0, p1, p2, p3, p4, p5, p6, p7)
            return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tl.float16, PURE, 2)


@triton.jit(do_not_specialize=["num_rows"])
def dequantize_kernel(
    words,  # [rows, WORDS]
    groups,  # [rows, G], as `group_words` gives them
    out,  # [rows, K], contiguous
    num_rows,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    WORDS: tl.constexpr = (K + 31) // 32 * 4
    G: tl.constexpr = (K + GROUP - 1) // GROUP
    COLUMNS: tl.constexpr = (WORDS + BLOCK_W - 1) // BLOCK_W
    row = (tl.program_id(0) // COLUMNS).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(0) % COLUMNS * BLOCK_W
    column = start + tl.arange(0, BLOCK_W)
    inside = (row < num_rows)[:, None]
    codes = tl.load(words + row[:, None] * WORDS + column[None, :], mask=inside & (column < WORDS)[None, :], other=0)
    # A block is of one group: BLOCK_W divides its words.
    scales = tl.load(groups + row[:, None] * G + start // (GROUP // 8), mask=inside, other=0)
    values = weight_tile(codes, scales, out.dtype.element_ty, True)
    k = start * 8 + tl.arange(0, BLOCK_W * 8)
    wait(PDL)  # the kernel before may still read what was here
    tl.store(out + row[:, None] * K + k[None, :], values, mask=inside & (k < K)[None, :])


Packed = tuple[torch.Tensor, torch.Tensor]
"""Words and groups of an `ops.int4.Int4Weight`."""


def group_words(groups: torch.Tensor) -> torch.Tensor:
    """groups [..., G, 2] of `ops.int4.Int4Weight` as integers [..., G] of twice the bits: the scale is the low half."""
    return groups.view(torch.int64 if groups.dtype == torch.float32 else torch.int32).squeeze(-1)


def words_of_group(group_size: int, most: int) -> int:
    """The largest power of two up to `most` that divides the words of a group."""
    words = group_size // 8
    return min(most, words & -words)


def launch_dequantize(
    words: torch.Tensor,
    groups: torch.Tensor,
    out: torch.Tensor,
    group_size: int,
    rows: int = 32,
) -> None:
    """Packed words [..., N, W] and groups [..., N, G, 2] into out [..., N, K], contiguous."""
    size = out.shape[-1]
    num_rows = out.numel() // size
    if num_rows == 0:
        return
    block = words_of_group(group_size, 16)
    pdl = launching.uses_pdl(out.device)
    launching.launch(
        dequantize_kernel,
        (-(-num_rows // rows) * -(-words.shape[-1] // block),),
        (words, group_words(groups), out, num_rows),
        (size, group_size, rows, block, pdl),
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of V2-Lite's experts in bf16."""
    names = dequantize_kernel.arg_names
    types = {"words": "*i32", "groups": "*i32", "out": "*bf16", "num_rows": "i32"}
    signature = {name: types.get(name, "constexpr") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in ("words", "groups", "out")}
    fixed = {"K": 2048, "GROUP": 128, "BLOCK_N": 32, "BLOCK_W": 16, "PDL": False}
    options = {"num_warps": 4, "num_stages": 3, "attrs": attrs}
    return [("int4-dequantize", dequantize_kernel, signature, fixed, options)]

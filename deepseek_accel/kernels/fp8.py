"""FP8 numbers inside kernels: the scale of a vector, its codes, and codes as numbers. Definition: `ops/fp8.py`.

Encoding and decoding are integer arithmetic, the same bits on every GPU and in Triton's interpreter: Triton's own
conversion rounds twice on some, and knows e4m3 only from compute capability 8.9 on.
"""

import triton
import triton.language as tl

VARIANTS = {None: 0, "e4m3": 1, "e5m2": 2}
"""Values of the kernels' constexpr FP8; 0 for entries of plain numbers."""


def _four(shift: int, mask: int, factor: int, kind: str) -> tl.constexpr:
    """PTX that turns four codes in one register into numbers in two: each code goes to the top of 16 bits, and its
    exponent and mantissa `shift` down to where `kind` has them. `factor` then mends the bias of the exponent."""
    lines = ["{ .reg .b32 t, u;"]
    for out, selector in (("$0", "0x1404"), ("$1", "0x3424")):
        lines += [f"prmt.b32 t, $2, 0, {selector};"]
        if shift == 0:
            lines += [f"mov.b32 {out}, t;"]
            continue
        lines += [f"shr.b32 u, t, {shift};", f"and.b32 u, u, {mask:#x};", "and.b32 t, t, 0x80008000;"]
        lines += ["or.b32 t, t, u;", f"mov.b32 u, {factor:#x};"]
        lines += [f"{{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.{kind} {out}, t, u, z; }}"]  # adds -0: exact
    return tl.constexpr(" ".join([*lines, "}"]))


E4M3_BF16 = _four(4, 0x07F007F0, 0x7B807B80, "bf16x2")  # 2**120
E5M2_BF16 = _four(3, 0x0FE00FE0, 0x77807780, "bf16x2")  # 2**112
E4M3_FP16 = _four(1, 0x3F803F80, 0x5C005C00, "f16x2")  # 2**8
E5M2_FP16 = _four(0, 0, 0, "f16x2")  # e5m2 is the upper half of fp16
E4M3_FP16_NATIVE = tl.constexpr(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)
"""What GPUs of compute capability 8.9 and later do in one instruction for two codes. Exact, so the same bits."""


@triton.jit
def scale_of(values, FP8: tl.constexpr):
    """Of fp32 values [..., N], over the last axis: their largest size over FP8's, NaN if one is not finite."""
    sizes = tl.abs(values)
    axis: tl.constexpr = len(values.shape) - 1
    largest = tl.max(sizes, axis)
    scale = largest * (1.743861607142857e-05 if FP8 == 2 else 0.002232142857142857)  # 1 / 57344, 1 / 448
    # not below the least normal number, so that the quotient cannot overflow
    scale = tl.where(largest == 0.0, 0.0, tl.maximum(scale, 1.1754943508222875e-38))
    finite = tl.min((sizes < float("inf")).to(tl.int32), axis)
    return tl.where(finite != 0, scale, float("nan"))


@triton.jit
def encode(values, scale, FP8: tl.constexpr):
    """uint8 codes of fp32 values / scale (of a shape that broadcasts): nearest, ties to even, at most FP8's largest."""
    quotient = tl.div_rn(values, tl.where(scale == 0.0, 1.0, scale) + tl.zeros_like(values))
    bits = quotient.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    if FP8 == 2:
        kept = tl.minimum(size, 0x47600000)  # 57344
        least = 0x38800000  # 2**-14, below which the step is 2**-16
        normal = ((kept + 0xFFFFF + ((kept >> 21) & 1)) >> 21) - (112 << 2)
        step = (kept.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
    else:
        kept = tl.minimum(size, 0x43E00000)  # 448
        least = 0x3C800000  # 2**-6, below which the step is 2**-9
        normal = ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20) - (120 << 3)
        step = (kept.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(kept < least, step, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


INTERPRETED = tl.constexpr(not isinstance(encode, triton.JITFunction))


@triton.jit
def decode(codes, dtype: tl.constexpr, FP8: tl.constexpr, PURE: tl.constexpr, NATIVE: tl.constexpr = False):
    """uint8 codes as numbers of `dtype`, exact in fp32, fp16 and bf16. Scales not applied. A code of NaN, which only
    comes with a scale of NaN, gives any number.

    PURE: whether the compiler may move the assembly. Not before matrix instructions that take registers (few rows, or
    a GPU before Hopper): Triton would decode once for each product and no longer load ahead. NATIVE: whether the GPU
    converts to fp16 by itself (`has_conversions`).
    """
    if INTERPRETED or dtype == tl.float32:
        wide = codes.to(tl.uint16)
        if FP8 == 2:
            numbers = (wide << 8).to(tl.float16, bitcast=True).to(dtype)
        else:  # the bits of an fp16 number of 2**-8 the size
            half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
            numbers = (half * 256.0).to(dtype)
    elif dtype == tl.bfloat16:
        if FP8 == 2:
            numbers = tl.inline_asm_elementwise(E5M2_BF16, "=r,=r,r", [codes], tl.bfloat16, PURE, 4)
        else:
            numbers = tl.inline_asm_elementwise(E4M3_BF16, "=r,=r,r", [codes], tl.bfloat16, PURE, 4)
    else:
        if FP8 == 2:
            numbers = tl.inline_asm_elementwise(E5M2_FP16, "=r,=r,r", [codes], tl.float16, PURE, 4)
        elif NATIVE:
            numbers = tl.inline_asm_elementwise(E4M3_FP16_NATIVE, "=r,=r,r", [codes], tl.float16, PURE, 4)
        else:
            numbers = tl.inline_asm_elementwise(E4M3_FP16, "=r,=r,r", [codes], tl.float16, PURE, 4)
    return numbers


def has_conversions(capability: tuple[int, int]) -> bool:
    """Whether GPUs of this compute capability turn FP8 numbers into fp16 ones in one instruction."""
    return capability >= (8, 9)


@triton.jit
def halved(values):
    """bf16 rows [R, N] as fp16 ones of size below two, and the powers of two [R] that they were divided by."""
    wide = values.to(tl.float32)
    bits = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)  # so that its inverse is a normal number
    factor, inverse = bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)
    return (wide * inverse[:, None]).to(tl.float16), factor


@triton.jit
def lifted(scale, FP8: tl.constexpr):
    """Scales times a power of two, about one in size: a softmax weight times a bare scale would leave fp16's range."""
    if FP8 == 2:
        return scale * 32768.0
    return scale * 256.0


@triton.jit
def lowered(total, FP8: tl.constexpr):
    """What was summed with `lifted` scales."""
    if FP8 == 2:
        return total * 3.0517578125e-05
    return total * 0.00390625


@triton.jit
def round_trip_kernel(
    values, codes, scales, back, N: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, PURE: tl.constexpr = True,
    NATIVE: tl.constexpr = False,
):  # fmt: skip
    """Vectors [rows, N] as codes, scales [rows] and what the codes decode to: the functions above, for their tests."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(values + row * N + column, mask=column < N, other=0.0).to(tl.float32)
    scale = scale_of(x, FP8)
    encoded = encode(x, scale, FP8)
    tl.store(scales + row, scale)
    tl.store(codes + row * N + column, encoded, mask=column < N)
    tl.store(back + row * N + column, decode(encoded, back.dtype.element_ty, FP8, PURE, NATIVE), mask=column < N)

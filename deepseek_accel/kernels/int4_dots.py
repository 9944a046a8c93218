"""One token times four-bit weights, without tensor cores: `int4_dots_kernel`, rows as dot products.

The norm before, the second weight of a gated MLP and the residual after are in the same launch. Expert forms of the
same loop are in `int4_pairs.py`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import choices, launching
from .experts_pairs import silu
from .int4 import group_dots, group_words, input_sums, load_inputs


@triton.jit
def load_words(row, start, limit, WORDS: tl.constexpr, BLOCK_W: tl.constexpr, CHECK: tl.constexpr):
    """[N, BLOCK_W] of the rows whose first words `row` [N, 1] points to; 0 beyond the row, if CHECK from `limit` on."""
    column = start + tl.arange(0, BLOCK_W)[None, :]
    if CHECK:
        return tl.load(row + column, mask=column < limit, other=0)
    elif WORDS % BLOCK_W == 0:
        return tl.load(row + column)
    else:
        return tl.load(row + column, mask=column < WORDS, other=0)


@triton.jit
def load_groups(
    row, start, limit, WORDS: tl.constexpr, BLOCK_W: tl.constexpr, GROUP: tl.constexpr, CHECK: tl.constexpr
):
    """[N, BLOCK_W / 4]: the group of each 32 inputs. 0, and with it the scale, where `load_words` is."""
    chunk = start // 4 + tl.arange(0, BLOCK_W // 4)[None, :]
    if CHECK:
        return tl.load(row + chunk // (GROUP // 32), mask=chunk * 4 < limit, other=0)
    elif WORDS % BLOCK_W == 0:
        return tl.load(row + chunk // (GROUP // 32))
    else:
        return tl.load(row + chunk // (GROUP // 32), mask=chunk < WORDS // 4, other=0)


@triton.jit
def block_dots(codes, scales, x, start, size, K: tl.constexpr, BLOCK_W: tl.constexpr, CHECK: tl.constexpr):
    """fp32 [N, BLOCK_W / 4]: what was loaded, times x from word `start` on."""
    dtype: tl.constexpr = x.dtype.element_ty
    x0, x1, x2, x3, x4, x5, x6, x7 = load_inputs(x, start, size, K, BLOCK_W, CHECK)
    sums, added = input_sums(x0, x1, x2, x3, x4, x5, x6, x7, dtype == tl.float32)
    return group_dots(codes, scales, x0, x1, x2, x3, x4, x5, x6, x7, sums, added, dtype)


@triton.jit
def row_dots(
    words,
    groups,
    x,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """fp32 [BLOCK_N, BLOCK_W / 4], to be summed over the last dim: x [K] times the rows whose first words and groups
    `words` and `groups` [BLOCK_N, 1] point to. The next block is on its way while one is computed with."""
    WORDS: tl.constexpr = (K + 31) // 32 * 4
    LAST: tl.constexpr = (WORDS - 1) // BLOCK_W * BLOCK_W
    total = tl.zeros([BLOCK_N, BLOCK_W // 4], tl.float32)
    codes = load_words(words, 0, WORDS, WORDS, BLOCK_W, False)
    scales = load_groups(groups, 0, WORDS, WORDS, BLOCK_W, GROUP, False)
    for start in range(0, LAST, BLOCK_W):
        next_codes = load_words(words, start + BLOCK_W, WORDS, WORDS, BLOCK_W, False)
        next_scales = load_groups(groups, start + BLOCK_W, WORDS, WORDS, BLOCK_W, GROUP, False)
        total += block_dots(codes, scales, x, start, K, K, BLOCK_W, False)
        codes, scales = next_codes, next_scales
    total += block_dots(codes, scales, x, LAST, K, K, BLOCK_W, False)
    return total


@triton.jit
def block_dots_of_two(
    codes,
    scales,
    other_codes,
    other_scales,
    x,
    norm,
    start,
    squares,
    K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    NORM: tl.constexpr,
):
    """`block_dots` of two weights, of x or, if NORM, of x times norm; and `squares` [1, BLOCK_W] with x's added."""
    dtype: tl.constexpr = x.dtype.element_ty
    x0, x1, x2, x3, x4, x5, x6, x7 = load_inputs(x, start, K, K, BLOCK_W, False)
    if NORM:
        squares += (x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3) + (x4 * x4 + x5 * x5 + x6 * x6 + x7 * x7)
        n0, n1, n2, n3, n4, n5, n6, n7 = load_inputs(norm, start, K, K, BLOCK_W, False)
        x0, x1, x2, x3, x4, x5, x6, x7 = x0 * n0, x1 * n1, x2 * n2, x3 * n3, x4 * n4, x5 * n5, x6 * n6, x7 * n7
    sums, added = input_sums(x0, x1, x2, x3, x4, x5, x6, x7, dtype == tl.float32)
    first = group_dots(codes, scales, x0, x1, x2, x3, x4, x5, x6, x7, sums, added, dtype)
    second = group_dots(other_codes, other_scales, x0, x1, x2, x3, x4, x5, x6, x7, sums, added, dtype)
    return first, second, squares


@triton.jit
def row_dots_of_two(
    words,
    groups,
    other_words,
    other_groups,
    x,
    norm,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    NORM: tl.constexpr,
):
    """fp32 [BLOCK_N] of two weights, of x or, if NORM, of x times norm [K]; and the sum of x's squares."""
    WORDS: tl.constexpr = (K + 31) // 32 * 4
    LAST: tl.constexpr = (WORDS - 1) // BLOCK_W * BLOCK_W
    total = tl.zeros([BLOCK_N, BLOCK_W // 4], tl.float32)
    other = tl.zeros([BLOCK_N, BLOCK_W // 4], tl.float32)
    squares = tl.zeros([1, BLOCK_W], tl.float32)
    codes = load_words(words, 0, WORDS, WORDS, BLOCK_W, False)
    other_codes = load_words(other_words, 0, WORDS, WORDS, BLOCK_W, False)
    scales = load_groups(groups, 0, WORDS, WORDS, BLOCK_W, GROUP, False)
    other_scales = load_groups(other_groups, 0, WORDS, WORDS, BLOCK_W, GROUP, False)
    for start in range(0, LAST, BLOCK_W):
        next_codes = load_words(words, start + BLOCK_W, WORDS, WORDS, BLOCK_W, False)
        next_other = load_words(other_words, start + BLOCK_W, WORDS, WORDS, BLOCK_W, False)
        next_scales = load_groups(groups, start + BLOCK_W, WORDS, WORDS, BLOCK_W, GROUP, False)
        next_other_scales = load_groups(other_groups, start + BLOCK_W, WORDS, WORDS, BLOCK_W, GROUP, False)
        first, second, squares = block_dots_of_two(
            codes, scales, other_codes, other_scales, x, norm, start, squares, K, BLOCK_W, NORM
        )
        total += first
        other += second
        codes, other_codes, scales, other_scales = next_codes, next_other, next_scales, next_other_scales
    first, second, squares = block_dots_of_two(
        codes, scales, other_codes, other_scales, x, norm, LAST, squares, K, BLOCK_W, NORM
    )
    return tl.sum(total + first, 1), tl.sum(other + second, 1), tl.sum(tl.sum(squares, 1), 0)


@triton.jit
def prefetch_rows(words, WORDS: tl.constexpr, PDL: tl.constexpr):
    """Ask for the rows that `words` [N, 1] points to, while the kernel before still runs."""
    if PDL:
        LINES: tl.constexpr = (WORDS + 31) // 32  # of 128 bytes
        line = tl.arange(0, triton.next_power_of_2(LINES))
        launching.prefetch(words + tl.minimum(line, LINES - 1)[None, :] * 32)


@triton.jit
def int4_dots_kernel(
    x,  # [K]
    words,  # [N, WORDS], contiguous, as are all
    groups,  # [N, G]
    other_words,  # as `words`, used if GATED
    other_groups,
    norm_weight,  # [K], used if NORM
    bias,  # [N], used if BIAS
    residual,  # [N], used if ADD
    out,  # [N]
    eps,
    K: tl.constexpr,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    launching.launch_dependents(PDL)
    WORDS: tl.constexpr = (K + 31) // 32 * 4
    G: tl.constexpr = (K + GROUP - 1) // GROUP
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.minimum(rows, N - 1).to(tl.int64)[:, None]  # a mask would cost an instruction per load
    prefetch_rows(words + safe * WORDS, WORDS, PDL)
    if GATED:
        prefetch_rows(other_words + safe * WORDS, WORDS, PDL)
    launching.wait(PDL)
    first, scales = words + safe * WORDS, groups + safe * G
    if GATED:
        other, other_scales = other_words + safe * WORDS, other_groups + safe * G
        gate, up, squares = row_dots_of_two(
            first, scales, other, other_scales, x, norm_weight, K, GROUP, BLOCK_N, BLOCK_W, NORM
        )
        if NORM:
            inverse = tl.rsqrt(squares / K + eps)
            gate *= inverse
            up *= inverse
        total = silu(gate) * up
    else:
        total = tl.sum(row_dots(first, scales, x, K, GROUP, BLOCK_N, BLOCK_W), 1)
    if BIAS:
        total += tl.load(bias + rows, mask=rows < N, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(out + rows, total.to(out.dtype.element_ty), mask=rows < N)


class Blocks(NamedTuple):
    """What one program takes: rows of the weight, words of a row at a time; and its warps."""

    rows: int
    words: int
    warps: int


@choices.by_device
def choose_blocks(capability: tuple[int, int], size: int, count: int, gated: bool) -> Blocks:
    """For a weight [count, size], or with `gated` two. A thread has four words of each row, so that loads of inputs lie
    as those of words do: 128 words a warp.

    Measured on an H200 in bf16, groups of 128, one token, us, best of 1 to 8 rows and 1 to 8 warps: 4,096 x 4,096 5.3
    (as 4 rows of 4 warps 7.3), 11,008 x 4,096 14.0 (14.9), 10,944 x 2,048 7.7 (8.0), 4,096 x 102,400 81 (100),
    3,584 x 3,584 4.6 to 4.8 (5.4), 2,048 x 2,048 3.8 to 4.3. Gated ones as `int4_pairs.py` was measured.
    """
    if gated:
        return Blocks(8, 256, 2) if size <= 2048 else Blocks(2, 128, 1)
    if count >= 32768 or (size > 8192 and count <= 2560):
        return Blocks(8, 512, 4)
    return Blocks(4 if 2048 < size <= 8192 else 8, 256, 2)


def launch(
    x: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor],
    other: tuple[torch.Tensor, torch.Tensor] | None,
    group_size: int,
    norm: tuple[torch.Tensor, float] | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """x [1, K] times weight (words, groups) [N, K] -> [1, N], or with `other` silu(x weight^T) * (x other^T).

    norm only with `other`. bias and residual are added at the end, the result is rounded once.
    """
    size, count = x.shape[1], weight[0].shape[0]
    out = torch.empty(1, count, dtype=x.dtype, device=x.device)
    blocks = blocks or choose_blocks(x.device, size, count, other is not None)
    second = weight if other is None else other
    pdl = launching.uses_pdl(x.device)
    launching.launch(
        int4_dots_kernel,
        (-(-count // blocks.rows),),
        (
            x.contiguous(),
            weight[0],
            group_words(weight[1]),
            second[0],
            group_words(second[1]),
            x if norm is None else norm[0],
            x if bias is None else bias,
            x if residual is None else residual.contiguous(),
            out,
            0.0 if norm is None else norm[1],
        ),
        (
            size,
            count,
            group_size,
            other is not None,
            norm is not None,
            bias is not None,
            residual is not None,
            blocks.rows,
            blocks.words,
            pdl,
        ),
        num_warps=blocks.warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of V2-Lite's dense MLP and LLM-7B's o and head in bf16."""
    pointers = ("x", "norm_weight", "bias", "residual", "out")
    integers = ("words", "groups", "other_words", "other_groups")
    types = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(integers, "*i32") | {"eps": "fp32"}
    arguments = int4_dots_kernel.arg_names
    attrs = {(arguments.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *integers)}
    cases = []
    for name, size, count, gated in (
        ("v2-lite-mlp", 2048, 10944, True),
        ("v2-lite-down", 10944, 2048, False),
        ("llm-7b-o", 4096, 4096, False),
        ("llm-7b-head", 4096, 102400, False),
    ):
        for capability in (80, 90, 100):
            blocks = choose_blocks((capability // 10, capability % 10), size, count, gated)
            fixed = {"K": size, "N": count, "GROUP": 128, "GATED": gated, "NORM": gated, "BIAS": False}
            fixed |= {"ADD": not gated, "BLOCK_N": blocks.rows, "BLOCK_W": blocks.words, "PDL": capability >= 90}
            signature = {argument: types.get(argument, "constexpr") for argument in arguments}
            options = {"num_warps": blocks.warps, "num_stages": 3, "attrs": attrs, "capability": capability}
            cases.append((f"int4_dots-{name}", int4_dots_kernel, signature, fixed, options))
    return cases

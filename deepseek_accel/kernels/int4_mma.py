"""Four-bit weights times few tokens on tensor cores, straight from the registers that they were loaded into.

One instruction (`int4_fragments.py`; compute capability 8.0 on) multiplies 16 rows of weights with 8 tokens over 16
inputs. Which 16 inputs it takes is free. So a lane reads 16 bytes, 32 codes, of each of its two rows, the four lanes of
a row together a group of 128, and uses them up in eight instructions. Only the last sum goes through shared memory.

Two codes become two 16-bit numbers by one shift and one logical operation: with the upper bits of 128 in bf16, 1024 in
fp16, a code is the number 128 + code. Scale, zero and what was added apply to the sums of a group, in fp32:

    scale * (sum x (c + code) - (c + zero) * sum x)

where the sums of x are one more product, with ones. So a weight costs about two instructions, where `int4_dots.py`
needs three and a half, and 8 tokens cost what one does.

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
from .int4_forms import DENSE, DOWN, GATE_UP, SEVERAL, Product, compile_signature, dense_product, weights_of_expert
from .int4_forms import launch_experts as launch_mixture
from .int4_fragments import add_group, gather, load_inputs_of, load_words_of, token_sums
from .launching import launch_dependents, wait

TOKENS = 8
"""Of one instruction."""


@triton.jit
def _load_rows(words, groups, row_low, row_high, width, scales_width, chunk, group, present, inside):
    """Codes and groups at one place of each lane's two rows. words, groups: int64 addresses. present: whether the
    lane's chunk is there; inside: whether the group is, whose sums a lane may hold without a chunk of it."""
    low0, low1 = load_words_of(words + (row_low * width + chunk * 4) * 4, present)
    high0, high1 = load_words_of(words + (row_high * width + chunk * 4) * 4, present)
    low_at = (groups + (row_low * scales_width + group) * 4).to(tl.pointer_type(tl.int32))
    high_at = (groups + (row_high * scales_width + group) * 4).to(tl.pointer_type(tl.int32))
    low_group, high_group = tl.load(low_at, mask=inside, other=0), tl.load(high_at, mask=inside, other=0)
    return low0, low1, high0, high1, low_group, high_group


@triton.jit
def _fetch(
    step, lane, low, high, next_low, next_high, words, groups, more_words, more_groups, width, scales_width,
    GATED: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """What a warp computes with at `step` [L], 128 inputs: their offset, whether a lane's are there, and codes and
    groups of each lane's two times two rows. Beyond the end nothing is read, and the scale is 0.

    words, groups: addresses of the rows; more_*: of the second rows, if GATED.
    """
    STEPS: tl.constexpr = (D + 127) // 128
    inside = step < STEPS
    step = tl.minimum(step, STEPS - 1)
    chunk = step * 4 + lane % 4
    valid = inside & (chunk < D // 32)
    chunk = tl.minimum(chunk, D // 32 - 1)
    group = step // (GROUP // 128)
    a0, a1, a2, a3, a4, a5 = _load_rows(words, groups, low, high, width, scales_width, chunk, group, valid, inside)
    if GATED:
        b0, b1, b2, b3, b4, b5 = _load_rows(
            more_words, more_groups, low, high, width, scales_width, chunk, group, valid, inside
        )
    else:
        b0, b1, b2, b3, b4, b5 = _load_rows(
            words, groups, next_low, next_high, width, scales_width, chunk, group, valid, inside
        )
    return chunk * 32, valid, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def int4_mma_kernel(
    x,  # hidden [T, D], or active [pairs, D] for DOWN; rows contiguous, of 16 bytes' alignment
    order,  # [pairs], as are `tiles` used by GATE_UP and DOWN
    tiles,  # [3, num_tiles]
    words,  # [E, N, WORDS], [E, 2N, WORDS] for GATE_UP, or [N, WORDS]; contiguous, as are all that follow
    groups,
    more_words,  # the shared experts' (gate's), the up weight of a gated DENSE, or the second of SEVERAL
    more_groups,
    up_words,  # the shared experts' up, for GATE_UP, or the third of SEVERAL
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
    WARPS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has 32 rows of weights, or 16 of gate and 16 of up, and 8 or 16 tokens; its warps share the groups."""
    launch_dependents(PDL)
    ROWS: tl.constexpr = 16 if GATED else 32
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
        width, scales_width = WORDS, G
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
        else:
            source = (begin + token).to(tl.int64)
            later = source + 8
        first_words, first_groups, second_words, second_groups, width, scales_width = weights_of_expert(
            first_words, first_groups, second_words, second_groups, up_words.to(tl.int64), up_groups.to(tl.int64),
            expert, FORM, E, SHARED, WORDS, G, N, 4,
        )  # fmt: skip

    # Rows past the last read the last: what they compute is not stored.
    row = column * ROWS + lane // 4
    low, high = tl.minimum(row, count - 1).to(tl.int64), tl.minimum(row + 8, count - 1).to(tl.int64)
    next_low, next_high = low, high
    if not GATED:
        next_low, next_high = tl.minimum(row + 16, count - 1).to(tl.int64), tl.minimum(row + 24, count - 1).to(tl.int64)
    inputs = x.to(tl.int64) + source * x_stride * 2
    late_inputs = x.to(tl.int64) + later * x_stride * 2
    used, late_used = begin + token < end, begin + 8 + token < end

    t0 = tl.zeros([32 * WARPS], tl.float32)
    t1, t2, t3, u0, u1, u2, u3 = t0, t0, t0, t0, t0, t0, t0
    v0, v1, v2, v3, w0, w1, w2, w3 = t0, t0, t0, t0, t0, t0, t0, t0
    offset, valid, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5 = _fetch(
        warp, lane, low, high, next_low, next_high, first_words, first_groups, second_words, second_groups, width,
        scales_width, GATED, D, GROUP,
    )  # fmt: skip
    wait(PDL)
    for step in tl.range(0, (STEPS + WARPS - 1) // WARPS, loop_unroll_factor=2):
        x0, x1, x2, x3, x4, x5, x6, x7 = load_inputs_of(inputs + offset * 2, valid & used)
        if TILES == 2:
            y0, y1, y2, y3, y4, y5, y6, y7 = load_inputs_of(late_inputs + offset * 2, valid & late_used)
        # the weights of the next step are on their way while this one is computed
        offset, valid, c0, c1, c2, c3, c4, c5, d0, d1, d2, d3, d4, d5 = _fetch(
            (step + 1) * WARPS + warp, lane, low, high, next_low, next_high, first_words, first_groups, second_words,
            second_groups, width, scales_width, GATED, D, GROUP,
        )  # fmt: skip
        s0, s1 = token_sums(x0, x1, x2, x3, x4, x5, x6, x7, dtype)
        t0, t1, t2, t3 = add_group(
            t0, t1, t2, t3, a0, a1, a2, a3, a4, a5, x0, x1, x2, x3, x4, x5, x6, x7, s0, s1, dtype
        )  # fmt: skip
        u0, u1, u2, u3 = add_group(
            u0, u1, u2, u3, b0, b1, b2, b3, b4, b5, x0, x1, x2, x3, x4, x5, x6, x7, s0, s1, dtype
        )  # fmt: skip
        if TILES == 2:
            s0, s1 = token_sums(y0, y1, y2, y3, y4, y5, y6, y7, dtype)
            v0, v1, v2, v3 = add_group(
                v0, v1, v2, v3, a0, a1, a2, a3, a4, a5, y0, y1, y2, y3, y4, y5, y6, y7, s0, s1, dtype
            )  # fmt: skip
            w0, w1, w2, w3 = add_group(
                w0, w1, w2, w3, b0, b1, b2, b3, b4, b5, y0, y1, y2, y3, y4, y5, y6, y7, s0, s1, dtype
            )  # fmt: skip
        a0, a1, a2, a3, a4, a5 = c0, c1, c2, c3, c4, c5
        b0, b1, b2, b3, b4, b5 = d0, d1, d2, d3, d4, d5

    first, second = gather(t0, t1, t2, t3, WARPS), gather(u0, u1, u2, u3, WARPS)
    first_row = column * ROWS
    _store_tile(
        first, second, first_row, begin, end, order, bias, bias_rows, residual, out, count, FORM, GATED, BIAS, ADD
    )
    if TILES == 2:
        first, second = gather(v0, v1, v2, v3, WARPS), gather(w0, w1, w2, w3, WARPS)
        begin += 8
        _store_tile(
            first, second, first_row, begin, end, order, bias, bias_rows, residual, out, count, FORM, GATED, BIAS, ADD
        )


@triton.jit
def _store_tile(
    result, more, first_row, begin, end, order, bias, bias_rows, residual, out, count,
    FORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Sums as `gather` gives them, of 8 tokens from `begin` on, to where they belong. count: rows of the weight;
    bias_rows: of its bias, 0 if it has none."""
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
    """Warps that share the inputs of a row; each has the program's rows."""

    warps: int


@choices.by_device
def choose_program(capability: tuple[int, int], steps: int, columns: int, dense: bool) -> Program:
    """steps: of 128 inputs; columns: programs of one tile of tokens. Measured on an H200 in bf16, groups of 128, us,
    with 2, 4, 8 and 16 warps:

    V2-Lite's experts with shared ones, 8 tokens 95, 90, 180, 32 tokens 155, 153, 314 (both products alike); unpacked
    through shared memory (`int4_tiles.py`) 121 and 192. Dense, 8 tokens: gate and up of 4,096 x 11,008 21.6, 24.9,
    36.0, 54.5 (52.3 there), 11,008 x 4,096 44.2, 24.4, 18.5, 17.0 (52.3), 10,944 x 2,048 52.9, 20.9, 15.7, 15.2
    (49.5), 18,432 x 7,168 77.5, 48.8, 35.8, 38.7 (86.6). So a dense weight wants some ten warps on a processor, but
    each with four steps: q, k and v of 4,096 x 4,096 18.2, 12.5, 24.3, 27.4; 2,048 x (3,072 + 576) 7.8, 6.8, 8.4, 12.7.
    """
    warps = 4
    if dense:
        warps = 2
        while warps < 16 and columns * warps <= 1024 and 8 * warps <= steps:
            warps *= 2
    return Program(max(1, min(warps, triton.next_power_of_2(steps))))


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] with rows that begin at multiples of 16 bytes, as they are read."""
    return x.clone(memory_format=torch.contiguous_format) if x.stride(0) % 8 or x.data_ptr() % 16 else x


def _columns(product: Product) -> int:
    """Programs of one tile of tokens."""
    counts = product.experts if product.form == SEVERAL else (product.count,)
    return sum(-(-count // (16 if product.gated else 32)) for count in counts)


def _launch(
    product: Product,
    group_size: int,
    tiles: int,
    program: Program | None,
    biases: tuple[torch.Tensor | None, ...] = (),
) -> None:
    """biases: of SEVERAL weights."""
    columns, x = _columns(product), product.x
    is_dense = product.form in (DENSE, SEVERAL)
    program = program or choose_program(x.device, -(-product.size // 128), columns, is_dense)
    pdl = launching.uses_pdl(x.device)
    arguments, (form, gated, has_bias, *rest) = product.arguments(), product.constants()
    if biases:
        has_bias = sum(1 << i for i, bias in enumerate(biases) if bias is not None)
    more_biases = [x if bias is None else bias for bias in (*biases[1:], None, None)[:2]]
    launching.launch(
        int4_mma_kernel,
        (columns * product.num_tiles,),
        (*arguments, *more_biases),
        (form, gated, has_bias, *rest, group_size, tiles, program.warps, ROW_TILES, pdl),
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
) -> torch.Tensor:
    """x [T, K] times weight [N, K] -> [T, N], or with `other` silu(x weight^T) * (x other^T); T not 0."""
    tiles = 1 if len(x) <= TOKENS else 2
    product = dense_product(_aligned(x), weight, other, bias, residual, TOKENS * tiles)
    _launch(product, group_size, tiles, program)
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
        SEVERAL, _aligned(x), (first, second, third[0] if third else second), out, False, num_tokens,
        -(-num_tokens // (TOKENS * tiles)), (*counts, 0)[:3], bias=biases[0],
    )  # fmt: skip
    _launch(product, group_size, tiles, program, biases)
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
    """As `int4_forms.launch_experts`, in tiles of 8; tiles of 16 were slower at any number of tokens."""

    def launch(product: Product) -> None:
        _launch(product, group_size, 1, programs[product.form == DOWN])

    hidden = _aligned(hidden)
    launch_mixture(hidden, indices, weights, gate_up, down, out, shared, residual, intermediate, TOKENS, launch)


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) for V2-Lite in bf16, experts and its dense
    MLP, and q, k and v of Qwen2-7B."""
    arguments = int4_mma_kernel.arg_names
    signature, attrs = compile_signature(int4_mma_kernel)
    cases = []
    for form, name, size, count, experts, tokens in (
        (GATE_UP, "gate_up", 2048, 1408, (64, 8, 2), (1,)),
        (DOWN, "down", 1408, 2048, (64, 8, 2), (1,)),
        (DENSE, "dense-gated", 2048, 10944, (1, 1, 0), (1, 2)),
        (DENSE, "dense", 10944, 2048, (1, 1, 0), (1, 2)),
        (SEVERAL, "several", 3584, 4608, (3584, 512, 512), (1, 2)),
    ):
        gated, is_dense = form == GATE_UP or "gated" in name, form in (DENSE, SEVERAL)
        columns = -(-count // (16 if gated else 32))
        has_bias = 7 if form == SEVERAL else False
        for capability in (80, 90, 100):
            for tiles in tokens:
                where = (capability // 10, capability % 10)
                program = choose_program(where, -(-size // 128), columns, is_dense)
                values = (form, gated, has_bias, name == "dense", *experts, size, count, 128, tiles, program.warps)
                names = arguments[arguments.index("FORM") :]
                fixed = dict(zip(names, (*values, ROW_TILES, capability >= 90), strict=True))
                options = {"num_warps": program.warps, "num_stages": 3, "capability": capability, "attrs": attrs}
                cases.append((f"int4_mma_{name}-{tiles}", int4_mma_kernel, signature, fixed, options))
    return cases

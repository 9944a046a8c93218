"""Few tokens' experts of four bits on tensor cores, every pair of token and expert by itself: nothing is sorted.

Gate and up are the form PAIRS of `int4_mma.py`. Down adds a token's experts up in one product: its inputs are those of
all its experts one after the other, and the warps of a program share them. The order of pairs is that of
`int4_pairs.py`, which does the same by dot products, without what `int4_mma.py` asks of weights.
"""

import torch
import triton
import triton.language as tl

from . import choices, launching
from .int4 import Packed, group_words
from .int4_forms import PAIRS, Product
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
from .int4_mma import Program, aligned, launch_product, store_tile
from .launching import launch_dependents, wait


@triton.jit
def _fetch(
    item, lane, row, low, high, next_low, next_high, indices, weights, words, groups, shared_words, shared_groups,
    E: tl.constexpr, K: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, I: tl.constexpr,  # noqa: E741
    GROUP: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """What a warp computes with at `item` [L], 128 inputs of one expert: where a lane's are, whether they are there,
    the expert's weight, and codes and groups as in `load_rows`. words to shared_groups: int64 addresses. An expert
    that does not exist is not read."""
    WORDS: tl.constexpr = I // 8
    G: tl.constexpr = (I + GROUP - 1) // GROUP
    STEPS: tl.constexpr = (I + 127) // 128
    slot, step = item // STEPS, item % STEPS
    inside = slot < SHARED + K
    routed = inside & (slot >= SHARED)
    expert = tl.load(indices + slot - SHARED, mask=routed, other=0).to(tl.int64)
    inside = inside & (expert >= 0) & (expert < E)
    weight = tl.load(weights + slot - SHARED, mask=routed & inside, other=1.0).to(tl.float32)
    first, scales = words + (expert * D + row) * (WORDS * 4), groups + (expert * D + row) * (G * 4)
    apart, scales_apart = tl.full([], WORDS * 32, tl.int64), tl.full([], G * 32, tl.int64)
    if SHARED:
        shared = slot < SHARED
        place = row.to(tl.int64) * SHARED + slot
        first = tl.where(shared, shared_words + place * (WORDS * 4), first)
        scales = tl.where(shared, shared_groups + place * (G * 4), scales)
        apart = tl.where(shared, apart * SHARED, apart)
        scales_apart = tl.where(shared, scales_apart * SHARED, scales_apart)
    chunk, group = step * 4 + lane % 4, step // (GROUP // 128)
    present = inside & (chunk < I // 32)
    a0, a1, a2, a3, a4, a5 = load_rows(first, scales, apart, scales_apart, low, high, chunk, group, present, inside)
    b0, b1, b2, b3, b4, b5 = a0, a1, a2, a3, a4, a5
    if TWO:
        first += 2 * apart
        scales += 2 * scales_apart
        b0, b1, b2, b3, b4, b5 = load_rows(
            first, scales, apart, scales_apart, next_low, next_high, chunk, group, present, inside
        )
    return slot * I + chunk * 32, present, weight, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5


@triton.jit
def int4_mma_down_kernel(
    active,  # [T * (SHARED + K), I], contiguous, as are all
    indices,  # [T * K]
    weights,  # [T * K]
    words,  # [E, D, WORDS]
    groups,  # [E, D, G]
    shared_words,  # [D, words of SHARED * I], used if SHARED
    shared_groups,
    residual,  # [T, D], used if ADD
    out,  # [T, D]
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    ADD: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,  # as in int4_mma_kernel, 1 or 2
    PDL: tl.constexpr,
):
    """A program has ROWS, 16 or 32, outputs of one token; its warps share the inputs of all its experts."""
    launch_dependents(PDL)
    TWO: tl.constexpr = ROWS == 32
    COLUMNS: tl.constexpr = (D + ROWS - 1) // ROWS
    ITEMS: tl.constexpr = (SHARED + K) * ((I + 127) // 128)
    dtype: tl.constexpr = active.dtype.element_ty
    lanes = tl.arange(0, 32 * WARPS)
    lane, warp = lanes % 32, lanes // 32
    place = place_upper_bits(lanes, dtype)
    column, token = tl.program_id(0) % COLUMNS, tl.program_id(0) // COLUMNS
    row = column * ROWS + lane // 4
    low, high, next_low, next_high = row < D, row + 8 < D, row + 16 < D, row + 24 < D
    shared_words_at, shared_groups_at = shared_words.to(tl.int64), shared_groups.to(tl.int64)
    words_at, groups_at = words.to(tl.int64), groups.to(tl.int64)
    if SHARED and PDL:
        # What experts the token has is not known yet, the shared ones are.
        LINES: tl.constexpr = (SHARED * I // 2 + 127) // 128
        for start in tl.static_range(0, ROWS * LINES, 32 * WARPS):
            line = tl.minimum(start + lanes, ROWS * LINES - 1)
            line_row = tl.minimum(column * ROWS + line // LINES, D - 1).to(tl.int64)
            launching.prefetch(shared_words + line_row * (SHARED * I // 8) + line % LINES * 32)
    wait(PDL)
    first_pair = token.to(tl.int64) * K
    indices += first_pair
    weights += first_pair
    inputs = active.to(tl.int64) + token.to(tl.int64) * ((SHARED + K) * I * 2)
    used = lane // 4 == 0

    t0 = tl.zeros([32 * WARPS], tl.float32)
    t1, t2, t3, u0, u1, u2, u3 = t0, t0, t0, t0, t0, t0, t0
    at, present, weight, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5 = _fetch(
        warp, lane, row, low, high, next_low, next_high, indices, weights, words_at, groups_at, shared_words_at,
        shared_groups_at, E, K, SHARED, D, I, GROUP, TWO,
    )  # fmt: skip
    next_at, next_present, next_weight = at, present, weight
    if DEPTH == 2:
        next_at, next_present, next_weight, c0, c1, c2, c3, c4, c5, d0, d1, d2, d3, d4, d5 = _fetch(
            WARPS + warp, lane, row, low, high, next_low, next_high, indices, weights, words_at, groups_at,
            shared_words_at, shared_groups_at, E, K, SHARED, D, I, GROUP, TWO,
        )  # fmt: skip
    x0, x1, x2, x3, x4, x5, x6, x7 = load_inputs_of(inputs + at * 2, present & used)
    for step in tl.range(0, (ITEMS + WARPS - 1) // WARPS, loop_unroll_factor=DEPTH + 1):
        last_at, last_present, last_weight, e0, e1, e2, e3, e4, e5, f0, f1, f2, f3, f4, f5 = _fetch(
            (step + DEPTH) * WARPS + warp, lane, row, low, high, next_low, next_high, indices, weights, words_at,
            groups_at, shared_words_at, shared_groups_at, E, K, SHARED, D, I, GROUP, TWO,
        )  # fmt: skip
        if DEPTH == 1:
            next_at, next_present, next_weight = last_at, last_present, last_weight
        z0, z1, z2, z3, z4, z5, z6, z7 = load_inputs_of(inputs + next_at * 2, next_present & used)
        upper = upper_bits(place)
        x0, x1, x2, x3, x4, x5, x6, x7 = pair_inputs(x0, x1, x2, x3, x4, x5, x6, x7)
        s0, s1 = token_sums(x0, x1, x2, x3, x4, x5, x6, x7, dtype)
        t0, t1, t2, t3 = add_group(
            t0, t1, t2, t3, upper, a0, a1, a2, a3, a4, a5, x0, x1, x2, x3, x4, x5, x6, x7, s0, s1, weight, dtype
        )  # fmt: skip
        if TWO:
            u0, u1, u2, u3 = add_group(
                u0, u1, u2, u3, upper, b0, b1, b2, b3, b4, b5, x0, x1, x2, x3, x4, x5, x6, x7, s0, s1, weight, dtype
            )  # fmt: skip
        weight = next_weight
        x0, x1, x2, x3, x4, x5, x6, x7 = z0, z1, z2, z3, z4, z5, z6, z7
        if DEPTH == 2:
            next_at, next_present, next_weight = last_at, last_present, last_weight
            a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5 = c0, c1, c2, c3, c4, c5, d0, d1, d2, d3, d4, d5
            c0, c1, c2, c3, c4, c5, d0, d1, d2, d3, d4, d5 = e0, e1, e2, e3, e4, e5, f0, f1, f2, f3, f4, f5
        else:
            a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5 = e0, e1, e2, e3, e4, e5, f0, f1, f2, f3, f4, f5

    first, second = gather(t0, t1, t2, t3, WARPS), gather(u0, u1, u2, u3, WARPS)
    store_tile(
        first, second, column * ROWS, token, token + 1, indices, residual, D, residual, out, D, 0, False, False, ADD,
        TWO,
    )  # fmt: skip


@choices.by_device
def choose_down(capability: tuple[int, int], size: int, num_tokens: int) -> Program:
    """size: outputs. Measured on an H200 in bf16, groups of 128, with shared experts, both products, us, best of 4 to
    16 warps, 16 and 32 rows and both depths, and what `int4_mma.py` takes with sorting: V2-Lite, 1 token 18.8 (by dot
    products 25.4), 2 tokens 31 (44), 4 tokens 55 (59); V3, 1 token 74 (88.7), 2 tokens 142 (210), 4 tokens 273 (325).
    """
    for warps, rows in ((8, 16), (8, 32)):
        if -(-size // rows) * num_tokens <= 132:  # processors
            return Program(warps, rows, 2)
    return Program(4, 32, 2)


def launch(
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
    """Into out [T, D]; the rest as in `ops.int4_experts.int4_mixture`, indices and weights contiguous."""
    num_tokens, top_k = indices.shape
    num_experts, size = down[0].shape[:2]
    gate, up, shared_down = (gate_up, gate_up, down) if shared is None else shared
    num_shared = 0 if shared is None else gate[0].shape[0] // intermediate
    slots = top_k + num_shared
    active = hidden.new_empty(num_tokens * slots, intermediate)
    first, second = programs[0], programs[1] or choose_down(hidden.device, size, num_tokens)
    experts = (num_experts, slots, num_shared)
    packed = (gate_up, gate, up)
    pairs = Product(PAIRS, aligned(hidden), packed, active, True, len(active), len(active), experts, indices)
    launch_product(pairs, group_size, 1, first)
    pdl = launching.uses_pdl(hidden.device)
    sizes = (num_experts, top_k, num_shared, residual is not None, size, intermediate, group_size)
    launching.launch(
        int4_mma_down_kernel,
        (-(-size // second.rows) * num_tokens,),
        (
            active,
            indices,
            weights,
            down[0],
            group_words(down[1]),
            shared_down[0],
            group_words(shared_down[1]),
            out if residual is None else residual,
            out,
        ),
        (*sizes, second.rows, second.warps, second.depth, pdl),
        num_warps=second.warps,
        **({"launch_pdl": True} if pdl else {}),
    )


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) for V2-Lite, also without shared experts, and V3 in bf16."""
    types = dict.fromkeys(("active", "residual", "out"), "*bf16") | {"indices": "*i64", "weights": "*fp32"}
    types |= dict.fromkeys(("words", "groups", "shared_words", "shared_groups"), "*i32")
    arguments = int4_mma_down_kernel.arg_names
    signature = {argument: types.get(argument, "constexpr") for argument in arguments}
    attrs = {(arguments.index(argument),): [["tt.divisibility", 16]] for argument in types}
    cases = []
    for model, experts, top_k, size, intermediate, shared in (
        ("v2-lite", 64, 6, 2048, 1408, 2),
        ("v3", 256, 8, 7168, 2048, 1),
        ("routed-alone", 64, 6, 2048, 1408, 0),
    ):
        for capability in (80, 90, 100):
            for tokens in (1, 2, 4):
                program = choose_down((capability // 10, capability % 10), size, tokens)
                sizes = (experts, top_k, shared, shared > 0, size, intermediate, 128)
                values = (*sizes, program.rows, program.warps, program.depth, capability >= 90)
                fixed = dict(zip(arguments[arguments.index("E") :], values, strict=True))
                options = {"num_warps": program.warps, "num_stages": 3, "capability": capability, "attrs": attrs}
                cases.append((f"int4_mma_down-{model}-{tokens}", int4_mma_down_kernel, signature, fixed, options))
    return cases

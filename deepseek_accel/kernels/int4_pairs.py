"""One token's experts of four bits, where `int4_mma_pairs.py` cannot read the weights: each pair reads its rows once.

`experts_pairs.py` with packed weights: the same pairs in the same order, shared experts first.
"""

import torch
import triton
import triton.language as tl

from . import choices, launching
from .experts_pairs import silu
from .int4 import Packed, group_words
from .int4_dots import Blocks, block_dots, load_groups, load_words, prefetch_rows, row_dots, row_dots_of_two


@triton.jit
def int4_pair_gate_up_kernel(
    hidden,  # [T, D], rows contiguous
    indices,  # [T * K]
    words,  # [E, 2I, WORDS], contiguous, as are all that follow
    groups,  # [E, 2I, G]
    gate_words,  # [SHARED * I, WORDS], used if SHARED
    gate_groups,
    up_words,
    up_groups,
    active,  # [T * (SHARED + K), I]
    hidden_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,  # the shared experts count as this many experts of size I, chosen by every token
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    GROUP: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    launching.launch_dependents(PDL)
    WORDS: tl.constexpr = (D + 31) // 32 * 4
    G: tl.constexpr = (D + GROUP - 1) // GROUP
    pair = tl.program_id(1).to(tl.int64)
    token, slot = pair // (SHARED + K), pair % (SHARED + K)
    rows = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    safe = tl.minimum(rows, I - 1).to(tl.int64)[:, None]
    if slot < SHARED:
        first = slot * I + safe
        gate, gate_scales = gate_words + first * WORDS, gate_groups + first * G
        up, up_scales = up_words + first * WORDS, up_groups + first * G
        prefetch_rows(gate, WORDS, PDL)
        prefetch_rows(up, WORDS, PDL)
        launching.wait(PDL)
    else:
        launching.wait(PDL)
        expert = tl.load(indices + token * K + slot - SHARED).to(tl.int64)
        if (expert < 0) | (expert >= E):
            return  # int4_pair_down_kernel does not read this row
        first = expert * (2 * I) + safe
        gate, gate_scales = words + first * WORDS, groups + first * G
        up, up_scales = gate + tl.full([], I, tl.int64) * WORDS, gate_scales + tl.full([], I, tl.int64) * G
    x = hidden + token * hidden_stride
    gates, ups, _ = row_dots_of_two(gate, gate_scales, up, up_scales, x, x, D, GROUP, BLOCK_I, BLOCK_W, False)
    tl.store(active + pair * I + rows, (silu(gates) * ups).to(active.dtype.element_ty), mask=rows < I)


@triton.jit
def _load_block(
    words,
    groups,
    expert,
    start,
    rows,
    E: tl.constexpr,
    D: tl.constexpr,
    WORDS: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Codes and scales of an expert's rows [N, 1]; 0, and nothing is read, of one that does not exist."""
    valid = (expert >= 0) & (expert < E)
    limit = tl.where(valid, WORDS, 0)
    chosen = tl.where(valid, expert, 0) * D + rows
    codes = load_words(words + chosen * WORDS, start, limit, WORDS, BLOCK_W, True)
    return codes, load_groups(groups + chosen * G, start, limit, WORDS, BLOCK_W, GROUP, True)


@triton.jit
def int4_pair_down_kernel(
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
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    launching.launch_dependents(PDL)
    WORDS: tl.constexpr = (I + 31) // 32 * 4
    G: tl.constexpr = (I + GROUP - 1) // GROUP
    SIZE: tl.constexpr = SHARED * I
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    safe = tl.minimum(rows, D - 1).to(tl.int64)[:, None]
    row = active + token * (SHARED + K) * I
    total = tl.zeros([BLOCK_D, BLOCK_W // 4], tl.float32)
    if SHARED:
        SHARED_WORDS: tl.constexpr = (SIZE + 31) // 32 * 4
        first = shared_words + safe * SHARED_WORDS
        prefetch_rows(first, SHARED_WORDS, PDL)
        launching.wait(PDL)
        scales = shared_groups + safe * ((SIZE + GROUP - 1) // GROUP)
        total += row_dots(first, scales, row, SIZE, GROUP, BLOCK_D, BLOCK_W)
    else:
        launching.wait(PDL)
    # Blocks of all experts in one loop, so that the next one is always on its way.
    STEPS: tl.constexpr = (WORDS + BLOCK_W - 1) // BLOCK_W
    expert = tl.load(indices + token * K).to(tl.int64)
    codes, scales = _load_block(words, groups, expert, 0, safe, E, D, WORDS, G, GROUP, BLOCK_W)
    for step in range(0, K * STEPS):
        k, start = step // STEPS, step % STEPS * BLOCK_W
        following = tl.minimum(step + 1, K * STEPS - 1)
        next_expert = tl.load(indices + token * K + following // STEPS).to(tl.int64)
        begin = following % STEPS * BLOCK_W
        next_codes, next_scales = _load_block(words, groups, next_expert, begin, safe, E, D, WORDS, G, GROUP, BLOCK_W)
        valid = (expert >= 0) & (expert < E)
        weight = tl.load(weights + token * K + k, mask=valid, other=0.0).to(tl.float32)
        size = tl.where(valid, I, 0)
        total += weight * block_dots(codes, scales, row + (SHARED + k) * I, start, size, I, BLOCK_W, True)
        expert, codes, scales = next_expert, next_codes, next_scales
    result = tl.sum(total, 1)
    if ADD:
        result += tl.load(residual + token * D + rows, mask=rows < D, other=0.0).to(tl.float32)
    tl.store(out + token * D + rows, result.to(out.dtype.element_ty), mask=rows < D)


@choices.by_device
def choose_gate_up(capability: tuple[int, int], size: int) -> Blocks:
    """Measured on an H200 in bf16, groups of 128, both kernels, one token with shared experts, with these and those of
    `choose_down`: V2-Lite 24.8 us of the 8.6 that its bytes take, V3 87.2 of 49.2."""
    return Blocks(8, 256, 2) if size <= 2048 else Blocks(2, 128, 1)


@choices.by_device
def choose_down(capability: tuple[int, int], intermediate: int) -> Blocks:
    """Measured as above."""
    return Blocks(8, 512, 4) if intermediate < 2048 else Blocks(8, 256, 2)


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
    blocks: tuple[Blocks, Blocks] | None = None,
) -> None:
    """Into out [T, D]; the rest as in `ops.int4_experts.int4_mixture`, indices and weights contiguous."""
    num_tokens, top_k = indices.shape
    num_experts, size = down[0].shape[:2]
    gate, up, shared_down = (gate_up, gate_up, down) if shared is None else shared
    num_shared = 0 if shared is None else gate[0].shape[0] // intermediate
    active = hidden.new_empty(num_tokens * (num_shared + top_k), intermediate)
    first, second = blocks or (choose_gate_up(hidden.device, size), choose_down(hidden.device, intermediate))
    sizes = (num_experts, top_k, num_shared)
    pdl = launching.uses_pdl(hidden.device)
    dependent = {"launch_pdl": True} if pdl else {}
    launching.launch(
        int4_pair_gate_up_kernel,
        (-(-intermediate // first.rows), num_tokens * (num_shared + top_k)),
        (
            hidden,
            indices,
            gate_up[0],
            group_words(gate_up[1]),
            gate[0],
            group_words(gate[1]),
            up[0],
            group_words(up[1]),
            active,
            hidden.stride(0),
        ),
        (*sizes, size, intermediate, group_size, first.rows, first.words, pdl),
        num_warps=first.warps,
        **dependent,
    )
    launching.launch(
        int4_pair_down_kernel,
        (-(-size // second.rows), num_tokens),
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
        (*sizes, residual is not None, size, intermediate, group_size, second.rows, second.words, pdl),
        num_warps=second.warps,
        **dependent,
    )


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) for V2-Lite and V3 in bf16."""
    numbers = ("hidden", "active", "residual", "out")
    packed = ("words", "groups", "gate_words", "gate_groups", "up_words", "up_groups", "shared_words", "shared_groups")
    types = dict.fromkeys(numbers, "*bf16") | dict.fromkeys(packed, "*i32")
    types |= {"indices": "*i64", "weights": "*fp32", "hidden_stride": "i32"}
    cases = []
    for model, experts, top_k, size, intermediate, shared in (
        ("v2-lite", 64, 6, 2048, 1408, 2),
        ("v3", 256, 8, 7168, 2048, 1),
    ):
        for capability in (80, 90, 100) if model == "v2-lite" else (90,):
            where = (capability // 10, capability % 10)
            first, second = choose_gate_up(where, size), choose_down(where, intermediate)
            fixed = {"E": experts, "K": top_k, "SHARED": shared, "ADD": True, "D": size, "I": intermediate}
            fixed |= {"GROUP": 128, "PDL": capability >= 90}
            for stem, kernel, blocks, name in (
                ("gate_up", int4_pair_gate_up_kernel, first, "BLOCK_I"),
                ("down", int4_pair_down_kernel, second, "BLOCK_D"),
            ):
                arguments = kernel.arg_names
                aligned = [argument for argument in arguments if argument in types]
                constants = fixed | {name: blocks.rows, "BLOCK_W": blocks.words}
                options = {"num_warps": blocks.warps, "num_stages": 3, "capability": capability}
                options["attrs"] = {(arguments.index(argument),): [["tt.divisibility", 16]] for argument in aligned}
                signature = {argument: types.get(argument, "constexpr") for argument in arguments}
                constants = {argument: value for argument, value in constants.items() if argument in arguments}
                cases.append((f"int4_pair_{stem}-{model}", kernel, signature, constants, options))
    return cases

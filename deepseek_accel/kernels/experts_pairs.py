"""Experts for few tokens: every pair of token and expert reads its expert's rows once, without tensor cores.

  1. `pair_gate_up_kernel`  silu(gate) * up of every pair
  2. `pair_down_kernel`     for each token and block of columns the weighted sum over its experts, in order

Shared experts are pairs too: they come first, since their weights are known before the router is done, so that with
programmatic dependent launch their reading starts while the kernel before still runs.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import launching
from .launching import launch_dependents, wait


@triton.jit
def silu(value):
    return value / (1.0 + tl.exp(-value))


@triton.jit
def pair_gate_up_kernel(
    hidden,  # [T, D]
    indices,  # [T * K]
    gate_up,  # [E, 2I, D]
    shared_gate,  # [SHARED * I, D], contiguous; used if SHARED
    shared_up,
    active,  # [T * (SHARED + K), I], contiguous
    hidden_stride,
    expert_stride,
    row_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,  # the shared experts count as this many experts of size I, chosen by every token
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    pair = tl.program_id(1).to(tl.int64)
    token, slot = pair // (SHARED + K), pair % (SHARED + K)
    rows = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    columns = tl.arange(0, BLOCK_D)
    inside = rows[:, None] < I
    x = hidden + token * hidden_stride + columns
    gate = tl.zeros([BLOCK_I], tl.float32)
    up = tl.zeros([BLOCK_I], tl.float32)
    if slot < SHARED:
        offsets = (slot * I + rows)[:, None] * D + columns[None, :]
        mask = inside & (columns < D)[None, :]
        # the first block of weights is on its way before the hidden state is there
        gate_weight = tl.load(shared_gate + offsets, mask=mask, other=0.0)
        up_weight = tl.load(shared_up + offsets, mask=mask, other=0.0)
        wait(PDL)
        value = tl.load(x, mask=columns < D, other=0.0).to(tl.float32)[None, :]
        gate += tl.sum(gate_weight.to(tl.float32) * value, 1)
        up += tl.sum(up_weight.to(tl.float32) * value, 1)
        for start in tl.static_range(BLOCK_D, D, BLOCK_D):
            in_row = columns < D - start
            mask = inside & in_row[None, :]
            value = tl.load(x + start, mask=in_row, other=0.0).to(tl.float32)[None, :]
            gate_weight = tl.load(shared_gate + offsets + start, mask=mask, other=0.0)
            up_weight = tl.load(shared_up + offsets + start, mask=mask, other=0.0)
            gate += tl.sum(gate_weight.to(tl.float32) * value, 1)
            up += tl.sum(up_weight.to(tl.float32) * value, 1)
    else:
        wait(PDL)
        expert = tl.load(indices + token * K + slot - SHARED).to(tl.int64)
        if (expert < 0) | (expert >= E):
            return  # pair_down_kernel does not read this row
        gate_rows = gate_up + expert * expert_stride + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
        up_rows = gate_rows + tl.full([], I, tl.int64) * row_stride
        for start in tl.static_range(0, D, BLOCK_D):
            in_row = columns < D - start
            mask = inside & in_row[None, :]
            gate_weight = tl.load(gate_rows + start, mask=mask, other=0.0)
            up_weight = tl.load(up_rows + start, mask=mask, other=0.0)
            value = tl.load(x + start, mask=in_row, other=0.0).to(tl.float32)[None, :]
            gate += tl.sum(gate_weight.to(tl.float32) * value, 1)
            up += tl.sum(up_weight.to(tl.float32) * value, 1)
    tl.store(active + pair * I + rows, (silu(gate) * up).to(active.dtype.element_ty), mask=rows < I)


@triton.jit
def pair_down_kernel(
    active,  # [T * (SHARED + K), I], contiguous
    indices,  # [T * K]
    weights,  # [T * K]
    down,  # [E, D, I]
    shared_down,  # [D, SHARED * I], contiguous; used if SHARED
    residual,  # [T, D], contiguous; used if ADD
    out,  # [T, D], contiguous
    expert_stride,
    row_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    SHARED: tl.constexpr,
    ADD: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_I)
    inside = rows[:, None] < D
    row = active + token * (SHARED + K) * I + columns
    total = tl.zeros([BLOCK_D], tl.float32)
    if SHARED:
        shared_offsets = rows.to(tl.int64)[:, None] * (SHARED * I) + columns[None, :]
        first = tl.load(
            shared_down + shared_offsets, mask=inside & (columns < SHARED * I)[None, :], other=0.0
        )  # before the hidden values are there, as above
        wait(PDL)
        value = tl.load(row, mask=columns < SHARED * I, other=0.0).to(tl.float32)[None, :]
        total += tl.sum(first.to(tl.float32) * value, 1)
        for start in tl.static_range(BLOCK_I, SHARED * I, BLOCK_I):
            in_row = columns < SHARED * I - start
            matrix = tl.load(shared_down + shared_offsets + start, mask=inside & in_row[None, :], other=0.0)
            value = tl.load(row + start, mask=in_row, other=0.0).to(tl.float32)[None, :]
            total += tl.sum(matrix.to(tl.float32) * value, 1)
    else:
        wait(PDL)
    offsets = rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
    for k in tl.static_range(K):
        pair = token * K + k
        expert = tl.load(indices + pair).to(tl.int64)
        valid = (expert >= 0) & (expert < E)
        weight = tl.load(weights + pair, mask=valid, other=0.0).to(tl.float32)
        matrix_rows = down + tl.where(valid, expert, 0) * expert_stride + offsets
        output = tl.zeros([BLOCK_D], tl.float32)
        for start in tl.static_range(0, I, BLOCK_I):
            in_row = columns < tl.where(valid, I - start, 0)
            matrix = tl.load(matrix_rows + start, mask=inside & in_row[None, :], other=0.0)
            value = tl.load(row + (SHARED + k) * I + start, mask=in_row, other=0.0).to(tl.float32)[None, :]
            output += tl.sum(matrix.to(tl.float32) * value, 1)
        total += weight * output
    if ADD:
        total += tl.load(residual + token * D + rows, mask=rows < D, other=0.0).to(tl.float32)
    tl.store(out + token * D + rows, total.to(out.dtype.element_ty), mask=rows < D)


class Blocks(NamedTuple):
    """What one program of a kernel takes: rows of the matrix, columns at a time; and its warps."""

    rows: int
    columns: int
    warps: int


@functools.cache
def choose_blocks(size: int, intermediate: int) -> tuple[Blocks, Blocks]:
    """Of the gate-up and of the down kernel. Measured on an H200, one token with shared experts: V2-Lite 39.5 us of at
    least 32.5. For V3 not measured: 193 of 186 with Blocks(4, 512, 4) for down."""
    return (
        Blocks(4, min(triton.next_power_of_2(size), 1024), 4),
        Blocks(2, min(triton.next_power_of_2(intermediate), 1024), 4),
    )


def launch(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    residual: torch.Tensor | None,
    blocks: tuple[Blocks, Blocks] | None = None,
) -> None:
    """Into out [T, D]; the rest as in `ops.experts.mixture`, indices and weights contiguous."""
    num_tokens, top_k = indices.shape
    num_experts, size, intermediate = down.shape
    # where there is no shared expert, any pointer will do: the kernels do not read it
    shared_gate, shared_up, shared_down = (gate_up, gate_up, down) if shared is None else shared
    num_shared = 0 if shared is None else shared_gate.shape[0] // intermediate
    active = hidden.new_empty(num_tokens * (num_shared + top_k), intermediate)
    first, second = blocks or choose_blocks(size, intermediate)
    sizes = (num_experts, top_k, num_shared)
    pdl = launching.uses_pdl(hidden.device)
    dependent = {"launch_pdl": True} if pdl else {}
    launching.launch(
        pair_gate_up_kernel,
        (-(-intermediate // first.rows), num_tokens * (num_shared + top_k)),
        (
            hidden,
            indices,
            gate_up,
            shared_gate,
            shared_up,
            active,
            hidden.stride(0),
            gate_up.stride(0),
            gate_up.stride(1),
        ),
        (*sizes, size, intermediate, first.rows, first.columns, pdl),
        num_warps=first.warps,
        **dependent,
    )
    launching.launch(
        pair_down_kernel,
        (-(-size // second.rows), num_tokens),
        (
            active,
            indices,
            weights,
            down,
            shared_down,
            out if residual is None else residual,
            out,
            down.stride(0),
            down.stride(1),
        ),
        (*sizes, residual is not None, size, intermediate, second.rows, second.columns, pdl),
        num_warps=second.warps,
        **dependent,
    )


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) for V2-Lite and V3 in bf16, with and without shared experts."""
    types = {
        **dict.fromkeys(("hidden", "gate_up", "down", "active", "outputs", "out", "residual"), "*bf16"),
        **dict.fromkeys(("shared_gate", "shared_up", "shared_down"), "*bf16"),
        **{"weights": "*fp32", "indices": "*i64", "order": "*i32", "tiles": "*i32"},
        **dict.fromkeys(("hidden_stride", "expert_stride", "row_stride", "num_pairs", "num_tiles"), "i32"),
    }
    cases = []

    def add(name: str, kernel: triton.JITFunction, constants: dict, **options: object) -> None:
        arguments = kernel.arg_names
        aligned = [name for name in arguments if types.get(name, "")[:1] == "*" or name.endswith("_stride")]
        options["attrs"] = {(arguments.index(name),): [["tt.divisibility", 16]] for name in aligned}
        signature = {argument: types.get(argument, "constexpr") for argument in arguments}
        constants = {name: value for name, value in constants.items() if name in arguments}
        cases.append((name, kernel, signature, constants, options))

    for model, experts, top_k, size, intermediate in (("v2-lite", 64, 6, 2048, 1408), ("v3", 256, 8, 7168, 2048)):
        for shared in (0, 2 if model == "v2-lite" else 1):
            sizes = {"E": experts, "K": top_k, "D": size, "I": intermediate, "SHARED": shared, "ADD": shared > 0}
            first, second = choose_blocks(size, intermediate)
            for capability in (80, 89, 90, 100):
                options = {"num_stages": 3, "capability": capability}
                fixed = sizes | {"PDL": capability >= 90}
                blocks = {"BLOCK_I": first.rows, "BLOCK_D": first.columns}
                name = f"{model}-{shared}"
                add(f"pair_gate_up-{name}", pair_gate_up_kernel, fixed | blocks, num_warps=first.warps, **options)
                blocks = {"BLOCK_D": second.rows, "BLOCK_I": second.columns}
                add(f"pair_down-{name}", pair_down_kernel, fixed | blocks, num_warps=second.warps, **options)
    return cases

"""Linear layers for one to four tokens: dot products, each program some rows of one weight, for all tokens.

A step reads every weight once, so its time is that of the memory. Each thread therefore has several 16-byte loads under
way: a tile of rows x BLOCK_K goes into registers while the one before it is multiplied, and with dependent launch the
first tile, for D up to a few thousand all of it, is on its way before the kernel ahead has finished. No tensor cores:
at four tokens the multiplications still hide behind the loads.

Tiles are [tokens, rows, columns] and never change their layout: all threads lie along the columns, and sums over
VECTOR neighbours stay within a thread. The norm needs no pass of its own: its mean of squares is known when the
products are, and scales the sums.
"""

import functools

import torch
import triton
import triton.language as tl

from . import launching


@triton.jit
def _select(block, first, second, third, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr):
    """What belongs to the weight that `block` is in; weights have B0, B1, B2 blocks."""
    chosen = first
    if B1 > 0:
        chosen = tl.where(block < B0, chosen, second)
    if B2 > 0:
        chosen = tl.where(block < B0 + B1, chosen, third)
    return chosen


@triton.jit
def _load_columns(row, start, D: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns start to start + BLOCK_K, as far as D, of rows whose first elements `row` [.., .., 1] points to."""
    columns = start + tl.arange(0, BLOCK_K)[None, None, :]
    if D % BLOCK_K == 0:
        return tl.load(row + columns)
    else:
        return tl.load(row + columns, mask=columns < D, other=0.0)


@triton.jit
def _load_tokens(x, x_stride, start, T: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_T, 1, BLOCK_K] in fp32, 0 for tokens from T on."""
    token = tl.arange(0, BLOCK_T)[:, None, None]
    columns = start + tl.arange(0, BLOCK_K)[None, None, :]
    pointers = x + token.to(tl.int64) * x_stride + columns
    if T == BLOCK_T and D % BLOCK_K == 0:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=(token < T) & (columns < D), other=0.0).to(tl.float32)


@triton.jit
def _partial_sums(product, VECTOR: tl.constexpr):
    """Sums of VECTOR neighbours of the last dim."""
    LAST: tl.constexpr = product.shape[2] // VECTOR
    return tl.sum(tl.reshape(product, [product.shape[0], product.shape[1], LAST, VECTOR]), 3)


@triton.jit
def project_kernel(
    x,  # [T, D]
    weight0,  # [N0, D], contiguous, as are all that follow
    weight1,
    weight2,
    bias0,  # [N0], used if BIAS0
    bias1,
    bias2,
    norm_weight,  # [D], used if NORM
    residual,  # [T, N0], used if ADD
    out0,  # [T, N0]
    out1,
    out2,
    x_stride,
    eps,
    T: tl.constexpr,
    D: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,  # 0 without a second weight
    N2: tl.constexpr,
    BIAS0: tl.constexpr,
    BIAS1: tl.constexpr,
    BIAS2: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    launching.launch_dependents(PDL)
    B0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    B1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    B2: tl.constexpr = (N2 + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0)
    weight = _select(block, weight0, weight1, weight2, B0, B1, B2)
    size = _select(block, N0, N1, N2, B0, B1, B2)
    rows = (block - _select(block, 0, B0, B0 + B1, B0, B1, B2)) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < size
    # Rows beyond the last one read the last one: a mask would cost an instruction per load.
    row = weight + tl.minimum(rows, size - 1).to(tl.int64)[None, :, None] * D
    tile = _load_columns(row, 0, D, BLOCK_K)
    first_norm = norm_weight + tl.zeros([1, 1, 1], tl.int64)
    if NORM:
        scale = _load_columns(first_norm, 0, D, BLOCK_K)
    sums = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    squares = tl.zeros([BLOCK_T, 1, BLOCK_K // VECTOR], tl.float32)
    launching.wait(PDL)

    for start in range(0, D - BLOCK_K, BLOCK_K):
        next_tile = _load_columns(row, start + BLOCK_K, D, BLOCK_K)
        value = _load_tokens(x, x_stride, start, T, D, BLOCK_T, BLOCK_K)
        if NORM:
            squares += _partial_sums(value * value, VECTOR)
            value *= scale.to(tl.float32)
            scale = _load_columns(first_norm, start + BLOCK_K, D, BLOCK_K)
        sums += _partial_sums(tile.to(tl.float32) * value, VECTOR)
        tile = next_tile
    LAST: tl.constexpr = (D - 1) // BLOCK_K * BLOCK_K
    value = _load_tokens(x, x_stride, LAST, T, D, BLOCK_T, BLOCK_K)
    if NORM:
        squares += _partial_sums(value * value, VECTOR)
        value *= scale.to(tl.float32)
    sums += _partial_sums(tile.to(tl.float32) * value, VECTOR)

    token = tl.arange(0, BLOCK_T)[:, None]
    used = (token < T) & inside[None, :]
    place = token.to(tl.int64) * size + rows[None, :]
    total = tl.sum(sums, 2)  # [BLOCK_T, BLOCK_N]
    if NORM:
        total *= tl.rsqrt(tl.sum(squares, 2) / D + eps)
    if (BIAS0 or BIAS1) or BIAS2:
        bias = _select(block, bias0, bias1, bias2, B0, B1, B2)
        has_bias = _select(block, BIAS0, BIAS1, BIAS2, B0, B1, B2)
        total += tl.load(bias + rows, mask=inside & has_bias, other=0.0).to(tl.float32)[None, :]
    if ADD:
        total += tl.load(residual + place, mask=used, other=0.0).to(tl.float32)
    out = _select(block, out0, out1, out2, B0, B1, B2)
    tl.store(out + place, total.to(out0.dtype.element_ty), mask=used)


@triton.jit
def gated_project_kernel(
    x,  # [T, D]
    gate,  # [I, D], contiguous, as are all that follow
    up,  # [I, D]
    norm_weight,  # [D], used if NORM
    out,  # [T, I]
    x_stride,
    eps,
    T: tl.constexpr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    NORM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    PDL: tl.constexpr,
):
    launching.launch_dependents(PDL)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = tl.minimum(rows, I - 1).to(tl.int64)[None, :, None] * D
    gate_tile = _load_columns(gate + offsets, 0, D, BLOCK_K)
    up_tile = _load_columns(up + offsets, 0, D, BLOCK_K)
    first_norm = norm_weight + tl.zeros([1, 1, 1], tl.int64)
    if NORM:
        scale = _load_columns(first_norm, 0, D, BLOCK_K)
    gate_sums = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    up_sums = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    squares = tl.zeros([BLOCK_T, 1, BLOCK_K // VECTOR], tl.float32)
    launching.wait(PDL)

    for start in range(0, D - BLOCK_K, BLOCK_K):
        next_gate = _load_columns(gate + offsets, start + BLOCK_K, D, BLOCK_K)
        next_up = _load_columns(up + offsets, start + BLOCK_K, D, BLOCK_K)
        value = _load_tokens(x, x_stride, start, T, D, BLOCK_T, BLOCK_K)
        if NORM:
            squares += _partial_sums(value * value, VECTOR)
            value *= scale.to(tl.float32)
            scale = _load_columns(first_norm, start + BLOCK_K, D, BLOCK_K)
        gate_sums += _partial_sums(gate_tile.to(tl.float32) * value, VECTOR)
        up_sums += _partial_sums(up_tile.to(tl.float32) * value, VECTOR)
        gate_tile = next_gate
        up_tile = next_up
    LAST: tl.constexpr = (D - 1) // BLOCK_K * BLOCK_K
    value = _load_tokens(x, x_stride, LAST, T, D, BLOCK_T, BLOCK_K)
    if NORM:
        squares += _partial_sums(value * value, VECTOR)
        value *= scale.to(tl.float32)
    gate_total = tl.sum(gate_sums + _partial_sums(gate_tile.to(tl.float32) * value, VECTOR), 2)
    up_total = tl.sum(up_sums + _partial_sums(up_tile.to(tl.float32) * value, VECTOR), 2)
    if NORM:
        inverse = tl.rsqrt(tl.sum(squares, 2) / D + eps)
        gate_total *= inverse
        up_total *= inverse
    token = tl.arange(0, BLOCK_T)[:, None]
    active = gate_total / (1.0 + tl.exp(-gate_total)) * up_total
    place = token.to(tl.int64) * I + rows[None, :]
    tl.store(out + place, active.to(out.dtype.element_ty), mask=(token < T) & (rows < I)[None, :])


@triton.jit
def silu_mul_kernel(
    gate,  # [size], contiguous, as are all
    up,
    out,
    size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launching.launch_dependents(PDL)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    launching.wait(PDL)
    value = tl.load(gate + place, mask=place < size, other=0.0).to(tl.float32)
    other = tl.load(up + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out + place, (value / (1.0 + tl.exp(-value)) * other).to(out.dtype.element_ty), mask=place < size)


@functools.cache
def tile_sizes(size: int, num_rows: int, num_tokens: int, itemsize: int, matrices: int = 1) -> tuple[int, ...]:
    """(BLOCK_T, BLOCK_N, BLOCK_K, VECTOR) and the number of warps. `matrices` share the registers of a program."""
    block_n, block_k = _block(size, num_rows, num_tokens, matrices)
    block_k = min(max(16, triton.next_power_of_2(size)), block_k * 2 // itemsize)
    vector = min(16 // itemsize, block_k)
    return triton.next_power_of_2(num_tokens), block_n, block_k, vector, max(1, min(4, block_k // (32 * vector)))


def _block(size: int, num_rows: int, num_tokens: int, matrices: int) -> tuple[int, int]:
    """(BLOCK_N, BLOCK_K for 2 bytes), within a few percent of the best of those measured on an H200 in bf16, for
    V2-Lite's, V3's and LLM-7B's layers."""
    if matrices > 1:
        return {1: 4, 2: 2}.get(num_tokens, 1), 2048  # of three tokens and more, larger blocks spill
    narrow = num_rows <= 2560  # o of V2-Lite, q_a and kv_a of V3: only short blocks give every multiprocessor work
    if num_tokens == 1:
        if size % 1024 and size < 2048:  # q_b of V3: D = 1536 in tiles of 1024 would be a third empty
            return 8, 512
        if (narrow and size <= 8192) or (size > 8192 and size % 2048 == 0):
            return 2, 2048
        return (8 if num_rows >= 8192 else 4), 1024
    if num_tokens == 2:
        if size > 8192:
            return 2, 2048
        return (8 if narrow and size > 4096 else 4), 1024
    return (2, 2048) if narrow else (4, 1024)


def launch(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, ...],
    norm: tuple[torch.Tensor, float] | None,
    residual: torch.Tensor | None,
    tiles: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    """`ops.projection.project` for a few tokens, T not 0. Weights are contiguous. `tiles`: instead of `tile_sizes`."""
    num_tokens, size = x.shape
    counts = [len(weight) for weight in weights]
    outs = tuple(torch.empty(num_tokens, count, dtype=x.dtype, device=x.device) for count in counts)
    missing = 3 - len(weights)
    tiles = tiles or tile_sizes(size, sum(counts), num_tokens, x.element_size())
    pdl = launching.uses_pdl(x.device)
    launching.launch(
        project_kernel,
        (sum(-(-count // tiles[1]) for count in counts),),
        (
            x,
            *weights,
            *weights[:1] * missing,
            *(weight if bias is None else bias for weight, bias in zip(weights, biases, strict=True)),
            *weights[:1] * missing,
            x if norm is None else norm[0],
            x if residual is None else residual.contiguous(),
            *outs,
            *outs[:1] * missing,
            x.stride(0),
            0.0 if norm is None else norm[1],
        ),
        (
            num_tokens,
            size,
            *counts,
            *(0,) * missing,
            *(bias is not None for bias in biases),
            *(False,) * missing,
            norm is not None,
            residual is not None,
            *tiles[:4],
            pdl,
        ),
        num_warps=tiles[4],
        **({"launch_pdl": True} if pdl else {}),
    )
    return outs


def launch_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    norm: tuple[torch.Tensor, float] | None,
    tiles: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """`ops.projection.gated_project` for a few tokens, T not 0. gate and up are contiguous."""
    (num_tokens, size), count = x.shape, len(gate)
    out = torch.empty(num_tokens, count, dtype=x.dtype, device=x.device)
    tiles = tiles or tile_sizes(size, count, num_tokens, x.element_size(), 2)
    pdl = launching.uses_pdl(x.device)
    launching.launch(
        gated_project_kernel,
        (-(-count // tiles[1]),),
        (
            x,
            gate,
            up,
            x if norm is None else norm[0],
            out,
            x.stride(0),
            0.0 if norm is None else norm[1],
        ),
        (num_tokens, size, count, norm is not None, *tiles[:4], pdl),
        num_warps=tiles[4],
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def launch_silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of one shape and contiguous, rounded once."""
    out = torch.empty_like(gate)
    if out.numel() == 0:
        return out
    pdl = launching.uses_pdl(gate.device)
    launching.launch(
        silu_mul_kernel,
        (-(-out.numel() // 1024),),
        (gate, up, out, out.numel()),
        (1024, pdl),
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of shapes of V2-Lite, V3 and LLM-7B in bf16."""
    pointers = ("x", "weight0", "weight1", "weight2", "bias0", "bias1", "bias2", "norm_weight", "residual")
    signature = dict.fromkeys((*pointers, "out0", "out1", "out2"), "*bf16") | {"x_stride": "i32", "eps": "fp32"}
    flags = {"BIAS0": False, "BIAS1": False, "BIAS2": False, "NORM": True, "ADD": False}
    cases: list[tuple] = []

    def add(name: str, kernel: object, pointers: dict, fixed: dict, tiles: tuple[int, ...]) -> None:
        blocks = dict(zip(("BLOCK_T", "BLOCK_N", "BLOCK_K", "VECTOR"), tiles[:4], strict=True))
        options = {"num_warps": tiles[4], "num_stages": 3}
        for pdl, only in ((False, {}), (True, {"capability": 90}), (True, {"capability": 100})):
            constants = {**fixed, **blocks, "PDL": pdl}
            kinds = pointers | dict.fromkeys(constants, "constexpr")
            cases.append((f"{name}{'-pdl' * pdl}", kernel, kinds, constants, options | only))

    for name, tokens, size, counts, changes in (
        ("v2-lite-q-kv", 1, 2048, (3072, 576, 0), {}),
        ("v2-lite-o", 4, 2048, (2048, 0, 0), {"NORM": False, "ADD": True}),
        ("qwen-qkv", 2, 3584, (3584, 512, 512), {"BIAS0": True, "BIAS1": True, "BIAS2": True}),
        ("v3-o", 1, 16384, (7168, 0, 0), {"NORM": False, "ADD": True}),
        ("head", 1, 2048, (102400, 0, 0), {}),
        ("v3-q-a-kv", 2, 7168, (1536, 576, 0), {}),
        ("v3-q-b", 1, 1536, (24576, 0, 0), {}),
    ):
        fixed = {"T": tokens, "D": size, **dict(zip(("N0", "N1", "N2"), counts, strict=True)), **flags, **changes}
        add(f"project-{name}", project_kernel, signature, fixed, tile_sizes(size, sum(counts), tokens, 2))
    gated = dict.fromkeys(("x", "gate", "up", "norm_weight", "out"), "*bf16") | {"x_stride": "i32", "eps": "fp32"}
    for name, tokens, size, count in (("v2-lite", 1, 2048, 10944), ("llm-7b", 4, 4096, 11008)):
        fixed = {"T": tokens, "D": size, "I": count, "NORM": True}
        add(f"gated_project-{name}", gated_project_kernel, gated, fixed, tile_sizes(size, count, tokens, 2, 2))
    silu = {"gate": "*bf16", "up": "*bf16", "out": "*bf16", "size": "i32", "BLOCK": "constexpr", "PDL": "constexpr"}
    fixed = {"BLOCK": 1024, "PDL": False}
    cases.append(("silu_mul", silu_mul_kernel, silu, fixed, {"num_warps": 4, "num_stages": 3}))
    return cases

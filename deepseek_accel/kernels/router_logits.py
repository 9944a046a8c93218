"""The router's logits of many tokens: tensor cores, but products and sums as exact as in fp32.

A product of two bf16 (or fp16) values is exact in fp32, so a 16-bit weight needs nothing else; TF32, which would round
an fp32 weight to 11 bits, is never used. An fp32 weight beside bf16 tokens is the sum of three bf16 values, which hold
all its 24 bits, and takes three products.

E is small, so few programs have a part of the weight each: with few tokens D is split too, and the parts of a logit are
summed in order by whoever reads them.
"""

import functools

import torch
import triton
import triton.language as tl

from . import launching


@triton.jit
def _add_product(total, rest, value, weight, PARTS: tl.constexpr):
    """total + rest plus value weight^T; `rest` is what the lower parts of the weight give."""
    if PARTS == 1:
        total = tl.dot(value, tl.trans(weight), total, input_precision="ieee")
    else:
        high = weight.to(value.dtype)
        left = weight - high.to(tl.float32)
        middle = left.to(value.dtype)
        low = (left - middle.to(tl.float32)).to(value.dtype)
        total = tl.dot(value, tl.trans(high), total)
        rest = tl.dot(value, tl.trans(middle), rest)
        rest = tl.dot(value, tl.trans(low), rest)
    return total, rest


@triton.jit(do_not_specialize=["num_tokens"])
def router_logits_kernel(
    hidden,  # [T, D], contiguous
    gate,  # [E, D], contiguous
    logits,  # [splits, T, E] fp32
    num_tokens,
    E: tl.constexpr,
    D: tl.constexpr,
    SPAN: tl.constexpr,  # columns of a split, a multiple of BLOCK_K
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,  # places in each row's span, a power of two
    PARTS: tl.constexpr,  # 3 for an fp32 weight beside bf16 tokens, else 1
    PDL: tl.constexpr,
):
    launching.launch_dependents(PDL)
    EVEN: tl.constexpr = D % SPAN == 0
    first = tl.program_id(2) * SPAN
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    gate_rows = gate + tl.minimum(expert, E - 1).to(tl.int64)[:, None] * D
    if PDL:
        line = tl.minimum(first + tl.arange(0, PREFETCH) * (SPAN // PREFETCH), D - 1)
        launching.prefetch(gate_rows + line[None, :])
    token = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    exists = token < num_tokens
    rows = hidden + token[:, None] * D
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    rest = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    launching.wait(PDL)

    for start in tl.range(0, SPAN, BLOCK_K, num_stages=STAGES):
        columns = (first + start + inner)[None, :]
        if EVEN:
            value = tl.load(rows + columns, mask=exists[:, None], other=0.0)
            weight = tl.load(gate_rows + columns)
        else:
            value = tl.load(rows + columns, mask=exists[:, None] & (columns < D), other=0.0)
            weight = tl.load(gate_rows + columns, mask=columns < D, other=0.0)
        total, rest = _add_product(total, rest, value, weight, PARTS)
    place = (tl.program_id(2).to(tl.int64) * num_tokens + token)[:, None] * E + expert[None, :]
    tl.store(logits + place, total + rest, mask=exists[:, None] & (expert < E)[None, :])


def takes(token_dtype: torch.dtype, gate_dtype: torch.dtype) -> bool:
    """Whether the kernel gives fp32 logits for these. fp16 has no range for the lower parts of an fp32 weight."""
    return token_dtype in (torch.bfloat16, torch.float16) and (
        gate_dtype == token_dtype or (token_dtype, gate_dtype) == (torch.bfloat16, torch.float32)
    )


@functools.cache
def tile_sizes(size: int, num_experts: int, num_tokens: int, gate_itemsize: int) -> tuple[int, ...]:
    """(SPAN, BLOCK_T, BLOCK_E, BLOCK_K, STAGES, PREFETCH) and the number of warps."""
    block_t, block_e = (16, 16) if num_tokens <= 256 else (64, 32)
    block_k = min(max(16, triton.next_power_of_2(size)), 128)
    programs = -(-num_experts // block_e) * -(-num_tokens // block_t)
    splits = max(1, min(8, triton.next_power_of_2(132 // programs), -(-size // (2 * block_k))))
    span = -(-size // (splits * block_k)) * block_k
    prefetch = block_k // 16  # divides the span; some rows of a weight have more lines than are asked for
    while span % (2 * prefetch) == 0 and span // prefetch * gate_itemsize > 128:
        prefetch *= 2
    return span, block_t, block_e, block_k, 4, prefetch, 2 if block_t == 16 else 4


def launch(normed: torch.Tensor, gate: torch.Tensor, tiles: tuple[int, ...] | None = None) -> torch.Tensor:
    """Parts [splits, T, E] of the fp32 logits normed gate^T, to be summed in order. Both contiguous, T not 0."""
    (num_tokens, size), num_experts = normed.shape, len(gate)
    tiles = tiles or tile_sizes(size, num_experts, num_tokens, gate.element_size())
    span, block_t, block_e = tiles[:3]
    splits = -(-size // span)
    logits = torch.empty(splits, num_tokens, num_experts, dtype=torch.float32, device=normed.device)
    pdl = launching.uses_pdl(normed.device)
    launching.launch(
        router_logits_kernel,
        (-(-num_experts // block_e), -(-num_tokens // block_t), splits),
        (normed, gate, logits, num_tokens),
        (num_experts, size, *tiles[:6], 1 if gate.dtype == normed.dtype else 3, pdl),
        num_warps=tiles[6],
        **({"launch_pdl": True} if pdl else {}),
    )
    return logits


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of V2-Lite's and V3's router."""
    names = ("SPAN", "BLOCK_T", "BLOCK_E", "BLOCK_K", "STAGES", "PREFETCH")
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    cases = []
    for name, experts, size, gate, num_tokens in (
        ("v2-lite-128", 64, 2048, "*bf16", 128),
        ("v3-8", 256, 7168, "*bf16", 8),
        ("v3-32-fp32", 256, 7168, "*fp32", 32),
        ("v3-8192-fp32", 256, 7168, "*fp32", 8192),
    ):
        tiles = tile_sizes(size, experts, num_tokens, 4 if gate == "*fp32" else 2)
        fixed = {
            "E": experts,
            "D": size,
            **dict(zip(names, tiles[:6], strict=True)),
            "PARTS": 3 if "fp32" in gate else 1,
        }
        for pdl, only in ((False, {}), (True, {"capability": 90}), (True, {"capability": 100})):
            constants = {**fixed, "PDL": pdl}
            kinds = {"hidden": "*bf16", "gate": gate, "logits": "*fp32", "num_tokens": "i32"}
            kinds |= dict.fromkeys(constants, "constexpr")
            options = {"num_warps": tiles[6], "num_stages": 3, "attrs": attrs, **only}
            cases.append((f"router_logits-{name}{'-pdl' * pdl}", router_logits_kernel, kinds, constants, options))
    return cases

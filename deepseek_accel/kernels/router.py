"""The DeepSeek routers after their logits: one launch, one program of one warp per token.

A score and its id are packed into one sortable int64, so that one maximum gives the best score and, of equal scores,
the lowest id. NaN sorts above all numbers, as in torch; ids stay distinct and in range whatever the logits are.
"""

import functools

import torch
import triton
import triton.language as tl

from . import launching

REMOVED = tl.constexpr(-(1 << 63))  # below the packed -inf, so a removed expert is never chosen again


@triton.jit
def _sortable(value):
    """fp32 to int32 of the same order; NaN the largest, -0 equal to 0."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, ordered)


@triton.jit
def _pack(value, rank):
    """The larger value first; of equal values the larger rank. 0 <= rank < 2^31."""
    return (_sortable(value).to(tl.int64) << 32) | rank.to(tl.int64)


@triton.jit
def _unpack_value(packed):
    ordered = (packed >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _score(logit, largest, total, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        return tl.exp(logit - largest) / total
    else:
        return 1.0 / (1.0 + tl.exp(-logit))


@triton.jit
def route_kernel(
    logits,  # [T, E]
    bias,  # [E]
    weights,  # [T, K] fp32
    indices,  # [T, K] int64
    logits_stride,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    TOP2: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    SIZE: tl.constexpr = E // GROUPS
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    member = tl.arange(0, BLOCK_S)
    expert = group[:, None] * SIZE + member[None, :]  # [BLOCK_G, BLOCK_S]
    exists = (group[:, None] < GROUPS) & (member[None, :] < SIZE)
    row = logits + token * logits_stride
    logit = tl.load(row + expert, mask=exists, other=float("-inf")).to(tl.float32)
    largest = 0.0
    total = 1.0
    if SOFTMAX:
        largest = tl.max(tl.max(logit, 1), 0)
        total = tl.sum(tl.sum(tl.exp(logit - largest), 1), 0)
    choice = _score(logit, largest, total, SOFTMAX)
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    rank = E - 1 - tl.where(exists, expert, 0)
    packed = tl.where(exists, _pack(choice, rank), REMOVED)

    if TOPK_GROUPS < GROUPS:
        best = tl.max(packed, 1)  # [BLOCK_G]
        group_score = _unpack_value(best)
        if TOP2:
            group_score += _unpack_value(tl.max(tl.where(packed == best[:, None], REMOVED, packed), 1))
        packed_group = tl.where(
            group < GROUPS, _pack(group_score, GROUPS - 1 - tl.where(group < GROUPS, group, 0)), REMOVED
        )
        chosen = group < 0
        for _ in tl.static_range(TOPK_GROUPS):
            first = packed_group == tl.max(packed_group, 0)
            chosen = chosen | first
            packed_group = tl.where(first, REMOVED, packed_group)
        packed = tl.where(chosen[:, None], packed, REMOVED)

    slot = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32)
    for k in tl.static_range(K):
        first = tl.max(tl.max(packed, 1), 0)
        ids = tl.where(slot == k, E - 1 - (first & 0xFFFFFFFF).to(tl.int32), ids)
        packed = tl.where(packed == first, REMOVED, packed)

    logit = tl.load(row + ids).to(tl.float32)
    weight = _score(logit, largest, total, SOFTMAX)
    if NORMALIZE:
        weight = weight / (tl.sum(tl.where(slot < K, weight, 0.0), 0) + 1e-20)
    tl.store(weights + token * K + slot, weight * scale, mask=slot < K)
    tl.store(indices + token * K + slot, ids.to(tl.int64), mask=slot < K)


@functools.cache
def _blocks(*sizes: int) -> tuple[int, ...]:
    return tuple(triton.next_power_of_2(size) for size in sizes)


def launch(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    num_groups: int = 1,
    topk_groups: int = 1,
    scoring: str = "sigmoid",
    group_score: str | None = "top2",
    normalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    indices = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    if num_tokens == 0:
        return weights, indices
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    if group_score is None or topk_groups == num_groups:
        num_groups = topk_groups = 1
    launching.launch(
        route_kernel,
        (num_tokens,),
        (
            logits,
            logits if bias is None else bias.contiguous(),
            weights,
            indices,
            logits.stride(0),
            scale,
        ),
        (
            num_experts,
            top_k,
            num_groups,
            topk_groups,
            scoring == "softmax",
            group_score == "top2",
            bias is not None,
            normalize,
            *_blocks(num_groups, num_experts // num_groups, top_k),
        ),
        num_warps=1,
    )
    return weights, indices


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of V2-Lite's and V3's router."""
    pointers = {"logits": "*fp32", "bias": "*fp32", "weights": "*fp32", "indices": "*i64"}
    v2_lite = {
        "E": 64,
        "K": 6,
        "GROUPS": 1,
        "TOPK_GROUPS": 1,
        "SOFTMAX": True,
        "TOP2": False,
        "HAS_BIAS": False,
        "NORMALIZE": False,
        "BLOCK_G": 1,
        "BLOCK_S": 64,
        "BLOCK_K": 8,
    }
    v3 = {
        "E": 256,
        "K": 8,
        "GROUPS": 8,
        "TOPK_GROUPS": 4,
        "SOFTMAX": False,
        "TOP2": True,
        "HAS_BIAS": True,
        "NORMALIZE": True,
        "BLOCK_G": 8,
        "BLOCK_S": 32,
        "BLOCK_K": 8,
    }
    signature = pointers | {"logits_stride": "i32", "scale": "fp32"} | dict.fromkeys(v3, "constexpr")
    options = {"num_warps": 1, "num_stages": 3}
    return [
        ("route-v2-lite", route_kernel, signature, v2_lite, options),
        ("route-v3", route_kernel, signature, v3, options),
    ]

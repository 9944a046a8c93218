"""The DeepSeek routers: from the logits on, one program of one warp per token; from the norm on, the product
spread over programs, of which the last to finish chooses.

A score and its id are packed into one sortable int64, so that one maximum gives the best score and, of equal scores,
the lowest id. NaN sorts above all numbers, as in torch; ids stay distinct and in range whatever the logits are.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from . import adaptive_topk, launching
from .adaptive_topk import drop_pairs

REMOVED = tl.constexpr(-(1 << 63))  # below the packed -inf, so a removed expert is never chosen again


@triton.jit
def _sortable(value):
    """fp32 to int32 of the same order; NaN the largest, -0 equal to 0."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, ordered)


@triton.jit
def pack(value, rank):
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
def _load_logits(pointers, mask, split_stride, SPLITS: tl.constexpr):
    """Sums of the SPLITS parts of logits, -inf outside `mask`, read past the L1 cache, since another program may have
    written them."""
    logit = tl.load(pointers, mask=mask, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        logit += tl.load(pointers + split * split_stride, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    return logit


@triton.jit
def _choose(
    row,  # [BLOCK_T, 1, 1] pointers to the first logit of each token
    bias,  # [E]
    split_stride,  # int64: between the parts of a logit
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
    SPLITS: tl.constexpr,
):
    """Weights and ids [BLOCK_T, BLOCK_K], of which the first K count."""
    SIZE: tl.constexpr = E // GROUPS
    group = tl.arange(0, BLOCK_G)
    member = tl.arange(0, BLOCK_S)
    expert = (group[:, None] * SIZE + member[None, :])[None, :, :]  # [1, BLOCK_G, BLOCK_S]
    exists = ((group[:, None] < GROUPS) & (member[None, :] < SIZE))[None, :, :]
    logit = _load_logits(row + expert, exists, split_stride, SPLITS)
    largest = 0.0
    total = 1.0
    if SOFTMAX:
        largest = tl.max(tl.max(logit, 2), 1)[:, None]  # [BLOCK_T, 1]
        total = tl.sum(tl.sum(tl.exp(logit - largest[:, :, None]), 2), 1)[:, None]
        choice = _score(logit, largest[:, :, None], total[:, :, None], SOFTMAX)
    else:
        choice = _score(logit, largest, total, SOFTMAX)
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    rank = E - 1 - tl.where(exists, expert, 0)
    packed = tl.where(exists, pack(choice, rank), REMOVED)  # [BLOCK_T, BLOCK_G, BLOCK_S]

    if TOPK_GROUPS < GROUPS:
        best = tl.max(packed, 2)  # [BLOCK_T, BLOCK_G]
        group_score = _unpack_value(best)
        if TOP2:
            group_score += _unpack_value(tl.max(tl.where(packed == best[:, :, None], REMOVED, packed), 2))
        real = group[None, :] < GROUPS
        packed_group = tl.where(real, pack(group_score, GROUPS - 1 - tl.where(real, group[None, :], 0)), REMOVED)
        chosen = packed_group != packed_group
        for _ in tl.static_range(TOPK_GROUPS):
            first_group = packed_group == tl.max(packed_group, 1)[:, None]
            chosen = chosen | first_group
            packed_group = tl.where(first_group, REMOVED, packed_group)
        packed = tl.where(chosen[:, :, None], packed, REMOVED)

    slot = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros([packed.shape[0], BLOCK_K], tl.int32)
    for k in tl.static_range(K):
        first = tl.max(tl.max(packed, 2), 1)
        ids = tl.where(slot == k, E - 1 - (first & 0xFFFFFFFF).to(tl.int32)[:, None], ids)
        packed = tl.where(packed == first[:, None, None], REMOVED, packed)

    pointers = tl.reshape(row, [packed.shape[0], 1]) + ids
    weight = _score(_load_logits(pointers, ids >= 0, split_stride, SPLITS), largest, total, SOFTMAX)
    if NORMALIZE:
        weight = weight / (tl.sum(tl.where(slot < K, weight, 0.0), 1)[:, None] + 1e-20)
    return weight * scale, ids


@triton.jit
def route_kernel(
    logits,  # [SPLITS, T, E]: parts, summed in order
    bias,  # [E]
    live,  # [1] int32, used if HAS_LIVE
    feeling,  # [T] fp32, of `ops.adaptive_topk.Drop`, used if DROP says so; as the next three
    offset,  # [E] fp32
    losses,  # [T, K] fp32
    tally,  # [4] int64
    weights,  # [T, K] fp32
    indices,  # [T, K] int64
    logits_stride,
    split_stride,
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
    SPLITS: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    DROP: tl.constexpr,
    MIN_EXPERTS: tl.constexpr,
    SETTLED: tl.constexpr,
    ALONE: tl.constexpr,
    PDL: tl.constexpr,
):
    launching.launch_dependents(PDL)
    launching.wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    weight, ids = _choose(
        logits + token * logits_stride + tl.zeros([1, 1, 1], tl.int64),
        bias,
        split_stride,
        scale,
        E,
        K,
        GROUPS,
        TOPK_GROUPS,
        SOFTMAX,
        TOP2,
        HAS_BIAS,
        NORMALIZE,
        BLOCK_G,
        BLOCK_S,
        BLOCK_K,
        SPLITS,
    )
    tokens = token + tl.zeros([1], tl.int64)
    slot = tl.arange(0, BLOCK_K)[None, :]
    used = slot < K
    if HAS_LIVE:
        idle = token >= tl.load(live)
        weight = tl.where(idle, 0.0, weight)
        ids = tl.where(idle, -1, ids)
        used = used & (tokens[:, None] < tl.load(live))
    if DROP:
        felt = tl.zeros([1], tl.float32)
        if DROP == 1:
            felt += tl.load(feeling + token)
        offsets = tl.load(offset + ids, mask=used, other=0.0)
        weight, ids = drop_pairs(
            weight, ids, used, tokens, felt, offsets, losses, tally, K, BLOCK_K, DROP, MIN_EXPERTS, SETTLED, ALONE
        )
    tl.store(weights + token * K + slot, weight, mask=slot < K)
    tl.store(indices + token * K + slot, ids.to(tl.int64), mask=slot < K)


@triton.jit(do_not_specialize=["num_tokens"])
def norm_route_kernel(
    x,  # [T, D]
    norm_weight,  # [D]
    gate_weight,  # [E, D], contiguous
    bias,  # [E]
    live,  # [1] int32, used if HAS_LIVE
    counters,  # [token groups] int32: programs of the group that are done; 0 before and after
    slope,  # [D] fp32, of `ops.adaptive_topk.Drop`, used if DROP says so; as the next four
    feeling,  # [T] fp32
    offset,  # [E] fp32
    losses,  # [T, K] fp32
    tally,  # [4] int64
    normed,  # [T, D], contiguous
    logits,  # [T, E] fp32, contiguous
    weights,  # [T, K] fp32
    indices,  # [T, K] int64
    num_tokens,
    x_stride,
    eps,
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
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    DROP: tl.constexpr,
    MIN_EXPERTS: tl.constexpr,
    SETTLED: tl.constexpr,
    ALONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_E logits of BLOCK_T tokens; the last program of a token group to finish chooses its experts."""
    launching.launch_dependents(PDL)
    group = tl.program_id(1)
    columns = tl.arange(0, BLOCK_D)[None, None, :]
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = tl.minimum(experts, E - 1).to(tl.int64)[None, :, None] * D
    gate = tl.load(gate_weight + rows + columns, mask=columns < D, other=0.0)  # [1, BLOCK_E, BLOCK_D]
    norm_scale = tl.load(norm_weight + columns, mask=columns < D, other=0.0).to(tl.float32)
    if DROP:
        # here and compared with ids later: a load at an id would be one more trip to memory at the end
        every = tl.arange(0, BLOCK_G * BLOCK_S)
        every_offset = tl.load(offset + every, mask=every < E, other=0.0)
    if DROP == 1:  # of the program that needs it, for which the last one waits
        slopes = tl.load(slope + columns, mask=columns < tl.where(tl.program_id(0) == 0, D, 0), other=0.0)
    launching.wait(PDL)

    token = group.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = token < num_tokens
    inside = exists[:, None, None] & (columns < D)
    value = tl.load(x + token[:, None, None] * x_stride + columns, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 2) / D + eps)  # [BLOCK_T, 1]
    rounded = (wide * inverse[:, :, None]).to(value.dtype).to(tl.float32)
    hidden = (norm_scale * rounded).to(value.dtype)
    if tl.program_id(0) == 0:
        tl.store(normed + token[:, None, None] * D + columns, hidden, mask=inside)
        if DROP == 1:
            tl.store(feeling + token[:, None], tl.sum(slopes * hidden.to(tl.float32), 2), mask=exists[:, None])
    products = tl.sum(gate.to(tl.float32) * hidden.to(tl.float32), 2)  # [BLOCK_T, BLOCK_E]
    place = token[:, None] * E + experts[None, :]
    tl.store(logits + place, products, mask=exists[:, None] & (experts < E)[None, :])

    tl.debug_barrier()  # every thread's logits are written before one thread says so
    if tl.atomic_add(counters + group, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(counters + group, 0)
        last = tl.minimum(token, num_tokens - 1)
        felt = tl.zeros([BLOCK_T], tl.float32)
        if DROP == 1:  # past the L1 cache: another program may have written it
            felt = tl.load(feeling + token, mask=exists, other=0.0, cache_modifier=".cg")
        weight, ids = _choose(
            logits + last[:, None, None] * E,
            bias,
            0,
            scale,
            E,
            K,
            GROUPS,
            TOPK_GROUPS,
            SOFTMAX,
            TOP2,
            HAS_BIAS,
            NORMALIZE,
            BLOCK_G,
            BLOCK_S,
            BLOCK_K,
            1,
        )
        slot = tl.arange(0, BLOCK_K)[None, :]
        used = exists[:, None] & (slot < K)
        if HAS_LIVE:
            idle = token[:, None] >= tl.load(live)
            weight = tl.where(idle, 0.0, weight)
            ids = tl.where(idle, -1, ids)
        if DROP:
            live_pairs = used
            if HAS_LIVE:
                live_pairs = used & ~(token[:, None] >= tl.load(live))
            own = ids[:, :, None] == every[None, None, :]
            offsets = tl.sum(tl.where(own, every_offset[None, None, :], 0.0), 2)
            weight, ids = drop_pairs(
                weight, ids, live_pairs, token, felt, offsets, losses, tally,
                K, BLOCK_K, DROP, MIN_EXPERTS, SETTLED, ALONE,
            )  # fmt: skip
        tl.store(weights + token[:, None] * K + slot, weight, mask=used)
        tl.store(indices + token[:, None] * K + slot, ids.to(tl.int64), mask=used)


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
    live: torch.Tensor | None = None,
    drop: Any = None,
    feeling: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.router.route`, also of logits [splits, T, E] in parts; with `live`, idle tokens as in `norm_route`.

    drop: an `ops.adaptive_topk.Drop`, with what its `feeling` gives.
    """
    num_tokens, num_experts = logits.shape[-2:]
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    indices = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    if num_tokens == 0:
        return weights, indices
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    pdl = launching.uses_pdl(logits.device)
    rule = adaptive_topk.rule(drop, num_tokens, top_k)
    losses = torch.empty_like(weights) if rule[-1] else weights
    launching.launch(
        route_kernel,
        (num_tokens,),
        (
            logits,
            logits if bias is None else bias.contiguous(),
            indices if live is None else live,
            weights if feeling is None else feeling,
            weights if drop is None else drop.offset,
            losses,
            indices if drop is None else drop.tally,
            weights,
            indices,
            logits.stride(-2),
            logits.stride(0),
            scale,
        ),
        (
            *_rule(num_experts, bias, top_k, num_groups, topk_groups, scoring, group_score, normalize),
            len(logits) if logits.dim() == 3 else 1,
            live is not None,
            *rule,
            num_tokens == 1,
            pdl,
        ),
        num_warps=1,
        **({"launch_pdl": True} if pdl else {}),
    )
    adaptive_topk.finish(drop, losses, weights, indices, num_experts)
    return weights, indices


def _rule(
    num_experts: int,
    bias: torch.Tensor | None,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    scoring: str,
    group_score: str | None,
    normalize: bool,
) -> tuple[int, ...]:
    """The constants E to BLOCK_K of both kernels."""
    if group_score is None or topk_groups == num_groups:
        num_groups = topk_groups = 1
    return (
        num_experts,
        top_k,
        num_groups,
        topk_groups,
        scoring == "softmax",
        group_score == "top2",
        bias is not None,
        normalize,
        *_blocks(num_groups, num_experts // num_groups, top_k),
    )


def norm_route_tiles(size: int, num_experts: int, num_tokens: int) -> tuple[int, ...]:
    """BLOCK_E, BLOCK_T and the number of warps, as measured on an H200 with V2-Lite and V3 at 1 to 128 tokens."""
    block_t = min(4, triton.next_power_of_2(num_tokens))
    warps = min(8 if num_tokens == 1 else 16, max(1, triton.next_power_of_2(size) // 512))
    if num_tokens == 1 or (num_tokens <= 4 and num_experts <= 132):
        return 1, block_t, warps
    return (2 if num_tokens <= 32 else 8), block_t, warps


def launch_norm_route(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    num_groups: int = 1,
    topk_groups: int = 1,
    scoring: str = "sigmoid",
    group_score: str | None = "top2",
    normalize: bool,
    scale: float,
    live: torch.Tensor | None,
    counters: torch.Tensor,
    drop: Any = None,
    tiles: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ops.router.norm_route` for T not 0. gate_weight and norm_weight are contiguous; counters int32, zeros, one for
    each token group of `norm_route_tiles` (or `tiles`)."""
    num_tokens, size = x.shape
    num_experts = len(gate_weight)
    normed = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    logits = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=x.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=x.device)
    indices = torch.empty(num_tokens, top_k, dtype=torch.int64, device=x.device)
    block_e, block_t, num_warps = tiles or norm_route_tiles(size, num_experts, num_tokens)
    pdl = launching.uses_pdl(x.device)
    rule = adaptive_topk.rule(drop, num_tokens, top_k)
    losses = torch.empty_like(weights) if rule[-1] else weights
    feeling = weights if drop is None or drop.relative else torch.empty_like(logits[:, 0])
    launching.launch(
        norm_route_kernel,
        (-(-num_experts // block_e), -(-num_tokens // block_t)),
        (
            x,
            norm_weight,
            gate_weight,
            gate_weight if bias is None else bias.contiguous(),
            counters if live is None else live,
            counters,
            weights if drop is None else drop.slope,
            feeling,
            weights if drop is None else drop.offset,
            losses,
            indices if drop is None else drop.tally,
            normed,
            logits,
            weights,
            indices,
            num_tokens,
            x.stride(0),
            eps,
            scale,
        ),
        (
            *_rule(num_experts, bias, top_k, num_groups, topk_groups, scoring, group_score, normalize),
            size,
            *_blocks(size),
            block_e,
            block_t,
            live is not None,
            *rule,
            num_tokens == 1,
            pdl,
        ),
        num_warps=num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )
    adaptive_topk.finish(drop, losses, weights, indices, num_experts)
    return normed, weights, indices


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of V2-Lite's and V3's router."""
    pointers = {"logits": "*fp32", "bias": "*fp32", "live": "*i32"}
    dropping = {"feeling": "*fp32", "offset": "*fp32", "losses": "*fp32", "tally": "*i64"}
    pointers |= dropping | {"weights": "*fp32", "indices": "*i64"}
    off = {"DROP": 0, "MIN_EXPERTS": 0, "SETTLED": False, "ALONE": False}
    by_feeling = {"DROP": 1, "MIN_EXPERTS": 1, "SETTLED": False, "ALONE": True}
    settled = {"DROP": 2, "MIN_EXPERTS": 2, "SETTLED": True, "ALONE": False}
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
    signature = pointers | {"logits_stride": "i32", "split_stride": "i32", "scale": "fp32"}
    signature |= dict.fromkeys((*v3, "SPLITS", "HAS_LIVE", *off, "PDL"), "constexpr")
    whole, parts = {"SPLITS": 1, "HAS_LIVE": False}, {"SPLITS": 8, "HAS_LIVE": True}
    options = {"num_warps": 1, "num_stages": 3}
    cases = [
        ("route-v2-lite", route_kernel, signature, v2_lite | whole | off | {"PDL": False}, options),
        (
            "route-v2-lite-drop",
            route_kernel,
            signature,
            v2_lite | whole | by_feeling | {"PDL": False},
            options | {"capability": 80},
        ),
        (
            "route-v3-settled",
            route_kernel,
            signature,
            v3 | parts | settled | {"PDL": True},
            options | {"capability": 100},
        ),
        ("route-v3", route_kernel, signature, v3 | whole | off | {"PDL": False}, options),
        ("route-v3-pdl", route_kernel, signature, v3 | parts | off | {"PDL": True}, options | {"capability": 90}),
    ]
    names = ("x", "norm_weight", "gate_weight", "bias", "live", "counters", "slope", *dropping)
    names += ("normed", "logits", "weights", "indices")
    kinds = ("*bf16", "*bf16", "*bf16", "*fp32", "*i32", "*i32", "*fp32", *dropping.values())
    kinds += ("*bf16", "*fp32", "*fp32", "*i64")
    scalars = {"num_tokens": "i32", "x_stride": "i32", "eps": "fp32", "scale": "fp32"}
    for name, rule, size, gate, num_tokens, drop in (
        ("v2-lite", v2_lite, 2048, "*bf16", 1, off),
        ("v3", v3, 7168, "*fp32", 1, off),
        ("v3-4", v3, 7168, "*bf16", 4, off),
        ("v2-lite-64", v2_lite, 2048, "*bf16", 64, off),
        ("v2-lite-drop", v2_lite, 2048, "*bf16", 1, by_feeling),
        ("v3-4-settled", v3, 7168, "*bf16", 4, settled),
    ):
        block_e, block_t, num_warps = norm_route_tiles(size, rule["E"], num_tokens)
        fixed = {"D": size, "BLOCK_D": triton.next_power_of_2(size), "BLOCK_E": block_e, "BLOCK_T": block_t}
        chips: Any = ((False, {}), (True, {"capability": 90}), (True, {"capability": 100}))
        if drop is not off:
            chips = ((False, {"capability": 80}), (True, {"capability": 90}))
        for pdl, only in chips:
            constants = {**rule, **fixed, "HAS_LIVE": True, **drop, "PDL": pdl}
            signature = dict(zip(names, kinds, strict=True)) | {"gate_weight": gate} | scalars
            signature |= dict.fromkeys(constants, "constexpr")
            options = {"num_warps": num_warps, "num_stages": 3, **only}
            cases.append((f"norm_route-{name}{'-pdl' * pdl}", norm_route_kernel, signature, constants, options))
    return cases

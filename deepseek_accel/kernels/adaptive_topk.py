"""Dropping chosen experts: a part of the router's kernels, and what a batch-wide budget and the tally need after them.

The rule is that of `ops.adaptive_topk.Drop`. Counts are added by integer atomics, whose order does not matter.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from . import launching

OFF, BY_FEELING, RELATIVE = 0, 1, 2
"""DROP in the router's kernels."""
_BY_FEELING, _RELATIVE = tl.constexpr(BY_FEELING), tl.constexpr(RELATIVE)


@triton.jit
def drop_pairs(
    weight,  # [T, BLOCK_K] fp32
    ids,  # [T, BLOCK_K] int32
    used,  # [T, BLOCK_K]: pairs of live tokens
    token,  # [T] int64
    felt,  # [T] fp32, slope . x; used BY_FEELING
    offsets,  # [T, BLOCK_K] fp32, of each pair's expert
    losses,  # [T', K] fp32
    tally,  # [4] int64
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DROP: tl.constexpr,
    MIN_EXPERTS: tl.constexpr,
    SETTLED: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Weights and ids without dropped pairs. SETTLED: all stay, and their losses are written for `settle_kernel`.
    ALONE: the only token of its step."""
    slot = tl.arange(0, BLOCK_K)[None, :]
    logs = tl.log(weight)
    score = 2 * logs + offsets
    if DROP == _RELATIVE:
        score -= 2 * tl.max(tl.where(used, logs, float("-inf")), 1)[:, None]
    else:
        score += felt[:, None]
    ranked = tl.where(score == score, score, float("inf"))
    waiting = used
    for _ in tl.static_range(MIN_EXPERTS):
        best = tl.max(tl.where(waiting, ranked, float("-inf")), 1)[:, None]
        first = tl.min(tl.where(waiting & (ranked == best), slot, BLOCK_K), 1)[:, None]
        waiting = waiting & (slot != first)
    live_tokens = tl.sum(tl.max(used.to(tl.int32), 1), 0).to(tl.int64)
    tl.atomic_add(tally + 1, live_tokens, sem="relaxed")
    if SETTLED:
        loss = tl.where(waiting, tl.exp(score), float("inf"))
        tl.store(losses + token[:, None] * K + slot, loss, mask=used)
    else:
        dropped = waiting & (score < 0)
        kept = tl.sum(tl.sum((used & ~dropped).to(tl.int32), 1), 0).to(tl.int64)
        tl.atomic_add(tally, kept, sem="relaxed")
        if ALONE:
            tl.atomic_add(tally + 2, kept, sem="relaxed")
            tl.atomic_add(tally + 3, live_tokens, sem="relaxed")
        weight = tl.where(dropped, 0.0, weight)
        ids = tl.where(dropped, -1, ids)
    return weight, ids


@triton.jit(do_not_specialize=["num_pairs"])
def settle_kernel(
    losses,  # [T, K] fp32, used if BUDGETED
    tally,  # [4] int64
    weights,  # [T, K] fp32
    indices,  # [T, K] int64
    num_pairs,
    budget,
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # at least T * K
    BUDGETED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per expert: whether a step reads it. With BUDGETED its pairs go where their losses are too small.

    Programs write pairs of their own expert only, so that none sees another's."""
    launching.launch_dependents(PDL)
    launching.wait(PDL)
    pair = tl.arange(0, BLOCK)
    exists = pair < num_pairs
    ids = tl.load(indices + pair, mask=exists, other=-1)
    mine = exists & (ids == tl.program_id(0))
    pairs = tl.sum(mine.to(tl.int32), 0)
    reads = (pairs > 0).to(tl.int32)
    if BUDGETED:
        total = tl.sum(tl.where(mine, tl.load(losses + pair, mask=mine, other=0.0), 0.0), 0)
        if total < budget:  # NaN stays
            tl.store(weights + pair, tl.zeros([BLOCK], tl.float32), mask=mine)
            tl.store(indices + pair, tl.full([BLOCK], -1, tl.int64), mask=mine)
            reads = reads * 0
            pairs = pairs * 0
        tl.atomic_add(tally, pairs.to(tl.int64), sem="relaxed")
    tl.atomic_add(tally + 2, reads.to(tl.int64), sem="relaxed")
    if tl.program_id(0) == 0:
        # whatever the other programs drop meanwhile, each live token keeps `min_experts` pairs
        tl.atomic_add(tally + 3, tl.max((exists & (ids >= 0)).to(tl.int32), 0).to(tl.int64), sem="relaxed")


def rule(drop: Any, num_tokens: int, top_k: int) -> tuple[int, int, bool]:
    """DROP, MIN_EXPERTS and SETTLED of the router's kernels for a step, by `ops.adaptive_topk.Drop` or None."""
    if drop is None:
        return OFF, 0, False
    settled = drop.settles(num_tokens)
    at_least = top_k if drop.budget and not settled else drop.min_experts  # K: nothing is dropped, all is counted
    return RELATIVE if drop.relative else BY_FEELING, at_least, settled


def finish(drop: Any, losses: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, num_experts: int) -> None:
    """After a router's kernel: apply a budget to weights and indices [T, K] in place, and count distinct experts."""
    num_tokens, top_k = weights.shape
    if drop is None or not (drop.settles(num_tokens) or (num_tokens > 1 and drop.counts_experts(num_tokens))):
        return
    pdl = launching.uses_pdl(weights.device)
    launching.launch(
        settle_kernel,
        (num_experts,),
        (losses, drop.tally, weights, indices, num_tokens * top_k, float(drop.budget)),
        (top_k, triton.next_power_of_2(num_tokens * top_k), drop.budget > 0, pdl),
        num_warps=4 if num_tokens * top_k > 128 else 1,
        **({"launch_pdl": True} if pdl else {}),
    )


def compile_cases() -> list[tuple[Any, ...]]:
    """(name, kernel, signature, constexprs, options) of V2-Lite's steps."""
    pointers = {"losses": "*fp32", "tally": "*i64", "weights": "*fp32", "indices": "*i64"}
    signature = pointers | {"num_pairs": "i32", "budget": "fp32"}
    signature |= dict.fromkeys(("K", "BLOCK", "BUDGETED", "PDL"), "constexpr")
    cases = []
    for tokens, budgeted, pdl, only in (
        (128, True, False, {}),
        (8, False, True, {"capability": 90}),
        (8, True, True, {"capability": 100}),
    ):
        constants = {"K": 6, "BLOCK": triton.next_power_of_2(6 * tokens), "BUDGETED": budgeted, "PDL": pdl}
        options = {"num_warps": 4 if 6 * tokens > 128 else 1, "num_stages": 3, **only}
        cases.append((f"settle-{tokens}-{budgeted}", settle_kernel, signature, constants, options))
    return cases

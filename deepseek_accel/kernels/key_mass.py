"""What a decoding step attended to, key by key, from the scores that the attention kernel left.

The attention kernels write the scores of every head, base 2 and masked, and each part's log2-sum-exp; here the two
become the mean over heads of p (or of -p log p) and are added to each key's score, of one layer or of several at once.
The contract is `KeyScores` and `ScoreGroup` of `ops/key_mass.py`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import launching
from .combine import Launch, active_parts, compile_case, merge_arguments

BLOCK_KEYS = 128
BLOCK_HEADS = 16


@triton.jit(
    do_not_specialize=[
        *("num_splits", "num_queries", "least_blocks", "num_rows", "raw_stride", "score_stride", "layer_stride")
    ]
)
def key_mass_kernel(
    raw,  # [G, B * H, raw_stride]
    lse,  # [G, B * H, num_splits]
    lengths,  # [G, B]
    starts,  # [B] or None
    live,  # [1] or None
    scores,  # [G, ...], layers layer_stride and rows score_stride apart
    num_splits,
    num_queries,
    least_blocks,
    num_rows,
    raw_stride,
    score_stride,
    layer_stride,
    decay,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    ENTROPY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One query per row. A program adds up TILE keys of a row, head by head in a fixed order."""
    launching.launch_dependents(PDL)
    batch, layer = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    raw += layer * num_rows * HEADS * raw_stride
    lse += layer * num_rows * HEADS * num_splits
    lengths += layer * num_rows
    scores += layer * layer_stride
    keys = tl.program_id(1) * TILE + tl.arange(0, TILE)
    launching.wait(PDL)
    length = tl.load(lengths + batch)
    if live is not None:
        length = tl.where(batch < tl.load(live), length, 0)
    if tl.program_id(1) * TILE >= length:
        return
    start = 0
    if starts is not None:
        start = tl.load(starts + batch)
    first = batch * 0  # the query, and a head: all heads of one query have equally many parts
    active = active_parts(
        lengths,
        starts,
        batch,
        first,
        first,
        num_queries,
        num_splits,
        least_blocks,
        GROUP,
        BLOCK_ROWS,
        BLOCK_KEYS,
        CAUSAL,
    )
    split = tl.arange(0, BLOCK_SPLITS)
    present = (keys >= start) & (keys < length)
    total = tl.zeros((TILE,), tl.float32)
    for begin in range(0, HEADS, BLOCK_HEADS):
        head = begin + tl.arange(0, BLOCK_HEADS)
        row = batch * HEADS + head
        there = head < HEADS
        parts = tl.load(
            lse + row[:, None] * num_splits + split[None, :],
            mask=there[:, None] & (split < active)[None, :],
            other=float("-inf"),
        )
        largest = tl.max(parts, 1)
        largest = tl.where(largest == float("-inf"), 0.0, largest)
        whole = largest + tl.log2(tl.sum(tl.exp2(parts - largest[:, None]), 1))
        score = tl.load(
            raw + row[:, None] * raw_stride + keys[None, :],
            mask=there[:, None] & present[None, :],
            other=float("-inf"),
        )
        seen = score > float("-inf")
        exponent = tl.where(seen, score - whole[:, None], 0.0)
        mass = tl.where(seen, tl.exp2(exponent), 0.0)
        if ENTROPY:
            mass = mass * exponent * -0.6931471805599453
        total += tl.sum(mass, 0)
    place = scores + batch * score_stride + keys
    before = tl.load(place, mask=keys < length, other=0.0)
    tl.store(place, before * decay + total / HEADS, mask=keys < length)


def scores_room(query: torch.Tensor, lse: torch.Tensor, watch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Where an attention launch leaves scores [B * H, R] and log2-sum-exps like lse [B * H, parts], for one that is
    watched (`ops.key_mass.KeyScores`)."""
    shape = query.shape[0] * query.shape[2], watch.scores.shape[1]
    group = watch.group
    if group is None:
        return query.new_empty(shape, dtype=torch.float32), lse
    if group.raw is None:
        layers = len(group.scores)
        group.raw, group.lse = query.new_empty(layers, *shape, dtype=torch.float32), lse.new_empty(layers, *lse.shape)
    group.done += 1
    return group.raw[group.done - 1], group.lse[group.done - 1]


def key_mass_launches(attention: dict[str, Any], watch: Any, heads: int, group: int) -> list[Launch]:
    """After an attention launch with these arguments, which left scores in `scores_room`: what scores keys by them, if
    that is not to wait for further layers."""
    merge = merge_arguments(attention, group)
    del merge["parts"]
    raw, scores, together = attention["raw"], watch.scores[None], watch.group
    if together is not None:
        if together.done < len(together.scores):
            return []
        raw, scores = together.raw, together.scores
        merge |= {"lse": together.lse, "lengths": together.lengths}
        together.raw = together.lse = None  # their memory is the next group's
    num_splits = merge["lse"].shape[-1]
    layers, rows, room = scores.shape
    arguments = {
        **merge,
        "raw": raw,
        "starts": attention["starts"],
        "live": watch.live,
        "scores": scores,
        "num_splits": num_splits,
        "num_rows": rows,
        "raw_stride": raw.shape[-1],
        "score_stride": scores.stride(1),
        "layer_stride": scores.stride(0),
        "decay": watch.decay,
        "HEADS": heads,
        "BLOCK_SPLITS": triton.next_power_of_2(num_splits),
        "BLOCK_HEADS": BLOCK_HEADS,
        "TILE": BLOCK_KEYS,
        "ENTROPY": watch.entropy,
    }
    grid = (rows, triton.cdiv(room, BLOCK_KEYS), layers)
    return [Launch(key_mass_kernel, grid, arguments, num_warps=4, num_stages=2)]


def compile_cases() -> list[tuple[Any, ...]]:
    """DeepSeek-V2-Lite and V3 heads, mass and entropy, in a graph and without."""
    cases = []
    for heads, num_splits, entropy, graph in ((16, 64, False, True), (128, 16, False, True), (32, 4, True, False)):
        index = {"dtype": torch.int32, "device": "meta"}
        number = {"dtype": torch.float32, "device": "meta"}
        for capability in (80, 90, 100):
            attention = {
                "out": None,
                "lse": torch.empty(2 * heads, num_splits, **number),
                "lengths": torch.empty(2, **index),
                "starts": None,
                "num_queries": 1,
                "least_blocks": 2,
                "BLOCK_ROWS": 16,
                "BLOCK_KEYS": 64,
                "CAUSAL": False,
                "PDL": graph and capability >= 90,
            }
            watch = key_mass_case(2, 2048, graph, entropy)
            attention["raw"] = torch.empty(2 * heads, 2048, **number)
            (launch,) = key_mass_launches(attention, watch, heads, heads)
            cases.append(compile_case(f"key_mass H{heads}{' entropy' * entropy}", launch, capability))
    return cases


class KeyScoresLike(NamedTuple):
    """`ops.key_mass.KeyScores`, which kernels do not import."""

    scores: torch.Tensor
    decay: float
    entropy: bool
    live: torch.Tensor | None
    group: Any = None


def key_mass_case(rows: int, room: int, graph: bool, entropy: bool = False) -> KeyScoresLike:
    """What a compile case of an attention kernel watches with."""
    live = torch.empty(1, dtype=torch.int32, device="meta") if graph else None
    return KeyScoresLike(torch.empty(rows, room, dtype=torch.float32, device="meta"), 0.997, entropy, live)

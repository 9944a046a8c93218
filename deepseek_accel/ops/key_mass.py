"""What a few queries attend to, key by key: what eviction scores tokens by.

Letters: B rows, S queries, H query heads, G key heads, D key dim, T keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCORES_BYTES = 1 << 28
"""Scores held at a time, in bytes, of as many heads as fit (one at least)."""

# (B, S, H, G, D, T, causal, mask); what only that case can catch
CASES = [
    (1, 1, 4, 1, 16, 7, True, False),  # one query
    (2, 5, 4, 2, 16, 5, True, False),  # as many queries as keys, grouped heads
    (2, 3, 6, 3, 8, 40, True, False),  # the last queries of many keys
    (2, 3, 4, 1, 8, 40, False, True),  # a mask, with a query that sees nothing
]


@dataclass
class ScoreGroup:
    """Layers of one decoding step that are scored in one launch, by the attention of the last of them.

    Attention is given one `KeyScores` of each, in order, and leaves what it attended to here until then.
    """

    scores: Tensor
    """[G, B, R] fp32, contiguous: of each layer what `KeyScores.scores` is."""
    lengths: Tensor
    """[G, B] int32, contiguous: keys of each layer's rows."""
    done: int = 0
    """Layers that have been."""
    raw: Tensor | None = None
    """[G, B * H, R] fp32: scores of all heads, base 2, as the kernels leave them."""
    lse: Tensor | None = None
    """[G, B * H, parts] fp32: the log2 of each part's sum of exponentials."""


class KeyScores(NamedTuple):
    """Where a decoding step of one query per row leaves what it attended to; taken by the attention ops, on GPUs.

    A key's score becomes score x decay + the mean over heads of p, or of -p log p (`entropy`), as `key_mass` has them.
    """

    scores: Tensor
    """[B, R] fp32, of unit last stride; R is at least every length."""
    decay: float
    entropy: bool = False
    live: Tensor | None = None
    """[1] int32: rows from here on are idle, their scores stay. None: none is."""
    group: ScoreGroup | None = None
    """The layers that this one is scored with; None: alone, at once."""


@torch.no_grad()
def key_mass(
    query: Tensor, keys: Tensor, scale: float, *, causal: bool = True, mask: Tensor | None = None, entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """(mass, score), both [B, T] fp32. mass: the mean over heads of p, summed over queries, p the softmax of attention.
    score: the same, or with `entropy` that of -p log p (nats).

    query [B, S, H, D], the row's last S tokens if `causal`; keys [B, G, T, D]; head h reads key head h // (H / G).
    mask [B, 1, S, T], bool or added to scores. A query that sees no key gives zeros.
    """
    batch, num_queries, heads, _ = query.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    hidden, bias = None, None
    if mask is not None:
        hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
        bias = None if mask.dtype == torch.bool else mask
    if causal and num_queries > 1:
        last = torch.arange(num_queries, device=keys.device) + (num_keys - num_queries)
        later = torch.arange(num_keys, device=keys.device) > last[:, None]
        hidden = later if hidden is None else hidden | later
    mass = torch.zeros(batch, num_keys, dtype=torch.float32, device=keys.device)
    spread = torch.zeros_like(mass) if entropy else mass
    together = max(1, SCORES_BYTES // max(1, 4 * batch * num_queries * num_keys))
    group = heads // num_kv_heads
    for head in range(num_kv_heads):
        key = keys[:, head, None].to(dtype)
        for begin in range(head * group, (head + 1) * group, together):
            own = query[:, :, begin : min(begin + together, (head + 1) * group)].to(dtype).transpose(1, 2)
            scores = own @ key.transpose(2, 3) * scale
            if bias is not None:
                scores = scores + bias
            if hidden is not None:
                scores = scores.masked_fill(hidden, float("-inf"))
            weights = scores.softmax(-1).nan_to_num(nan=0.0)  # 0 / 0 where nothing is seen
            mass += weights.sum((1, 2))
            if entropy:
                spread += torch.special.entr(weights).sum((1, 2))
    return mass / heads, spread / heads


def case_inputs(case: Any, dtype: torch.dtype, device: Any = "cpu") -> dict[str, Any]:
    """Keyword arguments of `key_mass` for a case."""
    batch, queries, heads, groups, dim, length, causal, masked = case
    generator = torch.Generator().manual_seed(length)
    mask = None
    if masked:
        mask = torch.rand(batch, 1, queries, length, generator=generator) < 0.5
        mask[0, 0, 1] = False
        mask = mask.to(device)
    return {
        "query": torch.randn(batch, queries, heads, dim, generator=generator).to(dtype).to(device),
        "keys": torch.randn(batch, groups, length, dim, generator=generator).to(dtype).to(device),
        "scale": dim**-0.5,
        "causal": causal,
        "mask": mask,
    }

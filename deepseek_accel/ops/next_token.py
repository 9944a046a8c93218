"""The end of a decoding step: the likeliest token of each row, and which rows go on. All on the device."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .choice import uses_triton


class Case(NamedTuple):
    batch: int
    vocabulary: int
    unfinished: tuple[int, ...]  # 1: goes on; as many as rows


CASES = [
    Case(1, 1, (1,)),  # one token: the padding of the block must not win
    Case(3, 100, (1, 0, 1)),  # a finished row gets the pad token and stays finished
    Case(2, 4096, (1, 1)),  # exactly one block
    Case(5, 9001, (1, 1, 1, 0, 0)),  # several blocks, the last one partly filled; rows no power of two
]


def next_token(
    logits: Tensor | None,
    tokens: Tensor,
    unfinished: Tensor,
    live: Tensor,
    eos: Tensor,
    pad: Tensor,
    posts: Tensor,
    count: Tensor,
) -> None:
    """Write each row's next token and whether it goes on, in place, and post both for the host.

    logits [B, V]: tokens [B] int64 become the ids of the largest logits, of equal ones the lowest id, of NaN the first,
    as `torch.argmax`; None: tokens hold the choice already. Then, for a row whose `unfinished` [B] bool is False, the
    token is `pad` [1] int64; a row whose token is in `eos` [N] int64 (-1: none) is not unfinished any more.
    posts [R, B + 1] int64 may be pinned memory of the host: its row `count` [1] int32 modulo R gets the tokens and,
    last, whether any row before live [1] int32 is unfinished; then `count` is one more.
    """
    step = _kernel_launch() if uses_triton(tokens.device) else next_token_reference
    step(logits, tokens, unfinished, live, eos, pad, posts, count)


@functools.cache
def _kernel_launch() -> Any:
    from ..kernels.next_token import launch

    return launch


def next_token_reference(
    logits: Tensor | None,
    tokens: Tensor,
    unfinished: Tensor,
    live: Tensor,
    eos: Tensor,
    pad: Tensor,
    posts: Tensor,
    count: Tensor,
) -> None:
    """`next_token` in plain torch."""
    if logits is not None:
        tokens.copy_(logits.argmax(-1))
    tokens.copy_(torch.where(unfinished, tokens, pad))
    unfinished &= ~(tokens.unsqueeze(1) == eos).any(1)
    post = posts[int(count) % len(posts)]
    post[:-1] = tokens
    post[-1] = unfinished[: int(live)].any()
    count += 1

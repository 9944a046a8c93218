"""Greedy choice in two launches: the best of each block of the vocabulary, then the best of these and who goes on."""

import torch
import triton
import triton.language as tl

from . import launching
from .launching import launch_dependents, wait
from .router import pack

BLOCK = 4096


@triton.jit(do_not_specialize=["vocabulary"])
def best_of_block_kernel(
    logits,  # [B, V]
    best,  # [B, blocks] int64: the largest value and, in the low bits, 2147483647 - its id
    vocabulary,
    row_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    wait(PDL)
    value = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    # a real -inf has a lower id than the padding, which so never wins
    tl.store(best + row * tl.num_programs(1) + block, tl.max(pack(value, 2147483647 - token), 0))


@triton.jit(do_not_specialize=["batch", "num_blocks"])
def next_token_kernel(
    best,  # [B, blocks]; used if CHOOSE
    tokens,  # [B]
    unfinished,  # [B] as bytes
    live,  # [1]
    eos,  # [EOS]
    pad,  # [1]
    posts,  # [POSTS, B + 1], also in pinned memory of the host
    count,  # [1]
    batch,
    num_blocks,
    CHOOSE: tl.constexpr,
    EOS: tl.constexpr,
    POSTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    launch_dependents(PDL)
    row = tl.arange(0, BLOCK_ROWS)
    present = row < batch
    wait(PDL)
    going = tl.load(unfinished + row, mask=present, other=0) != 0
    if CHOOSE:
        block = tl.arange(0, BLOCK_BLOCKS)
        inside = present[:, None] & (block < num_blocks)[None, :]
        pointers = best + row.to(tl.int64)[:, None] * num_blocks + block[None, :]
        largest = tl.max(tl.load(pointers, mask=inside, other=-(1 << 63)), 1)
        token = 2147483647 - (largest & 0xFFFFFFFF)
    else:
        token = tl.load(tokens + row, mask=present, other=0)
    token = tl.where(going, token, tl.load(pad))
    for i in tl.static_range(EOS):
        going = going & (token != tl.load(eos + i))
    tl.store(tokens + row, token, mask=present)
    tl.store(unfinished + row, going.to(tl.uint8), mask=present)
    number = tl.load(count)
    post = posts + (number % POSTS) * (batch + 1)
    tl.store(post + row, token, mask=present)
    tl.store(post + batch, tl.max((going & (row < tl.load(live))).to(tl.int64), 0))
    tl.store(count, number + 1)


def launch(
    logits: torch.Tensor | None,
    tokens: torch.Tensor,
    unfinished: torch.Tensor,
    live: torch.Tensor,
    eos: torch.Tensor,
    pad: torch.Tensor,
    posts: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """`ops.next_token.next_token`."""
    batch = len(tokens)
    pdl = launching.uses_pdl(tokens.device)
    dependent = {"launch_pdl": True} if pdl else {}
    best, num_blocks = tokens, 1
    if logits is not None:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        num_blocks = triton.cdiv(logits.shape[1], BLOCK)
        best = torch.empty(batch, num_blocks, dtype=torch.int64, device=tokens.device)
        launching.launch(
            best_of_block_kernel,
            (batch, num_blocks),
            (logits, best, logits.shape[1], logits.stride(0)),
            (BLOCK, pdl),
            num_warps=8,
            **dependent,
        )
    launching.launch(
        next_token_kernel,
        (1,),
        (best, tokens, unfinished.view(torch.uint8), live, eos, pad, posts, count, batch, num_blocks),
        (
            logits is not None,
            len(eos),
            len(posts),
            triton.next_power_of_2(batch),
            triton.next_power_of_2(num_blocks),
            pdl,
        ),
        num_warps=4,
        **dependent,
    )


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options): V2-Lite's vocabulary, one row and 128."""
    cases = []
    for capability in (80, 89, 90, 100):
        options = {"num_stages": 3, "capability": capability}
        pdl = capability >= 90
        signature = {"logits": "*bf16", "best": "*i64", "vocabulary": "i32", "row_stride": "i32"}
        fixed = {"BLOCK": BLOCK, "PDL": pdl}
        signature |= dict.fromkeys(fixed, "constexpr")
        cases.append(("best_of_block", best_of_block_kernel, signature, fixed, options | {"num_warps": 8}))
        for rows in (1, 128):
            signature = {"best": "*i64", "tokens": "*i64", "unfinished": "*u8", "live": "*i32", "eos": "*i64"}
            signature |= {"pad": "*i64", "posts": "*i64", "count": "*i32", "batch": "i32", "num_blocks": "i32"}
            fixed = {"CHOOSE": True, "EOS": 16, "POSTS": 4, "BLOCK_ROWS": rows, "BLOCK_BLOCKS": 32, "PDL": pdl}
            signature |= dict.fromkeys(fixed, "constexpr")
            cases.append((f"next_token-{rows}", next_token_kernel, signature, fixed, options | {"num_warps": 4}))
    return cases

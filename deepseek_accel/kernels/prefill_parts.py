"""Around prefill attention by parts: merging two parts, and keys in one piece for a kernel that wants them so.

The contracts are those of `merge` and `whole_keys` in `ops/prefill_attention.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from .combine import Launch, compile_case, padded


@triton.jit(do_not_specialize=["num_queries"])
def merge_kernel(
    out,  # [B, S, H, V] of any strides but a unit last one
    lse,  # [B, H, S], contiguous
    other,
    other_lse,
    merged,  # [B, S, H, V], contiguous
    merged_lse,
    num_queries,
    out_stride_b, out_stride_s, out_stride_h, other_stride_b, other_stride_s, other_stride_h,
    H: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK queries of a head: both parts weighted with their share of the softmax denominator."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    query = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_V)
    live = query < num_queries
    mask = live[:, None] & (column < V)[None, :]
    place = (batch * H + head) * num_queries + query
    mine = tl.load(lse + place, mask=live, other=float("-inf"))
    theirs = tl.load(other_lse + place, mask=live, other=float("-inf"))
    most = tl.maximum(mine, theirs)
    most = tl.where(most == float("-inf"), 0.0, most)  # a query that sees no key: both shares are 0, not NaN
    old, new = tl.exp(mine - most), tl.exp(theirs - most)
    total = old + new
    scale = 1.0 / tl.where(total == 0.0, 1.0, total)
    rows = out + batch * out_stride_b + head * out_stride_h + query[:, None] * out_stride_s
    other_rows = other + batch * other_stride_b + head * other_stride_h + query[:, None] * other_stride_s
    first = tl.load(rows + column[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(other_rows + column[None, :], mask=mask, other=0.0).to(tl.float32)
    result = first * (old * scale)[:, None] + second * (new * scale)[:, None]
    target = merged + ((batch * num_queries + query) * H + head)[:, None] * V + column[None, :]
    tl.store(target, result.to(merged.dtype.element_ty), mask=mask)
    tl.store(merged_lse + place, most + tl.log(total), mask=live)


def plan_merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    other: torch.Tensor,
    other_lse: torch.Tensor,
    merged: torch.Tensor,
    merged_lse: torch.Tensor,
) -> Launch:
    batch, num_queries, heads, width = out.shape
    block_v = padded(width)
    block = max(1, 4096 // block_v)
    arguments = {
        "out": out,
        "lse": lse,
        "other": other,
        "other_lse": other_lse,
        "merged": merged,
        "merged_lse": merged_lse,
        "num_queries": num_queries,
        "out_stride_b": out.stride(0),
        "out_stride_s": out.stride(1),
        "out_stride_h": out.stride(2),
        "other_stride_b": other.stride(0),
        "other_stride_s": other.stride(1),
        "other_stride_h": other.stride(2),
        "H": heads,
        "V": width,
        "BLOCK_V": block_v,
        "BLOCK": block,
    }
    return Launch(merge_kernel, (triton.cdiv(num_queries, block), heads, batch), arguments, 4, 3)


def launch_merge(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(both parts as one in `dtype`, the log of its softmax denominator)."""
    lse, other_lse = lse.contiguous(), other_lse.contiguous()
    merged_lse = torch.empty_like(lse)
    merged = torch.empty(out.shape, dtype=dtype, device=out.device)
    if merged.numel():
        plan_merge(out, lse, other, other_lse, merged, merged_lse).run()
    return merged, merged_lse


@triton.jit
def whole_keys_kernel(
    key,  # [B * T, G, N], keys and heads of any strides
    k_shared,  # [B, T, R] of any strides but a unit last one
    whole,  # [B * T, G, N + R], contiguous
    num_keys, key_stride_b, key_stride_t, key_stride_g, shared_stride_b, shared_stride_t,
    G: tl.constexpr, N: tl.constexpr, R: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The keys of BLOCK_G heads of one token."""
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    own, shared = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    mask = (head < G)[:, None] & (own < N)[None, :]
    source = key + batch * key_stride_b + token * key_stride_t + head[:, None].to(tl.int64) * key_stride_g
    target = whole + ((batch * num_keys + token) * G + head)[:, None] * (N + R)
    tl.store(target + own[None, :], tl.load(source + own[None, :], mask=mask), mask=mask)
    rope = tl.load(k_shared + batch * shared_stride_b + token * shared_stride_t + shared, mask=shared < R, other=0.0)
    mask = (head < G)[:, None] & (shared < R)[None, :]
    tl.store(target + N + shared[None, :], tl.broadcast_to(rope[None, :], (BLOCK_G, BLOCK_R)), mask=mask)


def plan_whole_keys(key: torch.Tensor, k_shared: torch.Tensor, whole: torch.Tensor) -> Launch:
    batch, num_keys, heads, own = key.shape
    rope = k_shared.shape[-1]
    block = min(16, triton.next_power_of_2(heads))
    arguments = {
        "key": key,
        "k_shared": k_shared,
        "whole": whole,
        "num_keys": num_keys,
        "key_stride_b": key.stride(0),
        "key_stride_t": key.stride(1),
        "key_stride_g": key.stride(2),
        "shared_stride_b": k_shared.stride(0),
        "shared_stride_t": k_shared.stride(1),
        "G": heads,
        "N": own,
        "R": rope,
        "BLOCK_G": block,
        "BLOCK_N": padded(own),
        "BLOCK_R": padded(rope),
    }
    return Launch(whole_keys_kernel, (num_keys, triton.cdiv(heads, block), batch), arguments, 4, 3)


def launch_whole_keys(key: torch.Tensor, k_shared: torch.Tensor) -> torch.Tensor:
    """`ops.prefill_attention.whole_keys`: torch's concatenation of these strides runs at a fifth of copy speed."""
    whole = key.new_empty(*key.shape[:3], key.shape[3] + k_shared.shape[-1])
    if whole.numel():
        plan_whole_keys(key, k_shared, whole).run()
    return whole


def compile_cases() -> list[tuple[str, Any, dict, dict, dict]]:
    """V2-Lite's 16 heads and V3's 128: into bf16 and into the fp32 of a sum that goes on."""
    cases = []
    for name, heads in (("v2-lite", 16), ("v3", 128)):
        meta = {"device": "meta", "dtype": torch.bfloat16}
        out, lse = torch.empty(1, 1024, heads, 128, **meta), torch.empty(1, heads, 1024, device="meta")
        both = torch.empty(1, 1024, heads, 256, **meta)
        whole = torch.empty(1, 1024, heads, 192, **meta)
        steps = [
            ("merge-last", plan_merge(out, lse, out, lse, out, lse)),
            ("merge-on", plan_merge(out.float(), lse, out, lse, out.float(), lse)),
            ("whole_keys", plan_whole_keys(both[..., :128], torch.empty(1, 1024, 576, **meta)[..., 512:], whole)),
        ]
        for capability in (80, 89, 90, 100):
            cases += [compile_case(f"{kind}-{name}", step, capability) for kind, step in steps]
    return cases

"""The routed experts of a DeepSeek layer: for each token the weighted sum of its chosen experts' gated MLPs."""

import itertools

import torch
import torch.nn.functional as F

from .choice import uses_triton
from .int4 import Int4Weight

# (T, E, K, D, I)
CASES = [
    (0, 4, 2, 16, 8),  # no tokens: a launch with an empty grid is an error
    (1, 16, 4, 64, 32),  # decode: most experts idle, one row per expert
    (3, 4, 4, 24, 12),  # K = E, sizes that are no power of two: masks in every dim
    (5, 3, 1, 33, 7),  # K = 1 and odd sizes: rows are not 16-byte aligned
    (40, 4, 2, 64, 32),  # many rows per expert: a run of an expert ends inside a tile
    (70, 160, 6, 32, 16),  # V2's count of experts, no power of two; some experts idle between busy ones
    (150, 2, 1, 16, 48),  # several tiles per expert
]

_WIDE = (torch.float32, torch.float64)
"""Dtypes in which a sum may be rounded after every addend."""


def _check(
    hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> None:
    num_experts, size, intermediate = down.shape
    if hidden.dim() != 2 or hidden.shape[1] != size or gate_up.shape != (num_experts, 2 * intermediate, size):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} do not fit: "
            "they must be [T, D], [E, 2I, D] and [E, D, I]"
        )
    if indices.dim() != 2 or indices.shape != weights.shape or indices.shape[0] != hidden.shape[0]:
        raise ValueError(
            f"indices {tuple(indices.shape)} and weights {tuple(weights.shape)} must both be [T, K] with T = "
            f"{hidden.shape[0]}"
        )
    if not hidden.dtype == gate_up.dtype == down.dtype:
        raise ValueError(f"hidden, gate_up and down differ in dtype: {hidden.dtype}, {gate_up.dtype}, {down.dtype}")


def fused_experts_reference(
    hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The definition, expert by expert; arguments and result as those of `fused_experts`. Any dtype, fp64 too."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    outputs = torch.zeros(*indices.shape, hidden.shape[1], dtype=wide, device=hidden.device)  # [T, K, D]
    for expert in range(gate_up.shape[0]):
        token, slot = torch.where(indices == expert)
        if len(token) == 0:
            continue
        gate, up = F.linear(hidden[token], gate_up[expert]).chunk(2, dim=-1)
        output = F.linear(F.silu(gate) * up, down[expert])
        outputs[token, slot] = output.to(wide) * weights[token, slot, None].to(wide)
    total = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
    for output in outputs.unbind(1):
        total = total + output
    return total.to(hidden.dtype)


def _one_token(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    total: torch.Tensor | None = None,
) -> torch.Tensor:
    """`grouped_experts` for T = 1: no sort, and as few torch calls as possible, whose overhead is most of the time.

    total [D]: what the sum starts from, in hidden's dtype; fp32 and fp64 only, and written to.
    """
    num_experts = gate_up.shape[0]
    chosen: list[int] = indices[0].tolist()
    kept = [slot for slot, expert in enumerate(chosen) if 0 <= expert < num_experts]
    if not kept:
        return torch.zeros_like(hidden) if total is None else total.unsqueeze(0)
    experts = [chosen[slot] for slot in kept]
    scales = weights[0] if len(kept) == len(chosen) else weights[0, kept]
    if hidden.dtype in _WIDE:
        row = hidden[0]
        gate, up = torch.stack([torch.mv(gate_up[expert], row) for expert in experts]).chunk(2, dim=-1)
        # `down` is linear, so the weights may scale its input; in these dtypes that costs no precision.
        active = F.silu(gate).mul_(up).mul_(scales.unsqueeze(1)).unbind(0)
        if total is None:
            total = torch.mv(down[experts[0]], active[0])
            experts, active = experts[1:], active[1:]
        for expert, value in zip(experts, active, strict=True):
            total = total.addmv_(down[expert], value)
        return total.unsqueeze(0)
    gate, up = torch.cat([F.linear(hidden, gate_up[expert]) for expert in experts]).chunk(2, dim=-1)
    active = (F.silu(gate) * up).split(1)
    outputs = torch.cat([F.linear(value, down[expert]) for expert, value in zip(experts, active, strict=True)])
    return (outputs.float() * scales.float().unsqueeze(1)).sum(0, keepdim=True).to(hidden.dtype)


def _takes_grouped_mm(*tensors: torch.Tensor) -> bool:
    """Whether torch's grouped matmul takes these: not fp64, and every row 16-byte aligned."""
    if not hasattr(F, "grouped_mm") or tensors[0].dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return all(
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
        for tensor in tensors
    )


def grouped_experts(
    hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """`fused_experts` in torch: token-expert pairs sorted once, then two matmuls per hit expert on its run of rows.

    Expert weights are never copied. Deterministic. Differentiable, if slower for one token.
    """
    num_tokens, top_k = indices.shape
    num_experts, intermediate = gate_up.shape[0], down.shape[2]
    if num_tokens == 1 and not torch.is_grad_enabled():
        return _one_token(hidden, indices, weights, gate_up, down)
    experts, order = indices.reshape(-1).sort(stable=True)
    bounds = torch.searchsorted(experts, torch.arange(num_experts + 1, dtype=experts.dtype, device=experts.device))
    edges = bounds.tolist()
    first, end = edges[0], edges[-1]
    num_pairs = len(order)
    kept = order if end - first == num_pairs else order[first:end]
    if len(kept) == 0:
        return torch.zeros_like(hidden)

    rows = hidden[kept // top_k]
    aligned = intermediate * hidden.element_size() % 16 == 0
    if aligned and _takes_grouped_mm(rows, gate_up, down):
        ends = (bounds[1:] - first).int()
        gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        runs = [F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)]
    else:
        runs = []
        for expert, (begin, stop) in enumerate(itertools.pairwise(edges)):
            if begin < stop:
                gate, up = F.linear(rows[begin - first : stop - first], gate_up[expert]).chunk(2, dim=-1)
                runs.append(F.linear(F.silu(gate) * up, down[expert]))

    if len(kept) < num_pairs:  # dropped pairs: a row of zeros each, before and after the others, and no weight
        runs.insert(0, hidden.new_zeros(first, hidden.shape[1]))
        runs.append(hidden.new_zeros(num_pairs - end, hidden.shape[1]))
        weights = weights.masked_fill((indices < 0) | (indices >= num_experts), 0.0)
    outputs = torch.cat(runs) if len(runs) > 1 else runs[0]
    place = torch.empty_like(order).scatter_(0, order, torch.arange(num_pairs, device=order.device))
    wide = torch.promote_types(hidden.dtype, torch.float32)
    total = F.embedding_bag(
        place.view(num_tokens, top_k), outputs.to(wide), mode="sum", per_sample_weights=weights.to(wide)
    )
    return total.to(hidden.dtype)


def fused_experts(
    hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """For each token t the sum over k of weights[t, k] * down[e] @ (silu(gate) * up), e = indices[t, k].

    gate and up are the first and the last I of gate_up[e] @ hidden[t].

    hidden [T, D]; indices [T, K] of any integer dtype; weights [T, K] of any floating dtype; gate_up [E, 2I, D], first
    the I rows of gate, then those of up; down [E, D, I], in hidden's dtype, any strides but unit last stride. Returns
    [T, D] in hidden's dtype. An index below 0 or from E on is a dropped expert: it contributes nothing, and neither
    expert weights nor its routing weight are read into the result.

    Sums accumulate in fp32; the weighted sum runs over k in order, without atomics: repeated runs are bit-equal. Rows
    do not influence each other. On CUDA the host is never waited for. The Triton kernels have no backward: where a
    gradient is wanted, torch is used. Source: DeepseekV3Experts of transformers 5.24.
    Raises ValueError if shapes or dtypes do not fit together.
    """
    _check(hidden, indices, weights, gate_up, down)
    differentiable = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (hidden, weights, gate_up, down)
    )
    if uses_triton(hidden.device) and not differentiable and hidden.dtype != torch.float64:
        from ..kernels import experts as kernel

        return kernel.launch(hidden, indices, weights, gate_up, down)
    if hidden.shape[0] == 0:
        return torch.empty_like(hidden)
    return grouped_experts(hidden, indices, weights, gate_up, down)


Weight = torch.Tensor | Int4Weight
Shared = tuple[Weight, Weight, Weight]


def mixture(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    shared: Shared | None,
    residual: torch.Tensor,
) -> torch.Tensor:
    """residual + shared experts + `fused_experts`, where no gradient is wanted.

    shared: gate [J, D], up [J, D] and down [D, J] of the shared experts taken as one MLP of size J, or None.
    residual [T, D], contiguous. The rest, and the result, as in `fused_experts`. On a GPU shared experts run in the
    launches of the routed ones if J is a multiple of I and they are contiguous. Where weights are packed in four bits
    it is `ops.int4_experts.int4_mixture`.
    """
    if any(isinstance(weight, Int4Weight) for weight in (gate_up, down, *(shared or ()))):
        from .int4_experts import int4_mixture

        return int4_mixture(hidden, indices, weights, gate_up, down, shared, residual)
    return _plain_mixture(hidden, indices, weights, gate_up, down, shared, residual)  # type: ignore[arg-type]


def _plain_mixture(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    residual: torch.Tensor,
) -> torch.Tensor:
    if uses_triton(hidden.device) and hidden.dtype != torch.float64:
        from ..kernels import experts as kernel

        if shared is None or (
            shared[0].shape[0] % down.shape[2] == 0 and all(weight.is_contiguous() for weight in shared)
        ):
            return kernel.launch(hidden, indices, weights, gate_up, down, shared, residual)
    if hidden.shape[0] == 1 and hidden.dtype in _WIDE and not torch.is_grad_enabled():
        _check(hidden, indices, weights, gate_up, down)
        if shared is None:
            total = residual[0].clone()
        else:
            gate, up, shared_down = shared
            active = F.silu(torch.mv(gate, hidden[0]), inplace=True).mul_(torch.mv(up, hidden[0]))
            total = torch.addmv(residual[0], shared_down, active)
        return _one_token(hidden, indices, weights, gate_up, down, total)
    out = residual + fused_experts(hidden, indices, weights, gate_up, down)
    if shared is None:
        return out
    gate, up, shared_down = shared
    return out + F.linear(F.silu(F.linear(hidden, gate)) * F.linear(hidden, up), shared_down)

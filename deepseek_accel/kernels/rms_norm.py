"""Root mean square norm: one launch, one program per row."""

import torch
import triton
import triton.language as tl

from . import launching


@triton.jit(do_not_specialize=["inner"])
def rms_norm_kernel(
    x,  # [outer, inner, D]
    residual,  # [outer * inner, D], contiguous; used if ADD
    weight,  # [D]
    total,  # [outer * inner, D], contiguous; x + residual, written if ADD
    out,  # [outer * inner, D], contiguous
    inner,
    outer_stride,
    inner_stride,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    launching.launch_dependents(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    mask = columns < D
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    launching.wait(PDL)
    value = tl.load(x + start + columns, mask=mask, other=0.0)
    if ADD:
        other = tl.load(residual + row.to(tl.int64) * D + columns, mask=mask, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
        tl.store(total + row.to(tl.int64) * D + columns, value, mask=mask)
    wide = value.to(tl.float32)
    normal = wide * tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
    rounded = normal.to(value.dtype).to(tl.float32)
    tl.store(out + row.to(tl.int64) * D + columns, (scale * rounded).to(out.dtype.element_ty), mask=mask)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [outer, inner, D] with unit last stride; a copy only if three or more leading dims do not merge."""
    size = x.shape[-1]
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 3:
        return x
    if x.dim() < 3:
        return x.reshape(1, -1, size)
    return x.reshape(-1, x.shape[-2], size)


def launch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of x, x), or with a residual (norm of x + residual, x + residual)."""
    size = x.shape[-1]
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    if out.numel() == 0:
        return out, total
    rows = _as_rows(x)
    block = 1 << (size - 1).bit_length()
    pdl = launching.uses_pdl(x.device)
    launching.launch(
        rms_norm_kernel,
        (rows.shape[0] * rows.shape[1],),
        (
            rows,
            x if residual is None else residual.contiguous(),
            weight.contiguous(),
            total,
            out,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            eps,
        ),
        (size, block, residual is not None, pdl),
        num_warps=min(8, max(1, block // 512)),
        **({"launch_pdl": True} if pdl else {}),
    )
    return out, total


def compile_cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of the shapes of V2-Lite and V3 in bf16."""
    signature = {
        "x": "*bf16",
        "residual": "*bf16",
        "weight": "*bf16",
        "total": "*bf16",
        "out": "*bf16",
        "inner": "i32",
        "outer_stride": "i64",
        "inner_stride": "i32",
        "eps": "fp32",
        "D": "constexpr",
        "BLOCK_D": "constexpr",
        "ADD": "constexpr",
        "PDL": "constexpr",
    }
    cases = []
    for name, size in (("latent", 512), ("v3-query", 1536), ("v2-lite-hidden", 2048), ("v3-hidden", 7168)):
        block = triton.next_power_of_2(size)
        options = {"num_warps": min(8, max(1, block // 512)), "num_stages": 3}
        for add in (False, True):
            fixed = {"D": size, "BLOCK_D": block, "ADD": add, "PDL": False}
            cases.append((f"rms_norm-{name}{'-add' * add}", rms_norm_kernel, signature, fixed, options))
    fixed = fixed | {"PDL": True}
    cases.append(("rms_norm-v3-hidden-add-pdl", rms_norm_kernel, signature, fixed, options | {"capability": 90}))
    return cases

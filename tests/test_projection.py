"""Projections: torch form and kernels (in Triton's interpreter) against float64, poison, idle tiles, errors."""

import pytest
import torch
import torch.nn.functional as F
from interpreter import interpret

from deepseek_accel.ops.projection import (
    CASES,
    DOT_TOKENS,
    GATED_CASES,
    choose_form,
    gated_project,
    gated_project_reference,
    project,
    project_reference,
)

EPS = 1e-5


def make(case, dtype=torch.float32, seed=0):
    num_tokens, size, counts, with_bias, normed, added = case
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    x = randn(num_tokens, size)
    weights = tuple(randn(count, size) * size**-0.5 for count in counts)
    biases = tuple(randn(count) if i in with_bias else None for i, count in enumerate(counts))
    norm = (randn(size), EPS) if normed else None
    residual = randn(num_tokens, counts[0]) if added else None
    return x, weights, biases, norm, residual


def make_gated(case, dtype=torch.float32):
    num_tokens, size, count, normed = case
    x, weights, _, norm, _ = make((num_tokens, size, (count, count), (), normed, False), dtype)
    return x, *weights, norm


def wide(value):
    return value.double() if isinstance(value, torch.Tensor) else value


def by_formula(x, weights, biases, norm, residual):
    """float64, from the formula."""
    x = x.double()
    if norm is not None:
        x = x / ((x * x).mean(-1, keepdim=True) + norm[1]).sqrt() * norm[0].double()
    outs = [x @ weight.double().T for weight in weights]
    outs = [out if bias is None else out + bias.double() for out, bias in zip(outs, biases, strict=True)]
    return outs if residual is None else [outs[0] + residual.double()]


def gated_by_formula(x, gate, up, norm):
    gate, up = by_formula(x, (gate, up), (None, None), norm, None)
    return gate / (1 + (-gate).exp()) * up


@pytest.mark.parametrize("form", [project, project_reference])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_forms_are_the_formula(case, form):
    x, weights, biases, norm, residual = make(case)
    outs = form(x, weights, biases, norm=norm, residual=residual)
    for out, expected in zip(outs, by_formula(x, weights, biases, norm, residual), strict=True):
        assert out.dtype == x.dtype
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", [gated_project, gated_project_reference])
@pytest.mark.parametrize("case", GATED_CASES, ids=str)
def test_gated_torch_forms_are_the_formula(case, form):
    x, gate, up, norm = make_gated(case)
    out = form(x, gate, up, norm=norm)
    torch.testing.assert_close(out.double(), gated_by_formula(x, gate, up, norm), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_bits_are_those_of_stock_layers(dtype):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP, DeepseekV3RMSNorm

    torch.manual_seed(0)
    mlp = DeepseekV3MLP(DeepseekV3Config(hidden_size=64, intermediate_size=40)).to(dtype)
    norm = DeepseekV3RMSNorm(64, eps=EPS).to(dtype)
    x = torch.randn(3, 64).to(dtype)
    with torch.no_grad():
        norm.weight.normal_()
        active = gated_project(x, mlp.gate_proj.weight, mlp.up_proj.weight, norm=(norm.weight, EPS))
        (ours,) = project(active, (mlp.down_proj.weight,), residual=x)
        assert torch.equal(ours, x + mlp(norm(x)))


def test_gradient_reaches_every_tensor():
    x, weights, biases, norm, residual = make((2, 16, (8,), (0,), True, True))
    leaves = [x, weights[0], biases[0], norm[0], residual]
    for leaf in leaves:
        leaf.requires_grad_()
    project(x, weights, biases, norm=norm, residual=residual)[0].square().sum().backward()
    ours = [leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    project_reference(x, weights, biases, norm=norm, residual=residual)[0].square().sum().backward()
    torch.testing.assert_close(ours, [leaf.grad for leaf in leaves])


def test_errors():
    x, weight = torch.randn(2, 16), torch.randn(8, 16)
    with pytest.raises(ValueError, match=r"x must be"):
        project(x[0], (weight,))
    with pytest.raises(ValueError, match="1 to 3 weights"):
        project(x, (weight,) * 4)
    with pytest.raises(ValueError, match="a weight must be"):
        project(x, (weight[:, :8],))
    with pytest.raises(ValueError, match="a weight must be"):
        project(x, (weight.bfloat16(),))
    with pytest.raises(ValueError, match="norm"):
        project(x, (weight,), norm=(torch.ones(8), EPS))
    with pytest.raises(ValueError, match="biases"):
        project(x, (weight,), (torch.ones(7),))
    with pytest.raises(ValueError, match="biases"):
        project(x, (weight,), (None, None))
    with pytest.raises(ValueError, match="exactly one"):
        project(x, (weight, weight), residual=torch.zeros(2, 8))
    with pytest.raises(ValueError, match="residual must be"):
        project(x, (weight,), residual=torch.zeros(2, 7))
    with pytest.raises(ValueError, match="one shape"):
        gated_project(x, weight, weight[:4])


def interpreted() -> dict[str, float]:
    """For each case the kernel's error relative to the largest value. New tensors hold NaN in the interpreter."""
    from deepseek_accel.kernels.projection import launch, launch_gated, launch_silu_mul

    results = {}

    def compare(name, outs, expected):
        results[name] = max(
            ((out.double() - exact).abs().max() / exact.abs().max()).item() if out.shape == exact.shape else 9.0
            for out, exact in zip(outs, expected, strict=True)
        )

    for dtype in (torch.float32, torch.float16):
        for case in CASES[1:]:
            inputs = make(case, dtype)
            compare(f"{case} {dtype}", launch(*inputs), by_formula(*inputs))
        for case in GATED_CASES[1:]:
            inputs = make_gated(case, dtype)
            compare(f"gated {case} {dtype}", [launch_gated(*inputs)], [gated_by_formula(*inputs)])
        gate, up = make((3, 700, (1,), (), False, False), dtype)[0], make((3, 700, (1,), (), False, False), dtype, 1)[0]
        compare(f"silu_mul {dtype}", [launch_silu_mul(gate, up)], [F.silu(gate.double()) * up.double()])

    # Rows of a wider tensor: what lies between them is NaN.
    x, weights, biases, norm, residual = make(CASES[3])
    padded = torch.full((len(x), 100), float("nan"))
    padded[:, : x.shape[1]] = x
    outs = launch(padded[:, : x.shape[1]], weights, biases, norm, residual)
    compare("strided", outs, by_formula(x, weights, biases, norm, residual))
    # Every tiling must give the same, also where a tile is larger than the weight or has columns beyond D.
    for tiles in ((4, 8, 128, 4, 2), (4, 1, 16, 4, 1), (4, 2, 32, 1, 1)):
        inputs = make(CASES[3])
        compare(f"tiles {tiles}", launch(*inputs, tiles), by_formula(*inputs))
    return results


def test_kernels_in_the_interpreter():
    results = interpret(interpreted)
    assert len(results) == 2 * (len(CASES) + len(GATED_CASES) - 1) + 4
    tolerance = {True: 2e-3, False: 1e-5}
    assert {name: error for name, error in results.items() if not error < tolerance["float16" in name]} == {}


def rows_after_nan() -> list[bool]:
    """A token of NaN beside others: which rows of the result are finite."""
    from deepseek_accel.kernels.projection import launch

    x, weights, biases, norm, _ = make((4, 64, (24, 8), (1,), True, False))
    x[2] = float("nan")
    return [bool(row.isfinite().all()) for row in torch.cat(launch(x, weights, biases, norm, None), 1)]


def test_nan_stays_in_its_row():
    assert interpret(rows_after_nan) == [True, True, False, True]


def test_forms_by_tokens_and_bytes():
    for (limit, tokens), beyond in zip(DOT_TOKENS, (4, 2), strict=True):
        assert [choose_form(n, limit) for n in (1, tokens, tokens + 1)] == ["dots", "dots", "matmul"]
        assert [choose_form(n, limit + 1) for n in (1, beyond, beyond + 1)] == ["dots", "dots", "matmul"]

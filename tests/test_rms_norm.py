"""RMS norm: the torch form against the formula and Hugging Face, the kernel in Triton's interpreter."""

import pytest
import torch
from interpreter import interpret

from deepseek_accel.ops.rms_norm import CASES, rms_norm, rms_norm_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def by_formula(x, weight, eps):
    """fp64 from the formula."""
    x = x.double()
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * weight.double()


def make(leading, size, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, size, generator=generator) * 3
    return x.to(dtype), torch.randn(size, generator=generator).to(dtype)


@pytest.mark.parametrize("leading, size", CASES)
def test_reference_is_the_formula(leading, size):
    x, weight = make(leading, size, torch.float32)
    torch.testing.assert_close(rms_norm_reference(x, weight, 1e-6).double(), by_formula(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading, size", CASES)
def test_equals_hugging_face_bit_for_bit(leading, size, dtype):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    x, weight = make(leading, size, dtype)
    stock = DeepseekV3RMSNorm(size, eps=1e-6).to(dtype)
    stock.weight.data.copy_(weight)
    with torch.no_grad():
        ours = rms_norm(x, stock.weight, 1e-6)
        assert ours.dtype == stock(x).dtype
        assert torch.equal(ours, stock(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_dtype_is_promoted_after_rounding(dtype, weight_dtype):
    x, weight = make((3,), 40, dtype)
    weight = weight.to(weight_dtype)
    ours = rms_norm(x, weight, 1e-6)
    assert ours.dtype == torch.promote_types(dtype, weight_dtype)
    assert torch.equal(ours, rms_norm_reference(x, weight, 1e-6))


def test_fp16_squares_do_not_overflow():
    x = torch.full((2, 8), 60000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones_like(x))


def test_strided_rows_and_a_wrong_weight():
    x, _ = make((4, 3), 48, torch.float32)
    weight = torch.randn(32)
    assert torch.equal(rms_norm(x[..., :32], weight, 1e-6), rms_norm_reference(x[..., :32].clone(), weight, 1e-6))
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, weight, 1e-6)


def test_gradient():
    x, weight = make((5,), 16, torch.float32)
    gradients = []
    for norm in (rms_norm, rms_norm_reference):
        leaf, scale = x.clone().requires_grad_(), weight.clone().requires_grad_()
        norm(leaf, scale, 1e-6).square().sum().backward()
        gradients.append((leaf.grad, scale.grad))
    torch.testing.assert_close(gradients[0], gradients[1])


def interpreted() -> dict[str, bool]:
    """For each case whether the kernel is right. To be run in Triton's interpreter; new tensors hold NaN there."""
    from deepseek_accel.kernels.rms_norm import launch

    results = {}

    def compare(name, x, weight):
        ours, expected = launch(x, weight, 1e-6)[0], rms_norm_reference(x, weight, 1e-6)
        tolerance = 1e-5 if ours.dtype == torch.float32 else 2e-3
        close = torch.allclose(ours.double(), expected.double(), rtol=tolerance, atol=tolerance)
        results[name] = close and ours.dtype == expected.dtype and ours.shape == expected.shape

    for leading, size in CASES:
        for dtype in (torch.float32, torch.float16):
            compare(f"{leading}-{size}-{dtype}", *make(leading, size, dtype))
    x, weight = make((3, 4), 48, torch.float32)
    compare("strided", x[..., :40], weight[:40])
    compare("strided-2d", x[:, 1, :40], weight[:40])
    compare("transposed", x.transpose(0, 1), weight)
    compare("four-dims", make((2, 3, 4), 48, torch.float32)[0].transpose(1, 2)[..., 8:], weight[8:])
    compare("every-other", x[..., ::2], weight[::2])
    compare("mixed", x.half(), weight)
    x[1, 2] = float("nan")
    ours = launch(x, weight, 1e-6)[0]
    results["nan-stays-in-its-row"] = int(ours.isnan().any(-1).sum()) == 1
    return results


def test_kernel_in_the_interpreter():
    results = interpret(interpreted)
    assert len(results) == 2 * len(CASES) + 7
    assert [name for name, right in results.items() if not right] == []


def fused_residual_error(dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(2, 3, 33, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(33, generator=generator).to(dtype)
    from deepseek_accel.kernels.rms_norm import launch

    normed, total = launch(x, weight, 1e-6, residual)
    assert torch.equal(total, x + residual)
    expected = rms_norm_reference(x + residual, weight, 1e-6)
    return (normed.float() - expected.float()).abs().max().item()


def test_residual_is_added_before_the_norm():
    assert interpret(fused_residual_error, torch.float32) < 1e-5
    assert interpret(fused_residual_error, torch.float16) < 1e-2

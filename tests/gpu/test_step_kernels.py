"""Projections and norm_route on a GPU: accuracy in bf16 and fp16, bit-equal repeats, idle tokens, graphs."""

import pytest
import torch
import torch.nn.functional as F

from deepseek_accel.ops.choice import why_not_triton
from deepseek_accel.ops.projection import gated_project, project
from deepseek_accel.ops.rms_norm import rms_norm_reference
from deepseek_accel.ops.router import make_counters, norm_route, norm_route_reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if reason := why_not_triton(torch.device("cuda", 0)):
    pytest.skip(reason, allow_module_level=True)

V2_LITE = (64, 2048, {"top_k": 6, "scoring": "softmax", "group_score": None, "normalize": False, "scale": 1.0})
V3 = (256, 7168, {"top_k": 8, "num_groups": 8, "topk_groups": 4, "normalize": True, "scale": 2.5})
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # new tensors hold NaN
    with torch.no_grad():
        yield
    torch.use_deterministic_algorithms(False)


def assert_accurate(ours, stock, expected):
    """At most twice torch's own error in the same dtype."""
    error = (ours.double() - expected).abs().max().item()
    allowed = 2 * (stock.double() - expected).abs().max().item() + torch.finfo(ours.dtype).eps
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def randn(*shape, dtype):
    return torch.randn(*shape, device="cuda").to(dtype)


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 33, 64, 70])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size, counts", [(2048, (3072, 576)), (10944, (2047,)), (3584, (3584, 512, 512)), (33, (7,))])
def test_projections_are_accurate(size, counts, dtype, num_tokens):
    x = randn(num_tokens, size, dtype=dtype)
    weights = tuple((randn(count, size, dtype=torch.float32) * size**-0.5).to(dtype) for count in counts)
    biases = tuple(randn(count, dtype=dtype) for count in counts)
    norm = (randn(size, dtype=dtype), 1e-6)
    normed, exact = rms_norm_reference(x, *norm), rms_norm_reference(x.double(), norm[0].double(), 1e-6)
    for i, out in enumerate(project(x, weights, biases, norm=norm)):
        expected = F.linear(exact, weights[i].double(), biases[i].double())
        assert_accurate(out, F.linear(normed, weights[i], biases[i]), expected)
    residual = randn(num_tokens, counts[0], dtype=dtype)
    (out,) = project(x, weights[:1], residual=residual)
    expected = F.linear(x.double(), weights[0].double()) + residual.double()
    assert_accurate(out, F.linear(x, weights[0]) + residual, expected)
    gate, up = weights[0], weights[0].flip(0).contiguous()
    expected = F.silu(F.linear(exact, gate.double())) * F.linear(exact, up.double())
    stock = F.silu(F.linear(normed, gate)) * F.linear(normed, up)
    assert_accurate(gated_project(x, gate, up, norm=norm), stock, expected)


@pytest.mark.parametrize("num_tokens", [2, 33])
def test_projection_runs_are_bit_equal(num_tokens):
    x, weight = randn(num_tokens, 7168, dtype=torch.bfloat16), randn(1536, 7168, dtype=torch.bfloat16)
    first = project(x, (weight, weight[:576]), norm=(x[0], 1e-6))
    for _ in range(50):
        assert all(map(torch.equal, project(x, (weight, weight[:576]), norm=(x[0], 1e-6)), first))


@pytest.mark.parametrize("num_tokens", [1, 3, 9, 33, 70, 512, 600])
@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", [V2_LITE, V3], ids=["v2-lite", "v3"])
def test_norm_route(model, gate_dtype, num_tokens):
    num_experts, size, rule = model
    x, norm_weight = randn(num_tokens, size, dtype=torch.bfloat16), randn(size, dtype=torch.bfloat16)
    gate = (randn(num_experts, size, dtype=torch.float32) * size**-0.5).to(gate_dtype)
    counters = make_counters(torch.device("cuda", 0))
    for live in (num_tokens, num_tokens // 2):
        options = {**rule, "live": torch.tensor([live], device="cuda", dtype=torch.int32)}
        normed, weights, indices = norm_route(x, norm_weight, 1e-6, gate, None, counters=counters, **options)
        expected = norm_route_reference(x, norm_weight, 1e-6, gate, None, **options)
        torch.testing.assert_close(normed, expected[0], rtol=2**-7, atol=0)
        order, expected_order = indices.argsort(-1), expected[2].argsort(-1)
        same = (indices.gather(1, order) == expected[2].gather(1, expected_order)).all(-1)
        assert same.float().mean() > 0.98  # sums in another order swap experts of nearly equal logits
        difference = weights.gather(1, order) - expected[1].gather(1, expected_order)
        assert difference[same].abs().max() < 1e-3
        assert (indices[live:] == -1).all() and (weights[live:] == 0).all()
        assert not counters.any()
        for _ in range(50):
            again = norm_route(x, norm_weight, 1e-6, gate, None, counters=counters, **options)
            assert all(map(torch.equal, again, (normed, weights, indices)))


def test_a_graph_of_the_step_follows_its_inputs():
    num_experts, size, rule = V2_LITE
    x, norm_weight = randn(2, size, dtype=torch.bfloat16), randn(size, dtype=torch.bfloat16)
    gate = randn(num_experts, size, dtype=torch.bfloat16) * size**-0.5
    weight = randn(size, size, dtype=torch.bfloat16) * size**-0.5
    live = torch.tensor([2], device="cuda", dtype=torch.int32)
    counters = make_counters(x.device)

    def step():
        (out,) = project(x, (weight,), norm=(norm_weight, 1e-6))
        (out,) = project(out, (weight,), residual=x)
        return norm_route(out, norm_weight, 1e-6, gate, None, live=live, counters=counters, **rule)

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for num_live in (2, 1, 0):
        x.normal_()
        live.fill_(num_live)
        graph.replay()
        assert all(map(torch.equal, result, step()))

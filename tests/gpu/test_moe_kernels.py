"""Router, experts and norm on a GPU: accuracy in bf16 and fp16, bit-equal repeats, sizes past 2^31, graphs, time."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from deepseek_accel.ops.choice import why_not_triton
from deepseek_accel.ops.experts import fused_experts, fused_experts_reference, mixture
from deepseek_accel.ops.rms_norm import rms_norm, rms_norm_reference
from deepseek_accel.ops.router import CASES as ROUTER_CASES
from deepseek_accel.ops.router import route, route_reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if reason := why_not_triton(torch.device("cuda", 0)):
    pytest.skip(reason, allow_module_level=True)

# (E, K, D, I)
V2_LITE = (64, 6, 2048, 1408)
V3_LIKE = (32, 8, 7168, 2048)
TOKENS = [1, 2, 8, 33, 128, 1000, 3000]  # 3,000 16-bit ones go through TMA


@contextlib.contextmanager
def poisoned():
    """New tensors hold NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch.cuda.empty_cache()


_weights = {}


def experts_of(model, dtype):
    """gate_up and down; only the last asked for stay in memory."""
    if (model, dtype) not in _weights:
        _weights.clear()
        num_experts, _, size, intermediate = model
        gate_up = torch.randn(num_experts, 2 * intermediate, size, device="cuda", dtype=dtype).mul_(2 * size**-0.5)
        down = torch.randn(num_experts, size, intermediate, device="cuda", dtype=dtype).mul_(2 * intermediate**-0.5)
        _weights[model, dtype] = gate_up, down
    return _weights[model, dtype]


def tokens_of(model, num_tokens, dtype):
    num_experts, top_k, size, _ = model
    hidden = torch.randn(num_tokens, size, device="cuda", dtype=dtype)
    indices = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k).indices
    return hidden, indices, torch.rand(num_tokens, top_k, device="cuda")


def in_fp64(hidden, indices, weights, gate_up, down):
    """The formula; weights of one expert at a time are widened."""
    out = torch.zeros(hidden.shape, dtype=torch.float64, device="cuda")
    for expert in range(len(down)):
        token, slot = torch.where(indices == expert)
        if len(token) == 0:
            continue
        gate, up = (hidden[token].double() @ gate_up[expert].double().T).chunk(2, -1)
        output = (F.silu(gate) * up) @ down[expert].double().T
        out.index_add_(0, token, output * weights[token, slot, None].double())
    return out


def assert_accurate(ours, stock, expected):
    """At most twice torch's own error in the same dtype."""
    scale = expected.abs().max().item()
    error = (ours.double() - expected).abs().max().item()
    allowed = 2 * (stock.double() - expected).abs().max().item() + torch.finfo(ours.dtype).eps * scale
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}, largest value {scale:.3g}"


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("model", [V2_LITE, V3_LIKE], ids=["v2-lite", "v3-like"])
def test_experts_are_accurate(model, dtype, num_tokens):
    inputs = (*tokens_of(model, num_tokens, dtype), *experts_of(model, dtype))
    with poisoned():
        ours = fused_experts(*inputs)
    assert_accurate(ours, fused_experts_reference(*inputs), in_fp64(*inputs))


@pytest.mark.parametrize("num_tokens", [1, 8, 128, 3000])
def test_dropped_experts_are_not_read(num_tokens):
    hidden, indices, weights = tokens_of(V2_LITE, num_tokens, torch.bfloat16)
    gate_up, down = (tensor.clone() for tensor in experts_of(V2_LITE, torch.bfloat16))
    unread = indices[0, 0].item()
    gate_up[unread] = float("nan")
    down[unread] = float("nan")
    indices[indices == unread] = -1
    indices[-1, -1] = 64
    indices[num_tokens // 2, 1:] = 10**9
    weights[(indices < 0) | (indices >= 64)] = float("nan")
    inputs = (hidden, indices, weights, gate_up, down)
    with poisoned():
        ours = fused_experts(*inputs)
    assert_accurate(ours, fused_experts_reference(*inputs), in_fp64(*inputs))


@pytest.mark.parametrize("num_tokens", [1, 3, 64, 3000])
def test_nan_stays_in_its_row_and_no_tokens(num_tokens):
    hidden, indices, weights = tokens_of(V2_LITE, num_tokens, torch.bfloat16)
    experts = experts_of(V2_LITE, torch.bfloat16)
    clean = fused_experts(hidden, indices, weights, *experts)
    hidden[0] = float("nan")
    dirty = fused_experts(hidden, indices, weights, *experts)
    assert dirty[0].isnan().all()
    assert torch.equal(dirty[1:], clean[1:])
    assert fused_experts(hidden[:0], indices[:0], weights[:0], *experts).shape == (0, 2048)


@pytest.mark.parametrize("num_tokens", [1, 2, 64, 3000])
@pytest.mark.parametrize("num_shared", [0, 1, 2])
def test_shared_experts_and_residual(num_shared, num_tokens):
    """Shared experts are experts of weight one, here the first routed ones."""
    intermediate = V2_LITE[-1]
    hidden, indices, weights = tokens_of(V2_LITE, num_tokens, torch.bfloat16)
    gate_up, down = experts_of(V2_LITE, torch.bfloat16)
    shared, always = None, torch.zeros_like(hidden, dtype=torch.float64)
    for expert in range(num_shared):
        one = torch.full((num_tokens, 1), expert, device="cuda")
        always += in_fp64(hidden, one, torch.ones(num_tokens, 1, device="cuda"), gate_up, down)
    if num_shared:
        gate, up = gate_up[:num_shared, :intermediate], gate_up[:num_shared, intermediate:]
        shared = (gate.flatten(0, 1), up.flatten(0, 1), down[:num_shared].transpose(0, 1).flatten(1).contiguous())
    residual = torch.randn_like(hidden)
    with poisoned():
        ours = mixture(hidden, indices, weights, gate_up, down, shared, residual)
        again = mixture(hidden, indices, weights, gate_up, down, shared, residual)
    stock = residual + fused_experts_reference(hidden, indices, weights, gate_up, down)
    if shared is not None:
        stock += F.linear(F.silu(F.linear(hidden, shared[0])) * F.linear(hidden, shared[1]), shared[2])
    expected = in_fp64(hidden, indices, weights, gate_up, down) + always + residual
    assert_accurate(ours, stock, expected)
    assert torch.equal(ours, again)


@pytest.mark.parametrize("num_tokens", [1, 64, 1000, 3000])
def test_runs_are_bit_equal(num_tokens):  # E11
    inputs = (*tokens_of(V3_LIKE, num_tokens, torch.bfloat16), *experts_of(V3_LIKE, torch.bfloat16))
    first = fused_experts(*inputs)
    assert all(torch.equal(fused_experts(*inputs), first) for _ in range(50))


# Past 2^31 elements: pairs x D from 37,450 tokens on (V3's D, K = 8); pairs x I from 131,073 tokens on.
@pytest.mark.parametrize(
    "model, num_tokens",
    [((8, 8, 7168, 64), 37_448), ((8, 8, 7168, 64), 37_600), ((8, 8, 64, 2048), 131_200)],
    ids=["below", "outputs", "intermediates"],
)
def test_more_than_2_31_elements(model, num_tokens):  # I01
    hidden, indices, weights = tokens_of(model, num_tokens, torch.bfloat16)
    experts = experts_of(model, torch.bfloat16)
    with poisoned():
        ours = fused_experts(hidden, indices, weights, *experts)
    assert ours.isfinite().all()
    for rows in (slice(0, 64), slice(num_tokens - 64, num_tokens)):
        inputs = (hidden[rows], indices[rows], weights[rows], *experts)
        assert_accurate(ours[rows], fused_experts_reference(*inputs), in_fp64(*inputs))
        torch.testing.assert_close(ours[rows], fused_experts(*inputs), rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("num_tokens", [300, 3000])
def test_one_expert_gets_every_token(num_tokens):  # E09, and the largest skew of tiles
    hidden, indices, weights = tokens_of(V2_LITE, num_tokens, torch.bfloat16)
    indices[:] = torch.tensor([63, 0, 5, 17, 1, 2], device="cuda")
    inputs = (hidden, indices, weights, *experts_of(V2_LITE, torch.bfloat16))
    assert_accurate(fused_experts(*inputs), fused_experts_reference(*inputs), in_fp64(*inputs))


@pytest.mark.parametrize("case", ROUTER_CASES, ids=str)
def test_router(case):
    num_tokens, num_experts, top_k, num_groups, topk_groups, scoring, group_score, normalize, scale = case
    logits = torch.randn(num_tokens, num_experts, device="cuda")
    options = {
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "scoring": scoring,
        "group_score": group_score,
        "normalize": normalize,
        "scale": scale,
    }
    for bias in (None, torch.randn(num_experts, device="cuda") * 0.05, torch.full((num_experts,), -2.0, device="cuda")):
        with poisoned():
            weights, indices = route(logits, bias, top_k, **options)
        expected_weights, expected_indices = route_reference(logits, bias, top_k, **options)
        # GPU and torch round exp differently: choices may swap where two scores are equal but for the last bits.
        order, expected_order = indices.argsort(-1), expected_indices.argsort(-1)
        assert torch.equal(indices.gather(1, order), expected_indices.gather(1, expected_order))
        torch.testing.assert_close(
            weights.gather(1, order), expected_weights.gather(1, expected_order), rtol=1e-5, atol=1e-7
        )


def test_router_ties_and_fp32():  # E07
    options = {"normalize": True, "scale": 1.0}
    bias = 8 + 0.01 * torch.arange(16, device="cuda")
    logits = torch.zeros(3, 16, device="cuda")
    assert route(logits, bias, 4, group_score=None, **options)[1].tolist() == [[15, 14, 13, 12]] * 3
    assert route(logits, None, 4, num_groups=4, topk_groups=2, **options)[1].tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [24, 512, 1536, 2048, 7168])
def test_rms_norm(size, dtype):
    weight = torch.randn(size, device="cuda").to(dtype)
    wide = torch.randn(3, 5, size + 64, device="cuda").to(dtype)
    for x in (
        wide[..., :size],
        wide[:, 2, :size],
        wide.transpose(0, 1)[..., :size],
        wide[0, 0, :size],
        wide[:0, :, :size],
    ):
        with poisoned():
            ours = rms_norm(x, weight, 1e-6)
        expected = rms_norm_reference(x.double(), weight.double(), 1e-6)
        assert ours.shape == x.shape and ours.dtype == dtype
        if x.numel():
            assert_accurate(ours, rms_norm_reference(x, weight, 1e-6), expected)


def captured(function):
    """A CUDA graph of `function`, which has run before so that everything is compiled."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.mark.parametrize("num_tokens", [1, 8, 128])
def test_graph_follows_its_inputs(num_tokens):
    experts = experts_of(V2_LITE, torch.bfloat16)
    hidden = torch.randn(num_tokens, 2048, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(num_tokens, 64, device="cuda")

    def layer():
        weights, indices = route(logits, None, 6, scoring="softmax", group_score=None, normalize=False, scale=1.0)
        return fused_experts(rms_norm(hidden, hidden[0].abs(), 1e-6), indices, weights, *experts)

    graph, result = captured(layer)
    for _ in range(2):  # other tokens, other experts, another number of tokens for each
        hidden.normal_()
        logits.normal_()
        graph.replay()
        assert torch.equal(result, layer())


@pytest.mark.parametrize("model", [V2_LITE, V3_LIKE], ids=["v2-lite", "v3-like"])
def test_time(model, capsys):
    """No assertion: prints device time beside the time of reading the hit experts at the rate of a copy."""
    num_experts, _, size, intermediate = model
    experts = experts_of(model, torch.bfloat16)
    block = torch.empty(2**29, dtype=torch.int8, device="cuda")

    def milliseconds(graph, calls):
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 20 / calls

    source = block.clone()
    rate = 2 * block.numel() / milliseconds(captured(lambda: block.copy_(source))[0], 1)
    lines = [f"copy {rate / 1e9:.2f} TB/s"]
    for num_tokens in TOKENS:
        # Eight sets of tokens in turn, or one token's experts would stay in the L2 cache.
        inputs = [tokens_of(model, num_tokens, torch.bfloat16) for _ in range(8)]
        graph, _ = captured(lambda inputs=inputs: [fused_experts(*tokens, *experts) for tokens in inputs])
        hit = sum(len(indices.unique()) for _, indices, _ in inputs) / 8
        floor = hit * 3 * size * intermediate * 2 / rate
        lines.append(
            f"T {num_tokens:5d}: {1000 * milliseconds(graph, 8):8.1f} us; reading {hit:.0f} of {num_experts} experts "
            f"{1000 * floor:8.1f} us"
        )
    logits = torch.randn(1, num_experts, device="cuda")
    hidden = torch.randn(1, size, device="cuda", dtype=torch.bfloat16)
    graph, _ = captured(lambda: [route(logits, None, 6, group_score=None, normalize=True, scale=1.0) for _ in range(8)])
    lines.append(f"route {1000 * milliseconds(graph, 8):.1f} us")
    graph, _ = captured(lambda: [rms_norm(hidden, hidden[0], 1e-6) for _ in range(8)])
    lines.append(f"rms_norm {1000 * milliseconds(graph, 8):.1f} us")
    with capsys.disabled():
        print("", *lines, sep="\n  ")

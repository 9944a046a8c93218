"""Four-bit weights on a GPU: accuracy at every number of tokens, bit-equal repeats, graphs, undo, memory."""

import contextlib
import copy
import gc

import pytest
import torch
import torch.nn.functional as F

from deepseek_accel import (
    Attention,
    CUDAGraphs,
    FusedExperts,
    FusedLayers,
    KVCache,
    MixedPrecision,
    OptimizeConfig,
    optimize,
    report,
    restore,
)
from deepseek_accel.ops.choice import why_not_triton
from deepseek_accel.ops.experts import fused_experts_reference, mixture
from deepseek_accel.ops.int4 import dequantize, quantize
from deepseek_accel.ops.int4_experts import int4_experts
from deepseek_accel.ops.int4_linear import int4_gated, int4_linear, int4_project, unpack
from deepseek_accel.ops.rms_norm import rms_norm_reference
from deepseek_accel.testing import picture, relative_error, tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if reason := why_not_triton(torch.device("cuda", 0)):
    pytest.skip(reason, allow_module_level=True)

TOKENS = (1, 2, 3, 4, 8, 15, 16, 17, 33, 64, 65, 128, 129, 300)
HALVES = [torch.bfloat16, torch.float16]


@contextlib.contextmanager
def poisoned():
    """New tensors hold NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def without_gradients(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    gc.collect()
    torch.cuda.empty_cache()


def packed(*shape, dtype=torch.bfloat16, group_size=128):
    """Scales differ by group up to 64 times, so that a wrong group cannot pass."""
    group = torch.arange(shape[-1], device="cuda") // group_size
    spread = torch.tensor([1.0, 64.0, 1 / 64], device="cuda")[group % 3]
    return quantize((torch.randn(*shape, device="cuda") * shape[-1] ** -0.5 * spread).to(dtype), group_size)


def is_close(ours, stock, exact):
    """Within twice the error of torch in the same dtype, and two roundings of the largest value."""
    exact = exact.double()
    error, allowed = (ours.double() - exact).abs().max(), 2 * (stock.double() - exact).abs().max()
    return bool(error <= allowed + torch.finfo(ours.dtype).eps * exact.abs().max())


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("shape, group_size", [((40, 10944), 128), ((3, 33, 1000), 64), ((7, 96), 32)])
def test_unpacking_gives_the_same_bits(shape, group_size, dtype):
    weight = packed(*shape, dtype=dtype, group_size=group_size)
    with poisoned():
        assert torch.equal(unpack(weight), dequantize(weight))


def test_unpacking_past_2_31_values():
    weight = packed(8, 4096, 2048)
    times = 40  # 2.7e9 values
    words, groups = weight.words.repeat(times, 1, 1), weight.groups.repeat(times, 1, 1, 1)
    whole = unpack(type(weight)(words, groups, weight.size, weight.group_size))
    assert whole.numel() > 2**31
    assert torch.equal(whole[-8:], dequantize(weight))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "size, count, group_size", [(1408, 2048, 128), (2048, 1408, 64), (10944, 512, 128), (2048, 576, 32), (1000, 77, 96)]
)
def test_linear_at_every_number_of_tokens(size, count, group_size, dtype):  # Q04, D01
    weight, up = (packed(count, size, dtype=dtype, group_size=group_size) for _ in range(2))
    matrix, other = dequantize(weight), dequantize(up)
    x = torch.randn(max(TOKENS), size, device="cuda", dtype=dtype)
    bias, norm = (
        torch.randn(count, device="cuda", dtype=dtype),
        (torch.rand(size, device="cuda").to(dtype) * 0.25 + 0.1, 1e-6),
    )
    residual = torch.randn(len(x), count, device="cuda", dtype=dtype)
    exact = F.linear(x.double(), matrix.double(), bias.double()) + residual.double()
    stock = F.linear(x, matrix, bias) + residual
    normed = rms_norm_reference(x.double(), norm[0].double(), norm[1])
    gated = F.silu(normed @ matrix.double().T) * (normed @ other.double().T)
    half = rms_norm_reference(x, *norm)
    stock_gated = F.silu(half @ matrix.T) * (half @ other.T)
    for tokens in TOKENS:
        with poisoned():
            ours = int4_linear(x[:tokens], weight, bias, residual[:tokens])
            assert ours.dtype == dtype
            assert is_close(ours, stock[:tokens], exact[:tokens]), tokens
            assert torch.equal(int4_linear(x[:tokens], weight, bias, residual[:tokens]), ours)
            ours = int4_gated(x[:tokens], weight, up, norm)
            assert is_close(ours, stock_gated[:tokens], gated[:tokens]), tokens
            assert torch.equal(int4_gated(x[:tokens], weight, up, norm), ours)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "size, counts, with_bias", [(2048, (3072, 576), ()), (3584, (3584, 512, 512), (0, 1, 2)), (1000, (77, 40), (1,))]
)
def test_several_weights_of_one_input(size, counts, with_bias, dtype):
    """One launch, where the kernel reads them; the last case goes one by one."""
    weights = tuple(packed(n, size, dtype=dtype) for n in counts)
    biases = tuple(torch.randn(n, device="cuda", dtype=dtype) if i in with_bias else None for i, n in enumerate(counts))
    x = torch.randn(max(TOKENS), size, device="cuda", dtype=dtype)
    for tokens in TOKENS:
        with poisoned():
            found = int4_project(x[:tokens], weights, biases)
            again = int4_project(x[:tokens], weights, biases)
        for ours, same, weight, bias in zip(found, again, weights, biases, strict=True):
            exact = F.linear(x[:tokens].double(), dequantize(weight).double(), None if bias is None else bias.double())
            assert ours.is_contiguous() and torch.equal(ours, same)
            assert is_close(ours, F.linear(x[:tokens], dequantize(weight), bias), exact), tokens


def test_fp32_models():
    weight = packed(200, 320, dtype=torch.float32, group_size=64)
    x = torch.randn(40, 320, device="cuda")
    exact = x.double() @ dequantize(weight, torch.float64).T
    for tokens in (1, 2, 17, 40):
        assert relative_error(int4_linear(x[:tokens], weight), exact[:tokens]) < 1e-5


def test_large_inputs_stay_finite_in_bf16():  # D01
    weight = packed(256, 1024)
    x = torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16) * 1e5
    exact = x.double() @ dequantize(weight, torch.float64).T
    for tokens in (1, 8, 100, 300):
        ours = int4_linear(x[:tokens], weight)
        assert relative_error(ours, exact[:tokens]) < 0.02


# (E, K, D, I, shared experts, group_size, dtype)
MODELS = [
    (64, 6, 2048, 1408, 2, 128, torch.bfloat16),
    (64, 6, 2048, 1408, 2, 128, torch.float16),
    (16, 8, 7168, 2048, 1, 128, torch.bfloat16),
    (8, 2, 1000, 200, 0, 64, torch.bfloat16),  # sizes that are no multiples of anything
    (8, 2, 256, 96, 1, 64, torch.bfloat16),  # shared experts cannot ride: I is no multiple of the group
]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_experts_at_every_number_of_tokens(model):
    num_experts, top_k, size, intermediate, num_shared, group_size, dtype = model
    kwargs = {"dtype": dtype, "group_size": group_size}
    gate_up, down = (
        packed(num_experts, 2 * intermediate, size, **kwargs),
        packed(num_experts, size, intermediate, **kwargs),
    )
    wide = num_shared * intermediate
    shared = (
        (packed(wide, size, **kwargs), packed(wide, size, **kwargs), packed(size, wide, **kwargs)) if wide else None
    )
    plain = dequantize(gate_up), dequantize(down), shared and tuple(dequantize(weight) for weight in shared)
    for tokens in (1, 2, 4, 8, 33, 128, 1000, 3000):
        hidden, residual = (torch.randn(tokens, size, device="cuda", dtype=dtype) * 0.1 for _ in range(2))  # fits fp16
        indices = torch.rand(tokens, num_experts, device="cuda").topk(top_k).indices
        weights = torch.rand(tokens, top_k, device="cuda")
        indices[0, 0], weights[0, 0] = -1, torch.nan
        indices[-1, -1], weights[-1, -1] = num_experts, torch.nan
        inputs = (hidden, indices, weights, gate_up, down, shared, residual)
        exact = fused_experts_reference(hidden.float(), indices, weights, plain[0].float(), plain[1].float())
        exact += residual.float()
        if shared is not None:
            gate, up, last = (weight.float() for weight in plain[2])
            exact += (F.silu(hidden.float() @ gate.T) * (hidden.float() @ up.T)) @ last.T
        stock = mixture(hidden, indices, weights, *plain, residual)
        with poisoned():
            ours = mixture(*inputs)
            assert torch.equal(mixture(*inputs), ours), tokens
        assert is_close(ours, stock, exact), tokens


def test_dropped_experts_are_not_read():
    gate_up, down = packed(8, 256, 256), packed(8, 256, 128)
    gate_up.groups[3], down.groups[3] = torch.nan, torch.nan
    for tokens in (1, 5, 60):
        hidden = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
        indices = torch.rand(tokens, 8, device="cuda").topk(3).indices
        weights = torch.rand(tokens, 3, device="cuda").masked_fill(indices == 3, torch.nan)
        indices[indices == 3] = -1
        assert torch.isfinite(int4_experts(hidden, indices, weights, gate_up, down)).all()
        assert (int4_experts(hidden, indices * 0 - 1, weights, gate_up, down) == 0).all()


FAST = (Attention(), FusedExperts(), FusedLayers(), KVCache())


def rounded_copy(model):
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and any(part in name for part in ("gate_proj", "gate_up", "up_proj", "down_proj")):
            parameter.data = dequantize(quantize(parameter.data, 32))
    return model


# in bf16 the router of a tiny mixture may choose differently for a rounding: there only our runs are compared
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "family, dtype, limit",
    [
        ("deepseek_v2", torch.float32, 1e-3),
        ("deepseek_v3", torch.float32, 1e-3),
        ("deepseek_v3", torch.bfloat16, None),
        ("llama", torch.bfloat16, 0.05),
    ],
)
def test_models_and_graphs(family, dtype, limit, batch):
    model = tiny_model(family).to("cuda", dtype)
    rounded = rounded_copy(model)
    ids = torch.randint(2, 128, (batch, 40), device="cuda")
    options = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    stock = rounded.generate(ids, **options)
    int4 = MixedPrecision(method="rtn", group_size=32)
    runs = []
    for passes in ((int4, *FAST), (int4, *FAST, CUDAGraphs())):
        optimize(model, OptimizeConfig(passes, allow_skips=True))
        for _ in range(2):  # the second replays
            runs.append(model.generate(ids, **options))
        counters = report(model).counters
        assert counters["mixed_precision: packed layers"] > 0
        assert not any("stock loop" in key for key in counters)
        restore(model)
    for run in runs:
        assert torch.equal(run.sequences, runs[0].sequences)
        assert torch.isfinite(torch.stack(run.logits)).all()
        assert limit is None or relative_error(run.logits[0], stock.logits[0]) < limit


def test_undo_and_memory():
    model = tiny_model("deepseek_v3", hidden_size=512, moe_intermediate_size=512, n_routed_experts=32)
    model = model.to("cuda", torch.bfloat16)
    bits = {name: p.detach().cpu() for name, p in model.named_parameters()}
    large = sum(tensor.nbytes for name, tensor in bits.items() if "mlp" in name and "proj" in name)
    before, held = picture(model), torch.cuda.memory_allocated()
    ids = torch.randint(2, 128, (1, 8), device="cuda")
    expected = model(ids).logits
    torch.cuda.reset_peak_memory_stats()
    optimize(model, [MixedPrecision(method="rtn"), FusedExperts()])
    layer = 3 * 32 * 512 * 512
    assert torch.cuda.max_memory_allocated() < held + 16 * layer  # one layer at a time, in fp32 and codes
    assert held - torch.cuda.memory_allocated() > 0.7 * large  # 4.25 bits of 16 are left, in groups of 128
    assert torch.isfinite(model(ids).logits).all()
    restore(model)
    assert picture(model) == before
    assert all(torch.equal(p.cpu(), bits[name]) and p.is_cuda for name, p in model.named_parameters())
    assert torch.equal(model(ids).logits, expected)

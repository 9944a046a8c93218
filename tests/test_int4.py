"""Four-bit weights: rounding and packing against their definition, the ops in torch, the kernels interpreted."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import interpret

from deepseek_accel.ops import int4_experts, int4_linear
from deepseek_accel.ops.experts import fused_experts_reference, mixture
from deepseek_accel.ops.int4 import DTYPES, dequantize, pack, quantize, round_to_nearest
from deepseek_accel.ops.int4_experts import int4_experts_reference
from deepseek_accel.ops.int4_linear import int4_gated_reference, int4_linear_reference
from deepseek_accel.ops.projection import gated_project, project
from deepseek_accel.ops.rms_norm import rms_norm_reference
from deepseek_accel.testing import relative_error


def randn(*shape, dtype=torch.float32, std=1.0, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std).to(dtype)


def packed(*shape, dtype=torch.float32, group_size=32, seed=0):
    """Scales that differ by group up to 64 times, so that a wrong group cannot pass (Q04)."""
    weight = randn(*shape, dtype=torch.float32, std=0.1, seed=seed)
    group = torch.arange(shape[-1]) // group_size
    return quantize((weight * torch.tensor([1.0, 64.0, 1 / 64])[group % 3]).to(dtype), group_size)


def is_close(ours, stock, exact):
    """Within twice the error of torch in the same dtype, and two roundings of the largest value."""
    error, allowed = relative_error(ours, exact), 2 * relative_error(stock, exact)
    return error <= allowed + torch.finfo(ours.dtype).eps


def by_formula(weight):
    """fp64, one group at a time, from what was packed."""
    codes, scales, zeros = weight.codes().double(), weight.scales.double(), weight.zeros.double()
    groups = torch.arange(weight.size) // weight.group_size
    return (codes - zeros[..., groups]) * scales[..., groups]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2048, 320), (40, 10944), (576, 64), (48, 100), (3, 5, 96)])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_every_value_is_off_by_half_a_scale_at_most(shape, group_size, dtype):  # Q05: also in the short last group
    weight = randn(*shape, dtype=dtype)
    before = weight.clone()
    codes, scales, zeros = round_to_nearest(weight, group_size)
    assert torch.equal(weight, before)
    assert scales.shape == zeros.shape == (*shape[:-1], -(-shape[-1] // group_size))
    assert scales.dtype == dtype and codes.dtype == zeros.dtype == torch.uint8
    groups = torch.arange(shape[-1]) // group_size
    values = (codes.double() - zeros[..., groups].double()) * scales[..., groups].double()
    assert ((values - weight.double()).abs() <= scales[..., groups].double() * (0.5 + 1e-6)).all()
    assert int(codes.amax()) == 15 and int(codes.amin()) == 0  # the whole range is used


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_without_a_range(dtype):  # L04
    weight = torch.zeros(6, 64, dtype=dtype)
    weight[1], weight[2], weight[3] = 0.3, -0.25, -0.0
    weight[4, 40] = 1e4  # an outlier makes its group coarse, not the other one
    weight[4, :32] = randn(32, dtype=dtype)
    weight[5] = torch.finfo(dtype).tiny
    codes, scales, zeros = round_to_nearest(weight, 32)
    values = dequantize(pack(codes, scales, zeros, 32), torch.float64)
    assert torch.isfinite(scales).all() and (scales > 0).all()
    assert (values[[0, 3]] == 0).all()
    assert ((values - weight.double()).abs() <= scales.double().repeat_interleave(32, 1) * 0.5001).all()
    assert (values[4, :32] != 0).any()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_is_packed_comes_out(data):
    rows, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 200))
    group_size, dtype = data.draw(st.sampled_from([32, 64, 96, 128])), data.draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    lead = data.draw(st.sampled_from([(), (2,), (2, 3)]))
    codes = torch.randint(0, 16, (*lead, rows, size), generator=generator, dtype=torch.uint8)
    shape = (*lead, rows, -(-size // group_size))
    zeros = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand(shape, generator=generator).to(dtype)
    weight = pack(codes, scales, zeros, group_size)
    assert weight.shape == codes.shape and weight.dtype == dtype
    assert torch.equal(weight.codes(), codes)
    assert torch.equal(weight.scales, scales) and torch.equal(weight.zeros, zeros)
    assert torch.equal(dequantize(weight, torch.float64), by_formula(weight))
    assert torch.equal(dequantize(weight), by_formula(weight).to(dtype))  # rounded once
    assert weight.nbytes == sum(t.nbytes for t in weight.tensors())
    assert torch.equal(weight[0].codes(), codes[0])


def test_where_codes_lie():  # 32 neighbours are 16 bytes: input 4 p + w in place p of word w
    codes = torch.arange(32, dtype=torch.uint8)[None] % 16
    weight = pack(codes, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.uint8), 32)
    expected = [sum(int(codes[0, 4 * p + w]) << 4 * p for p in range(8)) for w in range(4)]
    assert [word & 0xFFFFFFFF for word in weight.words[0].tolist()] == expected


def test_bytes():  # 4 bits and, in groups of 128 in 16 bit, 32 more for each of them
    assert quantize(randn(64, 2048, dtype=torch.bfloat16), 128).nbytes == 64 * 2048 * (4 + 32 / 128) / 8


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_cannot_be_rounded(bad):
    weight = randn(4, 64)
    weight[2, 40] = bad
    with pytest.raises(ValueError, match="NaN, an infinity"):
        round_to_nearest(weight, 32)


def test_arguments_that_do_not_fit():
    codes, scales, zeros = round_to_nearest(randn(4, 96), 64)
    for group_size in (0, 48, -32, 64.0, True):
        with pytest.raises(ValueError, match="multiple of 32"):
            round_to_nearest(randn(4, 96), group_size)
    with pytest.raises(ValueError, match=r"fp32, bf16 and fp16|fp32, bf16 or fp16"):
        round_to_nearest(randn(4, 96).double(), 32)
    with pytest.raises(ValueError, match="need scales"):
        pack(codes, scales, zeros, 32)
    with pytest.raises(ValueError, match="code is above"):
        pack(codes + 10, scales, zeros, 64)
    with pytest.raises(ValueError, match="not finite"):
        pack(codes, scales * torch.nan, zeros, 64)
    weight = pack(codes, scales, zeros, 64)
    with pytest.raises(ValueError, match="packed for that dtype"):
        int4_linear.int4_linear(randn(1, 96).bfloat16(), weight)
    with pytest.raises(ValueError, match=r"\[.., 96\]"):
        int4_linear.int4_linear(randn(1, 64), weight)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", int4_linear.CASES, ids=str)
def test_linear_in_torch(case, dtype):
    tokens, size, count, group_size = case
    weight, up = (packed(count, size, dtype=dtype, group_size=group_size, seed=seed) for seed in (0, 1))
    x, bias, residual = randn(tokens, size, dtype=dtype), randn(count, dtype=dtype), randn(tokens, count, dtype=dtype)
    exact = x.double() @ by_formula(weight).T + bias.double() + residual.double()
    ours = int4_linear.int4_linear(x, weight, bias, residual)
    stock = F.linear(x, dequantize(weight), bias) + residual
    assert ours.dtype == dtype
    if int4_linear.takes_native(tokens, weight):
        assert weight.native and dtype == torch.bfloat16 and size % group_size == count % 16 == 0
    else:
        assert torch.equal(ours, stock)
    if tokens:
        assert is_close(ours, stock, exact)
    assert torch.equal(project(x, (weight,), (bias,), residual=residual)[0], ours)
    norm = (randn(size, dtype=dtype).abs() * 0.05, 1e-6)
    plain = dequantize(weight)
    mixed = project(x, (weight, plain, up), norm=norm)  # packed and plain weights that share an input
    if tokens:
        assert relative_error(mixed[0], mixed[1]) < 4 * torch.finfo(dtype).eps
    gated = gated_project(x, weight, up, norm=norm)
    for gate, other in ((plain, up), (weight, dequantize(up))):
        if tokens:
            assert relative_error(gated_project(x, gate, other, norm=norm), gated) < 8 * torch.finfo(dtype).eps


def make_experts(case, dtype, num_shared=0):
    tokens, num_experts, top_k, size, intermediate, group_size = case
    kwargs = {"dtype": dtype, "group_size": group_size}
    gate_up, down = (
        packed(num_experts, 2 * intermediate, size, **kwargs),
        packed(num_experts, size, intermediate, **kwargs),
    )
    indices = torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(0)).topk(top_k).indices
    weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(1))
    if tokens > 1:  # some dropped, whose weights must not be read
        indices[0, 0], indices[-1, -1], indices[tokens // 2] = -1, num_experts, -7
        weights[(indices < 0) | (indices >= num_experts)] = torch.nan
    shared = None
    if num_shared:
        wide = num_shared * intermediate
        shared = (packed(wide, size, **kwargs), packed(wide, size, seed=1, **kwargs), packed(size, wide, **kwargs))
    hidden, residual = randn(tokens, size, dtype=dtype), randn(tokens, size, dtype=dtype, seed=2)
    return hidden, indices, weights, gate_up, down, shared, residual


def exact_mixture(hidden, indices, weights, gate_up, down, shared, residual):
    wide = hidden.double()
    out = fused_experts_reference(wide, indices, weights, by_formula(gate_up), by_formula(down)) + residual.double()
    if shared is not None:
        gate, up, shared_down = (by_formula(weight) for weight in shared)
        out += F.linear(F.silu(F.linear(wide, gate)) * F.linear(wide, up), shared_down)
    return out


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_shared", [0, 2])
@pytest.mark.parametrize("case", int4_experts.CASES, ids=str)
def test_experts_in_torch(case, num_shared, dtype):
    inputs = hidden, indices, weights, gate_up, down, shared, residual = make_experts(case, dtype, num_shared)
    ours = mixture(*inputs)
    assert ours.dtype == dtype and ours.shape == hidden.shape
    if len(hidden) == 0:
        return
    exact = exact_mixture(*inputs)
    plain = (dequantize(gate_up), dequantize(down), shared and tuple(dequantize(weight) for weight in shared))
    stock = mixture(hidden, indices, weights, *plain, residual)
    assert is_close(ours, stock, exact)
    if shared is not None:  # packed routed experts beside plain shared ones, and the reverse
        for mixed in ((gate_up, down, plain[2]), (*plain[:2], shared)):
            assert is_close(mixture(hidden, indices, weights, *mixed, residual), stock, exact)


def test_gradients_reach_the_inputs():
    hidden, indices, weights, gate_up, down, _, _ = make_experts((7, 4, 2, 64, 32, 32), torch.float32)
    indices.clamp_(0, 3)
    weights = weights.nan_to_num(0.5)
    gradients = []
    for experts, matrices in (
        (int4_experts.int4_experts, (gate_up, down)),
        (fused_experts_reference, (dequantize(gate_up), dequantize(down))),
    ):
        leaves = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
        experts(leaves[0], indices, leaves[1], *matrices).square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_only_chosen_experts_are_unpacked():  # an idle expert may hold anything
    hidden, indices, weights, gate_up, down, _, _ = make_experts((3, 4, 2, 96, 64, 64), torch.float32)
    indices = torch.tensor([[0, 1], [1, 3], [0, -1]])
    weights = torch.rand(3, 2)
    clean = int4_experts_reference(hidden, indices, weights, gate_up, down)
    groups = gate_up.groups.clone()
    groups[2] = torch.nan
    dirty = dataclasses.replace(gate_up, groups=groups)
    assert torch.equal(int4_experts_reference(hidden, indices, weights, dirty, down), clean)


# Interpreted kernels: few and small.


def _interpreted_linear(case, dtype):
    from deepseek_accel.kernels import int4, int4_dots, int4_tiles

    tokens, size, count, group_size = case
    weight, up = (packed(count, size, dtype=dtype, group_size=group_size, seed=seed) for seed in (0, 1))
    x, bias, residual = randn(tokens, size, dtype=dtype), randn(count, dtype=dtype), randn(tokens, count, dtype=dtype)
    whole = torch.empty(count, size, dtype=dtype)
    int4.launch_dequantize(*weight.tensors(), whole, group_size)
    assert torch.equal(whole, dequantize(weight))
    tile = int4_tiles.Tile(16, 16, 32, 4, 2)
    exact = int4_linear_reference(x.double(), weight, bias.double(), residual.double())
    gated = int4_gated_reference(x.double(), weight, up)
    pairs = [
        (int4_tiles.launch_dense(x, weight.tensors(), None, group_size, bias, residual, tile), exact),
        (int4_tiles.launch_dense(x, weight.tensors(), up.tensors(), group_size, tile=tile), gated),
    ]
    if tokens == 1:
        blocks = int4_dots.Blocks(4, 64, 1)
        norm = (randn(size, dtype=dtype).abs() + 0.5, 1e-6)
        gated = int4_gated_reference(rms_norm_reference(x.double(), norm[0].double(), norm[1]), weight, up)
        ours = int4_dots.launch(x, weight.tensors(), None, group_size, bias=bias, residual=residual, blocks=blocks)
        pairs.append((ours, exact))
        pairs.append((int4_dots.launch(x, weight.tensors(), up.tensors(), group_size, norm, blocks=blocks), gated))
    return [relative_error(ours, expected) for ours, expected in pairs]


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 2e-6), (torch.float16, 2e-3)])
@pytest.mark.parametrize("case", int4_linear.CASES[2:4], ids=str)
def test_linear_interpreted(case, dtype, limit):
    assert max(interpret(_interpreted_linear, case, dtype)) < limit


def _interpreted_experts(case, dtype, num_shared):
    from deepseek_accel.kernels import int4_dots, int4_pairs, int4_tiles

    hidden, indices, weights, gate_up, down, shared, residual = inputs = make_experts(case, dtype, num_shared)
    exact = exact_mixture(*inputs)
    errors = []
    for launch, layout in (
        (int4_pairs.launch, int4_dots.Blocks(8, 32, 1)),
        (int4_tiles.launch_experts, int4_tiles.Tile(16, 32, 32, 4, 2)),
    ):
        out = torch.empty_like(hidden)
        riding = shared and tuple(weight.tensors() for weight in shared)
        sizes = (case[4], case[5], (layout, layout))
        launch(hidden, indices, weights, gate_up.tensors(), down.tensors(), out, riding, residual, *sizes)
        errors.append(relative_error(out, exact))
    return errors


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 3e-6), (torch.float16, 3e-3)])
@pytest.mark.parametrize("case, num_shared", [((2, 4, 2, 64, 32, 32), 1), ((5, 3, 1, 40, 33, 32), 0)])
def test_experts_interpreted(case, num_shared, dtype, limit):
    assert max(interpret(_interpreted_experts, case, dtype, num_shared)) < limit


def _interpreted_mma_linear(tokens, size, count, group_size, gated):
    from deepseek_accel.kernels import int4_mma

    weight, up = (packed(count, size, dtype=torch.float16, group_size=group_size, seed=seed) for seed in (0, 1))
    x, bias, residual = (randn(*shape, dtype=torch.float16) for shape in ((tokens, size), (count,), (tokens, count)))
    x = x / 64  # products of large groups stay in fp16
    assert int4_linear.takes_mma(weight)
    errors = []
    for program in (int4_mma.Program(1), int4_mma.Program(2, 16, 2), int4_mma.Program(1, 32, 2)):
        if gated:
            exact = int4_gated_reference(x.double(), weight, up)
            ours = int4_mma.launch_dense(x, weight.tensors(), up.tensors(), group_size, program=program)
        else:
            exact = int4_linear_reference(x.double(), weight, bias.double(), residual.double())
            ours = int4_mma.launch_dense(x, weight.tensors(), None, group_size, bias, residual, program)
        errors.append(relative_error(ours, exact))
    return errors


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "tokens, size, count, group_size",
    [
        (1, 160, 40, 128),  # a short last group, whose last chunks are not there; rows that no program divides
        (2, 800, 16, 256),  # groups of two steps, more than two, and a short last one
        (11, 416, 33, 128),  # a second tile of tokens, not filled; more groups than warps
        (35, 128, 24, 128),  # several programs of tokens
    ],
)
def test_linear_by_mma_interpreted(tokens, size, count, group_size, gated):
    assert max(interpret(_interpreted_mma_linear, tokens, size, count, group_size, gated)) < 2e-3


def _interpreted_mma_several(tokens, size, counts, with_bias):
    from deepseek_accel.kernels import int4_mma

    weights = [packed(n, size, dtype=torch.float16, group_size=128, seed=i) for i, n in enumerate(counts)]
    biases = tuple(randn(n, dtype=torch.float16) if i in with_bias else None for i, n in enumerate(counts))
    x = randn(tokens, size, dtype=torch.float16) / 64
    errors = []
    for program in (int4_mma.Program(1), int4_mma.Program(2, 16, 2)):
        found = int4_mma.launch_several(x, tuple(w.tensors() for w in weights), 128, biases, program)
        for ours, weight, bias in zip(found, weights, biases, strict=True):
            assert ours.is_contiguous()
            exact = int4_linear_reference(x.double(), weight, None if bias is None else bias.double())
            errors.append(relative_error(ours, exact))
    assert len(errors) == 2 * len(counts)
    return errors


@pytest.mark.parametrize(
    "tokens, size, counts, with_bias",
    [
        (1, 160, (40, 8, 33), (0, 2)),  # rows of a weight that are no multiple of a program's; one without a bias
        (11, 128, (32, 64), ()),  # two weights; a second tile of tokens
        (3, 416, (24, 16, 72), (0, 1, 2)),
    ],
)
def test_several_by_mma_interpreted(tokens, size, counts, with_bias):
    assert max(interpret(_interpreted_mma_several, tokens, size, counts, with_bias)) < 2e-3


def _interpreted_mma_experts(case, num_shared, pairs, *programs):
    from deepseek_accel.kernels import int4_mma, int4_mma_pairs

    hidden, *others, residual = make_experts(case, torch.float16, num_shared)
    hidden = hidden / 64  # products of large groups stay in fp16
    indices, weights, gate_up, down, shared = others
    exact = exact_mixture(hidden, *others, residual)
    out = torch.empty_like(hidden)
    riding = shared and tuple(weight.tensors() for weight in shared)
    launch = int4_mma_pairs.launch if pairs else int4_mma.launch_experts
    sizes = (case[4], case[5], tuple(int4_mma.Program(*program) for program in programs))
    launch(hidden, indices, weights, gate_up.tensors(), down.tensors(), out, riding, residual, *sizes)
    return relative_error(out, exact)


@pytest.mark.parametrize(
    "case, num_shared, pairs, gate_up, down",
    [
        ((2, 16, 4, 128, 160, 128), 0, False, (1, 16, 1), (1, 32, 1)),  # I is no multiple of a group
        ((3, 4, 2, 544, 512, 256), 1, False, (2, 16, 1), (2, 16, 1)),  # groups of two steps
        ((20, 3, 3, 128, 128, 128), 2, False, (1, 16, 2), (1, 32, 1)),  # several tiles of an expert
        ((1, 16, 4, 128, 160, 128), 0, True, (2, 16, 1), (4, 16, 2)),
        ((1, 4, 2, 544, 512, 256), 1, True, (4, 16, 1), (2, 32, 1)),
        ((2, 3, 2, 128, 128, 128), 2, True, (1, 16, 1), (2, 32, 2)),
        ((5, 4, 2, 160, 128, 128), 1, True, (1, 16, 1), (1, 16, 1)),  # D is no multiple of a program's rows
    ],
)
def test_experts_by_mma_interpreted(case, num_shared, pairs, gate_up, down):
    assert interpret(_interpreted_mma_experts, case, num_shared, pairs, gate_up, down) < 3e-3


@pytest.mark.parametrize(
    "tokens, dtype, group_size, taken",
    [
        (1, torch.bfloat16, 128, "int4_mma_pairs.launch"),
        (4, torch.bfloat16, 256, "int4_mma_pairs.launch"),
        (5, torch.float16, 128, "int4_mma.launch_experts"),
        (24, torch.bfloat16, 128, "int4_mma.launch_experts"),  # 12 rows of an expert
        (25, torch.bfloat16, 128, "int4_tiles.launch_experts"),
        (1, torch.bfloat16, 64, "int4_pairs.launch"),
        (4, torch.bfloat16, 64, "int4_tiles.launch_experts"),
        (1, torch.float32, 128, "int4_pairs.launch"),
        (2000, torch.bfloat16, 128, "plain_mixture"),
    ],
)
def test_which_kernels_experts_take(monkeypatch, tokens, dtype, group_size, taken):
    pytest.importorskip("triton")
    from deepseek_accel.kernels import int4_mma, int4_mma_pairs, int4_pairs, int4_tiles

    called = []
    for module, name in (
        (int4_mma, "launch_experts"),
        (int4_mma_pairs, "launch"),
        (int4_pairs, "launch"),
        (int4_tiles, "launch_experts"),
        (int4_experts, "plain_mixture"),
    ):
        place = name if name == "plain_mixture" else f"{module.__name__.rpartition('.')[2]}.{name}"
        monkeypatch.setattr(module, name, lambda *_, place=place: called.append(place))
    monkeypatch.setattr(int4_experts, "takes_kernels", lambda *_: True)
    hidden, indices, weights, gate_up, down, _, _ = make_experts((tokens, 4, 2, 256, 256, group_size), dtype)
    int4_experts.int4_experts(hidden, indices, weights, gate_up, down)
    assert called == [taken]


@pytest.mark.parametrize(
    "tokens, size, dtype, taken",
    [
        (1, 4096, torch.bfloat16, "int4_dots"),
        (1, 16384, torch.bfloat16, "int4_mma"),
        (1, 16384, torch.float32, "int4_dots"),
        (2, 4096, torch.bfloat16, "int4_mma"),
        (32, 4096, torch.float16, "int4_mma"),
        (33, 4096, torch.float16, "int4_tiles"),
        (2, 4096, torch.float32, "int4_tiles"),
    ],
)
def test_which_kernel_a_product_takes(monkeypatch, tokens, size, dtype, taken):
    pytest.importorskip("triton")
    from deepseek_accel.kernels import int4_dots, int4_mma, int4_tiles

    called = []
    monkeypatch.setattr(int4_dots, "launch", lambda *_, **__: called.append("int4_dots"))
    monkeypatch.setattr(int4_mma, "launch_dense", lambda *_: called.append("int4_mma"))
    monkeypatch.setattr(int4_tiles, "launch_dense", lambda *_: called.append("int4_tiles"))
    monkeypatch.setattr(int4_linear, "takes_kernels", lambda *_: True)
    int4_linear.int4_linear(randn(tokens, size, dtype=dtype), packed(2, size, dtype=dtype, group_size=128))
    assert called == [taken]

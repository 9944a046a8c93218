"""Routed experts: torch forms against the formula and Hugging Face, the kernels in Triton's interpreter."""

import functools

import pytest
import torch
from interpreter import interpret

from deepseek_accel.ops.choice import triton_missing
from deepseek_accel.ops.experts import CASES, fused_experts, fused_experts_reference, grouped_experts, mixture


def make(case, dtype=torch.float32, seed=0):
    num_tokens, num_experts, top_k, size, intermediate = case
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, size, generator=generator)
    indices = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices
    weights = torch.rand(num_tokens, top_k, generator=generator)
    gate_up = torch.randn(num_experts, 2 * intermediate, size, generator=generator) * 0.1
    down = torch.randn(num_experts, size, intermediate, generator=generator) * 0.1
    return hidden.to(dtype), indices, weights, gate_up.to(dtype), down.to(dtype)


def by_formula(hidden, indices, weights, gate_up, down):
    """fp64, one pair at a time."""
    hidden, weights, gate_up, down = (tensor.double() for tensor in (hidden, weights, gate_up, down))
    num_experts, size, intermediate = down.shape
    out = torch.zeros(len(hidden), size, dtype=torch.float64)
    for token, ids in enumerate(indices.tolist()):
        for slot, expert in enumerate(ids):
            if 0 <= expert < num_experts:
                gate = gate_up[expert, :intermediate] @ hidden[token]
                up = gate_up[expert, intermediate:] @ hidden[token]
                out[token] += weights[token, slot] * (down[expert] @ (gate / (1 + (-gate).exp()) * up))
    return out


def is_close(ours, inputs):
    """Within twice the error of the reference in the same dtype, and two roundings of the largest value."""
    expected = by_formula(*inputs)
    if expected.numel() == 0:
        return ours.shape == expected.shape
    error = (ours.double() - expected).abs().max().item()
    stock = (fused_experts_reference(*inputs).double() - expected).abs().max().item()
    return error <= 2 * stock + torch.finfo(ours.dtype).eps * expected.abs().max().item()


def with_dropped(inputs, ids=(-1, -7, 10**6)):
    """Some pairs dropped: all of a token, and all of an expert; that expert and the dropped weights are NaN."""
    hidden, indices, weights, gate_up, down = (tensor.clone() for tensor in inputs)
    unread = int(indices[0, 0])
    indices[indices == unread] = ids[0]
    indices[len(indices) // 2] = ids[1]
    indices[-1, -1] = ids[2]
    gate_up[unread] = float("nan")
    down[unread] = float("nan")
    weights[(indices < 0) | (indices >= len(down))] = float("nan")
    return hidden, indices, weights, gate_up, down


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_formula(case):
    inputs = make(case, torch.float64)
    torch.testing.assert_close(fused_experts_reference(*inputs), by_formula(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_grouped(case, dtype):
    inputs = make(case, dtype)
    for with_grad in (False, True):  # with gradients one token takes the path of many
        with torch.set_grad_enabled(with_grad):
            ours = fused_experts(*inputs)
        assert ours.dtype == dtype and ours.shape == inputs[0].shape
        assert is_close(ours, inputs)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [(1, 16, 4, 64, 32), (6, 8, 3, 24, 12), (40, 4, 2, 64, 32)], ids=str)
def test_dropped_experts_are_not_read(case, dtype):
    inputs = with_dropped(make(case, dtype))
    ours = fused_experts(*inputs)
    assert is_close(ours, inputs)
    assert (ours[len(ours) // 2] == 0).all()
    sentinel = with_dropped(make(case, dtype), ids=(case[1],) * 3)  # Hugging Face's "no expert"
    assert is_close(fused_experts(*sentinel), sentinel)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_token_with_some_dropped(dtype):  # the kept weights are not the first ones
    hidden, indices, weights, gate_up, down = make((1, 16, 4, 64, 32), dtype)
    indices[0, 0], indices[0, 2] = 16, -1
    weights[0, 0] = float("nan")
    inputs = (hidden, indices, weights, gate_up, down)
    assert is_close(fused_experts(*inputs), inputs)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_mixture_is_the_sum_of_its_parts(num_tokens, num_shared, dtype):
    inputs = with_dropped(make((num_tokens, 16, 4, 24, 12), dtype))
    if num_tokens == 1:  # `with_dropped` drops all of its only token; here two of four are left, not the first ones
        inputs[1][0] = torch.tensor([16, 3, -1, 5])
        inputs[2][0] = torch.tensor([torch.nan, 0.5, torch.nan, 0.25])
        inputs[3].nan_to_num_(nan=0.1)
        inputs[4].nan_to_num_(nan=0.1)
    generator = torch.Generator().manual_seed(1)
    size = num_shared * 12
    gate, up, down = (torch.randn(s, generator=generator) * 0.3 for s in ((size, 24), (size, 24), (24, size)))
    shared = tuple(weight.to(dtype) for weight in (gate, up, down)) if num_shared else None
    residual = torch.randn(num_tokens, 24, generator=generator).to(dtype)
    given = residual.clone()
    routed = by_formula(*inputs)
    for ids in (inputs[1], torch.full_like(inputs[1], -1)):  # and every pair dropped: shared experts and residual stay
        expected = residual.double() + (routed if ids is inputs[1] else 0)
        if shared is not None:
            hidden, gate, up, down = (tensor.double() for tensor in (inputs[0], *shared))
            expected = expected + (torch.nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T
        ours = mixture(inputs[0], ids, *inputs[2:], shared, residual)
        assert ours.dtype == dtype and ours.shape == residual.shape
        error = (ours.double() - expected).abs().max().item()
        assert error <= 8 * torch.finfo(dtype).eps * expected.abs().max().item()
        assert torch.equal(residual, given) and ours.data_ptr() != residual.data_ptr()  # the caller's is not written


def stock_experts(inputs, implementation):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

    num_experts, size, intermediate = inputs[4].shape
    config = DeepseekV3Config(
        hidden_size=size, moe_intermediate_size=intermediate, n_routed_experts=num_experts, hidden_act="silu"
    )
    config._experts_implementation = implementation
    experts = DeepseekV3Experts(config).to(inputs[0].dtype)
    experts.gate_up_proj.data.copy_(inputs[3])
    experts.down_proj.data.copy_(inputs[4])
    return experts


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_equals_hugging_face(num_tokens):
    inputs = make((num_tokens, 16, 4, 64, 32), torch.float64)
    stock = stock_experts(inputs, "eager")(*inputs[:3])
    torch.testing.assert_close(fused_experts(*inputs), stock, rtol=1e-6, atol=1e-9)  # eager rounds weights to fp32
    inputs = make((num_tokens, 16, 4, 64, 32), torch.float32)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        stock = stock_experts(inputs, implementation)(*inputs[:3])
        torch.testing.assert_close(fused_experts(*inputs), stock, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_all_tokens_to_the_same_experts(num_tokens):  # E09
    hidden, indices, weights, gate_up, down = make((num_tokens, 16, 4, 64, 32))
    indices[:] = torch.tensor([11, 3, 4, 15])
    inputs = (hidden, indices, weights, gate_up, down)
    assert is_close(fused_experts(*inputs), inputs)
    indices[:] = 4  # one expert, four times
    assert is_close(fused_experts(*inputs), inputs)


@torch.no_grad()
def test_rows_do_not_mix_and_runs_repeat():
    hidden, indices, weights, gate_up, down = make((40, 4, 2, 64, 32))
    clean = fused_experts(hidden, indices, weights, gate_up, down)
    assert torch.equal(clean, fused_experts(hidden, indices, weights, gate_up, down))
    hidden[7] = float("nan")
    dirty = fused_experts(hidden, indices, weights, gate_up, down)
    assert dirty[7].isnan().all()
    torch.testing.assert_close(dirty[torch.arange(40) != 7], clean[torch.arange(40) != 7])


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_strides_and_index_dtypes(num_tokens):
    hidden, indices, weights, gate_up, down = inputs = make((num_tokens, 4, 2, 24, 12))
    wide_gate_up, wide_down = torch.full((4, 30, 40), torch.nan), torch.full((4, 30, 14), torch.nan)
    wide_gate_up[:, 3:27, 5:29], wide_down[:, 2:26, 1:13] = gate_up, down
    wide_hidden = torch.cat([hidden, hidden], 1)[:, :24]
    ours = fused_experts(
        wide_hidden, indices.int(), weights.bfloat16().float(), wide_gate_up[:, 3:27, 5:29], wide_down[:, 2:26, 1:13]
    )
    assert is_close(ours, (hidden, indices, weights.bfloat16().float(), gate_up, down))
    assert is_close(fused_experts(hidden, indices, weights.double(), gate_up, down), inputs)


def test_gradients_equal_those_of_the_reference():
    for case in ((1, 4, 2, 16, 8), (7, 4, 2, 16, 8), (7, 4, 2, 15, 7)):
        gradients = []
        for experts in (fused_experts, fused_experts_reference):
            hidden, indices, weights, gate_up, down = make(case)
            leaves = [tensor.requires_grad_() for tensor in (hidden, weights, gate_up, down)]
            experts(hidden, indices, weights, gate_up, down).square().sum().backward()
            gradients.append([leaf.grad for leaf in leaves])
        torch.testing.assert_close(gradients[0], gradients[1])


def test_all_dropped():
    hidden, indices, weights, gate_up, down = make((5, 4, 2, 16, 8))
    for num_tokens in (1, 5):
        inputs = (hidden[:num_tokens], indices[:num_tokens] + 4, weights[:num_tokens], gate_up, down)
        for with_grad in (False, True):
            with torch.set_grad_enabled(with_grad):
                assert torch.equal(grouped_experts(*inputs), torch.zeros(num_tokens, 16))


def test_shapes_and_dtypes_that_do_not_fit():
    hidden, indices, weights, gate_up, down = make((5, 4, 2, 16, 8))
    with pytest.raises(ValueError, match="do not fit"):
        fused_experts(hidden[:, :8], indices, weights, gate_up, down)
    with pytest.raises(ValueError, match="do not fit"):
        fused_experts(hidden, indices, weights, gate_up[:, :8], down)
    with pytest.raises(ValueError, match=r"\[T, K\]"):
        fused_experts(hidden, indices[:3], weights[:3], gate_up, down)
    with pytest.raises(ValueError, match="dtype"):
        fused_experts(hidden.bfloat16(), indices, weights, gate_up, down)


@pytest.mark.skipif(triton_missing() is not None, reason="Triton is not installed")
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_tiles_fit_the_chip(capability):
    from deepseek_accel.kernels.experts_tiles import _shared_bytes, _shared_limit, choose_tiles

    for element_bytes in (2, 4):
        for rows in (0.1, 8, 16, 40, 100, 5000):
            first, second = choose_tiles(rows, element_bytes, capability)
            assert first.rows == second.rows  # both matmuls share one map of tiles
            for tile, matrices in ((first, 2), (second, 1)):
                assert tile.stages >= 2
                assert _shared_bytes(tile, matrices, element_bytes, capability) < _shared_limit(capability)


def interpreted() -> dict[str, bool]:
    """For each case whether the kernels are right. To be run in Triton's interpreter; new tensors hold NaN there."""
    from deepseek_accel.kernels import experts as kernel
    from deepseek_accel.kernels import experts_order, experts_pairs, experts_tiles, experts_tma

    results = {}

    def compare(name, path, inputs):
        out = torch.full_like(inputs[0], float("nan"))
        path(*inputs, out, None, None)
        results[name] = is_close(out, inputs)
        return out

    swapped = (experts_tiles.Tile(16, 32, 16, 4, 2, True),) * 2
    paths = {
        "pair": experts_pairs.launch,
        "tile": experts_tiles.launch,
        "swapped": functools.partial(experts_tiles.launch, tiles=swapped),
    }
    for num_shared in (1, 2):  # the shared experts are one or two times as large as a routed one
        for num_tokens in (2, 20):
            hidden, indices, weights, gate_up, down = with_dropped(make((num_tokens, 16, 3, 24, 12)))
            generator = torch.Generator().manual_seed(num_shared)
            shared = tuple(
                torch.randn(shape, generator=generator) * 0.3
                for shape in ((num_shared * 12, 24), (num_shared * 12, 24), (24, num_shared * 12))
            )
            residual = torch.randn(num_tokens, 24, generator=generator)
            expected = mixture(hidden, indices, weights, gate_up, down, shared, residual)
            for name, path in paths.items():
                out = torch.full_like(hidden, float("nan"))
                path(hidden, indices, weights, gate_up, down, out, shared, residual)
                results[f"shared-{name}-{num_shared}-{num_tokens}"] = torch.allclose(out, expected, atol=1e-5)
            ours = kernel.launch(hidden, indices, weights, gate_up, down, shared, residual)
            results[f"shared-{num_shared}-{num_tokens}"] = torch.allclose(ours, expected, atol=1e-5)
    for case in CASES:
        for dtype in (torch.float32, torch.float16):
            inputs = make(case, dtype)
            results[f"launch-{case}-{dtype}"] = is_close(kernel.launch(*inputs), inputs)
            for name, path in paths.items():
                if (name != "pair" and case[0] == 1) or (name == "pair" and 1 < case[0] < 10):  # not what launch takes
                    compare(f"{name}-{case}-{dtype}", path, inputs)
    for name, path in paths.items():
        compare(f"{name}-dropped", path, with_dropped(make((6, 8, 3, 24, 12))))
        hidden, indices, weights, gate_up, down = make((6, 8, 3, 24, 12))
        compare(f"{name}-all-dropped", path, (hidden, indices + 8, weights, gate_up, down))
        indices[:] = torch.tensor([5, 7, 0])
        compare(f"{name}-same-experts", path, (hidden, indices.int(), weights.half(), gate_up, down))
        wide_gate_up, wide_down = torch.full((8, 30, 40), torch.nan), torch.full((8, 30, 14), torch.nan)
        wide_gate_up[:, 3:27, 5:29], wide_down[:, 2:26, 1:13] = gate_up, down
        strided = (torch.cat([hidden, hidden], 1)[:, :24], indices, weights, wide_gate_up[:, 3:27, 5:29])
        clean = compare(f"{name}-strided", path, (*strided, wide_down[:, 2:26, 1:13]))
        hidden[2] = float("nan")
        dirty = torch.empty_like(hidden)
        path(hidden, indices, weights, gate_up, down, dirty, None, None)
        others = torch.arange(6) != 2
        results[f"{name}-nan-stays-in-its-row"] = (
            torch.equal(dirty[others], clean[others]) and dirty[2].isnan().all().item()
        )

    # By TMA: columns of gate, up and down past the last block, more rows than a tile, dropped pairs, shared experts.
    for case in ((300, 3, 2, 64, 192), (40, 4, 3, 320, 64)):
        inputs = make(case, torch.float16)
        compare(f"tma-{case}", experts_tma.launch, inputs)
        compare(f"tma-dropped-{case}", experts_tma.launch, with_dropped(inputs))
        shared = [weight.flatten(0, 1) for weight in (inputs[3][:2, : case[4]], inputs[3][:2, case[4] :])]
        shared.append(torch.cat(inputs[4][:2].unbind(0), 1))
        residual = inputs[0].flip(0).contiguous()
        expected = mixture(
            *(tensor.double() for tensor in inputs[:1]),
            inputs[1],
            *(t.double() for t in inputs[2:]),
            tuple(weight.double() for weight in shared),
            residual.double(),
        )
        out = torch.full_like(residual, float("nan"))
        experts_tma.launch(*inputs, out, shared, residual)
        results[f"tma-shared-{case}"] = torch.allclose(out.double(), expected, rtol=2e-3, atol=2e-2)

    # The order and the map of tiles, where experts' runs end before, on and after the end of a tile.
    counts = [0, 16, 1, 31, 0, 0, 33, 15, 2, 0]
    indices = torch.tensor([expert for expert, count in enumerate(counts) for _ in range(count)] + [-1, 10])
    indices = indices[torch.randperm(100, generator=torch.Generator().manual_seed(0))]
    order = torch.full((100,), 10**6, dtype=torch.int32)
    num_tiles = 100 // 16 + 10
    tiles = torch.full((3, num_tiles), 10**6, dtype=torch.int32)
    experts_order.sort_kernel[(10,)](
        indices, order, tiles, 100, num_tiles, E=10, K=1, SHARED=0, BLOCK_M=16, BLOCK=32, PDL=False
    )
    expected = torch.where(indices >= 0, indices, 10).argsort(stable=True)[:98]
    results["sort-order"] = torch.equal(order[:98].long(), expected)
    runs = [(expert, first, end) for expert, first, end in tiles.t().tolist() if expert >= 0]
    covered = [(expert, row) for expert, first, end in runs for row in range(first, end)]
    results["sort-tiles"] = covered == list(zip(indices[expected].tolist(), range(98), strict=True))
    results["sort-unused"] = set(tiles[0].tolist()) <= set(range(-1, 10))
    return results


def test_kernels_in_the_interpreter():
    results = interpret(interpreted)
    assert len(results) >= 2 * len(CASES) + 13
    assert [name for name, right in results.items() if not right] == []

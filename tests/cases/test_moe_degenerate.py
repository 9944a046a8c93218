"""Class moe-degenerate: experts without tokens, no tokens, one expert for all."""

import copy

import pytest
import torch
from fixtures import assert_same, count, feed, tokens, whole

from deepseek_accel import optimize
from deepseek_accel.testing import relative_error, tiny_model


def pair(model_type, **options):
    stock = tiny_model(model_type, **options)
    return stock, optimize(copy.deepcopy(stock))


def blocks(model):
    return [layer.mlp for layer in model.model.layers[1:]]


MOE = ["deepseek", "deepseek_v2", "deepseek_v3"]


@torch.no_grad()
@pytest.mark.parametrize("model_type", MOE)
@pytest.mark.parametrize("length", [0, 1, 2])
def test_E09_few_or_no_tokens(model_type, length):
    """Experts with no tokens: an empty matmul, an empty grid, a shape that is lost."""
    stock, model = pair(model_type)
    x = torch.randn(1, length, 64, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(blocks(model), blocks(stock), strict=True):
        actual = ours(x)
        assert actual.shape == (1, length, 64) and actual.dtype == x.dtype
        assert_same(actual, theirs(x)) if length else None
        ids = ours.gate(x)[2]
        assert ids.shape == (length, 4) and len(ids.unique()) <= 4 * length, "experts must be idle"
    assert count(model, "experts: fused") > 0


@pytest.mark.parametrize("model_type", MOE)
def test_E09_few_or_no_tokens_with_gradients(model_type):
    """The same in training, where the stock experts run: no tokens must leave zero or no gradients, not NaN."""
    stock, model = pair(model_type)
    for length in (0, 1):
        results = []
        for m in (stock, model):
            x = torch.randn(1, length, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
            m.zero_grad()
            blocks(m)[0](x).sum().backward()
            results.append((x.grad, {n: p.grad for n, p in blocks(m)[0].named_parameters()}))
        (expected_x, expected), (actual_x, actual) = results
        assert torch.equal(actual_x, expected_x)
        for name in expected:
            assert (expected[name] is None) == (actual[name] is None), name
            assert expected[name] is None or torch.equal(actual[name], expected[name]), name


@torch.no_grad()
@pytest.mark.parametrize("same", [1, 4])
def test_E09_all_tokens_to_the_same_experts(same):
    """One expert gets every token and the others none."""
    stock, model = pair("deepseek_v3", num_experts_per_tok=same)
    for m in (stock, model):
        for block in blocks(m):
            block.gate.e_score_correction_bias[5 : 5 + same] += 100
    ids = tokens(30)
    for length in (30, 1):
        x = torch.randn(1, length, 64, generator=torch.Generator().manual_seed(1))
        for ours, theirs in zip(blocks(model), blocks(stock), strict=True):
            chosen = ours.gate(x)[2]
            if same == 1:
                assert set(chosen.flatten().tolist()) == {5}
            else:
                assert set(chosen.flatten().tolist()) == {5, 6, 7, 8}, "the two groups of the experts 5 to 8"
            assert_same(ours(x), theirs(x))
    expected = whole(stock, ids)
    assert_same(whole(model, ids), expected)
    assert_same(feed(model, ids, 20), expected)


@torch.no_grad()
@pytest.mark.parametrize("model_type", MOE)
def test_E09_dead_experts_and_their_weights_do_not_leak(model_type):
    """NaN in the weights of an expert no token uses must not reach the output: 0 * NaN is NaN."""
    stock, model = pair(model_type)
    for length in (6, 1):
        x = torch.randn(1, length, 64, generator=torch.Generator().manual_seed(2))
        block = copy.deepcopy(blocks(model)[0])
        idle = sorted(set(range(16)) - set(block.gate(x)[2].flatten().tolist()))
        assert idle
        block.experts.gate_up_proj[idle] = float("nan")
        block.experts.down_proj[idle] = float("nan")
        assert_same(block(x), blocks(stock)[0](x))


@torch.no_grad()
@pytest.mark.parametrize("model_type", MOE)
def test_E09_rows_do_not_depend_on_their_neighbours(model_type):
    """A token's result changes with the other tokens of its batch by more than rounding."""
    _, model = pair(model_type)
    x = torch.randn(8, 1, 64, generator=torch.Generator().manual_seed(3))
    for block in blocks(model):
        together = block(x)
        alone = torch.cat([block(row[None]) for row in x])
        assert relative_error(together, alone) < 1e-5
        assert torch.equal(together, block(x)), "repeated runs are bit-equal"

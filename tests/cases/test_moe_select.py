"""Class moe-select: group-limited top-k and the correction bias."""

import copy

import pytest
import torch
from fixtures import assert_same, count

from deepseek_accel import optimize
from deepseek_accel.testing import tiny_model


def gates(model_type="deepseek_v3", **options):
    """(the unpatched gate, the model, its optimized gate), of the first layer with experts."""
    stock = tiny_model(model_type, **options)
    model = optimize(copy.deepcopy(stock))
    return stock.model.layers[1].mlp.gate, model, model.model.layers[1].mlp.gate


def hidden(length=64, seed=0):
    return torch.randn(1, length, 64, generator=torch.Generator().manual_seed(seed))


def group_choice(gate, x):
    """(sigmoid scores, biased scores, ids of the two chosen groups) in fp64."""
    scores = (x.double().flatten(0, 1) @ gate.weight.double().T).sigmoid()
    biased = scores + gate.e_score_correction_bias.double()
    best = biased.unflatten(1, (4, 4)).topk(2, -1).values.sum(-1)
    return scores, biased, best.topk(2, -1).indices


@torch.no_grad()
def test_E01_negative_scores_stay_inside_the_chosen_groups():
    """Masked-out groups are filled with 0; when every biased score is negative, those zeros win."""
    _, model, gate = gates()
    gate.e_score_correction_bias.fill_(-2.0)
    x = hidden()
    _, biased, groups = group_choice(gate, x)
    outside = torch.ones(64, 4, dtype=torch.bool).scatter_(1, groups, False).repeat_interleave(4, 1)
    zero_fill = biased.masked_fill(outside, 0.0).topk(4, -1).indices
    assert outside.gather(1, zero_fill).any(1).sum() == 64, "the fixture must show the fault on every token"
    expected = biased.masked_fill(outside, float("-inf")).topk(4, -1).indices
    _, _, indices = gate(x)
    assert not outside.gather(1, indices).any()
    assert torch.equal(indices.sort(-1).values, expected.sort(-1).values)
    assert count(model, "experts: fused router") == 1


@torch.no_grad()
@pytest.mark.parametrize("norm", [True, False])
def test_E03_weights_are_the_unbiased_scores(norm):
    """Combine weights taken from biased scores; the bias is for selection only."""
    stock, model, gate = gates(norm_topk_prob=norm)
    x = hidden()
    assert gate.e_score_correction_bias.abs().max() > 0.05, "a zero bias cannot see it"
    logits, weights, indices = gate(x)
    scores, biased, _ = group_choice(gate, x)

    def combine(values):
        chosen = values.gather(1, indices)
        return (chosen / chosen.sum(-1, keepdim=True) if norm else chosen) * 2.5

    assert_same(weights, combine(scores), 1e-6)
    assert (combine(biased) - combine(scores)).abs().max() > 0.02
    stock_logits, stock_weights, stock_indices = stock(x)
    assert torch.equal(logits, stock_logits)
    order, stock_order = indices.argsort(-1), stock_indices.argsort(-1)
    assert torch.equal(indices.gather(1, order), stock_indices.gather(1, stock_order))
    assert_same(weights.gather(1, order), stock_weights.gather(1, stock_order), 1e-6)
    assert count(model, "experts: fused router") == 1


@torch.no_grad()
def test_E03_selection_uses_the_bias():
    """The bias is left out of the selection too."""
    _, _, gate = gates()
    x = hidden()
    before = gate(x)[2].sort(-1).values
    gate.e_score_correction_bias.add_(torch.linspace(-0.3, 0.3, 16))  # an update in place must be seen
    after = gate(x)[2].sort(-1).values
    assert (before != after).any(1).float().mean() > 0.5
    _, biased, groups = group_choice(gate, x)
    outside = torch.ones(64, 4, dtype=torch.bool).scatter_(1, groups, False).repeat_interleave(4, 1)
    expected = biased.masked_fill(outside, float("-inf")).topk(4, -1).indices.sort(-1).values
    assert torch.equal(after, expected)


@torch.no_grad()
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_E01_v2_groups_by_their_best(method):
    """V2's groups are ranked by their best expert, not by their two best, and "greedy" has no groups."""
    _, model, gate = gates("deepseek_v2", topk_method=method)
    x = hidden()
    scores = (x.double().flatten(0, 1) @ gate.weight.double().T).softmax(-1)
    if method == "group_limited_greedy":
        grouped = scores.unflatten(1, (4, 4))
        groups = grouped.amax(-1).topk(2, -1).indices
        by_two = grouped.topk(2, -1).values.sum(-1).topk(2, -1).indices
        assert (groups.sort(-1).values != by_two.sort(-1).values).any(), "the fixture must tell the rules apart"
        scores = scores.masked_fill(
            torch.ones(64, 4, dtype=torch.bool).scatter_(1, groups, False).repeat_interleave(4, 1), 0.0
        )
    expected_weights, expected = scores.topk(4, -1)
    _, weights, indices = gate(x)
    order, expected_order = indices.argsort(-1), expected.argsort(-1)
    assert torch.equal(indices.gather(1, order), expected.gather(1, expected_order))
    assert_same(weights.gather(1, order), expected_weights.gather(1, expected_order) * 2.5, 1e-6)
    assert count(model, "experts: fused router") == 1

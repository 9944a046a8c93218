"""Dropping experts on a GPU: the kernels against the reference, repeats, counts, graphs, whole models."""

import pytest
import torch

from deepseek_accel import AdaptiveTopK, calibrate_gates, optimize, report, restore
from deepseek_accel.ops.adaptive_topk import BATCH_TOKENS, Drop, scores_reference
from deepseek_accel.ops.choice import why_not_triton
from deepseek_accel.ops.router import make_counters, norm_route, norm_route_reference, route_normed
from deepseek_accel.testing import tiny_model

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if reason := why_not_triton(torch.device("cuda", 0)):
    pytest.skip(reason, allow_module_level=True)

V2_LITE = (64, 2048, {"top_k": 6, "scoring": "softmax", "group_score": None, "normalize": False, "scale": 1.0})
V3 = (256, 7168, {"top_k": 8, "num_groups": 8, "topk_groups": 4, "normalize": True, "scale": 2.5})


def make(model, num_tokens, *, relative=False, min_experts=1, budget=0.0):
    torch.manual_seed(0)
    num_experts, size, rule = model
    x = torch.randn(num_tokens, size, device="cuda", dtype=torch.bfloat16)
    gate = torch.randn(num_experts, size, device="cuda") * size**-0.5
    norm_weight = torch.ones(size, device="cuda", dtype=torch.bfloat16)
    middle = 1.0 if relative else 6.0 if not rule["normalize"] else 2.5
    drop = Drop(
        torch.randn(size, device="cuda") * size**-0.5,
        torch.randn(num_experts, device="cuda") + middle,
        relative,
        min_experts,
        budget,
        torch.zeros(4, dtype=torch.int64, device="cuda"),
    )
    return (x, norm_weight, 1e-6, gate, None), {**rule, "drop": drop}


@pytest.mark.parametrize("num_tokens", [1, 3, 8, 33, 128, 200])
@pytest.mark.parametrize("options", [{}, {"relative": True, "min_experts": 2}, {"budget": 3.0}], ids=str)
@pytest.mark.parametrize("model", [V2_LITE, V3], ids=["v2-lite", "v3"])
@torch.no_grad()
def test_kernels_keep_what_the_reference_keeps(model, options, num_tokens):
    inputs, rule = make(model, num_tokens, **options)
    drop = rule["drop"]
    counters = make_counters(torch.device("cuda", 0))
    for live in (num_tokens, num_tokens // 2):
        given = rule | {"live": torch.tensor([live], device="cuda", dtype=torch.int32)}
        drop.tally.zero_()
        _, weights, indices = norm_route(*inputs, **given, counters=counters)
        tally = drop.tally.tolist()
        normed, _, plain = norm_route_reference(*inputs, **given | {"drop": None})
        expected = norm_route_reference(*inputs, **given)[2]
        kept = indices >= 0
        assert torch.equal(weights > 0, kept) and not kept[live:].any()
        assert (kept[:live].sum(-1) >= drop.min_experts).all()
        # Sums in another order swap experts of nearly equal logits, and keep pairs whose score is nearly 0.
        same = (indices == expected).all(-1).float().mean().item()
        assert same > (0.9 if not drop.budget else 0.5), same
        if not drop.budget:
            scores, _ = scores_reference(norm_route_reference(*inputs, **given | {"drop": None})[1].clamp_min(1e-30),
                                         plain.clamp_min(0), drop.feeling(normed), drop)  # fmt: skip
            differ = (kept != (expected >= 0)) & (indices.clamp_min(0) == plain.clamp_min(0))
            assert (scores[differ].abs() < 0.05).all()
        assert tally[:2] == [int(kept.sum()), live]
        if num_tokens <= BATCH_TOKENS:
            distinct = len(indices[kept].unique())
            assert tally[2:] == [distinct, int(live > 0)]
        else:
            assert tally[2:] == [0, 0]
        for _ in range(20):
            again = norm_route(*inputs, **given, counters=counters)
            assert torch.equal(again[1], weights) and torch.equal(again[2], indices)
        assert not counters.any()
        routed = route_normed(normed, inputs[3], None, **given)
        assert (routed[1] == indices).all(-1).float().mean() > (0.9 if not drop.budget else 0.5)


@torch.no_grad()
def test_some_are_dropped_and_some_kept():
    for model in (V2_LITE, V3):
        for options in ({}, {"relative": True}, {"budget": 3.0}):
            inputs, rule = make(model, 33, **options)
            share = (norm_route(*inputs, **rule)[2] >= 0).float().mean().item()
            assert 0.2 < share < 0.98, (model[0], options, share)


IDS = torch.randint(2, 128, (3, 17), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["deepseek", "deepseek_v2", "deepseek_v3"])
def test_whole_models(family, dtype):
    """Target 1 gives the bits of the pass not applied, in graphs too; below, graphs give the loop's tokens."""
    from deepseek_accel import Attention, CUDAGraphs, FusedExperts, FusedLayers, KVCache

    model = tiny_model(family).to("cuda", dtype)
    found = calibrate_gates(model, [IDS[:1], IDS[1:2]])
    line = (Attention(), FusedExperts(), FusedLayers(), KVCache())

    def generate(*passes, rows=3):
        optimize(model, (*line, *passes))
        tokens = model.generate(IDS[:rows].cuda(), max_new_tokens=24, do_sample=False)
        again = model.generate(IDS[:rows].cuda(), max_new_tokens=24, do_sample=False)
        assert torch.equal(tokens, again)
        facts = report(model)
        restore(model)
        return tokens, facts

    for rows in (1, 3):
        plain, _ = generate(CUDAGraphs(), rows=rows)
        kept, facts = generate(AdaptiveTopK(1.0, sensitivity=found), CUDAGraphs(), rows=rows)
        assert torch.equal(kept, plain)
        assert facts.gating["experts_per_token"] == 4 and facts.counters["cuda_graphs: captured"] == 1
        for budget in (None, 2.0):
            config = AdaptiveTopK(0.6, sensitivity=found, batch_budget=budget)
            loop, _ = generate(config, rows=rows)
            graphs, facts = generate(config, CUDAGraphs(), rows=rows)
            # a budget depends on who shares a step: the graph of a prompt runs its last layer for all tokens
            if dtype == torch.float32 and (budget is None or rows > 1):
                assert torch.equal(graphs, loop)
            assert 1 <= facts.gating["experts_per_token"] < 4 or budget
            # the prompt, of at most 51 tokens, is a step too: all 16 experts
            assert all(0 < value <= 16 for value in facts.gating["experts_read_per_step_by_layer"])


def test_a_model_that_moves_takes_its_rule_along():
    model = tiny_model("deepseek_v3")
    found = calibrate_gates(model, [IDS[:1]])
    optimize(model, (AdaptiveTopK(0.6, sensitivity=found),))
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
        model.cuda()
        moved = model(input_ids=IDS.cuda()).logits.cpu()
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-3)

"""Routing: the reference against a definition in plain Python and Hugging Face, the kernel in Triton's interpreter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import interpret

from deepseek_accel.ops.rms_norm import rms_norm
from deepseek_accel.ops.router import CASES, norm_route, norm_route_reference, route, route_reference


def make(case, seed=0, bias_std=0.05):
    num_tokens, num_experts, top_k, num_groups, topk_groups, scoring, group_score, normalize, scale = case
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    bias = torch.randn(num_experts, generator=generator) * bias_std if scoring == "sigmoid" else None
    options = {
        "num_groups": num_groups,
        "topk_groups": topk_groups,
        "scoring": scoring,
        "group_score": group_score,
        "normalize": normalize,
        "scale": scale,
    }
    return logits, bias, top_k, options


def by_formula(logits, bias, top_k, *, num_groups, topk_groups, scoring, group_score, normalize, scale):
    """One token at a time in Python floats."""
    all_weights, all_ids = [], []
    for row in logits.tolist():
        if scoring == "softmax":
            powers = [math.exp(value - max(row)) for value in row]
            scores = [power / sum(powers) for power in powers]
        else:
            scores = [1 / (1 + math.exp(-value)) for value in row]
        choice = (
            [score + added for score, added in zip(scores, bias.tolist(), strict=True)] if bias is not None else scores
        )
        allowed = range(len(row))
        if group_score is not None:
            size = len(row) // num_groups
            best = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(num_groups)]
            value = [sum(group[:2]) if group_score == "top2" else group[0] for group in best]
            groups = sorted(range(num_groups), key=lambda g: (-value[g], g))[:topk_groups]
            allowed = [expert for expert in allowed if expert // size in groups]
        ids = sorted(allowed, key=lambda expert: (-choice[expert], expert))[:top_k]
        weights = [scores[expert] for expert in ids]
        if normalize:
            weights = [weight / (sum(weights) + 1e-20) for weight in weights]
        all_weights.append([weight * scale for weight in weights])
        all_ids.append(ids)
    shape = (len(logits), top_k)
    return torch.tensor(all_weights).double().view(shape), torch.tensor(all_ids, dtype=torch.int64).view(shape)


def by_id(weights, indices):
    """As a pair sorted by id: the order of the choices does not matter to anyone."""
    order = indices.argsort(-1)
    return weights.gather(-1, order), indices.gather(-1, order)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_formula(case):
    logits, bias, top_k, options = make(case)
    weights, indices = route_reference(logits, bias, top_k, **options)
    expected_weights, expected_indices = by_formula(logits, bias, top_k, **options)
    assert weights.dtype == torch.float32 and indices.dtype == torch.int64
    assert torch.equal(indices, expected_indices)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-7)


def v3_router(**changes):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    options = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "hidden_size": 64}
    router = DeepseekV3TopkRouter(DeepseekV3Config(**{**options, "routed_scaling_factor": 2.5, **changes}))
    with torch.no_grad():
        router.weight.normal_(0, 0.1)
        router.e_score_correction_bias.normal_(0, 0.05)
    return router


def ours_of_v3(router, logits):
    return route(
        logits,
        router.e_score_correction_bias,
        router.top_k,
        num_groups=router.num_group,
        topk_groups=router.topk_group,
        normalize=router.norm_topk_prob,
        scale=router.routed_scaling_factor,
    )


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("normalize", [False, True])
def test_equals_hugging_face_v3(normalize, scale):  # E03, E05
    torch.manual_seed(1)
    router = v3_router(norm_topk_prob=normalize, routed_scaling_factor=scale)
    logits, weights, indices = router(torch.randn(64, 64))
    ours, expected = by_id(*ours_of_v3(router, logits)), by_id(weights, indices)
    assert torch.equal(ours[1], expected[1])
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-6, atol=0)


@torch.no_grad()
def test_negative_bias_stays_in_the_chosen_groups():  # E01
    torch.manual_seed(1)
    router = v3_router()
    router.e_score_correction_bias.fill_(-2.0)
    logits, weights, indices = router(torch.randn(64, 64))
    ours = by_id(*ours_of_v3(router, logits))
    assert all(len(row.unique()) <= 2 for row in ours[1] // 4)
    best = (logits.sigmoid() - 2).view(64, 4, 4).topk(2).values.sum(-1).topk(2).indices
    assert (ours[1].unsqueeze(-1) // 4 == best.unsqueeze(1)).any(-1).all()
    assert torch.equal(ours[1], by_id(weights, indices)[1])


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 16.0])
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_equals_hugging_face_v2(method, scale):
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    torch.manual_seed(1)
    config = DeepseekV2Config(
        n_routed_experts=160,
        num_experts_per_tok=6,
        n_group=8,
        topk_group=3,
        hidden_size=64,
        topk_method=method,
        routed_scaling_factor=scale,
    )
    router = DeepseekV2TopkRouter(config)
    router.weight.normal_(0, 0.1)
    logits, weights, indices = router(torch.randn(64, 64))
    ours = route(
        logits,
        None,
        6,
        num_groups=8,
        topk_groups=3,
        scoring="softmax",
        group_score="max" if method == "group_limited_greedy" else None,
        normalize=False,
        scale=scale,
    )
    ours, expected = by_id(*ours), by_id(weights, indices)
    assert torch.equal(ours[1], expected[1])
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-6, atol=0)


def test_bias_keeps_fp32_resolution():  # E07
    bias = 8 + 0.01 * torch.arange(16)
    weights, indices = route(torch.zeros(3, 16), bias, 4, group_score=None, normalize=True, scale=1.0)
    assert indices.tolist() == [[15, 14, 13, 12]] * 3
    assert torch.equal(weights, torch.full((3, 4), 0.25))


def test_ties_go_to_the_lower_id():
    _, indices = route(torch.zeros(2, 16), None, 4, num_groups=4, topk_groups=2, normalize=True, scale=1.0)
    assert indices.tolist() == [[0, 1, 2, 3]] * 2
    underflow = torch.zeros(1, 16)
    underflow[0, 5] = 500.0  # every other softmax is 0
    options = {"scoring": "softmax", "group_score": "max", "normalize": False, "scale": 1.0}
    _, indices = route(underflow, None, 4, num_groups=4, topk_groups=1, **options)
    assert indices.tolist() == [[5, 4, 6, 7]]


@pytest.mark.parametrize(
    "top_k, options, message",
    [
        (0, {}, "top_k"),
        (17, {}, "top_k"),
        (9, {"num_groups": 4, "topk_groups": 2}, "top_k"),
        (2, {"num_groups": 3}, "fit"),
        (2, {"num_groups": 4, "topk_groups": 5}, "fit"),
        (2, {"num_groups": 16, "topk_groups": 8}, "top2"),
        (2, {"scoring": "tanh"}, "scoring"),
        (2, {"group_score": "mean"}, "group_score"),
    ],
)
def test_numbers_that_do_not_fit(top_k, options, message):
    with pytest.raises(ValueError, match=message):
        route(torch.zeros(2, 16), None, top_k, normalize=True, scale=1.0, **options)
    with pytest.raises(ValueError, match="bias"):
        route(torch.zeros(2, 16), torch.zeros(4), 2, normalize=True, scale=1.0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_invariants(data):
    num_groups = data.draw(st.integers(1, 6))
    size = data.draw(st.integers(2, 7))
    topk_groups = data.draw(st.integers(1, num_groups))
    top_k = data.draw(st.integers(1, topk_groups * size))
    scoring = data.draw(st.sampled_from(["sigmoid", "softmax"]))
    group_score = data.draw(st.sampled_from(["top2", "max"]))
    normalize = data.draw(st.booleans())
    shift = data.draw(st.sampled_from([-2.0, 0.0, 3.0]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    num_experts = num_groups * size
    # Coarse logits make ties common.
    logits = torch.randint(-4, 5, (7, num_experts), generator=generator) / 2
    bias = torch.randint(-2, 3, (num_experts,), generator=generator) / 4 + shift
    weights, indices = route(
        logits,
        bias,
        top_k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        scoring=scoring,
        group_score=group_score,
        normalize=normalize,
        scale=2.5,
    )
    assert ((indices >= 0) & (indices < num_experts)).all()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    for row, chosen, weight in zip(scores, indices, weights, strict=True):
        assert len(chosen.unique()) == top_k
        assert len((chosen // size).unique()) <= topk_groups
        if normalize:
            assert weight.sum().item() == pytest.approx(2.5, rel=1e-5)
        else:
            torch.testing.assert_close(weight, row[chosen] * 2.5)
        choice = row + bias
        ranked = [(-choice[expert].item(), expert) for expert in chosen.tolist()]
        assert ranked == sorted(ranked)


def interpreted() -> dict[str, bool]:
    """For each case whether the kernel is right. To be run in Triton's interpreter; new tensors hold NaN there."""
    from deepseek_accel.kernels.router import launch

    results = {}

    def compare(name, logits, bias, top_k, options):
        weights, indices = launch(logits, bias, top_k, **options)
        expected_weights, expected_indices = route_reference(logits, bias, top_k, **options)
        close = torch.allclose(weights, expected_weights, rtol=1e-5, atol=1e-7, equal_nan=True)
        results[name] = close and torch.equal(indices, expected_indices) and weights.dtype == torch.float32

    for case in CASES:
        compare(str(case), *make(case))
    logits, _, top_k, options = make(CASES[2])
    compare("E01", logits, torch.full((16,), -2.0), top_k, options)
    compare("E07", torch.zeros(2, 16), 8 + 0.01 * torch.arange(16), 4, options)
    compare("ties", torch.zeros(2, 16), None, top_k, options)
    compare("ties-of-signed-zeros", torch.zeros(1, 16), torch.tensor([-0.5, -0.5] * 8), top_k, options)
    compare("strided", torch.cat([logits, logits], 1)[:, 8:24], None, top_k, options)
    compare("transposed", logits.t().contiguous().t(), None, top_k, options)
    logits[3] = float("nan")
    logits[5, 2] = float("nan")
    logits[6, 3] = float("inf")
    logits[7] = float("-inf")
    compare("nan", logits, None, top_k, options)
    return results


def test_kernel_in_the_interpreter():
    results = interpret(interpreted)
    assert len(results) == len(CASES) + 7
    assert [name for name, right in results.items() if not right] == []


# (T, D, live or None, route case): what only it can catch
NORM_CASES = [
    (1, 64, None, CASES[5]),  # one token
    (3, 33, None, CASES[2]),  # odd D; three tokens fill a group of four
    (5, 64, 3, CASES[4]),  # two token groups; idle tokens in the first and all of the second
    (5, 64, 0, CASES[6]),  # no token is live
    (6, 520, 6, CASES[7]),  # all are; E = 6 is less than the experts of two programs of four
    (33, 48, 20, CASES[8]),  # more tokens: other tiles; V3's rule
]


def make_norm(case, dtype=torch.float32):
    num_tokens, size, live, rule = case
    _, bias, top_k, options = make(rule)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, size, generator=generator).to(dtype) * 3
    norm_weight = (1 + 0.3 * torch.randn(size, generator=generator)).to(dtype)
    gate_weight = torch.randn(rule[1], size, generator=generator) * 3 * size**-0.5
    live = None if live is None else torch.tensor([live], dtype=torch.int32)
    return (x, norm_weight, 1e-6, gate_weight, bias, top_k), {**options, "live": live}


@pytest.mark.parametrize("case", NORM_CASES, ids=str)
def test_norm_route_on_a_cpu_is_its_parts(case):
    inputs, options = make_norm(case)
    normed, weights, indices = norm_route(*inputs, **options)
    x, norm_weight, eps, gate_weight, bias, top_k = inputs
    live = len(x) if case[2] is None else case[2]
    expected = by_formula(
        (rms_norm(x, norm_weight, eps).double() @ gate_weight.double().T)[:live], bias, top_k, **make(case[3])[3]
    )
    torch.testing.assert_close(normed, rms_norm(x, norm_weight, eps))
    assert torch.equal(indices[:live], expected[1])
    torch.testing.assert_close(weights[:live].double(), expected[0], rtol=1e-4, atol=1e-6)
    assert (indices[live:] == -1).all() and (weights[live:] == 0).all()


@torch.no_grad()
def test_norm_route_is_the_stock_router():
    router = v3_router().bfloat16()
    router.e_score_correction_bias.data = router.e_score_correction_bias.float()
    x, norm_weight = torch.randn(64, 64).bfloat16(), torch.ones(64).bfloat16()
    rule = {"num_groups": router.num_group, "topk_groups": router.topk_group, "normalize": router.norm_topk_prob}
    bias = router.e_score_correction_bias
    normed, weights, indices = norm_route(
        x, norm_weight, 1e-6, router.weight, bias, router.top_k, **rule, scale=router.routed_scaling_factor
    )
    _, expected_weights, expected_indices = router(normed)
    ours, expected = by_id(weights, indices), by_id(expected_weights, expected_indices)
    assert torch.equal(ours[1], expected[1])
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-6, atol=0)


def test_norm_route_errors():
    x, norm_weight, gate = torch.randn(2, 8), torch.ones(8), torch.randn(4, 8)
    options = {"normalize": True, "scale": 1.0}
    for inputs, message in (
        ((x[0], norm_weight, 1e-6, gate, None, 2), "x must be"),
        ((x, norm_weight, 1e-6, gate[:, :4], None, 2), "x must be"),
        ((x, norm_weight[:4], 1e-6, gate, None, 2), "norm_weight"),
        ((x, norm_weight.half(), 1e-6, gate, None, 2), "norm_weight"),
        ((x, norm_weight, 1e-6, gate, None, 5), "top_k"),
    ):
        with pytest.raises(ValueError, match=message):
            norm_route(*inputs, **options)
    with pytest.raises(ValueError, match="live"):
        norm_route(x, norm_weight, 1e-6, gate, None, 2, live=torch.tensor([1]), **options)


def interpreted_norm_route() -> dict[str, bool]:
    """For each case and tiling whether the kernel is right and leaves its counters as they were."""
    from deepseek_accel.kernels.router import launch_norm_route

    results = {}
    for case in NORM_CASES:
        for dtype in (torch.float32, torch.float16):
            for tiles in (None, (1, 1, 1), (4, 4, 2)):
                inputs, options = make_norm(case, dtype)
                counters = torch.zeros(len(inputs[0]), dtype=torch.int32)
                ours = launch_norm_route(*inputs, **options, counters=counters, tiles=tiles)
                expected = norm_route_reference(*inputs, **options)
                tolerance = 1e-5 if dtype == torch.float32 else 2e-3
                results[f"{case} {dtype} {tiles}"] = (
                    torch.equal(ours[2], expected[2])
                    and torch.allclose(ours[0], expected[0], rtol=tolerance, atol=tolerance)
                    and torch.allclose(ours[1], expected[1], rtol=10 * tolerance, atol=1e-6)
                    and bool((counters == 0).all())
                )
    return results


def test_norm_route_kernel_in_the_interpreter():
    results = interpret(interpreted_norm_route)
    assert len(results) == 6 * len(NORM_CASES)
    assert [name for name, right in results.items() if not right] == []


def interpreted_logits() -> dict[str, bool]:
    """Whether the logits in parts are right for each tiling, and the selection from parts, with idle tokens."""
    from deepseek_accel.kernels import router_logits
    from deepseek_accel.kernels.router import launch

    results = {}
    for num_tokens, size, num_experts in ((1, 64, 16), (19, 2050, 20), (300, 48, 6)):
        for dtype in (torch.float32, torch.float16):
            generator = torch.Generator().manual_seed(2)
            normed = torch.randn(num_tokens, size, generator=generator).to(dtype)
            gate = (torch.randn(num_experts, size, generator=generator) * size**-0.5).to(dtype)
            exact = normed.double() @ gate.double().T
            for tiles in (None, (32, 16, 16, 16, 2, 2, 1), (size // 16 * 16 + 16, 16, 32, 16, 2, 2, 1)):
                parts = router_logits.launch(normed, gate, tiles)
                close = torch.allclose(parts.double().sum(0), exact, rtol=1e-5, atol=1e-5)
                results[f"{num_tokens} {size} {dtype} {tiles}"] = close and parts.dtype == torch.float32
    # Parts of one logit whose sum alone is right, and a part of another token far away.
    for case in (CASES[2], CASES[5]):
        logits, bias, top_k, options = make(case)
        parts = torch.stack([logits - 9, torch.full_like(logits, 4), torch.full_like(logits, 5)])
        for live in (None, 5):
            tensor = None if live is None else torch.tensor([live], dtype=torch.int32)
            weights, indices = launch(parts, bias, top_k, **options, live=tensor)
            expected = route_reference((parts[0] + parts[1]) + parts[2], bias, top_k, **options)
            used = slice(0, live)
            results[f"{case} {live}"] = (
                torch.equal(indices[used], expected[1][used])
                and torch.allclose(weights[used], expected[0][used], rtol=1e-5, atol=1e-7)
                and (live is None or bool((indices[live:] == -1).all() and (weights[live:] == 0).all()))
            )
    return results


def test_logits_in_the_interpreter():
    results = interpret(interpreted_logits)
    assert len(results) == 18 + 4
    assert [name for name, right in results.items() if not right] == []


def test_three_parts_hold_an_fp32_weight():
    """What `router_logits` does with an fp32 weight; its bf16 products cannot be run in the interpreter."""
    weight = torch.randn(10000, generator=torch.Generator().manual_seed(3)) * 0.02
    high = weight.bfloat16().float()
    middle = (weight - high).bfloat16().float()
    low = (weight - high - middle).bfloat16().float()
    assert torch.equal(high.double() + middle.double() + low.double(), weight.double())

"""Adaptive top-k: the rule against its definition, the kernels, calibration, the pass and what it keeps."""

import copy
import json
import math
import pickle
from dataclasses import replace

import pytest
import torch
from interpreter import interpret

from deepseek_accel import (
    AccelError,
    AdaptiveTopK,
    Attention,
    FusedExperts,
    FusedLayers,
    GateSensitivity,
    KVCache,
    OptimizeConfig,
    PlanError,
    calibrate_gates,
    families,
    models,
    optimize,
    plan,
    report,
    restore,
)
from deepseek_accel.bench import gating
from deepseek_accel.gating.sensitivity import fingerprint
from deepseek_accel.ops.adaptive_topk import BATCH_TOKENS, CASES, Drop, drop_experts
from deepseek_accel.ops.router import norm_route, norm_route_reference
from deepseek_accel.testing import picture, tiny_config, tiny_model

STEP = (FusedExperts(), Attention(), FusedLayers(), KVCache())


def make(case, seed=0):
    num_tokens, num_experts, top_k, min_experts, relative, budget = case
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(num_tokens, top_k, generator=generator) + 0.01
    indices = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)])
    offset = torch.randn(num_experts, generator=generator) + (0.7 if not relative else 2.0)
    tally = torch.zeros(4, dtype=torch.int64)
    drop = Drop(torch.randn(8, generator=generator) * 0.5, offset, relative, min_experts, budget, tally)
    hidden = torch.randn(num_tokens, 8, generator=generator)
    return weights, indices, hidden, drop


def by_formula(weights, indices, hidden, drop, live):
    """Kept pairs as a set of (token, slot), in Python floats."""
    scores, safe = {}, set()
    for t in range(live):
        felt = sum(a * b for a, b in zip(drop.slope.tolist(), hidden[t].tolist(), strict=True))
        largest = max(weights[t].tolist())
        for k, (w, e) in enumerate(zip(weights[t].tolist(), indices[t].tolist(), strict=True)):
            scores[t, k] = 2 * math.log(w) + drop.offset[e].item() + (-2 * math.log(largest) if drop.relative else felt)
        ranked = sorted(range(weights.shape[1]), key=lambda k: (-scores[t, k], k))
        safe |= {(t, k) for k in ranked[: drop.min_experts]}
    if not drop.budget:
        return {pair for pair, score in scores.items() if score >= 0} | safe
    wanted = {indices[pair].item() for pair in safe}
    loss: dict[int, float] = {}
    for pair, score in scores.items():
        loss[indices[pair].item()] = loss.get(indices[pair].item(), 0.0) + math.exp(score)
    return {pair for pair in scores if indices[pair].item() in wanted or loss[indices[pair].item()] >= drop.budget}


@pytest.mark.parametrize("live", [None, 2, 0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_rule_is_the_formula(case, live):
    weights, indices, hidden, drop = make(case)
    number = len(weights) if live is None else min(live, len(weights))
    tensor = None if live is None else torch.tensor([live], dtype=torch.int32)
    kept_weights, kept = drop_experts(weights, indices, drop.feeling(hidden), drop, tensor)
    expected = by_formula(weights, indices, hidden, drop, number)
    assert {tuple(pair) for pair in (kept >= 0).nonzero().tolist()} == expected
    assert torch.equal(kept_weights, torch.where(kept >= 0, weights, 0.0))
    assert torch.equal(kept, torch.where(kept >= 0, indices, -1))
    distinct = len({indices[pair].item() for pair in expected})
    assert drop.tally.tolist() == [len(expected), number, distinct, int(number > 0)]


def test_cases_drop_some_and_keep_some():
    shares = []
    for case in CASES:
        weights, indices, hidden, drop = make(case)
        shares.append((drop_experts(weights, indices, drop.feeling(hidden), drop)[1] >= 0).float().mean().item())
    assert sum(0 < share < 1 for share in shares) == len(CASES) - 1 and shares[2] == 1  # min_experts = K


def test_a_budget_leaves_long_steps_alone_and_infinite_offsets_keep_all():
    weights, indices, hidden, drop = make((BATCH_TOKENS + 1, 16, 4, 1, False, 5.0))
    assert torch.equal(drop_experts(weights, indices, drop.feeling(hidden), drop)[1], indices)
    assert drop.tally.tolist() == [indices.numel(), len(indices), 0, 0]
    weights[0] = 0.0  # ln 0 + inf is NaN, which stays
    drop = drop._replace(offset=torch.full((16,), float("inf")), budget=0.0)
    assert torch.equal(drop_experts(weights, indices, drop.feeling(hidden), drop)[1], indices)


def test_a_budget_of_one_is_the_rule_of_one_token():
    for seed in range(20):
        weights, indices, hidden, drop = make((1, 16, 4, 1, False, 0.0), seed)
        alone = drop_experts(weights, indices, drop.feeling(hidden), drop)
        assert torch.equal(drop_experts(weights, indices, drop.feeling(hidden), drop._replace(budget=1.0))[1], alone[1])


def make_norm(case, live, dtype):
    """Inputs of `norm_route`, D = 24."""
    num_tokens, num_experts, top_k, min_experts, relative, budget = case
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_tokens, 24, generator=generator).to(dtype)
    norm_weight = (1 + 0.3 * torch.randn(24, generator=generator)).to(dtype)
    gate = torch.randn(num_experts, 24, generator=generator) * 0.5
    drop = Drop(
        torch.randn(24, generator=generator) * 0.3,
        torch.randn(num_experts, generator=generator) + (2.0 if relative else 2.5),
        relative,
        min_experts,
        budget,
        torch.zeros(4, dtype=torch.int64),
    )
    rule = {"group_score": None, "normalize": True, "scale": 1.0, "drop": drop}
    if live is not None:
        rule["live"] = torch.tensor([live], dtype=torch.int32)
    return (x, norm_weight, 1e-6, gate, None, top_k), rule


def interpreted() -> dict[str, bool]:
    """For each case whether both kernels keep what the reference does. To be run in Triton's interpreter."""
    from deepseek_accel.kernels.router import launch, launch_norm_route

    results = {}
    for number, case in enumerate(CASES):
        live = (None, 2, None, 0, 20, None)[number]
        inputs, rule = make_norm(case, live, (torch.float32, torch.float16)[number % 2])
        drop = rule["drop"]
        expected = norm_route_reference(*inputs, **rule)
        counts = drop.tally.clone()
        drop.tally.zero_()
        counters = torch.zeros(len(inputs[0]), dtype=torch.int32)
        ours = launch_norm_route(*inputs, **{"live": None, **rule}, counters=counters)
        close = torch.allclose(ours[1], expected[1], rtol=1e-3, atol=1e-5)
        results[str(case)] = torch.equal(ours[2], expected[2]) and close and torch.equal(drop.tally, counts)
        if len(inputs[0]) <= 5:
            drop.tally.zero_()
            logits = expected[0].float() @ inputs[3].T
            parted = launch(logits, None, inputs[5], **rule, feeling=drop.feeling(expected[0]))
            results[f"{case} route"] = torch.equal(parted[1], expected[2]) and torch.equal(drop.tally, counts)
    return results


def test_kernels_in_the_interpreter():
    results = interpret(interpreted)
    assert len(results) == 2 * len(CASES) - 1
    assert [name for name, right in results.items() if not right] == []


# Calibration


@pytest.fixture(scope="module")
def bundled():
    model, tokenizer = models.load_tiny(dtype=torch.float32)
    return model, gating.windows(models.heldout_documents()[:5], tokenizer, 256)[:12]


@pytest.fixture(scope="module")
def sensitivity(bundled):
    model, rows = bundled
    before = picture(model)
    result = calibrate_gates(model, [row[None] for row in rows[::2]])
    assert picture(model) == before
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    return result


def test_gradients_are_those_of_finite_differences():
    """The first-order term against the loss itself, with each rank's weight moved a little."""
    model = tiny_model("deepseek_v3")
    ids = torch.randint(2, 128, (1, 24), generator=torch.Generator().manual_seed(1))
    measured = calibrate_gates(model, [ids])
    step = 2e-3
    for layer in range(2):
        for rank in range(4):

            def moved(number, weights, by, layer=layer, rank=rank):
                without = gating.without_ranks(weights, range(rank, rank + 1))
                return weights + by * (weights - without) if number == layer else weights

            losses = []
            for by in (step, -step):
                with gating.changed_weights(model, lambda number, weights, by=by: moved(number, weights, by)):
                    losses.append(gating.mean_loss(model, ids) * 23 / 24)
            slope = -(losses[0] - losses[1]) / (2 * step)
            assert measured.first[layer, rank].item() == pytest.approx(slope, rel=2e-2, abs=5e-4)


def test_prediction_agrees_with_really_leaving_out(bundled, sensitivity):
    model, rows = bundled
    told: list[str] = []
    predicted, measured = gating.brute_force(model, sensitivity, rows[::2], told.append)
    assert [text.split()[-3] for text in told] == ["0", "1", "2", "3"]
    assert len(predicted) == 16
    assert gating.correlation(predicted, measured) >= 0.9


def test_quality_and_mean_experts(bundled, sensitivity):
    """On text that was not calibrated on: near the target, and cheaper than the same mean by relative weights."""
    model, rows = bundled
    scorer = gating.Scorer(model, rows[1::2], gating.mean_loss(model, rows[1::2]))
    gradient = scorer.adaptive("gradient", AdaptiveTopK(0.75, sensitivity=sensitivity))
    threshold = scorer.adaptive("threshold", AdaptiveTopK(0.75, "threshold", sensitivity))
    static = scorer.static(3, 4)
    assert gradient.experts == pytest.approx(3.0, abs=0.15) and threshold.experts == pytest.approx(3.0, abs=0.15)
    assert 0 < gradient.loss_percent < 0.85 * min(threshold.loss_percent, static.loss_percent)


def test_thresholds_meet_the_target_on_the_calibrated_text(bundled, sensitivity):
    model, rows = bundled
    for target, min_experts in ((0.9, 1), (0.6, 2)):
        config = AdaptiveTopK(target, sensitivity=sensitivity, min_experts=min_experts)
        optimize(model, (config,))
        gating.mean_loss(model, rows[::2])
        facts = report(model).gating
        restore(model)
        assert facts["experts_per_token"] == pytest.approx(4 * target, abs=0.1)
        assert len(facts["experts_per_token_by_layer"]) == 4


def test_save_and_load(sensitivity, bundled, tmp_path):
    path = tmp_path / "gates.safetensors"
    sensitivity.save(path)
    loaded = GateSensitivity.load(path)
    assert loaded == sensitivity and hash(loaded) == hash(sensitivity) and "16" not in repr(loaded)[:20]
    loaded.offset[0, 0] += 1
    assert loaded != sensitivity
    half, _ = models.load_tiny()  # bf16: the same checkpoint in another dtype
    assert list(plan(half, (AdaptiveTopK(sensitivity=str(path)),)).edits())
    with torch.no_grad():
        half.model.layers[2].mlp.gate.weight.mul_(2)
    with pytest.raises(PlanError, match="other weights"):
        plan(half, (AdaptiveTopK(sensitivity=path),))
    with pytest.raises(PlanError, match="another model"):
        plan(tiny_model("deepseek_v3"), (AdaptiveTopK(sensitivity=path),))
    with pytest.raises(PlanError, match="no such file"):
        plan(bundled[0], (AdaptiveTopK(sensitivity=str(tmp_path / "none")),))
    path.write_bytes(b"nothing")
    with pytest.raises(PlanError, match="cannot be read"):
        GateSensitivity.load(path)


def test_calibration_refuses():
    model = tiny_model("deepseek_v3")
    ids = torch.ones(1, 5, dtype=torch.long)
    for data, message in (
        (["text"], "tokenizer"),
        ("text", "list of texts"),
        ([], "no text"),
        ([ids[:, :1]], "no text"),
        ([ids[0]], r"\[1, T\]"),
        ([3], "int"),
    ):
        with pytest.raises(PlanError, match=message):
            calibrate_gates(model, data)
    with pytest.raises(PlanError, match="no routed experts"):
        calibrate_gates(tiny_model("llama"), [ids])
    optimize(model, (FusedExperts(),))
    with pytest.raises(PlanError, match="optimized"):
        calibrate_gates(model, [ids])


# The pass

IDS = torch.randint(2, 128, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["deepseek", "deepseek_v2", "deepseek_v3"])
def small(request):
    model = tiny_model(request.param)
    return model, calibrate_gates(model, [IDS[:1], IDS[1:2]])


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def generate(model):
    return model.generate(IDS, max_new_tokens=6, do_sample=False)


def test_target_one_changes_no_bit(small):
    model, found = small
    for others in ((), (FusedExperts(),), STEP):
        for extra in ({}, {"batch_budget": 3.0}, {"method": "threshold"}):
            optimize(model, others) if others else None
            expected, tokens = logits(model), generate(model)
            restore(model)
            optimize(model, (*others, AdaptiveTopK(1.0, sensitivity=found, **extra)))
            assert torch.equal(logits(model), expected) and torch.equal(generate(model), tokens)
            facts = report(model)
            assert facts.gating["experts_per_token"] == 4 and not facts.warnings()
            restore(model)


def test_paths_agree_and_undo_is_exact(small):
    """Stock's experts on weights of 0, the fused ones on dropped ids, and the straight line give the same."""
    model, found = small
    before, expected = picture(model), logits(model)
    results, tokens = [], []
    for others in ((), (FusedExperts(),), STEP):
        optimize(model, (*others, AdaptiveTopK(0.6, sensitivity=found)))
        results.append(logits(model))
        tokens.append(generate(model))
        facts = report(model)
        assert 1 <= facts.gating["experts_per_token"] < 3.6 and facts.counters["adaptive_topk: routers"] > 0
        assert all(0 < distinct <= 12 for distinct in facts.gating["experts_read_per_step_by_layer"])
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert torch.equal(logits(copied), results[-1]) and report(model).gating == facts.gating  # counts of its own
        restore(model)
    assert picture(model) == before and torch.equal(logits(model), expected)
    assert not torch.allclose(results[0], expected, atol=1e-3)
    for result, chosen in zip(results[1:], tokens[1:], strict=True):
        torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-4)
        assert torch.equal(chosen, tokens[0])


def test_gradients_flow_through_what_is_kept(small):
    model, found = small
    optimize(model, (FusedExperts(), AdaptiveTopK(0.6, sensitivity=found)))
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    got = model(input_ids=IDS).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    got.sum().backward()
    assert model.model.layers[1].mlp.gate.weight.grad.abs().sum() > 0
    model.zero_grad()
    restore(model)


def test_a_batch_budget_reads_fewer_experts(small):
    model, found = small
    read = []
    for budget in (None, 4.0):
        optimize(model, (*STEP, AdaptiveTopK(0.6, sensitivity=found, batch_budget=budget)))
        generate(model)
        facts = report(model).gating
        read.append((sum(facts["experts_read_per_step_by_layer"]), facts["experts_per_token"]))
        restore(model)
    assert read[1][0] < read[0][0]


def test_threshold_without_calibration():
    model = tiny_model("deepseek_v3")
    optimize(model, (AdaptiveTopK(0.1, "threshold"),))
    seen = []
    gate = model.model.layers[1].mlp.gate
    hook = gate.register_forward_hook(lambda module, inputs, output: seen.append(output))
    logits(model)
    hook.remove()
    _, weights, indices = seen[0]
    kept = weights > 0
    assert kept.any(-1).all() and not kept.all() and ((indices >= 0) & (indices < 16)).all()
    assert (weights[kept] >= 0.9 * weights.amax(-1, keepdim=True).expand_as(weights)[kept]).all()
    assert any("below 0.9" in note for row in report(model).passes for note in row["notes"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"target": 0}, "target"),
        ({"target": 1.2}, "target"),
        ({"target": True}, "target"),
        ({"method": "magic"}, "method"),
        ({"min_experts": 0}, "min_experts"),
        ({"min_experts": 1.5}, "min_experts"),
        ({"sensitivity": 3}, "sensitivity"),
        ({"batch_budget": -1}, "batch_budget"),
    ],
)
def test_options_that_are_wrong(options, message):
    with pytest.raises(PlanError, match=message):
        AdaptiveTopK(**options)


def test_what_does_not_fit_is_refused_before_anything_changes(small):
    model, found = small
    before = picture(model)
    for config, message in (
        (AdaptiveTopK(), "needs a sensitivity"),
        (AdaptiveTopK(0.25, sensitivity=found, min_experts=2), "min_experts"),
        (AdaptiveTopK(0.75, sensitivity=found, min_experts=found.top_k), "min_experts"),
        (AdaptiveTopK(method="threshold", min_experts=5), "min_experts"),
    ):
        with pytest.raises(PlanError, match=message):
            optimize(model, (config,))
    assert picture(model) == before
    with pytest.raises(PlanError, match="no routed experts"):
        optimize(tiny_model("llama"), (AdaptiveTopK(method="threshold"),))
    skipped = plan(model, OptimizeConfig((FusedExperts(), AdaptiveTopK()), allow_skips=True))
    assert sum(edit.where.endswith("gate") for edit in skipped.edits()) == 2  # the fused routers, as without it


def test_what_was_optimized_in_inference_mode_runs_outside(bundled):
    model, _ = bundled
    with torch.inference_mode():
        optimize(model, (AdaptiveTopK(method="threshold"),))
    try:
        with torch.no_grad():
            model(torch.tensor([[5, 6, 7]]))
        assert report(model).gating["experts_per_token"] > 0
    finally:
        restore(model)


def test_offloaded_weights(sensitivity):
    from accelerate import cpu_offload

    model, _ = models.load_tiny(dtype=torch.float32)
    ids = torch.randint(2000, (1, 40), generator=torch.Generator().manual_seed(0))
    alone, outputs = calibrate_gates(model, [ids]), []
    for offloaded in (False, True):
        if offloaded:
            cpu_offload(model, execution_device=torch.device("cpu"))
        optimize(model, (AdaptiveTopK(0.5, sensitivity=sensitivity),))
        with torch.no_grad():
            outputs.append(model(ids).logits)
        assert report(model).gating["experts_per_token"] < 3
        restore(model)
        with pytest.raises(PlanError, match="other weights"):
            optimize(model, (AdaptiveTopK(sensitivity=other_fingerprint(sensitivity)),))
    assert torch.equal(*outputs) and calibrate_gates(model, [ids]) == alone


def test_the_fingerprint_is_that_of_the_checkpoint_in_any_dtype():
    model = tiny_model("deepseek_v2").to(torch.bfloat16)
    with torch.no_grad():  # 1.7e-7 is half lost in fp16, 1e5 is infinite there
        model.get_input_embeddings().weight.view(-1)[:3] = torch.tensor([1.7e-7, -1e-6, 1e5])
    family, found = families.find(model), set()
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16):
        found.add(fingerprint(model.to(dtype), family))
    assert len(found) == 1
    with torch.no_grad():
        model.get_input_embeddings().weight.view(-1)[0] = 0.5
    assert fingerprint(model, family) not in found


def other_fingerprint(known):
    return GateSensitivity("other", known.tokens, **known._tensors())


def test_planning_needs_no_weights(small):
    model, found = small
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(tiny_config(model.config.model_type)).eval()
    assert "mean experts" in str(plan(empty, (AdaptiveTopK(sensitivity=found),)))


def test_norm_route_drops_on_a_cpu():
    inputs, rule = make_norm(CASES[4], None, torch.float32)
    normed, weights, indices = norm_route(*inputs, **rule)
    plain = norm_route(*inputs, **{**rule, "drop": None})
    expected = drop_experts(*plain[1:], rule["drop"].feeling(plain[0]), rule["drop"])
    assert torch.equal(normed, plain[0]) and torch.equal(weights, expected[0]) and torch.equal(indices, expected[1])


# The commands


def test_calibrate_writes_a_file_and_bench_reads_it(monkeypatch, tmp_path, capsys):
    from deepseek_accel import cli

    text, out, result = tmp_path / "text.py", tmp_path / "gates.safetensors", tmp_path / "rows.json"
    text.write_text("import os\n\n\ndef add(first, second):\n    return first + second\n" * 20)
    words = ["--device", "cpu", "--dtype", "float32"]
    assert cli.main(["calibrate", "tiny", str(out), "--text", str(text), "--max-tokens", "300", *words]) == 0
    said = capsys.readouterr()
    assert "of 300 tokens" in said.out
    stages = ["loading tiny", *(f"calibrating: {stage}" for stage in gating.CALIBRATING)]
    assert [line for line in said.err.splitlines() if line in stages] == stages
    assert GateSensitivity.load(out).tokens == 300
    monkeypatch.setattr(models, "heldout_documents", lambda: [text.read_text() * 2])
    words += ["--sensitivity", str(out), "--targets", "0.75", "--json", str(result)]
    assert cli.main(["bench", "gating", *words]) == 0
    rows = json.loads(result.read_text())["rows"]
    rules = ["stock", "gradient", "threshold", "gradient, renormalised", "static", "static", "static"]
    assert [row["rule"] for row in rows] == rules
    assert rows[0]["experts"] == 4 and rows[4]["experts"] == 3 and 2 < rows[1]["experts"] < 4
    assert cli.main(["bench", "gating", "--targets", "much"]) == 2
    assert cli.main(["bench", "gating", "--targets", "2"]) == 2
    monkeypatch.setattr(gating, "calibrate_directory", None)  # what follows is refused before it
    assert cli.main(["calibrate", "tiny", str(tmp_path / "none" / "gates"), "--device", "cpu"]) == 2
    monkeypatch.undo()
    assert cli.main(["calibrate", "v2-lite", str(out), "--device", "cpu"]) == 2
    assert "no tokenizer" in capsys.readouterr().err
    assert cli.main(["calibrate", "tiny", str(out), "--text", str(tmp_path / "none"), "--device", "cpu"]) == 2


def test_bench_generate_times_targets(monkeypatch):
    from deepseek_accel.bench import generate
    from deepseek_accel.bench.shapes import Point, Subject

    model = tiny_model("deepseek_v2")
    monkeypatch.setattr(gating, "RANDOM_TOKENS", (2, 1, 32))
    options = generate.Options(
        "tiny", (Point(2, 65),), new_tokens=4, repeats=1, device="cpu", adaptive=("0.5", "top1", "0.5@3")
    )
    rows = generate.run(options, subject=Subject("tiny", model))["rows"]
    assert [row["variant"] for row in rows] == ["stock", "all", "target 0.5", "top1", "target 0.5@3"]
    assert [row["status"] for row in rows] == ["ok"] * 5 and all(row["itl_ms"] > 0 for row in rows)
    assert rows[1]["experts_per_token"] is None and rows[3]["experts_per_token"] == pytest.approx(1, abs=0.01)
    assert 1 < rows[2]["experts_per_token"] < 3 and "lossy" in rows[2]["detail"]
    assert rows[3]["floor_ms"] < rows[2]["floor_ms"] < rows[1]["floor_ms"]
    short = replace(options, points=(Point(2, 5),), adaptive=("0.5",))  # the prompt would count as a decoding step
    row = generate.run(short, subject=Subject("tiny", model))["rows"][2]
    assert row["itl_ms"] > 0 and row["experts_per_step"] is None and row["floor_ms"] is None
    with pytest.raises(AccelError, match="only_stock"):
        replace(options, only_stock=True)
    with pytest.raises(AccelError, match="adaptive variant"):
        gating.variants(model, ["best"], OptimizeConfig.lossless())
    with pytest.raises(AccelError, match="top9 does not fit"):
        gating.variants(model, ["top9"], OptimizeConfig.lossless())

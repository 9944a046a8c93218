"""The benchmarks: that a wrong result is not timed, that failures are rows, and what the rows and files hold."""

import io
import json
import sys

import pytest
import torch

from deepseek_accel import AccelError, MixedPrecision, OptimizeConfig, cli, optimize, report
from deepseek_accel.bench import accuracy, generate, greedy, int4_cases, measure, op_cases, ops, shapes, soak, tables
from deepseek_accel.bench.accuracy import Sample, compare
from deepseek_accel.bench.shapes import Point, Subject
from deepseek_accel.generation import reach, step
from deepseek_accel.passes import attention as attention_pass
from deepseek_accel.passes import experts as experts_pass
from deepseek_accel.testing import FAMILIES, tiny_model

CPU = torch.device("cpu")
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
SMALL = dict(vocab_size=512, hidden_size=256, intermediate_size=256, moe_intermediate_size=32)


def options(**changes):
    defaults = dict(model="tiny-test", points=(Point(2, 40),), new_tokens=5, repeats=1)
    return generate.Options(**(defaults | changes))


def subject(model_type="deepseek_v3", dtype=torch.float32) -> Subject:
    return Subject("tiny-test", tiny_model(model_type).to(dtype))


@pytest.fixture
def wrong_attention(monkeypatch):
    right = attention_pass.dense_latent_attention
    for module in (attention_pass, reach):
        monkeypatch.setattr(module, "dense_latent_attention", lambda *a, **k: right(*a, **k).flip(1).roll(1, -1))


def test_points():
    assert Point.parse_list("1x1024, 8x64") == (Point(1, 1024), Point(8, 64))
    assert str(Point(8, 64)) == "8x64"
    for text in ("", "8", "x8", "0x8", "8x0", "8x-1", "axb"):
        with pytest.raises(AccelError, match="BATCHxPROMPT"):
            Point.parse(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"new_tokens": 1},
        {"repeats": 0},
        {"skip_stock": True, "only_stock": True},
        {"int4": ("mlp",), "only_stock": True},
    ],
)
def test_options_are_checked(changes):
    with pytest.raises(AccelError):
        options(**changes)


def test_variants():
    assert list(options().configs()) == ["stock", "all"]
    names = [p.name for p in shapes.chosen_config("all").ordered()]
    assert list(options(ablate=True).configs()) == ["stock", *names, "all"]
    assert list(options(passes="attention,kv_cache").configs()) == ["stock", "attention+kv_cache"]
    assert list(options(skip_stock=True).configs()) == ["all"]
    assert list(options(only_stock=True).configs()) == ["stock"]
    with pytest.raises(AccelError, match="did you mean 'attention'"):
        options(passes="atention").configs()


@pytest.mark.parametrize("model_type", ["deepseek", "deepseek_v2", "deepseek_v3", "llama", "qwen2"])
def test_rows_of_a_right_model(model_type):
    model = subject(model_type)
    told = []
    result = generate.run(options(points=(Point(1, 33), Point(3, 40))), told.append, model)
    assert told == ["tiny-test 1x33 stock", "tiny-test 1x33 all", "tiny-test 3x40 stock", "tiny-test 3x40 all"]
    assert [row["status"] for row in result["rows"]] == ["ok"] * 4
    for row in result["rows"]:
        assert row["ttft_ms"] > 0 and row["dtype"] == "float32" and row["peak_bytes_above_weights"] is None
        assert row["ttft_ratio"] == 1.0 or row["variant"] == "all"
        heads = FAMILIES[model_type]["num_key_value_heads"]
        expected = (32 + 8) * 4 if FAMILIES[model_type].get("kv_lora_rank") else 2 * heads * 16 * 4
        assert row["kv_bytes_per_token_and_layer"] == expected
        assert row["floor_ms"] > 0
        if "n_routed_experts" in FAMILIES[model_type]:
            assert 4 <= row["experts_per_step"] <= min(16, 4 * row["batch"])
        else:
            assert row["experts_per_step"] is None
    ours = result["rows"][3]
    assert ours["detail"] == "15 tokens equal" and ours["accuracy"]["tokens_equal"] == 15
    assert not report(model.model).optimized
    assert generate.exit_code(result["rows"]) == 0


def test_low_precision_is_judged_by_stock_noise():
    result = generate.run(options(points=(Point(2, 64),)), subject=subject(dtype=torch.bfloat16))
    row = result["rows"][1]
    assert row["status"] == "ok", row["detail"]
    assert 0 < row["accuracy"]["error"] <= 2 * row["accuracy"]["noise"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_result_is_not_timed(wrong_attention, dtype):
    result = generate.run(options(points=(Point(2, 64),)), subject=subject(dtype=dtype))
    stock, ours = result["rows"]
    assert stock["status"] == "ok" and ours["status"] == "wrong"
    assert ours["itl_ms"] is None and ours["ttft_ms"] is None and "off by" in ours["detail"]
    assert generate.exit_code(result["rows"]) == 3


def test_a_wrong_result_ends_the_command_with_3(wrong_attention, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(generate, "load", lambda name, device, dtype: subject())
    path = tmp_path / "out.json"
    words = [
        "bench",
        "generate",
        "--model",
        "tiny",
        "--points",
        "1x64",
        "--new-tokens",
        "4",
        "--repeats",
        "1",
        "--device",
        "cpu",
        "--json",
    ]
    assert cli.main([*words, str(path)]) == 3
    output = capsys.readouterr()
    assert "wrong and were not timed" in output.err and "wrong: " in output.out
    assert json.loads(path.read_text())["rows"][1]["itl_ms"] is None


def test_only_a_pass_that_uses_the_wrong_op_is_refused(monkeypatch):
    right, right_mixture = experts_pass.fused_experts, step.mixture
    monkeypatch.setattr(experts_pass, "fused_experts", lambda h, i, *rest: right(h, (i + 1) % 16, *rest))
    monkeypatch.setattr(step, "mixture", lambda h, i, *rest: right_mixture(h, (i + 1) % 16, *rest))
    result = generate.run(options(ablate=True), subject=subject())
    states = {row["variant"]: row["status"] for row in result["rows"]}
    assert states["experts"] == states["all"] == "wrong"
    assert {states[name] for name in states if name not in ("experts", "all")} <= {"ok", "skipped"}
    assert states["attention"] == "ok"


def test_ablation_has_a_row_for_every_pass_and_all_of_them():
    result = generate.run(options(ablate=True), subject=subject("llama"))
    rows = {row["variant"]: row for row in result["rows"]}
    assert next(iter(rows)) == "stock" and list(rows)[-1] == "all"
    assert {"attention", "experts", "layers", "kv_cache"} <= set(rows)
    assert rows["experts"]["status"] == "skipped" and "no routed experts" in rows["experts"]["detail"]
    assert rows["all"]["status"] == "ok" and rows["kv_cache"]["itl_ms"] is not None


def test_packed_rows_stand_beside_the_others_of_their_point():
    model = subject()
    before = {name: id(value) for name, value in model.model.named_parameters()}
    points = (Point(1, 140), Point(2, 140))  # longer prompts than are counted as steps
    result = generate.run(
        options(points=points, int4=("experts", "mlp"), adaptive=("0.75",), skip_stock=True), subject=model
    )
    rows = result["rows"]
    names = ["all", "target 0.75", "int4", "int4 target 0.75"]
    assert [(row["batch"], row["variant"]) for row in rows] == [(batch, name) for batch in (1, 2) for name in names]
    assert {row["status"] for row in rows} == {"ok"}
    for all_of_it, _, packed, adaptive in (rows[:4], rows[4:]):
        assert packed["weight_bytes"] == adaptive["weight_bytes"] < 0.6 * all_of_it["weight_bytes"]
        assert packed["floor_ms"] is None or packed["floor_ms"] < all_of_it["floor_ms"]
        assert packed["detail"] == "lossy: not compared with stock" and packed["itl_ms"] > 0
        assert adaptive["experts_per_token"] < 4
    # a step of two rows reads more experts than one of one: each point counts its own
    assert rows[3]["experts_per_step"] == pytest.approx(rows[3]["experts_per_token"], rel=0.35)
    assert rows[7]["experts_per_step"] > 1.6 * rows[3]["experts_per_step"]
    assert {name: id(value) for name, value in model.model.named_parameters()} == before


def test_a_packed_variant_that_fails_leaves_the_others(monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("deepseek_accel.passes.mixed_precision.pack", full)
    result = generate.run(
        options(points=(Point(1, 40), Point(2, 40)), int4=("experts",), skip_stock=True), subject=subject()
    )
    found = [(row["batch"], row["variant"], row["status"], row["detail"]) for row in result["rows"]]
    assert [row[:3] for row in found] == [(b, v, s) for b in (1, 2) for v, s in (("all", "ok"), ("int4", "error"))]
    assert {row[3] for row in found if row[1] == "int4"} == {"out of memory"}


def test_skipping_stock_still_checks(wrong_attention):
    result = generate.run(options(skip_stock=True), subject=subject())
    assert [row["status"] for row in result["rows"]] == ["wrong"]


def test_stock_alone():
    result = generate.run(options(only_stock=True), subject=subject())
    assert [(row["variant"], row["status"]) for row in result["rows"]] == [("stock", "ok")]


def test_out_of_memory_is_a_row(monkeypatch):
    right = greedy.generate

    def small(model, prompt, new_tokens, **kwargs):
        if prompt.shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
        return right(model, prompt, new_tokens, **kwargs)

    monkeypatch.setattr(greedy, "generate", small)
    result = generate.run(options(points=(Point(4, 33), Point(2, 33))), subject=subject())
    assert [row["status"] for row in result["rows"]] == ["error", "error", "ok", "ok"]
    assert result["rows"][0]["detail"] == "out of memory"
    assert generate.exit_code(result["rows"]) == 0


def test_ours_is_timed_unchecked_where_stock_does_not_fit(monkeypatch):
    right = greedy.generate

    def small(model, prompt, new_tokens, **kwargs):
        if not report(model).optimized:
            raise torch.OutOfMemoryError
        return right(model, prompt, new_tokens, **kwargs)

    monkeypatch.setattr(greedy, "generate", small)
    stock, ours = generate.run(options(), subject=subject())["rows"]
    assert stock["status"] == "error" and ours["status"] == "ok"
    assert ours["detail"] == "not checked: stock ran out of memory" and ours["itl_ms"] is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_missing_device_is_a_row(capsys):
    assert cli.main(["bench", "generate", "--device", "cuda", "--points", "1x64"]) == 1
    assert "no CUDA device" in " ".join(capsys.readouterr().out.split())


def test_a_missing_model_is_named(capsys):
    assert cli.main(["bench", "generate", "--device", "cpu", "--model", "v3-lite"]) == 2
    assert "v2-lite" in capsys.readouterr().err


def test_every_token_is_timed():
    model = tiny_model("deepseek_v3")
    prompt = Subject("x", model).prompt(Point(2, 20))
    expected = greedy.generate(model, prompt, 5)
    first, rest, output = greedy.timed(model, prompt, 5)
    assert first > 0 and rest > 0 and torch.equal(output, expected)
    clock = greedy.Clock()
    greedy.generate(model, prompt, 5, streamer=clock)
    assert len(clock.moments) == 1 + 5 and clock.moments == sorted(clock.moments)


def test_an_ended_sequence_is_as_long_as_the_others():
    model = tiny_model("deepseek_v3")
    prompt = Subject("x", model).prompt(Point(1, 20))
    model.generation_config.eos_token_id = list(range(128))
    assert greedy.generate(model, prompt, 7).shape == (1, 27)
    assert model.generation_config.eos_token_id == list(range(128))


def test_files_hold_environment_rows_and_command(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(generate, "load", lambda name, device, dtype: subject())
    paths = [str(tmp_path / "out.json"), str(tmp_path / "out.png")]
    words = [
        "bench",
        "generate",
        "--model",
        "tiny",
        "--points",
        "1x40,2x40",
        "--new-tokens",
        "4",
        "--repeats",
        "1",
        "--device",
        "cpu",
        "--ablate",
    ]
    assert cli.main([*words, "--json", paths[0], "--png", paths[1]]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["command"][:3] == ["deepseek-accel", "bench", "generate"]
    facts = result["environment"]
    assert {"hardware", "torch", "triton", "transformers", "commit", "copy_bytes_per_second"} <= set(facts)
    assert len(result["rows"]) == 2 * len(options(ablate=True).configs())
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"
    shown = capsys.readouterr().out
    assert facts["transformers"] in shown and "float32" in shown and "2x40" in shown


def test_a_picture_without_matplotlib_is_refused_before_the_work(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(generate, "run", lambda *_: pytest.fail("ran"))
    assert cli.main(["bench", "generate", "--device", "cpu", "--png", "x.png"]) == 2
    assert "deepseek-accel[plots]" in capsys.readouterr().err


def samples(batch=2, steps=4, vocabulary=50):
    logits = torch.randn(batch, steps, vocabulary, generator=torch.Generator().manual_seed(0))
    return Sample(logits.argmax(-1), logits, 0)


def moved(sample: Sample, by: float) -> Sample:
    logits = sample.logits * (1 + by * torch.randn(sample.logits.shape, generator=torch.Generator().manual_seed(1)))
    return Sample(logits.argmax(-1), logits, 0)


def test_the_rule_for_low_precision():
    stock, noise = samples(), torch.full((2, 4), 0.01)
    assert compare(stock, stock, noise).ok
    assert compare(stock, moved(stock, 0.015), noise).ok
    assert "own rounding noise" in compare(stock, moved(stock, 0.1), noise).why


def test_one_wrong_row_among_good_ones_is_refused():
    stock = samples(batch=8)
    logits = stock.logits.clone()
    logits[5, 0] = logits[5, 0].flip(0)
    verdict = compare(stock, Sample(logits.argmax(-1), logits, 0), torch.full((8, 4), 0.01))
    assert not verdict.ok and "one step" in verdict.why


def test_steps_after_a_different_token_are_not_compared():
    stock = samples(batch=1)
    logits = stock.logits.clone()
    best, second = logits[0, 1].topk(2).indices
    logits[0, 1, second] = logits[0, 1, best] + 1e-4  # a near tie, decided the other way
    stock.logits[0, 1, second] = stock.logits[0, 1, best] - 1e-4
    logits[0, 2:] = 0.0  # what follows has another history
    ours = Sample(logits.argmax(-1), logits, 0)
    assert compare(stock, ours, torch.full((1, 4), 0.01)).ok
    assert not compare(stock, ours, None).ok


def test_right_logits_with_a_wrong_choice_are_refused():
    stock = samples()
    tokens = stock.tokens.clone()
    tokens[1, 3] = (tokens[1, 3] + 1) % 50
    assert "largest logit" in compare(stock, Sample(tokens, stock.logits, 0), torch.full((2, 4), 0.01)).why


@pytest.mark.parametrize("noise", [None, torch.full((2, 4), 0.01)])
def test_nan_never_passes(noise):
    stock = samples()
    logits = stock.logits.clone()
    logits[0, 0, 7] = float("nan")
    assert not compare(stock, Sample(stock.tokens, logits, 0), noise).ok
    assert not compare(stock, Sample(stock.tokens, stock.logits * float("nan"), 0), noise).ok


def test_noise_is_about_half_a_unit_in_the_last_place_times_depth():
    model = tiny_model("deepseek_v3").to(torch.bfloat16)
    prompt = Subject("x", model).prompt(Point(2, 30))
    noise = accuracy.stock_noise(model, prompt, greedy.sample(model, prompt, 5))
    assert noise.shape == (2, 5) and 1e-3 < noise.median() < 0.1
    assert not model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize(("name", "experts", "chosen"), [("v2-lite", 64, 6), ("v3-4layer", 256, 8)])
def test_random_routers_spread_tokens_over_all_experts(name, experts, chosen):
    config = shapes.SHAPES[name] | SMALL | dict(num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=3)
    model = shapes.random_model(config | dict(kv_lora_rank=64, q_lora_rank=None), CPU, torch.float32)
    for batch in (1, 8, 32):
        prompt = Subject("x", model).prompt(Point(batch, 17))
        with generate.counted_experts(model, batch) as counts:
            greedy.generate(model, prompt, 6)
        expected = experts * (1 - (1 - chosen / experts) ** batch)  # independent and uniform
        assert sum(counts) / len(counts) == pytest.approx(expected, rel=0.08)


def test_step_bytes_counts_the_experts_that_are_hit():
    model = tiny_model("deepseek_v3")
    every = generate.step_bytes(model, 1, 0, 0, 16)
    embedding = 128 * 64 * 4
    assert every == sum(p.numel() * 4 for p in model.parameters()) - embedding
    assert every - generate.step_bytes(model, 1, 0, 0, 4) == 2 * 12 * (3 * 32 * 64) * 4
    assert generate.step_bytes(model, 2, 10, 160, 16) - every == 160 * 3 * 2 * 10
    optimize(model, OptimizeConfig((MixedPrecision(method="rtn"),)))
    packed = generate.step_bytes(model, 1, 0, 0, 16)
    assert packed == report(model).parameter_bytes - embedding
    one = sum(vars(model.model.layers[1].mlp.experts)[f"_accel_{name}"].nbytes for name in EXPERT_WEIGHTS) / 16
    assert packed - generate.step_bytes(model, 1, 0, 0, 4) == pytest.approx(2 * 12 * one)
    assert generate.expected_experts(model, 1) == 4


def test_expected_experts():
    model = tiny_model("deepseek_v3")  # 4 of 16
    assert generate.expected_experts(model, 1) == 4
    assert generate.expected_experts(model, 2) == pytest.approx(4 + 4 * 12 / 16)
    assert generate.expected_experts(tiny_model("llama"), 2) is None


def test_the_floor_is_known_where_stock_does_not_fit(monkeypatch):
    def too_large(*args, **kwargs):
        raise torch.OutOfMemoryError("too large")

    counted = generate.run(options(), subject=subject())["rows"]
    monkeypatch.setattr(greedy, "sample", too_large)
    (row,) = generate.run(options(skip_stock=True), subject=subject())["rows"]
    assert row["experts_per_step"] is None
    assert row["floor_ms"] > 0 and row["floor_ratio"] == pytest.approx(row["itl_ms"] / row["floor_ms"])
    assert row["floor_ms"] == pytest.approx(counted[0]["floor_ms"], rel=0.3)


def test_soak(capsys):
    result = generate.run(options(soak=12), subject=subject("llama"))["soak"]
    assert result["calls"] == 12 and result["bytes_held"][0][0] == 1 and result["bytes_held"][-1][0] == 12
    assert result["bytes_grown"] == result["bytes_held"][-1][1] - result["bytes_held"][0][1]
    assert result["itl_first_ms"] > 0 and result["itl_last_ms"] > 0
    assert "12 calls" in tables.soak_line(result)


def test_soak_calls_are_mixed_and_the_largest_comes_first():
    calls = soak.mixed_calls((Point(2, 40), Point(8, 10)), 5, 100)
    assert len(calls) == 100 and calls[0] == (Point(8, 40), 5)
    assert {point.batch for point, _ in calls} == set(range(1, 9))
    assert len({point.prompt_length for point, _ in calls}) > 20
    assert {count for _, count in calls} == set(range(1, 6))


def test_a_soak_that_fails_says_why(monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no more pages")

    monkeypatch.setattr(soak, "run", fails)
    result = generate.run(options(soak=3), subject=subject("llama"))
    assert "no more pages" in tables.soak_line(result["soak"])
    assert all(row["status"] == "ok" for row in result["rows"])


def test_ops_are_checked_and_timed(capsys, tmp_path):
    path = tmp_path / "ops.json"
    assert cli.main(["bench", "ops", "--device", "cpu", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["op"] for row in rows} == set(ops.OPS)
    for row in rows:
        assert row["status"] == "ok", row
        assert row["microseconds"] > 0 and row["gigabytes_per_second"] > 0 and row["reference_ratio"] > 0
    shown = capsys.readouterr().out
    assert "copy speed" in shown and "latent_attention" in shown


@pytest.mark.parametrize("fault", [lambda x: x * 1.01, lambda x: x * float("nan"), lambda x: x.flip(-1)])
def test_a_wrong_op_is_not_timed(monkeypatch, fault, capsys):
    right = op_cases.rms_norm
    monkeypatch.setattr(op_cases, "rms_norm", lambda *arguments: fault(right(*arguments)))
    assert cli.main(["bench", "ops", "--op", "rms_norm,router", "--device", "cpu"]) == 3
    rows = ops.run(["rms_norm"], "cpu")["rows"]
    assert {row["status"] for row in rows} == {"wrong"} and rows[0]["microseconds"] is None


def test_an_op_that_breaks_is_a_row(monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel image\nsecond line")

    monkeypatch.setattr(op_cases, "rms_norm", broken)
    result = ops.run(["rms_norm", "router"], "cpu")
    states = {row["op"]: row["status"] for row in result["rows"]}
    assert states == {"rms_norm": "error", "router": "ok"}
    assert result["rows"][-1]["detail"] == "RuntimeError: no kernel image"
    assert "broken" in result["rows"][-1]["traceback"]


def test_an_unknown_op_is_named(capsys):
    assert cli.main(["bench", "ops", "--op", "softmax", "--device", "cpu"]) == 2
    assert "latent_attention" in capsys.readouterr().err


def test_gpu_shapes_cover_every_op():
    assert {shape.op for shape in op_cases.gpu_shapes()} == set(op_cases.OPS)
    assert {shape.op for shape in int4_cases.gpu_shapes()} == set(int4_cases.OPS)


def test_peaks_are_above_the_weights_packed_ones_included(monkeypatch):
    model = tiny_model("deepseek_v3", **SMALL)
    assert measure.peak_above_weights(model) is None
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10_000_000)
    before = measure.peak_above_weights(model)
    assert before == 10_000_000 - buffers - report(model).parameter_bytes
    optimize(model, [MixedPrecision(method="rtn")])
    packed = report(model)
    assert packed.parameter_bytes < packed.parameter_bytes_before
    assert measure.peak_above_weights(model) == 10_000_000 - buffers - packed.parameter_bytes > before


def test_the_copy_speed_is_plausible():
    assert 1e8 < measure.copy_bandwidth(CPU) < 1e13
    assert tables.ratio(None) == "-" and tables.ratio(2.0) == "2.00x"


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, capsys):
    with tables.progress(1) as step:
        step("one")
        step("two")
    assert capsys.readouterr().err == "one\ntwo\n"

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with tables.progress(1) as step:
        step("one")
        step("two")  # more than there were to be
    assert "1/2" in terminal.getvalue() and "two" in terminal.getvalue()

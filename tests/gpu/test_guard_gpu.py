"""The memory guard reads a GPU, and an engine with one goes on when memory is short; metrics of graphs."""

import time

import pytest
import torch

from deepseek_accel import optimize
from deepseek_accel.engine import Engine
from deepseek_accel.engine.guard import DeviceMemory, MemoryGuard, Stage
from deepseek_accel.engine.metrics import Metrics
from deepseek_accel.ops.choice import why_not_triton
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.testing import tiny_model

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if reason := why_not_triton(torch.device("cuda", torch.cuda.current_device())):
    pytest.skip(reason, allow_module_level=True)


def optimized():
    passes = {name: {} for name in PASSES}
    passes |= {"kv_cache": {"page_size": 16}, "cuda_graphs": {"batch_sizes": (1, 2, 4, 8)}, "allow_skips": True}
    return optimize(tiny_model("deepseek_v3").to("cuda", torch.float32), passes)


def prompts(count):
    return [[3 + (7 * i + j * (i + 1)) % 120 for j in range(30 + i % 5)] for i in range(count)]


def alone(model, prompt, new):
    ids = torch.tensor([prompt], device="cuda")
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    return out[0, len(prompt) :].tolist()


def test_what_is_reserved_and_what_may_be():
    memory = DeviceMemory("cuda", every=0)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    before = memory()
    ballast = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    after = memory()
    assert after.used - before.used == len(ballast) and before.limit <= total
    assert abs(after.limit - before.limit) < 256 << 20  # what is taken comes from what was free
    assert memory(reusable_bytes=len(ballast)).used == before.used
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        assert memory().limit <= total // 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_an_engine_short_of_memory_lowers_its_rows_shrinks_and_recovers():
    model, used = optimized(), [1 << 40]
    guard = MemoryGuard(shrink="fp8_e4m3", patience=1, calm=1, read=lambda: (used[0], 100 << 40))
    metrics = Metrics(model, spans=False)
    asked = prompts(12)
    exact = [alone(model, prompt, 60) for prompt in asked]
    options = {"max_new_tokens": 60, "do_sample": False}
    with Engine(model, guard=guard, observer=metrics, max_batch=8) as engine:
        first = [engine.submit(prompt, **options) for prompt in asked[:8]]
        while not all(request.tokens for request in first):
            time.sleep(0.001)
        used[0] = 96 << 40
        assert [request.result(120).tokens for request in first] == exact[:8]
        plain = engine.facts()["bytes_reserved"] / engine.facts()["pages_total"]
        results = engine.generate(asked, **options)
        assert guard.stage is Stage.SHRINK and guard.admitted == 1
        assert engine.facts()["bytes_reserved"] / engine.facts()["pages_total"] < 0.6 * plain
        assert all(result.error is None and len(result.tokens) == 60 for result in results)
        used[0] = 1 << 40
        engine.generate([[3, 4]] * 16, max_new_tokens=40)
        assert guard.stage < Stage.SHRINK
        assert [result.tokens for result in engine.generate(asked, **options)] == exact
    text = metrics.text()
    replays = float(text.split('deepseek_accel_graph_replays_total{kind="step"} ')[1].split()[0])
    captures = float(text.split('deepseek_accel_graph_captures_total{kind="step"} ')[1].split()[0])
    assert replays > captures > 0

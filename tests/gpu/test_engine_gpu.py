"""The engine on CUDA graphs, one step behind: the tokens of `generate`, and nothing of others in anybody's."""

import functools
import gc
import random
import threading
import time
import weakref

import pytest
import torch
from processors import Broken, processing

from deepseek_accel import optimize, report
from deepseek_accel.engine import Engine, rows
from deepseek_accel.engine import engine as engine_module
from deepseek_accel.ops.choice import why_not_triton
from deepseek_accel.passes import DEFAULTS as PASSES
from deepseek_accel.testing import tiny_model

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if reason := why_not_triton(torch.device("cuda", torch.cuda.current_device())):
    pytest.skip(reason, allow_module_level=True)

# V2-Lite's head sizes and number of experts, few layers and a small vocabulary
LITE = dict(
    vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=8, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, head_dim=64,
    n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=256, n_group=1, topk_group=1,
    topk_method="greedy", max_position_embeddings=4096,
)  # fmt: skip


def fresh(model_type="deepseek_v3", dtype=torch.float32, graphs=True, overrides=None, fp8=None, **cache):
    pages = {"page_size": 16, "dtype": fp8, **cache}
    passes = {name: {} for name in PASSES} | {"kv_cache": pages, "allow_skips": True}
    if graphs:
        passes["cuda_graphs"] = {"batch_sizes": (1, 2, 4, 8, 16, 32)}
    else:
        passes.pop("cuda_graphs")
    return optimize(tiny_model(model_type, **(overrides or {})).to("cuda", dtype), passes)


@functools.cache
def shared(model_type, graphs):
    return fresh(model_type, graphs=graphs)


def prompts(count, longest=40, seed=0, vocabulary=128):
    draw = random.Random(seed)
    return [[draw.randrange(2, vocabulary) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


def alone(model, prompt, **options):
    ids = torch.tensor([prompt], device="cuda")
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    return model.generate(ids, **options)[0, len(prompt) :].tolist()


def counted(model, what):
    return sum(number for name, number in report(model).counters.items() if what in name)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("model_type", ["deepseek", "deepseek_v2", "deepseek_v3", "llama", "qwen2"])
def test_requests_get_the_tokens_of_single_generate(model_type, graphs):
    model, asked = shared(model_type, graphs), prompts(24, 200, seed=1)
    before = counted(model, "cuda_graphs: replays")
    with Engine(model, max_batch=12, prefill_tokens=64) as engine:
        options = [{"max_new_tokens": 3 + i % 9} for i in range(24)]
        results = engine.generate(asked, options=options, do_sample=False)
        facts = engine.facts()
    replays = counted(model, "cuda_graphs: replays") - before
    assert (replays > 0) == graphs
    assert facts["pages_of_rows"] == 0
    assert facts["pages_in_use"] == facts["pages_kept"]
    for prompt, option, result in zip(asked, options, results, strict=True):
        assert (result.error, result.tokens) == (None, alone(model, prompt, **option))


def regret(exact, prompt, tokens):
    """How far the tokens are from those that the exact model finds likeliest, in logits, on average."""
    ids = torch.tensor([prompt + tokens], device="cuda")
    with torch.no_grad():
        logits = exact(ids).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
    return float((logits.amax(-1) - chosen).mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_on_v2_lites_shape(dtype):
    """Rounding depends on the number of rows, so tokens may differ from those of single calls, but are no worse."""
    exact = tiny_model("deepseek_v2", **LITE).to("cuda", dtype).float()
    model, asked = fresh("deepseek_v2", dtype, overrides=LITE), prompts(20, 300, seed=2, vocabulary=1024)
    with Engine(model, prefill_tokens=256) as engine:
        results = engine.generate(asked, max_new_tokens=8, do_sample=False)
    assert all(result.error is None and len(result.tokens) == 8 for result in results)
    ours = sum(regret(exact, prompt, r.tokens) for prompt, r in zip(asked, results, strict=True))
    single = sum(regret(exact, prompt, alone(model, prompt, max_new_tokens=8)) for prompt in asked)
    assert ours <= 2 * single + 0.2, (ours, single)  # a wrong token costs two to eight


def test_fp8_pages_and_their_graphs():
    model, asked, runs = fresh("deepseek_v3", torch.bfloat16, fp8="fp8_e4m3"), prompts(9, 60, seed=3), []
    with Engine(model, max_batch=8) as engine:
        for _ in range(2):
            runs.append([r.tokens for r in engine.generate(asked, max_new_tokens=12, do_sample=False)])
        assert engine._core.scheduler.rows.fp8 == "e4m3"
    assert all(len(tokens) == 12 for tokens in runs[0])
    assert counted(model, "cuda_graphs: replays") > 0


def test_few_pages_and_growing_ones():
    model, asked = shared("deepseek_v3", True), prompts(14, 60, seed=4)
    right = [alone(model, each, max_new_tokens=50) for each in asked]
    for pages in (14, None):
        with Engine(model, max_batch=8, max_pages=pages) as engine:
            results = engine.generate(asked, max_new_tokens=50, do_sample=False)
            assert (engine.facts()["preemptions"] > 0) == (pages is not None)
            if pages is None:
                assert engine.facts()["pages_total"] >= 64
        assert [result.tokens for result in results] == right


def test_prefixes():
    model = shared("deepseek_v3", True)
    asked = [[7, 8, 9] * 50 + tail for tail in prompts(8, 30, seed=5)]
    with Engine(model) as engine:
        engine.submit([7, 8, 9] * 50, max_new_tokens=1).result()
        results = engine.generate(asked, max_new_tokens=6, do_sample=False)
    assert all(result.num_cached_tokens == 144 for result in results)
    assert [result.tokens for result in results] == [alone(model, each, max_new_tokens=6) for each in asked]


def test_seeds_do_not_depend_on_the_batch():
    model, asked = shared("deepseek_v3", True), prompts(10, 30, seed=6)
    options = [{"temperature": 1.2}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.3}] * 2
    with Engine(model, max_batch=10) as engine:
        kinds = {"do_sample": True, "max_new_tokens": 10}
        together = engine.generate(asked, seeds=range(10), options=options, **kinds)
        single = [engine.submit(asked[i], seed=i, **options[i], **kinds).result() for i in range(10)]
    assert [r.tokens for r in together] == [r.tokens for r in single]


def test_load_with_cancellations_and_failures():
    model, draw = shared("deepseek_v3", True), random.Random(8)
    kinds = prompts(30, 60, seed=9)
    right = [alone(model, each, max_new_tokens=30) for each in kinds]
    torch.cuda.synchronize()
    with Engine(model, max_batch=24, max_pages=60) as engine:
        plans = []
        for i in range(400):
            kind, length, fate = draw.randrange(30), draw.randrange(1, 31), draw.choice(["", "", "", "cancel", "break"])
            options = processing(Broken(i % 9)) if fate == "break" else {}
            request = engine.submit(kinds[kind], max_new_tokens=length, do_sample=False, **options)
            plans.append((kind, length, fate, request))
            if fate == "cancel" and i % 2:
                request.cancel()
        for _, _, fate, request in plans:
            if fate == "cancel":
                request.cancel()
        results = [request.result(120) for *_, request in plans]
        facts = engine.facts()
        memory = torch.cuda.memory_allocated()
        again = engine.generate(kinds * 3, max_new_tokens=30, do_sample=False)
        assert torch.cuda.memory_allocated() - memory < 16 << 20
    for (kind, length, fate, _), result in zip(plans, results, strict=True):
        assert result.tokens == right[kind][: len(result.tokens)]
        if not fate:
            assert (result.error, len(result.tokens)) == (None, length)
        elif fate == "cancel":
            assert result.error is None
    assert facts["pages_of_rows"] == facts["running"] == facts["waiting"] == 0
    assert [result.tokens for result in again] == right * 3


def test_memory_of_a_burst_goes_back_and_graphs_follow(monkeypatch):
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(rows, "FIRST_TOKENS", 16)
    model, asked, met = fresh(reuse_prefix=True, prefix_bytes=1 << 20), prompts(32, 300, seed=14), []
    right = [alone(model, each, max_new_tokens=12) for each in asked]

    class Watching:
        def step(self, facts):
            met.extend(weakref.ref(storage) for storage in engine._core.scheduler.rows.storages.values())
            largest.append(engine.facts()["bytes_reserved"])

        def __getattr__(self, name):
            return lambda *what: None

    with Engine(model, max_batch=32, observer=Watching()) as engine:
        for _ in range(3):
            largest = []
            results = engine.generate(asked, max_new_tokens=12, do_sample=False)
            assert [result.tokens for result in results] == right
            end = time.monotonic() + 20
            while engine.facts()["bytes_reserved"] > 1 << 20:
                assert time.monotonic() < end
                time.sleep(0.01)
            assert max(largest) > 3 << 19
        gc.collect()
        alive = {id(storage) for ref in met if (storage := ref()) is not None}
        assert alive <= {id(storage) for storage in engine._core.scheduler.rows.storages.values()}
        # One at a time, the last first: within a burst what is kept may be forgotten before it is asked for.
        again = [engine.generate([each], max_new_tokens=12, do_sample=False)[0] for each in reversed(asked)]
    assert [result.tokens for result in again] == right[::-1] and any(result.num_cached_tokens for result in again)
    assert counted(model, "cuda_graphs: replays") > 0


def test_generate_from_another_thread_meanwhile():
    model, asked = shared("deepseek_v3", True), prompts(6, 30, seed=10)
    right = [alone(model, each, max_new_tokens=40) for each in asked]
    found, stop = [], threading.Event()

    def generate():
        while not stop.is_set():
            found.append(alone(model, asked[0], max_new_tokens=40))

    thread = threading.Thread(target=generate)
    with Engine(model) as engine:
        thread.start()
        for _ in range(5):
            results = engine.generate(asked, max_new_tokens=40, do_sample=False)
            assert [result.tokens for result in results] == right
        stop.set()
        thread.join()
    assert found
    assert all(tokens == right[0] for tokens in found)


def test_out_of_memory_in_a_step(monkeypatch):
    from deepseek_accel.engine.compute import Compute

    model, asked = shared("deepseek_v3", True), prompts(8, 30, seed=11)
    right = [alone(model, each, max_new_tokens=12) for each in asked]
    calls, step = [], Compute.step

    def failing(self, rows, *arguments):
        calls.append(len(rows))
        if len(calls) in (2, 5, 6):
            torch.empty(1 << 50, device="cuda")  # a real failure of the allocator
        return step(self, rows, *arguments)

    monkeypatch.setattr(Compute, "step", failing)
    with Engine(model) as engine:
        results = engine.generate(asked, max_new_tokens=12, do_sample=False)
    assert [result.tokens for result in results] == right

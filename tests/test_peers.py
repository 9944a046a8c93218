"""vLLM beside stock and ours: what it is asked, how it is timed, and what the rows say when it cannot run.

vLLM is not installed here; a stand-in module shows that the process of its own does what the rows say.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors import safe_open

from deepseek_accel import AccelError
from deepseek_accel.bench import generate, peers, tables
from deepseek_accel.bench.shapes import Point, Subject
from deepseek_accel.testing import tiny_model

POINTS = (Point(1, 7), Point(3, 5))
STAND_IN = """
    import json, os, time
    __version__ = "0.0.test"

    class SamplingParams:
        def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
            assert (temperature, ignore_eos, detokenize) == (0.0, True, False)
            self.max_tokens = max_tokens

    class LLM:
        def __init__(self, *, model, skip_tokenizer_init, dtype, max_model_len, max_num_seqs, **rest):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
            if os.environ.get("STAND_IN_FAILS"):
                raise ValueError("this GPU is too old")
            self.vocab = json.load(open(os.path.join(model, "config.json")))["vocab_size"]

        def generate(self, prompts, params, use_tqdm):
            class Out: pass
            time.sleep(0.002 * params.max_tokens)
            results = []
            for prompt in prompts:
                out, inner = Out(), Out()
                inner.token_ids = tuple((prompt["prompt_token_ids"][-1] + i) % self.vocab
                                        for i in range(params.max_tokens))
                out.outputs = [inner]
                results.append(out)
            return results
"""


def options(**changes):
    return generate.Options(**(dict(model="t", points=POINTS, new_tokens=4, repeats=1, peers=True) | changes))


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "checkpoint"
    tiny_model("deepseek_v3").save_pretrained(folder)
    return folder


def job(folder):
    return {
        "engine": peers.engine_options(str(folder), "bfloat16", POINTS, 4),
        "prompts": [[[5, 6, 7]], [[1, 2], [3, 126], [4, 127]]],
        "new_tokens": 4,
        "repeats": 2,
    }


def test_what_vllm_is_asked():
    asked = peers.engine_options("dir", "bfloat16", (Point(8, 100), Point(2, 3000)), 64)
    assert (asked["max_model_len"], asked["max_num_seqs"]) == (3064, 8)
    assert asked["skip_tokenizer_init"] and not asked["enable_prefix_caching"] and not asked["trust_remote_code"]
    assert peers.sampling_options(9) == dict(temperature=0.0, max_tokens=9, ignore_eos=True, detokenize=False)


def test_without_vllm_the_rows_say_so(monkeypatch):
    monkeypatch.setattr(peers, "is_installed", lambda: False)
    rows = generate.run(options(), subject=Subject("t", tiny_model("llama")))["rows"]
    assert [row["variant"] for row in rows] == ["stock", "all", "vllm"] * 2
    assert [row["batch"] for row in rows] == [1, 1, 1, 3, 3, 3]
    for row in rows[2::3]:
        assert (row["status"], row["detail"]) == ("skipped", "vLLM is not installed: skipped")
        assert row["itl_ms"] is row["ttft_ms"] is row["itl_ratio"] is row["floor_ratio"] is None
    assert generate.exit_code(rows) == 0


def test_without_a_gpu_the_rows_say_so(stand_in):
    assert peers.is_installed()
    rows = generate.run(options(), subject=Subject("t", tiny_model("llama")))["rows"]
    assert {(row["status"], row["detail"]) for row in rows[2::3]} == {
        ("error", "vLLM is compared on a CUDA device only")
    }
    assert all(row["status"] == "ok" for i, row in enumerate(rows) if i % 3 != 2)


def test_a_process_of_its_own(stand_in):
    result = peers._in_own_process(job(stand_in), stand_in, 0)
    assert result["version"] == "0.0.test"
    one, three = result["points"]
    assert one["tokens"] == [[7, 8, 9, 10]]
    assert three["tokens"] == [[2, 3, 4, 5], [126, 127, 0, 1], [127, 0, 1, 2]]
    for point in result["points"]:
        assert point["ttft_ms"] >= 2 and point["itl_ms"] >= 1


def test_a_process_that_fails_says_why(stand_in, monkeypatch):
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    with pytest.raises(AccelError, match=r"ended with code 1: ValueError: this GPU is too old"):
        peers._in_own_process(job(stand_in), stand_in, 0)


def test_a_process_that_hangs_is_ended(stand_in, monkeypatch):
    monkeypatch.setattr(peers, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(peers.sys, "executable", "/bin/sh")
    started = []
    popen = subprocess.Popen

    def sleeper(command, **kwargs):
        started.append(popen(["/bin/sh", "-c", "sleep 60 & sleep 60"], **kwargs))
        return started[-1]

    monkeypatch.setattr(peers.subprocess, "Popen", sleeper)
    with pytest.raises(AccelError, match="took more than"):
        peers._in_own_process(job(stand_in), stand_in, 0)
    assert started[0].returncode == -9


def test_times_are_medians_and_a_failing_point_is_one():
    def engine(prompts, new_tokens):
        if len(prompts) == 2:
            raise MemoryError("no room")
        return [[0] * (new_tokens - (len(prompts) == 3)) for _ in prompts]

    points = peers.timed_points(engine, [[[1]], [[1]] * 2, [[1]] * 3], 4, 3)
    assert points[0]["ttft_ms"] >= 0 and "error" not in points[0]
    assert points[1]["error"] == "MemoryError: no room"
    assert "asked for 4 tokens, got [3]" in points[2]["error"]


def test_rows_are_held_against_stock_and_the_floor(monkeypatch):
    subject = Subject("t", tiny_model("llama"))
    stock = {}

    def measure(_, points, new_tokens, repeats):
        tokens = [greedy_tokens(subject, point) for point in points]
        tokens[1][0][0] += 1
        return {"version": "9.9", "points": [{"ttft_ms": 2.0, "itl_ms": 0.5, "tokens": rows} for rows in tokens]}

    monkeypatch.setattr(peers, "is_installed", lambda: True)
    monkeypatch.setattr(peers, "measure", measure)
    result = generate.run(options(), subject=subject)
    stock, _, peer = result["rows"][:3]
    assert peer["variant"] == "vllm 9.9" and peer["status"] == "ok"
    assert peer["itl_ratio"] == pytest.approx(stock["itl_ms"] / 0.5)
    assert peer["floor_ratio"] == pytest.approx(0.5 / stock["floor_ms"])
    assert peer["detail"] == "first token as stock's in 1 of 1 rows"
    assert result["rows"][5]["detail"] == "first token as stock's in 2 of 3 rows"
    json.loads(tables.to_json(result))
    tables.generate_table(result)


def greedy_tokens(subject, point):
    prompt = subject.prompt(point)
    mask = torch.ones_like(prompt)
    new = subject.model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False)
    return new[:, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "llama", "qwen2"])
def test_the_checkpoint_is_one_of_the_published_layout(model_type, tmp_path):
    """One tensor per expert and projection, as vLLM's loaders read them."""
    tiny_model(model_type).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
    assert "model.layers.1.self_attn.o_proj.weight" in names
    if model_type.startswith("deepseek"):
        assert "model.layers.1.mlp.experts.15.down_proj.weight" in names
        assert "model.layers.1.self_attn.kv_b_proj.weight" in names

"""The engine on the Triton kernels, in Triton's interpreter: steps, short pieces and prompts as graphs record them."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = """
import contextlib, sys
from collections import Counter
import torch
import deepseek_accel
import deepseek_accel.generation.decode, deepseek_accel.generation.ragged, deepseek_accel.ops.experts
import deepseek_accel.ops.gqa_attention, deepseek_accel.ops.latent_write, deepseek_accel.ops.mla_attention
import deepseek_accel.passes.experts, deepseek_accel.ops.entry_copy, deepseek_accel.engine.engine

for module in [m for name, m in sys.modules.items() if name.startswith("deepseek_accel.")]:
    for name, value in (("uses_triton", lambda device: True), ("why_not_triton", lambda device: None),
                        ("prebuild", lambda device: contextlib.nullcontext())):
        if hasattr(module, name):
            setattr(module, name, value)

from deepseek_accel import optimize
from deepseek_accel.engine import Engine, compute, loop
from deepseek_accel.generation.graphs import StepGraphs, _Captured
from deepseek_accel.testing import tiny_model

family = sys.argv[1]
model = tiny_model(family, num_hidden_layers=1, first_k_dense_replace=0)
generator = torch.Generator().manual_seed(1)
asked = [torch.randint(2, 128, (n,), generator=generator).tolist() for n in (3, 18, 1, 5)]
lengths = [6, 3, 5, 4]  # three rows and more decode together, however late the others come
expected = []
for ids, n in zip(asked, lengths):
    ids = torch.tensor([ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, pad_token_id=0)
    expected.append(out[0, ids.shape[1]:].tolist())
optimize(model, {"attention": {}, "experts": {}, "layers": {}, "kv_cache": {"page_size": 16}, "allow_skips": True})
torch.cuda.device = lambda device: contextlib.nullcontext()

class Launch:  # what a graph would replay is launched
    def __init__(self, record): self.record = record
    def replay(self): self.logits.copy_(self.record())

class Launches(StepGraphs):
    keys = Counter()
    def _follow(self, stepper, cache):
        if self.addresses is None:
            self.addresses = torch.zeros(len(stepper.model.layers), dtype=torch.int64)
    def _captured_prompt(self, key, device, step): self.keys[str(key)] += 1
    def captured(self, bucket, run, choice):
        launch = Launch(lambda: run.record(choice))
        launch.logits = torch.full((bucket, model.config.vocab_size), torch.nan)
        self.keys[bucket] += 1
        return _Captured(launch, launch.logits)
    def release(self, device): self._lock.release()

vars(model)["_accel_graphs"] = graphs = Launches((2, 4), Counter())
loop.lags = lambda device: True
loop.SHORT_SIZES = compute.SHORT_SIZES = (1, 8)  # so that eighteen tokens are a prompt of their own
with Engine(model, max_batch=4, prefill_tokens=16) as engine:
    results = engine.generate(asked, options=[{"max_new_tokens": n} for n in lengths], do_sample=False)
    assert [r.error for r in results] == [None] * 4, results
    assert [r.tokens for r in results] == expected
    graphs._lock.acquire()  # somebody generates: without graphs, and nothing of theirs is left when they are back
    eager = engine.generate(asked[:1], max_new_tokens=2, do_sample=False)
    for buffers in graphs._buffers.values():
        for name in ("lengths", "tokens", "starts", "first_positions", "block_table"):
            getattr(buffers, name).fill_(3)
    graphs._lock.release()
    again = engine.generate(asked[:1], max_new_tokens=2, do_sample=False)
    assert eager[0].tokens == again[0].tokens == expected[0][:2]
assert {2, 4, '32'} <= set(graphs.keys) and any('engine' in str(key) for key in graphs.keys), graphs.keys
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_the_engine_runs_on_the_kernels(family):
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN, family]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=500)
    assert run.returncode == 0, run.stderr[-3000:]

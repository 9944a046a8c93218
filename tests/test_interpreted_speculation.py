"""Rows of different lengths on the Triton kernels, in Triton's interpreter: as graphs record them, with idle rows and
filled-up columns."""

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
import deepseek_accel.passes.experts

for module in [m for name, m in sys.modules.items() if name.startswith("deepseek_accel.")]:
    for name, value in (("uses_triton", lambda device: True), ("why_not_triton", lambda device: None)):
        if hasattr(module, name):
            setattr(module, name, value)

from deepseek_accel import optimize, report
from deepseek_accel.generation import speculate
from deepseek_accel.generation.graphs import StepGraphs
from deepseek_accel.testing import tiny_model

torch.set_grad_enabled(False)
family = sys.argv[1]
model = tiny_model(family, num_hidden_layers=1, first_k_dense_replace=0)
ids = torch.randint(2, 128, (3, 9), generator=torch.Generator().manual_seed(1))
ids[:, 6:] = ids[:, :3]
mask = torch.ones_like(ids)
mask[1, :3] = 0
options = dict(attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
expected = model.generate(ids, **options)
options["eos_token_id"] = expected[0, 10].item()  # a row is done before the others
expected = model.generate(ids, **options)
passes = {"attention": {}, "experts": {}, "layers": {}, "kv_cache": {"page_size": 16}, "allow_skips": True}
optimize(model, passes | {"speculative": {"draft": "self", "num_draft_tokens": 2}})
class Launches(StepGraphs):  # what a graph would replay is launched
    def _follow(self, stepper, cache): pass
    def _captured_prompt(self, key, device, step): self.keys.add(key)
torch.cuda.device = lambda device: contextlib.nullcontext()
graphs = Launches((2, 4), Counter())
graphs.keys = set()
speculate._Speculating.lease = lambda call, model: graphs
assert torch.equal(model.generate(ids, **options), expected)
counters = report(model).counters
assert counters["speculative: loops"] == 1 and counters["speculative: drafted tokens"] > 0
assert {key[1] for key in graphs.keys} == {2, 4}, graphs.keys
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_ragged_rows_run_on_the_kernels():
    """Launched alone they take the same kernels, which tests/gpu runs: the interpreter is slow."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", RUN, "deepseek_v3"]
    run = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-3000:]

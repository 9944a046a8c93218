"""The step of a CUDA graph over a cache that evicts, run as ops in Triton's interpreter, against the eager loop."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = """
import sys
import torch
import deepseek_accel.generation.decode, deepseek_accel.generation.evicting_graphs, deepseek_accel.ops.experts
import deepseek_accel.ops.gqa_attention, deepseek_accel.ops.latent_write, deepseek_accel.passes.experts

from deepseek_accel import families, optimize, report
from deepseek_accel.cache import Entropy, TopAttention, paged_cache
from deepseek_accel.generation import evicting_graphs, graphs
from deepseek_accel.generation.lines import read_model
from deepseek_accel.generation.sampling import Choice
from deepseek_accel.generation.step import Stepper
from deepseek_accel.testing import tiny_model
from deepseek_accel.versions import cache_argument

CACHE = cache_argument()
torch.set_grad_enabled(False)
ids = torch.randint(2, 128, (2, 37), generator=torch.Generator().manual_seed(1))
# full after one step; full from the start
for family, policy, NEW in (("llama", Entropy(38, 2, 6), 3), ("deepseek_v3", TopAttention(20, 2, 6), 3)):
    passes = {"attention": {}, "experts": {}, "layers": {}, "kv_cache": {}, "allow_skips": True}
    model = optimize(tiny_model(family, num_hidden_layers=2), passes)
    cache = paged_cache(model, 16, eviction=policy)
    options = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None, **{CACHE: cache})
    expected = model.generate(ids, **options)  # torch, on the CPU
    wanted = [kept.positions[:, :kept.held].sort().values for kept in cache.kept]

    cache = paged_cache(model, 16, eviction=policy)
    tokens = [model(ids, **{CACHE: cache}).logits[:, -1].argmax(-1)]
    cache.settle()
    length = cache.length
    for module in [m for name, m in sys.modules.items() if name.startswith("deepseek_accel.")]:
        if hasattr(module, "uses_triton"):
            module.uses_triton = lambda device: True
    found = families.find(model)
    stepper = Stepper(read_model(model, found), found, found.attentions(model)[0])
    steps = graphs.StepGraphs((3,), report(model).counters)
    steps.addresses = torch.zeros(len(stepper.model.layers), dtype=torch.int64)
    choice = Choice((), False)
    cache.reserve(length + 1, 64)
    run = evicting_graphs.EvictingRun(steps, stepper, 3, 2, cache, [0, 0], choice)
    going, pad = torch.ones(2, dtype=torch.bool), torch.zeros(1, dtype=torch.long)
    run.begin(tokens[0], torch.full((2,), length), going, [], pad)
    run.buffers.scores[:, 2:], run.buffers.token_positions[:, 2:] = float("nan"), -9
    for _ in range(NEW - 1):
        run._set_pages()
        assert run.record(choice)[:2].isfinite().all()
        run.launched += 1
        tokens.append(run.buffers.tokens[:2].clone())
    run.finish()
    cache.commit(length + NEW - 1)
    assert torch.equal(torch.stack(tokens, 1), expected[:, 37:]), (family, policy)
    assert cache.length == 37 + NEW - 1 and cache.tokens_held == [min(policy.budget, 36 + NEW)] * 2
    for kept, positions in zip(cache.kept, wanted):
        assert torch.equal(kept.positions[:, :kept.held].sort().values, positions), (family, policy)
    assert run.buffers.layer_slots[:, 2:].eq(-1).all()
    for module in [m for name, m in sys.modules.items() if name.startswith("deepseek_accel.")]:
        if hasattr(module, "uses_triton"):
            module.uses_triton = lambda device: False
print("ok")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_steps_equal_the_eager_loop():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.stdout.startswith("ok"), run.stderr[-3000:]

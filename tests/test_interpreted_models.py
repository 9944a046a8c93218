"""Whole optimized models with every op on its Triton kernel, in Triton's interpreter: the GPU path without a GPU."""

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
import deepseek_accel
import deepseek_accel.generation.decode, deepseek_accel.ops.experts, deepseek_accel.ops.gqa_attention
import deepseek_accel.ops.latent_write, deepseek_accel.ops.mla_attention, deepseek_accel.passes.experts

for module in [m for name, m in sys.modules.items() if name.startswith("deepseek_accel.")]:
    for name, value in (("uses_triton", lambda device: True), ("why_not_triton", lambda device: None)):
        if hasattr(module, name):
            setattr(module, name, value)

from deepseek_accel import optimize, report
from deepseek_accel.cache import paged_cache
from deepseek_accel.testing import relative_error, tiny_model
from deepseek_accel.versions import cache_argument

CACHE = cache_argument()
torch.set_grad_enabled(False)

family, dtype = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
model = tiny_model(family)
generator = torch.Generator().manual_seed(1)
ids = torch.randint(2, 128, (2, 19), generator=generator)
mask = torch.ones_like(ids)
mask[1, :7] = 0
options = dict(
    attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0, return_dict_in_generate=True,
    output_logits=True,
)
# Stock's loop and attention, which gathers. On FP8 pages the kernels must write and read the same numbers.
stock_cache = lambda: {} if dtype is None else {CACHE: paged_cache(model, dtype=dtype)}
expected = model.generate(ids, **options, **stock_cache())
beams = model.generate(ids[:1], max_new_tokens=3, num_beams=2, do_sample=False, **stock_cache())
passes = {"attention": {}, "experts": {}, "layers": {}, "kv_cache": {"dtype": dtype}, "allow_skips": True}
optimize(model, passes)
ours = model.generate(ids, **options)
assert torch.equal(ours.sequences, expected.sequences)
error = max(relative_error(a, b) for a, b in zip(ours.logits, expected.logits))
assert error < 1e-5, error
assert torch.equal(model.generate(ids[:1], max_new_tokens=3, num_beams=2, do_sample=False), beams)
counters = report(model).counters
assert counters["attention: " + ("absorbed" if family.startswith("deepseek_v") else "paged")] > 0
assert not [name for name in counters if "stock loop" in name and "beam" not in name], counters

# The step of a CUDA graph, run as ops: rows of another bucket, positions, slots and pages found on the device.
from deepseek_accel import families
from deepseek_accel.generation import graphs, prefill
from deepseek_accel.generation.lines import read_model
from deepseek_accel.generation.sampling import Choice
from deepseek_accel.generation.step import Stepper

found = families.find(model)
stepper = Stepper(read_model(model, found), found, found.attentions(model)[0])
steps = graphs.StepGraphs((4,), report(model).counters)
steps.addresses = torch.zeros(len(stepper.model.layers), dtype=torch.int64)
chosen = {}
for choice in (None, Choice((), False)):
    cache = paged_cache(model, 16, dtype=dtype)
    starts, positions = [0, 7], (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache}).logits[:, -1]
    tokens = [logits.argmax(-1)]
    cache.reserve(cache.length + 1, 3)
    run = graphs.GraphRun(steps, stepper, 4, 2, cache, starts, choice)
    run.begin(tokens[0], positions[:, -1] + 1, torch.ones(2, dtype=torch.bool), [], torch.zeros(1, dtype=torch.long))
    for storage in run._storages:
        storage[cache.pool.table.high_water :] = float("nan") if dtype is None else 255  # NaN as codes and scales
    for _ in range(3):
        run._set_pages()
        out = run.record(choice)
        assert out[:2].isfinite().all()
        tokens.append(run.buffers.tokens[:2].clone() if choice else out[:2].argmax(-1))
        if not choice:
            run.buffers.tokens[:2] = tokens[-1]
    cache.commit(cache.length + 3)
    assert torch.equal(torch.stack(tokens, 1), expected.sequences[:, ids.shape[1] :]), tokens
    assert run.buffers.lengths.tolist() == [22, 22, 0, 0] and run.buffers.slots[2:].tolist() == [-1, -1]

# The graph of a prompt, run as ops: what a longer one left behind its end must not matter.
from deepseek_accel.generation import prompt_graphs

buffers = prompt_graphs.PromptBuffers.make(torch.device("cpu"))
buffers.set(torch.full((1, 12), 5), torch.arange(12), torch.arange(12) + 10**6)

def by_graph(input_ids, positions, held, slots):
    addresses = torch.tensor([pages.storage.data_ptr() for pages in held])
    buffers.set(input_ids, positions, slots)
    return prompt_graphs.record(stepper, 12, buffers, addresses, held[0])

if dtype is None:
    caches = [paged_cache(model, 16), paged_cache(model, 16)]
    straight, graphed = (
        prefill.prefill(stepper, ids[:1, :9], cache, instead=way) for cache, way in zip(caches, (None, by_graph))
    )
    assert relative_error(graphed, straight) < 1e-5
    for straight, graphed in zip(*(cache.layers for cache in caches)):
        assert relative_error(graphed._pages().entries(), straight._pages().entries()) < 1e-5

    # Tokens that join them, filled up to the graph's size, in a graph with an idle row.
    from deepseek_accel.generation import join_graphs

    joined = join_graphs.JoinBuffers.make(2, 4, 2, torch.device("cpu"))
    joined.set(torch.full((2, 4), 5), torch.arange(4)[None], torch.arange(8) + 10**6, caches[0].layers[0]._pages())

    def by_join(input_ids, positions, held, slots):
        addresses = torch.tensor([pages.storage.data_ptr() for pages in held])
        joined.set(input_ids, positions, slots, held[0])
        return join_graphs.record(stepper, joined, addresses, held)[:1]

    straight, graphed = (
        prefill.prefill(stepper, ids[:1, 9:12], cache, instead=way) for cache, way in zip(caches, (None, by_join))
    )
    assert relative_error(graphed, straight) < 1e-5
    for straight, graphed in zip(*(cache.layers for cache in caches)):
        assert relative_error(graphed._pages().entries(), straight._pages().entries()) < 1e-5
print("ok", error, counters)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "arguments",
    [
        ["deepseek_v2"],
        ["deepseek_v3"],
        ["llama"],
        ["qwen2"],
        ["deepseek_v3", "fp8_e4m3"],
        ["llama", "fp8_e5m2"],
    ],
    ids="-".join,
)
def test_tokens_equal_stock(arguments):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550
    )
    assert run.stdout.startswith("ok"), run.stderr[-3000:]

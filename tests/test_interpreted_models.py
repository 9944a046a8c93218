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
from deepseek_accel.ops import choice, experts, gqa_attention, mla_attention, rms_norm, router
from deepseek_accel.passes import attention as seam, experts as experts_pass, layers

for module in (choice, experts, gqa_attention, mla_attention, rms_norm, router, seam, experts_pass, layers):
    for name, value in (("uses_triton", lambda device: True), ("why_not_triton", lambda device: None)):
        if hasattr(module, name):
            setattr(module, name, value)

from deepseek_accel import optimize, report
from deepseek_accel.testing import relative_error, tiny_model

family = sys.argv[1]
model = tiny_model(family)
generator = torch.Generator().manual_seed(1)
ids = torch.randint(2, 128, (2, 19), generator=generator)
mask = torch.ones_like(ids)
mask[1, :7] = 0
options = dict(
    attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0, return_dict_in_generate=True,
    output_logits=True,
)
expected = model.generate(ids, **options)
beams = model.generate(ids[:1], max_new_tokens=3, num_beams=2, do_sample=False)
optimize(model)
ours = model.generate(ids, **options)
assert torch.equal(ours.sequences, expected.sequences)
error = max(relative_error(a, b) for a, b in zip(ours.logits, expected.logits))
assert error < 1e-5, error
assert torch.equal(model.generate(ids[:1], max_new_tokens=3, num_beams=2, do_sample=False), beams)
counters = report(model).counters
assert counters["attention: " + ("absorbed" if family.startswith("deepseek") else "paged")] > 0
print("ok", error, counters)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "llama", "qwen2"])
def test_tokens_equal_stock(family):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", RUN, family], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.stdout.startswith("ok"), run.stderr[-3000:]

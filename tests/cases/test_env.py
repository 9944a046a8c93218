"""Class env: no Triton, no GPU, not Linux. Each case is a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

HERE = Path(__file__).parent
RUN = """
from deepseek_accel import optimize, plan, report, restore
from deepseek_accel.testing import relative_error, tiny_model
import torch
torch.set_num_threads(1)
for model_type in ("deepseek_v3", "llama"):
    stock, model = tiny_model(model_type), optimize(tiny_model(model_type))
    ids = torch.randint(2, 128, (1, 20), generator=torch.Generator().manual_seed(0))
    options = dict(max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
    ours, theirs = model.generate(ids, **options), stock.generate(ids, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert relative_error(torch.stack(ours.logits), torch.stack(theirs.logits)) < 1e-4
    text = str(report(model))
    assert text.count("(cpu tensors use the torch implementation)") + text.count(": cpu tensors use") >= 2, text
    assert not report(model).warnings()
import sys
assert not [name for name in sys.modules if name.startswith("deepseek_accel.kernels.")]
print("done")
"""
NO_TRITON = "import sys; sys.modules['triton'] = None\n"
# torch and transformers ask for files of the other platform, and for all of Triton, when they load: they come first
LOADED = """
import sys, torch, transformers.generation
import transformers.models.deepseek_v3.modeling_deepseek_v3, transformers.models.llama.modeling_llama
"""
BROKEN = """
from deepseek_accel.ops.choice import triton_missing
assert "Triton does not import" in triton_missing(), triton_missing()
"""
LIGHT_OTHER = """
import deepseek_accel, deepseek_accel.ops.experts, deepseek_accel.ops.mla_attention, deepseek_accel.ops.gqa_attention
print("done")
"""
ABSENT = """
from deepseek_accel.ops.choice import triton_missing
assert triton_missing() == "Triton is not installed", triton_missing()
"""
LIGHT = """
import sys
import deepseek_accel
from deepseek_accel.cache import PagePool
loaded = [n for n in ("triton", "transformers.generation", "deepseek_accel.kernels") if n in sys.modules]
assert not loaded, loaded
import deepseek_accel.ops.experts, deepseek_accel.ops.router, deepseek_accel.ops.rms_norm
import deepseek_accel.ops.mla_attention, deepseek_accel.ops.gqa_attention
assert "triton" not in sys.modules
print("done")
"""


def run(script, **environment):
    env = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | environment
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent.parent), env.get("PYTHONPATH", "")])
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "done" in result.stdout, result.stderr[-3000:]
    return result


def test_N01_import_is_light():
    """import fails, or is slow, because Triton and the generation package are imported at module top."""
    run(LIGHT)


def test_N01_import_is_light_without_triton():
    """The same where Triton is not installed."""
    run(NO_TRITON + LIGHT.replace('("triton", ', "(").replace('assert "triton" not in sys.modules', ""))


def test_N01_no_triton_no_gpu():
    """A CPU-only machine without Triton: import, optimize and generate must work and say what they use."""
    result = run(NO_TRITON + ABSENT + RUN, CUDA_VISIBLE_DEVICES="")
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_N01_other_platforms():
    """Windows and macOS, where there is no Triton."""
    for platform in ("win32", "darwin"):
        script = LOADED + f"sys.platform, sys.modules['triton'] = {platform!r}, None\n" + ABSENT
        run(script + (RUN if platform == "win32" else LIGHT_OTHER), CUDA_VISIBLE_DEVICES="")


def test_N01_triton_without_its_language():
    """A broken Triton: the package is there and triton.language is not."""
    pytest.importorskip("triton")
    run(LOADED + "sys.modules['triton.language'] = None\n" + BROKEN + RUN, CUDA_VISIBLE_DEVICES="")


def test_N01_metadata_does_not_force_triton():
    """pip refuses to install on Windows, macOS or ARM because Triton is a plain requirement."""
    text = (HERE.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    lines = [
        line.strip().strip(",").strip('"')
        for line in text.partition("\ndependencies = [")[2].partition("\n]")[0].splitlines()
    ]
    requirements = [Requirement(line) for line in lines if line]
    assert {"torch", "transformers", "triton"} <= {r.name for r in requirements}
    (triton,) = [r for r in requirements if r.name == "triton"]
    for system, machine, wanted in [
        ("Linux", "x86_64", True),
        ("Linux", "armv7l", False),
        ("Windows", "AMD64", False),
        ("Darwin", "arm64", False),
    ]:
        platform = {"Linux": "linux", "Windows": "win32", "Darwin": "darwin"}[system]
        where = {"platform_system": system, "platform_machine": machine, "sys_platform": platform}
        assert triton.marker is not None and triton.marker.evaluate(where) == wanted, (system, machine)

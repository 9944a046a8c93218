"""Every example runs on a CPU and prints what it promises; the trainer makes a checkpoint of the bundled layout."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from deepseek_accel import report
from deepseek_accel.models import path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PRINTS = {
    "quickstart": ["tokens equal: True", "tokens equal after restore: True", "deepseek_v3: optimized"],
    "pipeline_dropin": [
        "texts equal: True",
        "paged generate calls: 1",
        "streamed: join(pkg_dir, *args, **kwargs):",
        "samples: ['class Parser:",
        "texts equal after restore: True",
    ],
    "batched_generation": [
        "tokens equal: True",
        "pieces: '\\n' 'class' ",
        "{'num_beams': 4} AccelError",
        "same seed, same tokens: True",
        "cancelled: True",
        "asyncio: 2 texts",
        "still running: 0 waiting: 0",
    ],
    "lora_adapter": [
        "with the adapter: {'attention: expanded (",
        "tokens equal on a stock model: True",
        "tokens equal after merging: True",
        "tokens equal after restore: True",
    ],
    "long_context_cache": [
        "next token equal: True",
        "after the prompt:        paged 3,276,800 bytes, DynamicCache 3,200,000 bytes",
        "500 tokens taken back:   paged 2,457,600 bytes, DynamicCache 2,400,000 bytes",
        "same next token after writing them again: True",
        "each row one token more: paged 3,584,000 bytes, DynamicCache 12,806,400 bytes",
        "next tokens of the rows equal: True",
    ],
}
SCRIPTS = {"train_tiny_deepseek": "--device DEVICE", "build_corpus": "--megabytes MEGABYTES"}
"""Name and a line of the help. They run in this process, below."""


@pytest.fixture(scope="module")
def running():
    """All of them at once: most of their time is imports."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = {
        name: subprocess.Popen(
            [sys.executable, EXAMPLES / f"{name}.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for name in PRINTS
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.wait()


@pytest.fixture
def example(monkeypatch):
    """Imports an example by name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def test_every_example_is_covered():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*PRINTS, *SCRIPTS}


@pytest.mark.parametrize("name", PRINTS)
def test_examples_print_what_they_promise(running, name):
    if name == "lora_adapter":
        pytest.importorskip("peft")
    out, error = running[name].communicate(timeout=300)
    assert running[name].returncode == 0, error[-2000:]
    for line in PRINTS[name]:
        assert line in out, out


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_have_help(example, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        example(name).main()
    assert stopped.value.code == 0 and SCRIPTS[name] in capsys.readouterr().out


def test_the_adapter_example_says_that_peft_is_missing(example, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    example("lora_adapter").main()
    assert capsys.readouterr().out.startswith("skipped: peft is not installed")


def test_a_corpus_is_built_and_a_checkpoint_of_the_bundled_layout_trained(example, monkeypatch, tmp_path):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    data, out = tmp_path / "data", tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["build_corpus", str(data), "--megabytes", "0.5"])
    example("build_corpus").main()
    tokens = np.load(data / "train.npy")
    assert tokens.dtype == np.uint16 and tokens[0] == 0 and tokens[-1] == 1 and 1000 < tokens.max() < 2048

    trainer = example("train_tiny_deepseek")
    options = ["--device", "cpu", "--minutes", "0.02", "--draft-minutes", "0.005"]
    sizes = ["--batch", "3", "--length", "32", "--windows", "1"]
    monkeypatch.setattr(sys, "argv", ["train_tiny_deepseek", str(data), str(out), *options, *sizes])
    stock = trainer.deepseek.DeepseekV3Experts.forward
    trainer.main()
    assert trainer.deepseek.DeepseekV3Experts.forward is stock

    for name in ("deepseek-tiny", "deepseek-tiny-draft"):
        with (
            safe_open(out / name / "model.safetensors", "pt") as ours,
            safe_open(path(name) / "model.safetensors", "pt") as bundled,
        ):
            layouts = [
                {key: (f.get_slice(key).get_shape(), f.get_slice(key).get_dtype()) for key in f.keys()}  # noqa: SIM118
                for f in (ours, bundled)
            ]
        assert layouts[0] == layouts[1]
    made, shipped = (json.loads((folder / "deepseek-tiny/config.json").read_text()) for folder in (out, path().parent))
    assert made == shipped

    model, loading = AutoModelForCausalLM.from_pretrained(out / "deepseek-tiny", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    assert {key.split(".")[2] for key in loading["unexpected_keys"]} == {"5"}  # the MTP layer
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.dtype == torch.float32 and bias.abs().max() > 0


def test_the_code_of_the_readme_runs_from_top_to_bottom(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)  # it calibrates on README.md
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    placeholder = "load_quantized("
    for block in blocks:
        exec("\n".join(line for line in block.splitlines() if placeholder not in line), names)
    said = capsys.readouterr().out
    assert "deepseek_v3: optimized" in said and said.count(" length") == 2  # of the engine's requests
    assert [p["status"] for p in report(names["model"]).passes] == ["applied"] * 3

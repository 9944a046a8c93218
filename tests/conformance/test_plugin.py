"""The wiring of `plugin.py`, on a tree made up here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import run

HERE = Path(__file__).resolve().parent

MODEL_TEST = """
import unittest
from transformers.models.{family} import modeling_{family} as module

class {prefix}ModelTest(unittest.TestCase):
    def test_is_optimized(self):
        from tests.test_modeling_common import EXPECTED, make
        model = make(module, "{prefix}", "{family}")
        assert hasattr(model, "_deepseek_accel") == EXPECTED, "outermost"
        assert not hasattr(model.model, "_deepseek_accel"), "only the outermost"

    def test_loaded(self):
        import tempfile
        from tests.test_modeling_common import EXPECTED, make
        model = make(module, "{prefix}", "{family}")
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            assert hasattr(type(model).from_pretrained(directory), "_deepseek_accel") == EXPECTED

    def test_tp_left_out(self):
        raise AssertionError
"""

COMMON = """
import sys
from small import CONFIGS
EXPECTED = "--optimize" in sys.argv

def make(module, prefix, family):
    return getattr(module, prefix + "ForCausalLM")(getattr(module, prefix + "Config")(**CONFIGS[family]))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    prefixes = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "llama": "Llama", "qwen2": "Qwen2"}
    for family, prefix in prefixes.items():
        folder = root / "tests" / "models" / family
        folder.mkdir(parents=True)
        text = MODEL_TEST.format(family=family, prefix=prefix)
        (folder / f"test_modeling_{family}.py").write_text(text, encoding="utf-8")
    (root / "tests" / "test_modeling_common.py").write_text(COMMON, encoding="utf-8")
    return root


@pytest.mark.parametrize(("mode", "models"), [("--stock", 0), ("--optimize", 12)])
def test_every_outermost_model_is_optimized(tree, mode, models):
    command = [sys.executable, "-m", "pytest", str(HERE / "test_transformers.py"), f"--transformers-tree={tree}", mode]
    root = str(HERE.parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(
        [*command, "-o", "filterwarnings=", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "8 passed, 4 deselected" in done.stdout
    assert f"conformance: {models} models optimized" in done.stdout


def test_table_lists_what_differs(tmp_path):
    facts = {"transformers": "5", "torch": "2", "tests_are": "its own tests", "left_out": {"reason": 4}}
    ok, bad = {"outcome": "passed", "message": "", "optimized_models": 1}, {"outcome": "failed", "message": "a | b\nc"}
    stock = facts | {"tests": {"LlamaModelTest::test_a": ok, "LlamaModelTest::test_b": bad}}
    optimized = facts | {"tests": {"LlamaModelTest::test_a": bad, "LlamaModelTest::test_b": bad}}
    text = run.table(stock, optimized)
    assert "| Llama | 2 | 0 | 0 | 1 | 2 | 1 |" in text
    assert "| `LlamaModelTest::test_a` | passed | failed | a \\| b c |" in text
    assert "test_b" not in text and "Left out: 4 tests (reason)." in text
    page = tmp_path / "support.md"
    other = "### transformers 10\n\nrows"
    page.write_text(f"before\n{run.BEGIN}\n### transformers 5\nold\n\n{other}\n{run.END}\nafter\n", encoding="utf-8")
    run.write(page, text)
    run.write(page, text)
    assert page.read_text(encoding="utf-8") == f"before\n{run.BEGIN}\n{other}\n\n{text}\n{run.END}\nafter\n"

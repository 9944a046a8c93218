"""A new pass is one file and one line; a new family is one file. Tried in a copy of the tree."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PASS = """
from dataclasses import dataclass
from ..plan import Edit
from .base import Pass

@dataclass(frozen=True)
class Tag(Pass):
    text: str = "hi"

    def plan(self, model, family, context):
        yield Edit(model, "tag", lambda: self.text, "model")

PASS = Tag
"""
FAMILY = """
from .deepseek_v3 import DeepseekV3

class MyFamily(DeepseekV3):
    modeling_module = "transformers.models.deepseek_v3.modeling_deepseek_v3"

FAMILY = MyFamily("my_family", attention="mla")
"""
RUN = """
from deepseek_accel import OptimizeConfig, optimize, restore
from deepseek_accel.testing import picture, tiny_model
model = tiny_model("deepseek_v3")
model.config.model_type = "my_family"
before = picture(model)
optimize(model, OptimizeConfig.from_dict({"tag": {"text": "x"}, "attention": {}}))
assert model.tag == "x"
restore(model)
assert picture(model) == before
print("ok")
"""


def test_one_file_and_one_line(tmp_path):
    package = tmp_path / "deepseek_accel"
    shutil.copytree(ROOT / "deepseek_accel", package, ignore=shutil.ignore_patterns("data", "__pycache__"))
    (package / "passes/tag.py").write_text(PASS)
    registry = package / "passes/__init__.py"
    registry.write_text(registry.read_text().replace('    "kv_cache",\n', '    "kv_cache",\n    "tag",\n'))
    (package / "families/my_family.py").write_text(FAMILY)
    run = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout.strip() == "ok", run.stderr[-800:]

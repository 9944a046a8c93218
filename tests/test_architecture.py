"""Layers import downwards only, importing is light, and no Triton means no failure."""

import ast
import subprocess
import sys
from pathlib import Path

import deepseek_accel

ROOT = Path(deepseek_accel.__file__).parent
LOW = {"errors", "versions"}
MAY_IMPORT = {
    "errors": set(),
    "versions": {"errors"},
    "journal": {"errors"},
    "plan": {"errors", "journal"},
    "kernels": {"errors"},
    "ops": {"errors", "kernels"},
    "families": LOW,
    "cache": LOW | {"ops", "families"},
    "quantization": LOW | {"ops", "families", "watch"},
    "watch": {"journal"},
    "gating": LOW | {"families"},
    "generation": LOW | {"families", "ops", "cache", "watch", "journal"},
    "passes": LOW | {"journal", "plan", "families", "ops", "cache", "watch", "generation", "gating", "quantization"},
    "config": {"errors", "passes"},
    "report": {"plan"},
    "api": LOW | {"journal", "plan", "families", "passes", "config", "report"},
    "loading": {"api", "config", "errors", "models", "passes", "quantization"},
    "__init__": {"api", "config", "errors", "gating", "loading", "models", "passes", "quantization"},
    "models": {"errors"},
    "testing": set(),
}
FREE = {"bench", "cli", "engine", "__main__"}


def internal_imports(path: Path):
    parts = path.relative_to(ROOT).parts
    layer = parts[0].removesuffix(".py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == len(parts):
            yield from ((layer, (node.module or alias.name).split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepseek_accel."):
            yield layer, node.module.split(".")[1]


def test_layers_import_downwards():
    seen = {edge for path in ROOT.rglob("*.py") for edge in internal_imports(path)}
    assert ("passes", "ops") in seen  # the walk finds imports
    bad = {(a, b) for a, b in seen if a != b and a not in FREE and b not in MAY_IMPORT[a]}
    assert not bad


def test_every_file_belongs_to_a_layer():
    layers = {p.relative_to(ROOT).parts[0].removesuffix(".py") for p in ROOT.rglob("*.py")}
    assert layers <= set(MAY_IMPORT) | FREE


def test_import_is_light():
    code = (
        "import sys, deepseek_accel; "
        "heavy = ('transformers.generation', 'matplotlib', 'deepseek_accel.engine', 'prometheus', 'opentelemetry'); "
        "print([m for m in sys.modules if m == 'triton' or m.startswith(heavy)])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert run.stdout.strip() == "[]"


def test_only_kernels_import_triton():
    for path in ROOT.rglob("*.py"):
        if "kernels" in path.parts:
            continue
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            names.append(getattr(node, "module", "") or "")
            assert not any(n.split(".")[0] == "triton" for n in names), path


def test_nothing_is_loaded_by_pickle_and_remote_code_is_never_trusted():
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                call = ast.unparse(node.func)
                assert call not in ("torch.load", "pickle.load", "pickle.loads"), path
                trusts = [k for k in node.keywords if k.arg == "trust_remote_code"]
                assert not any(ast.unparse(k.value) == "True" for k in trusts), path


def test_every_test_file_has_a_name_of_its_own():
    """Two of one name in different folders cannot be collected together; on machines without a GPU it does not show."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) > 50
    assert sorted(names) == sorted(set(names))

"""Run transformers' own model tests, with every model passed through `deepseek_accel.optimize`.

    pytest tests/conformance --transformers-tree PATH --optimize      # or --stock, for comparison

PATH is a source tree of the installed transformers version; nothing of it is in this repository.

The seam is where a user would call `optimize`: after `Model(config)` and after `Model.from_pretrained(...)`. A model
that is built inside another one (the decoder in `ForCausalLM`) or inside `from_pretrained` is left to the outer call.
Copies and unpickled models carry what the original carried, as they do for a user.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FAMILIES = ("deepseek_v2", "deepseek_v3", "llama", "qwen2")

COMPILED = "torch.compile or torch.export, which may outlast the timeout; run with --with-compile"

# Not run, and why. A test is left out if its name contains the key.
LEFT_OUT = {
    "compil": COMPILED,
    "export": COMPILED,
    "test_tp_": "starts several processes and needs one accelerator each",
    "test_fsdp": "starts several processes and needs one accelerator each",
}

# Mixins that are replaced by empty classes: module, class, and whether a tree that has the module uses its own.
EMPTY_MIXINS = (
    ("test_pipeline_mixin", "PipelineTesterMixin", False),  # downloads tokenizers, needs `datasets`
    ("exporters.test_export", "ExportTesterMixin", True),  # not in the source distribution
    ("generation.test_utils", "GenerationTesterMixin", True),  # not in the source distribution
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "transformers' own model tests")
    group.addoption("--transformers-tree", metavar="PATH", help="source tree of the installed transformers version")
    group.addoption("--optimize", action="store_true", help="pass every model through deepseek_accel.optimize()")
    group.addoption("--stock", action="store_true", help="leave every model as it is (the default)")
    group.addoption("--with-compile", action="store_true", help="run the tests of torch.compile and torch.export too")
    group.addoption("--conformance-json", metavar="FILE", help="write the outcome of every test to FILE")


def tree_of(config: pytest.Config) -> Path | None:
    """The tree to test with, or None if this is not a conformance run."""
    value = config.getoption("--transformers-tree", default=None)
    return Path(value).resolve() if value else None


def pytest_configure(config: pytest.Config) -> None:
    if (tree := tree_of(config)) is None:
        return
    if config.getoption("--optimize") and config.getoption("--stock"):
        raise pytest.UsageError("give --optimize or --stock, not both")
    if not (tree / "tests" / "test_modeling_common.py").is_file():
        raise pytest.UsageError(f"{tree} is no transformers source tree: it has no tests/test_modeling_common.py")
    config.option.strict_markers = False  # their marks are registered in their own conftest
    config.addinivalue_line("filterwarnings", "always")  # not errors, and visible to tests that look for one
    mount(tree)
    config.pluginmanager.register(Recorder(config, tree), "conformance-recorder")


def mount(tree: Path) -> None:
    """Make `tree/tests` importable as `tests`, which is what it calls itself, whatever else has that name."""
    package = types.ModuleType("tests")
    package.__path__ = [str(tree / "tests")]
    sys.modules["tests"] = package
    for name, mixin, prefer_theirs in EMPTY_MIXINS:
        parent, _, module = f"tests.{name}".rpartition(".")
        if prefer_theirs and (tree / "tests" / name.replace(".", "/")).with_suffix(".py").is_file():
            continue
        if parent not in sys.modules:
            sys.modules[parent] = types.ModuleType(parent)
            sys.modules[parent].__path__ = []  # type: ignore[attr-defined]
        stub = sys.modules[f"{parent}.{module}"] = types.ModuleType(f"{parent}.{module}")
        setattr(stub, mixin, type(mixin, (), {"__module__": stub.__name__}))


class Optimizer:
    """Passes models through `optimize` as they are built, and counts them."""

    def __init__(self) -> None:
        self.depth, self.models = 0, 0

    def optimize(self, model: Any) -> None:
        from deepseek_accel import optimize

        optimize(model)
        self.models += 1

    @contextmanager
    def outermost(self) -> Iterator[list[Any]]:
        """Optimizes what the block leaves in the list, unless it runs within another such block."""
        built: list[Any] = []
        self.depth += 1
        try:
            yield built
        finally:
            self.depth -= 1
        if self.depth == 0:
            for model in built:
                self.optimize(model)

    def watch(self, model_class: Any) -> None:
        """Optimize every instance of `model_class` from now on."""
        build, load = model_class.__init__, model_class.from_pretrained.__func__

        @functools.wraps(build)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            with self.outermost() as built:
                build(model, *args, **kwargs)
                built.append(model)

        @functools.wraps(load)
        def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
            with self.outermost() as built:
                result = load(cls, *args, **kwargs)
                built.append(result[0] if isinstance(result, tuple) else result)
            return result

        model_class.__init__ = __init__
        model_class.from_pretrained = classmethod(from_pretrained)


def model_classes(family: str) -> list[Any]:
    """Every model class of one family that can be built."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    names = (name for name in module.__all__ if not name.endswith("PreTrainedModel"))
    return [c for name in names if hasattr(c := getattr(module, name), "from_pretrained")]


class Recorder:
    """The outcome of every test, and how many models each test optimized."""

    def __init__(self, config: pytest.Config, tree: Path) -> None:
        self.config, self.tree = config, tree
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.left_out: Counter[str] = Counter()
        self.optimizer = Optimizer()
        if config.getoption("--optimize"):
            for family in FAMILIES:
                for model_class in model_classes(family):
                    self.optimizer.watch(model_class)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        keys = {key: why for key, why in LEFT_OUT.items() if why != COMPILED or not config.getoption("--with-compile")}
        out = {item: why for item in items for key, why in keys.items() if key in item.name}
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]
        self.left_out.update(out.values())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        before = self.optimizer.models
        try:
            return (yield)
        finally:
            item.user_properties.append(("optimized_models", self.optimizer.models - before))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self.outcomes.get(report.nodeid.partition("::")[2])
        if report.passed and (report.when != "call" or (known and known["outcome"] == "failed")):
            return  # a failed subtest is followed by the report of its test, which may say "passed"
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else str(report.longrepr[2] if isinstance(report.longrepr, tuple) else "")
        self.outcomes[report.nodeid.partition("::")[2]] = {
            "outcome": report.outcome,
            "message": message,
            "seconds": round(report.duration, 2),
            "optimized_models": dict(report.user_properties).get("optimized_models", 0),
        }

    def pytest_sessionfinish(self) -> None:
        file = self.config.getoption("--conformance-json")
        if not file or hasattr(self.config, "workerinput"):
            return
        import torch
        import transformers

        theirs = (self.tree / "tests" / "models").is_dir()
        document = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "tests_are": "their own model tests" if theirs else "their common test mixins over small configs of ours",
            "left_out": self.left_out,
            "tests": self.outcomes,
        }
        Path(file).write_text(json.dumps(document, indent=1), encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        models = sum(o["optimized_models"] for o in self.outcomes.values())
        tests = sum(o["optimized_models"] > 0 for o in self.outcomes.values())
        terminalreporter.write_line(f"conformance: {models} models optimized in {tests} of {len(self.outcomes)} tests")
        for why, count in self.left_out.items():
            terminalreporter.write_line(f"conformance: {count} tests left out: {why}")

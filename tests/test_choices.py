"""Stored kernel choices: what is shipped is valid, is compiled somewhere, and overrides the rule only where it says."""

import importlib
import inspect
import json
import pkgutil
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import deepseek_accel.kernels
from deepseek_accel.kernels import choices


class Tile(NamedTuple):
    rows: int
    num_warps: int


def rule(capability: tuple[int, int], tokens: int, hidden: int = 2048) -> Tile:
    return Tile(64 if capability >= (9, 0) else 16, 4)


ENTRIES = [
    {"when": {"tokens": 1, "hidden": 4096}, "use": {"rows": 1, "num_warps": 1}},
    {"when": {"tokens": [1, 8]}, "use": {"num_warps": 8}},
    {"when": {"tokens": [8, 16]}, "use": {"num_warps": 16}},
]


@pytest.fixture
def choose(monkeypatch, tmp_path):
    """A chooser, with choices stored for a device that is not shipped."""
    content = {"Some GPU": {"capability": [9, 0], "choices": {"test_choices.rule": ENTRIES}}}
    (tmp_path / "choices.json").write_text(json.dumps(content))
    monkeypatch.setattr(choices, "FILE", tmp_path / "choices.json")
    monkeypatch.setattr(choices, "RULES", {})
    monkeypatch.setattr(choices, "used", set())
    choices.stored.cache_clear()
    yield choices.by_device(rule)
    choices.stored.cache_clear()


def on_gpu(monkeypatch, name, capability=(9, 0)):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return torch.device("cuda", 0)


def test_stored_fields_override_the_rule(choose):
    assert choose("Some GPU", 1, hidden=4096) == Tile(1, 1)
    assert choose("Some GPU", 1) == Tile(64, 8), "hidden has a default, which does not agree"
    assert choose("Some GPU", 8) == Tile(64, 8), "the first entry that agrees is taken, ranges include their ends"
    assert choose("Some GPU", 9) == choose("Some GPU", 16, 4096) == Tile(64, 16)
    assert choose("Some GPU", 17) == Tile(64, 4)
    assert choices.used == {("Some GPU", "test_choices.rule", number) for number in range(3)}


def test_a_device_is_looked_up_by_its_name(choose, monkeypatch):
    assert choose(on_gpu(monkeypatch, "Some GPU"), 4) == Tile(64, 8)


@pytest.mark.parametrize("name, capability, rows", [("NVIDIA A100", (8, 0), 16), ("Next year's GPU", (13, 0), 64)])
def test_other_devices_get_the_rule(choose, monkeypatch, name, capability, rows):
    assert choose(on_gpu(monkeypatch, name, capability), 4) == Tile(rows, 4)
    assert not choices.used


def test_the_rule_alone(choose):
    assert choose((9, 0), 4) == Tile(64, 4)
    assert choose(torch.device("cpu"), 4) == choose((8, 9), 4) == Tile(16, 4)


def test_a_wrong_key_raises(choose):
    with pytest.raises(TypeError, match="token"):
        choose("Some GPU", token=4)
    with pytest.raises(TypeError, match="tokens"):
        choose("Some GPU", hidden=4)
    with pytest.raises(ValueError, match="'Some GUP'; there are Some GPU"):
        choose("Some GUP", 4)


def test_looked_up_once_per_key(choose, monkeypatch):
    choose("Some GPU", 4)
    monkeypatch.setattr(choices, "identify", lambda where: pytest.fail("looked up again"))
    assert choose("Some GPU", 4) == Tile(64, 8)


def kernel_modules():
    return [
        importlib.import_module(f"deepseek_accel.kernels.{info.name}")
        for info in pkgutil.iter_modules(deepseek_accel.kernels.__path__)
    ]


def shipped():
    return [
        (device, name, number, entry)
        for device, content in json.loads(choices.FILE.read_text()).items()
        for name, entries in content["choices"].items()
        for number, entry in enumerate(entries)
    ]


def test_the_h200_is_shipped():
    assert choices.identify("NVIDIA H200") == ("NVIDIA H200", (9, 0))


def test_shipped_entries_are_valid():
    """Every name exists, every range is one, every entry says how it was measured."""
    kernel_modules()
    for device, name, _, entry in shipped():
        rule = choices.RULES.get(name)
        assert rule is not None, f"{device}: no rule {name}"
        assert set(entry) == {"when", "use", "measured"}, f"{device} {name}: {entry}"
        assert entry["use"] and entry["measured"]
        parameters = list(inspect.signature(rule).parameters)[1:]
        assert set(entry["when"]) <= set(parameters), f"{device} {name}: {entry['when']}"
        fields = inspect.signature(rule, eval_str=True).return_annotation._fields
        assert set(entry["use"]) <= set(fields), f"{device} {name}: {entry['use']}"
        for wanted in entry["when"].values():
            assert not isinstance(wanted, list) or (len(wanted) == 2 and wanted[0] <= wanted[1])


def test_shipped_entries_are_compiled():
    """tests/test_kernels_compile.py checks shared memory and spills of compile cases, so each entry must be in one."""
    for module in kernel_modules():
        getattr(module, "compile_cases", list)()
    missing = [entry[:3] for entry in shipped() if entry[:3] not in choices.used]
    assert not missing, f"no compile case meets {missing}"

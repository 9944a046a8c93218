"""How a kernel is laid out on a device: a rule, and for devices that were measured, what was measured.

A kernel module writes its rule as a function of the compute capability and of the sizes that matter, and marks it:

    class Tile(NamedTuple):
        rows: int
        num_warps: int

    @choices.by_device
    def choose_tile(capability: tuple[int, int], tokens: int, hidden: int) -> Tile: ...

    choose_tile(hidden.device, tokens=8, hidden=2048)     # on a call; looked up once per key, then cached
    choose_tile("NVIDIA H200", tokens=8, hidden=2048)     # for compile cases: what that device will be given
    choose_tile((8, 9), tokens=8, hidden=2048)            # for compile cases: the rule alone

The rule serves every device; `choices.json` beside this file overrides it by the device's name as torch gives it:

    {"NVIDIA H200": {"capability": [9, 0], "choices": {"experts.choose_tile": [
        {"when": {"hidden": 2048, "tokens": [5, 16]}, "use": {"rows": 32}, "measured": "<commit>, <command>"}]}}}

`when` names parameters of the rule: a number must be equal, a pair is an inclusive range, what is not named may be
anything. The first entry that agrees replaces the fields in `use`. Nothing is measured at run time. Each entry must be
met by a compile case of its module (tests/test_choices.py), so that it is known to fit the device.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

Chosen = TypeVar("Chosen", bound=tuple[Any, ...])
FILE = Path(__file__).with_suffix(".json")
LEAST_CAPABILITY = (8, 0)
"""Stands for a device that has none: a CPU, on which Triton's interpreter runs kernels."""

RULES: dict[str, Callable[..., Any]] = {}
"""Name as in `choices.json` -> the rule. Complete once every kernel module is imported."""
used: set[tuple[str, str, int]] = set()
"""(device name, rule, number) of every entry that has been chosen in this process."""


@functools.cache
def stored() -> Mapping[str, Any]:
    """The content of `choices.json`."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def identify(where: torch.device | str | tuple[int, int]) -> tuple[str | None, tuple[int, int]]:
    """(name under which choices are stored or None, compute capability). Raises ValueError on an unknown name."""
    if isinstance(where, tuple):
        return None, where
    if isinstance(where, torch.device):
        if where.type != "cuda":
            return None, LEAST_CAPABILITY
        return torch.cuda.get_device_name(where), torch.cuda.get_device_capability(where)
    if where not in stored():
        raise ValueError(f"no choices are stored for a device {where!r}; there are {', '.join(stored())}")
    major, minor = stored()[where]["capability"]
    return where, (major, minor)


def by_device(rule: Callable[..., Chosen]) -> Callable[..., Chosen]:
    """`rule(capability, ...)`, which returns a named tuple, becomes `choose(device, ...)` with what is stored in it.

    The rule's further arguments must be numbers or strings. A wrong one raises TypeError, as the rule itself would.
    """
    name = f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}"
    signature = inspect.signature(rule)
    RULES[name] = rule

    @functools.cache
    @functools.wraps(rule)
    def choose(where: torch.device | str | tuple[int, int], *arguments: Any, **key: Any) -> Chosen:
        device, capability = identify(where)
        bound = signature.bind(capability, *arguments, **key)
        bound.apply_defaults()
        chosen = rule(*bound.args, **bound.kwargs)
        entries = stored().get(device, {"choices": {}})["choices"].get(name, ()) if device is not None else ()
        for number, entry in enumerate(entries):
            if all(_agrees(bound.arguments[field], wanted) for field, wanted in entry["when"].items()):
                used.add((str(device), name, number))
                return chosen._replace(**entry["use"])  # type: ignore[attr-defined, no-any-return]
        return chosen

    return choose


def _agrees(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return bool(wanted[0] <= value <= wanted[1])
    return bool(value == wanted)

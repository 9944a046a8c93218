"""Runs a test's function in Triton's interpreter.

The interpreter must be on before Triton is first imported, and off for tests that compile, so it has a process of its
own: one for each test process, started at first use.
"""

import functools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from deepseek_accel.ops.choice import triton_missing


def interpret(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in the interpreter. Functions are found by name: they must be at a module's top level."""
    if reason := triton_missing():
        pytest.skip(reason)
    return _interpreter().submit(function, *arguments).result(timeout=300)


@functools.cache
def _interpreter() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_switch_on)


def _switch_on() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    # torch.empty then holds NaN: an output that is not written everywhere shows.
    torch.use_deterministic_algorithms(True)

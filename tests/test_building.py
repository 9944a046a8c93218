"""Kernels are built by threads, once each, and land where launches look for them; the bar keeps quiet where it should.

Triton compiles without a GPU once it is told of one; a stand-in driver does that here.
"""

import sys
import threading
import types

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from deepseek_accel.kernels import building, launching  # noqa: E402


@triton.jit
def add_kernel(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < count) + 1, at < count)


@triton.jit
def double_kernel(x, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < count) * 2, at < count)


@triton.jit
def wrong_kernel(x, y, count, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 0, "never builds")


class OnGPU(torch.Tensor):
    """A CPU tensor that says it is on a GPU: building needs its dtype and address only."""

    @property
    def device(self):
        return torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """An H200, as far as Triton's compiler can tell, with an empty kernel cache."""
    from triton.runtime import driver

    stand_in = types.SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        set_current_device=lambda device: None,
    )
    monkeypatch.setattr(driver, "_active", stand_in, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: threading.Lock())  # a context that does nothing
    monkeypatch.setattr(launching, "_compiled", {})
    for kernel in (add_kernel, double_kernel, wrong_kernel):
        kernel.device_caches.clear()
    yield
    for kernel in (add_kernel, double_kernel, wrong_kernel):
        kernel.device_caches.clear()


def launch(kernel, block, dtype=torch.float32, x=None):
    x = torch.zeros(64, dtype=dtype).as_subclass(OnGPU) if x is None else x
    launching.launch(kernel, (1,), (x, torch.empty_like(x).as_subclass(OnGPU), 64), (block,), num_warps=1)


def test_each_kind_is_built_once_and_found_by_launches(gpu, monkeypatch):
    built = []
    build = launching._build
    monkeypatch.setattr(launching, "_build", lambda *a: (built.append(threading.current_thread().name), build(*a))[1])
    with launching.prebuild():
        for _ in range(3):
            for kernel in (add_kernel, double_kernel):
                for block in (32, 64):
                    for dtype in (torch.float32, torch.bfloat16):
                        launch(kernel, block, dtype)
    assert len(built) == 8 and all(name.startswith("build-kernels") for name in built)
    assert len(launching._compiled) == 8
    for compiled in launching._compiled.values():
        assert compiled.asm["cubin"] and compiled.metadata.num_warps == 1
    # Triton's own launch finds them too
    assert sum(len(kernel.device_caches[0][0]) for kernel in (add_kernel, double_kernel)) == 8
    with launching.prebuild():
        launch(add_kernel, 32)
    assert len(built) == 8


def test_nothing_is_launched_in_a_dry_run(gpu):
    """Not even what is built already: its inputs are garbage."""
    with launching.prebuild():
        launch(add_kernel, 32)
    (key,) = launching._compiled
    launching._compiled[key] = types.SimpleNamespace()  # launching this would raise
    with launching.prebuild():
        launch(add_kernel, 32)
    with pytest.raises(TypeError):
        launch(add_kernel, 32)


def test_other_threads_launch_meanwhile(gpu):
    with launching.prebuild():
        seen = []
        thread = threading.Thread(target=lambda: seen.append(building.dry_run()))
        thread.start()
        thread.join()
        assert seen == [None] and building.dry_run() is not None
    assert building.dry_run() is None


def test_an_error_of_a_build_is_raised_and_the_rest_is_kept(gpu):
    with pytest.raises(triton.CompilationError, match="never builds"), launching.prebuild():
        launch(add_kernel, 32)
        launch(wrong_kernel, 32)
    assert building.dry_run() is None
    with launching.prebuild():
        launch(add_kernel, 32)
    assert len(launching._compiled) == 1


def test_an_error_of_the_caller_ends_the_dry_run(gpu):
    with pytest.raises(KeyError), launching.prebuild():
        raise KeyError("x")
    assert building.dry_run() is None


class Terminal:
    def __init__(self, is_terminal=True):
        self.written, self.is_terminal = "", is_terminal

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        self.written += text

    def flush(self):
        pass


def shown(monkeypatch, terminal, total=3):
    monkeypatch.setattr(sys, "stderr", terminal)
    with building.progress(total) as advance:
        for _ in range(total):
            advance()
    return terminal.written


def test_the_bar_shows_on_a_terminal(monkeypatch):
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    assert "building kernels" in shown(monkeypatch, Terminal())


def test_the_bar_keeps_quiet(monkeypatch):
    from transformers.utils import logging

    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    assert shown(monkeypatch, Terminal(is_terminal=False)) == ""
    assert shown(monkeypatch, Terminal(), total=0) == ""
    with monkeypatch.context() as patch:
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        assert shown(patch, Terminal()) == ""
    logging.disable_progress_bar()
    try:
        assert shown(monkeypatch, Terminal()) == ""
    finally:
        logging.enable_progress_bar()


def test_dependent_launch_only_with_calls_that_compile():
    """Triton 3.4 has the calls, but its compiler passes them what they do not take; 3.5 and later mended it."""

    def of_34(_builder=None):
        pass

    def of_35(_semantic=None):
        pass

    assert launching.can_compile(of_35) and not launching.can_compile(of_34) and not launching.can_compile(None)
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    assert (launching.gdc_wait is not None) == (launching.gdc_launch_dependents is not None) == (version >= (3, 5))

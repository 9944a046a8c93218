"""Launch a kernel at a fraction of the host time Triton's own launch takes.

Triton looks at every argument of every launch anew: on a decoding step, whose kernels run for microseconds, that is
most of the time. Here the first launch with a set of argument kinds goes through Triton and returns the compiled
kernel; later ones with the same kinds call it directly. A kind holds everything Triton specialises on: dtype and
16-byte alignment of pointers, and whether an integer is 1, a multiple of 16, or beyond 32 bits.

Programmatic dependent launch (Hopper on; PTX ISA, "griddepcontrol"): a kernel compiled with `launch_pdl` may start
while the one before it still runs. It may then read weights, which no kernel of a step writes; before it touches
anything that the step computes, and before it writes anything, it must call `wait`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from . import building

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.4 has no such calls; `uses_pdl` is then False, so that none is compiled
    gdc_launch_dependents = gdc_wait = None


def can_compile(call: Callable[..., Any] | None) -> bool:
    """Whether kernels can hold this call of Triton's. Those of 3.4 take what its compiler no longer gives."""
    return call is not None and "_semantic" in inspect.signature(call).parameters


if not can_compile(gdc_wait):
    gdc_launch_dependents = gdc_wait = None

_compiled: dict[Any, Any] = {}


@triton.jit
def wait(PDL: tl.constexpr):
    """Until every kernel before this one is done and what it wrote can be read. Nothing without dependent launch."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """The next kernel may start once all programs of this one said so. A hint; nothing without dependent launch."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Bring the cache lines of `pointers`, of weights, into the L2. What can be asked for before `wait`, when a loop
    that loads ahead can only start after it. Not in Triton's interpreter."""
    address = pointers.to(tl.int64)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], tl.int32, False, 1)


@functools.cache
def uses_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` start with programmatic dependent launch."""
    return device.type == "cuda" and gdc_wait is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: tuple[Any, ...], **options: int
) -> None:
    """Run `kernel` over `grid`. arguments, then constants (the constexpr parameters), in the kernel's order.

    options: num_warps, num_stages, launch_pdl. The launch goes to the device and current stream of the first tensor.
    """
    device = arguments[0].device
    if device.type != "cuda" or not isinstance(kernel, triton.JITFunction):
        kernel[grid](*arguments, *constants, **options)  # Triton's interpreter
        return
    index = device.index
    switch = torch.cuda.device(index) if index != torch._C._cuda_getDevice() else None
    kinds = tuple(
        [
            (argument.dtype, argument.data_ptr() & 15 == 0) if isinstance(argument, torch.Tensor) else _kind(argument)
            for argument in arguments
        ]
    )
    key = (id(kernel), index, constants, kinds, *options.values())
    grid = (*grid, 1, 1)[:3]
    compiled = _compiled.get(key)
    if (builds := building.dry_run()) is not None:
        if compiled is None:
            builds.add(key, functools.partial(_build, index, kernel, grid, (*arguments, *constants), options))
        return
    with switch or contextlib.nullcontext():
        if compiled is None:
            with building.progress(1):
                _compiled[key] = kernel[grid](*arguments, *constants, **options)
        else:
            compiled[grid](*arguments, *constants)


def prebuild() -> contextlib.AbstractContextManager[None]:
    """Within this block, `launch` builds kernels in threads and starts none; see `building.prebuild`.

    Run a step in it once, with tensors of the real shapes, before the first one that counts.
    """
    return building.prebuild(_compiled)


def _build(index: int, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, int]) -> Any:
    with torch.cuda.device(index):  # a thread of its own has a current device of its own
        return kernel.warmup(*arguments, grid=grid, **options)


def _kind(argument: Any) -> Any:
    if type(argument) is int:
        return 1 if argument == 1 else (argument & 15 == 0, -(2**31) <= argument < 2**31)
    if (block := getattr(argument, "block_shape", None)) is not None:  # a TMA descriptor
        return argument.base.dtype, tuple(block)
    return type(argument)

"""Launch a kernel at a fraction of the host time Triton's own launch takes.

Triton looks at every argument of every launch anew: on a decoding step, whose kernels run for microseconds, that is
most of the time. Here the first launch with a set of argument kinds goes through Triton and returns the compiled
kernel; later ones with the same kinds call it directly. A kind holds everything Triton specialises on: dtype and
16-byte alignment of pointers, and whether an integer is 1, a multiple of 16, or beyond 32 bits.
"""

import contextlib
from typing import Any

import torch
import triton

_compiled: dict[Any, Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: tuple[Any, ...], **options: int
) -> None:
    """Run `kernel` over `grid`. arguments, then constants (the constexpr parameters), in the kernel's order.

    options: num_warps, num_stages. The launch goes to the device and current stream of the first tensor.
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
    key = (id(kernel), index, constants, kinds, options["num_warps"], options.get("num_stages"))
    grid = (*grid, 1, 1)[:3]
    compiled = _compiled.get(key)
    with switch or contextlib.nullcontext():
        if compiled is None:
            _compiled[key] = kernel[grid](*arguments, *constants, **options)
        else:
            compiled[grid](*arguments, *constants)


def _kind(argument: Any) -> Any:
    if type(argument) is int:
        return 1 if argument == 1 else (argument & 15 == 0, -(2**31) <= argument < 2**31)
    return type(argument)

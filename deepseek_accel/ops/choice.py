"""Which implementation an op uses on a device. Decided once per device, never at a failing call."""

import contextlib
import functools
import importlib.util
import sys

import torch


@functools.cache
def triton_missing() -> str | None:
    """Why Triton kernels cannot be built here, or None if they can."""
    if importlib.util.find_spec("triton") is None or sys.modules.get("triton", ...) is None:
        return "Triton is not installed"
    try:
        import triton.language
    except ImportError as error:
        return f"Triton does not import ({error})"
    version = str(triton.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 3):
        return f"Triton {version} is installed; the kernels need 3.3 or newer"
    return None


@functools.cache
def why_not_triton(device: torch.device) -> str | None:
    """Why ops on `device` use the torch implementation, or None if they use Triton kernels."""
    if device.type != "cuda":
        return f"{device.type} tensors use the torch implementation"
    if torch.version.hip is not None:
        return "AMD GPUs use the torch implementation"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}; the kernels need 8.0 or newer"
    return triton_missing()


def uses_triton(device: torch.device) -> bool:
    return why_not_triton(device) is None


def prebuild(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Within this block ops on `device` build their kernels, many at once, and run none: their results are garbage.

    Run what is to come once in it, so that its first run does not wait for one kernel after the other.
    """
    if not uses_triton(device):
        return contextlib.nullcontext()
    from ..kernels.launching import prebuild

    return prebuild()

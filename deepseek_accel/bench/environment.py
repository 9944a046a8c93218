"""Where a number was measured: a number without its hardware and versions is not printed."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

from ..errors import AccelError

DTYPES = ("float32", "bfloat16", "float16")


def resolve_device(name: str) -> Any:
    """The torch.device of "auto", "cpu", "cuda" or "cuda:N". Raises AccelError if there is none."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise AccelError(f"no such device: {name!r}. Use auto, cpu, cuda or cuda:N.") from error
    if device.type not in ("cpu", "cuda"):
        raise AccelError(f"device {name!r} is not measured here. Use auto, cpu, cuda or cuda:N.")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise AccelError(f"device {name!r} was asked for, but torch {torch.__version__} sees no CUDA device here")
    if (device.index or 0) >= torch.cuda.device_count():
        raise AccelError(f"no device {name!r}: torch sees {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def resolve_dtype(name: str | None, device: Any) -> Any:
    """The torch.dtype of a name; None is bf16 on a GPU, and fp32 on a CPU so that tokens can be compared exactly."""
    import torch

    if name is None:
        name = "bfloat16" if device.type == "cuda" else "float32"
    if name not in DTYPES:
        raise AccelError(f"no such dtype: {name!r}. Use one of {', '.join(DTYPES)}.")
    return getattr(torch, name)


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def commit() -> str:
    """The commit of this package's source tree, with "+changes" if files differ from it, or "unknown"."""
    here = str(Path(__file__).parent)
    if (head := _output("git", "-C", here, "rev-parse", "--short=12", "HEAD")) is None:
        return "unknown"
    return head + ("+changes" if _output("git", "-C", here, "status", "--porcelain", "--", "..") else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@functools.cache
def _driver(index: int) -> str:
    query = ("nvidia-smi", f"--id={index}", "--query-gpu=driver_version", "--format=csv,noheader")
    if (version := _output(*query)) is not None:
        return version.splitlines()[0]
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return next((word for word in text.split() if word.count(".") >= 1 and word[0].isdigit()), "unknown")


def environment(device: Any) -> dict[str, Any]:
    """Hardware, driver, versions and commit, as plain values."""
    import torch

    facts: dict[str, Any] = {"device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "hardware": properties.name,
            "memory_bytes": properties.total_memory,
            "driver": _driver(device.index or 0),
            "cuda": torch.version.cuda,
        }
    else:
        facts |= {"hardware": _cpu_name(), "threads": torch.get_num_threads()}
    versions = {name: _version(name) for name in ("triton", "transformers")}
    return facts | {"torch": torch.__version__, **versions, "python": platform.python_version(), "commit": commit()}


def describe(facts: dict[str, Any]) -> str:
    """The facts in one line, for the head of a table."""
    parts = [str(facts["hardware"])]
    if "driver" in facts:
        parts.append(f"driver {facts['driver']}")
    if "threads" in facts:
        parts.append(f"{facts['threads']} thread{'' if facts['threads'] == 1 else 's'}")
    parts += [f"{name} {facts[name]}" for name in ("torch", "triton", "transformers", "commit")]
    return ", ".join(parts)

"""The host's side: how fast a checkpoint is read and made a model, and what another length costs a page table."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..cache.pages import PageTable
from ..errors import AccelError
from ..models import path
from ..quantization.files import local_config
from .environment import environment, resolve_device
from .record import Keep, forget
from .tables import number, table

CHUNK_BYTES = 1 << 26
PAGE_SIZE = 64
LENGTHS = (1024, 32768)
"""Tokens of a row before and after a switch."""


def run(directory: str, repeats: int = 3, device_name: str = "auto", keep: Keep = forget) -> dict[str, Any]:
    """{"bench", "environment", "directory", "bytes", "rows"}; a row's value is the median of `repeats`.

    directory: a checkpoint, or "tiny". Rows with `gigabytes_per_second` count the bytes of its safetensors files.
    keep: told the rows so far after each of them. Raises AccelError where the directory cannot be loaded.
    """
    if repeats < 1:
        raise AccelError(f"at least one repeat is needed, got {repeats}")
    place = str(path()) if directory == "tiny" else directory
    config = local_config(place)
    device = resolve_device(device_name)
    files = sorted(Path(place).glob("*.safetensors"))
    if not files:
        raise AccelError(f"{place!r} holds no safetensors files; only those are read")
    num_bytes = sum(file.stat().st_size for file in files)
    rows: list[dict[str, Any]] = []
    result = {"bench": "host", "environment": environment(device), "directory": directory, "bytes": num_bytes}
    result |= {"rows": rows}
    _plain(str(path()), device)  # imports, and the device's own start
    buffer = bytearray(CHUNK_BYTES)
    works: dict[str, Callable[[], object]] = {"read the files": lambda: _read(files, buffer)}
    if getattr(config, "quantization_config", None) is None:
        works["from_pretrained"] = lambda: _plain(place, device)
    else:
        works["load_quantized"] = lambda: _quantized(place, device)
    for name, work in works.items():
        for cold in (False, True):
            if cold and not hasattr(os, "posix_fadvise"):
                continue
            found = [_timed(work, files if cold else []) for _ in range(repeats)]
            seconds, faults = sorted(found)[len(found) // 2]
            cache = "not cached" if cold else "cached"
            row = {"what": f"{name}, {cache}", "seconds": seconds, "gigabytes_per_second": num_bytes / seconds / 1e9}
            rows.append(row | {"major_faults": faults})
            keep(result)
    for name, seconds in _switches(max(repeats, 100)):
        rows.append({"what": name, "seconds": seconds, "gigabytes_per_second": None, "major_faults": None})
        keep(result)
    return result


def _timed(work: Callable[[], object], forgotten: list[Path]) -> tuple[float, int]:
    """Seconds and major page faults, after the system has dropped `forgotten` from its cache of files."""
    import resource

    for file in forgotten:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)  # what is not written yet stays
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_majflt, time.perf_counter()
    held = work()
    seconds = time.perf_counter() - start
    del held
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults


def _read(files: list[Path], buffer: bytearray) -> None:
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def _quantized(directory: str, device: Any) -> Any:
    from ..loading import load_quantized

    return _waited(load_quantized(directory, device=device), device)


def _plain(directory: str, device: Any) -> Any:
    from ..loading import load_directory

    return _waited(load_directory(directory).to(device), device)


def _waited(model: Any, device: Any) -> Any:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return model


def _switches(repeats: int) -> Iterator[tuple[str, float]]:
    """Median seconds of one row's change of length in a page table that has been in use."""
    short, long = LENGTHS
    table = PageTable(PAGE_SIZE)
    table.start(1)
    grow, shrink, rebuild, step = ([] for _ in range(4))  # type: list[float], list[float], list[float], list[float]
    for _ in range(repeats):
        for times, work in (
            (grow, lambda: table.extend(short, long)),
            (step, lambda: table.extend(long, long + 1)),
            (shrink, lambda: table.trim(short)),
        ):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        table.start(1)
        table.extend(0, short)
        rebuild.append(time.perf_counter() - start)
    for name, times in (
        (f"page table from {short:,} to {long:,} tokens", grow),
        (f"page table from {long:,} to {short:,} tokens", shrink),
        ("page table by the next page", step),
        (f"page table from nothing to {short:,} tokens", rebuild),
    ):
        yield name, sorted(times)[len(times) // 2]


def host_table(result: dict[str, Any]) -> Any:
    """One line per row: its time, and of what is loaded the speed and page faults."""
    rows = [
        [
            row["what"],
            f"{number(row['seconds'] * 1e6)} us"
            if row["gigabytes_per_second"] is None
            else f"{number(row['seconds'] * 1e3)} ms",
            number(row["gigabytes_per_second"]),
            "-" if row["major_faults"] is None else str(row["major_faults"]),
        ]
        for row in result["rows"]
    ]
    title = f"{result['directory']}, {result['bytes'] / 1e9:.3f} GB"
    return table(title, ("what", "time", "GB/s", "major faults"), rows, left=1)

"""Build kernels: many at once before they are needed, and with a progress bar where someone is watching.

Triton takes a few tenths of a second to seconds for a kernel, much of it in native code and in ptxas, so that threads
help. The first token needs dozens. `prebuild` finds out which by a dry run: the caller runs its step once,
`launching.launch` starts nothing and hands each kernel it has not seen to a thread, and at the end all of them are
there. So there is no list of kernels to be kept in step with the code.
"""

import contextlib
import contextvars
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

MOST_THREADS = 16


class _Builds:
    """What a dry run has asked for so far."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.pool = pool
        self.futures: dict[Any, Future[Any]] = {}

    def add(self, key: Any, build: Callable[[], Any]) -> None:
        if key not in self.futures:
            self.futures[key] = self.pool.submit(build)


_dry_run: contextvars.ContextVar[_Builds | None] = contextvars.ContextVar("deepseek_accel_dry_run", default=None)


def dry_run() -> _Builds | None:
    """What collects kernels instead of launching them, in this thread, or None: launch."""
    return _dry_run.get()


@contextlib.contextmanager
def prebuild(compiled: dict[Any, Any]) -> Iterator[None]:
    """Within this block, kernels are built by threads and not launched. At its end they are in `compiled`.

    Whatever the block computes is garbage: tensors that kernels should have written hold anything. It must not read
    them on the host, nor index with them. Only launches of the calling thread are held back. The first error of a
    build is raised at the end of the block; what was built until then stays.
    """
    pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "build-kernels")
    builds = _Builds(pool)
    token = _dry_run.set(builds)
    try:
        try:
            yield
        finally:
            _dry_run.reset(token)
        keys = {future: key for key, future in builds.futures.items()}
        with progress(len(keys)) as advance:
            for future in as_completed(keys):
                compiled[keys[future]] = future.result()
                advance()
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[], Any]]:
    """A bar "building kernels" on stderr while the block runs; call what it gives once per kernel.

    Shown in a terminal or notebook, unless progress bars are off in transformers or in its hub.
    """
    if not total or not _is_watched() or _is_switched_off():
        yield lambda: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc="building kernels", unit="kernel", leave=False) as bar:
        yield bar.update


def _is_watched() -> bool:
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        return True
    return sys.stderr is not None and sys.stderr.isatty()


def _is_switched_off() -> bool:
    if os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in ("1", "ON", "YES", "TRUE"):
        return True
    logging = sys.modules.get("transformers.utils.logging")  # not imported for this: kernels work without it
    return logging is not None and not logging.is_progress_bar_enabled()

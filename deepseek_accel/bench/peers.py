"""vLLM on the same weights, prompts and points, as rows beside stock's and ours.

The weights are saved as a checkpoint and vLLM runs in a process of its own, after ours has left the device. Times are
taken as ours: the first token is a call of one token, a further one is the rest of a whole call; both are medians.
Prompts go in as token ids and no tokenizer is loaded, so nothing but the model is timed. Prefix caching is off: it
would skip the prefill of every repeat.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import AccelError
from .rows import ERROR, SKIPPED, STOCK, Options, Row, new_row
from .shapes import Point, Subject

VLLM = "vllm"
MISSING = "vLLM is not installed: skipped"
TIMEOUT_SECONDS = 1800
MEMORY_FRACTION = 0.85
"""Of the whole device, weights and cache together."""


def is_installed() -> bool:
    return importlib.util.find_spec(VLLM) is not None


def with_peers(rows: Sequence[Row], subject: Subject, options: Options) -> list[Row]:
    """`rows` with one of vLLM after those of each point. What it could not measure says why."""
    ours = [new_row(options, point, VLLM, subject.model.dtype) for point in options.points]
    result: dict[str, Any] = {"points": [{} for _ in ours]}
    if not is_installed():
        for row in ours:
            row.status, row.detail = SKIPPED, MISSING
    else:
        try:
            result = measure(subject, options.points, options.new_tokens, options.repeats)
        except Exception as error:
            for row in ours:
                row.fail(error)
    merged: list[Row] = []
    for row, measured in zip(ours, result["points"], strict=True):
        same = [other for other in rows if (other.batch, other.prompt_length) == (row.batch, row.prompt_length)]
        if "error" in measured:
            row.status, row.detail = ERROR, measured["error"]
        elif measured:
            _fill_peer(row, same, measured)
            row.variant = f"{VLLM} {result['version']}"
        merged += [*same, row]
    return merged


def _fill_peer(row: Row, same_point: Sequence[Row], measured: dict[str, Any]) -> None:
    row.ttft_ms, row.itl_ms = measured["ttft_ms"], measured["itl_ms"]
    row.detail = "not checked"
    row.tokens_per_second = row.batch / row.itl_ms * 1e3 if row.itl_ms > 0 else None
    for other in same_point:
        row.floor_ms = row.floor_ms or other.floor_ms
        row.experts_per_step = row.experts_per_step or other.experts_per_step
        if other.variant == STOCK and other.ttft_ms and other.itl_ms:
            row.ttft_ratio = other.ttft_ms / row.ttft_ms
            row.itl_ratio = other.itl_ms / row.itl_ms if row.itl_ms > 0 else None
        if (expected := other.first_tokens) is not None:
            got = [tokens[0] for tokens in measured["tokens"]]
            equal = sum(a == b for a, b in zip(got, expected, strict=True))
            row.detail = f"first token as stock's in {equal} of {len(expected)} rows"
    row.floor_ratio = row.itl_ms / row.floor_ms if row.floor_ms else None


def engine_options(directory: str, dtype: str, points: Sequence[Point], new_tokens: int) -> dict[str, Any]:
    """The arguments of `vllm.LLM`. What is not named here is vLLM's own choice, kernels and graphs among it."""
    return {
        "model": directory,
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "max_model_len": max(point.prompt_length for point in points) + new_tokens,
        "max_num_seqs": max(point.batch for point in points),
        "gpu_memory_utilization": MEMORY_FRACTION,
        "enable_prefix_caching": False,
        "trust_remote_code": False,
        "seed": 0,
    }


def sampling_options(new_tokens: int) -> dict[str, Any]:
    """The arguments of `vllm.SamplingParams`: greedy, always `new_tokens` long."""
    return {"temperature": 0.0, "max_tokens": new_tokens, "ignore_eos": True, "detokenize": False}


def measure(subject: Subject, points: Sequence[Point], new_tokens: int, repeats: int) -> dict[str, Any]:
    """Run vLLM on the subject's weights: {"version": ..., "points": [{ttft_ms, itl_ms, tokens} or {error}, ...]}.

    The model moves to the CPU meanwhile and back. Raises AccelError if vLLM cannot run.
    """
    model, device = subject.model, subject.model.device
    if device.type != "cuda":
        raise AccelError("vLLM is compared on a CUDA device only")
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    with tempfile.TemporaryDirectory(prefix="deepseek-accel-") as folder:
        if size > shutil.disk_usage(folder).free:
            raise AccelError(
                f"vLLM reads the weights from a file, and {folder!r} has no room for {size / 2**30:.0f} GiB"
            )
        model.save_pretrained(folder)
        job = {
            "engine": engine_options(folder, str(model.dtype).removeprefix("torch."), points, new_tokens),
            "prompts": [subject.prompt(point).tolist() for point in points],
            "new_tokens": new_tokens,
            "repeats": repeats,
        }
        model.to("cpu")
        try:
            _release()
            return _in_own_process(job, Path(folder), device.index or 0)
        finally:
            model.to(device)


def _release() -> None:
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _in_own_process(job: dict[str, Any], folder: Path, device_index: int) -> dict[str, Any]:
    job_file, result_file, log_file = (folder / f"peer.{name}" for name in ("job", "result", "log"))
    job_file.write_text(json.dumps(job), encoding="utf-8")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = visible.split(",")[device_index] if visible else str(device_index)
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    command = [sys.executable, "-m", __name__, str(job_file), str(result_file)]
    with open(log_file, "wb") as log:
        child = subprocess.Popen(
            command,
            env={**os.environ, **quiet, "CUDA_VISIBLE_DEVICES": chosen},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(child)
    if not result_file.is_file():
        lines = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        how = f"took more than {TIMEOUT_SECONDS} s" if code is None else f"ended with code {code}"
        raise AccelError(f"vLLM {how}: {lines[-1][:300]}")
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    return result


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the process and the workers it started, which would keep the device's memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def timed_points(
    generate: Callable[[list[list[int]], int], list[list[int]]],
    prompts: Sequence[list[list[int]]],
    new_tokens: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Time `generate(prompts, new_tokens) -> new token ids` for each batch of prompts. A failure is that point's."""
    points: list[dict[str, Any]] = []
    for batch in prompts:
        try:
            tokens = generate(batch, new_tokens)  # warms up, untimed
            if any(len(row) != new_tokens for row in tokens):
                raise RuntimeError(f"asked for {new_tokens} tokens, got {sorted({len(row) for row in tokens})}")
            first: list[float] = []
            whole: list[float] = []
            for _ in range(repeats):
                for times, count in ((first, 1), (whole, new_tokens)):
                    start = time.perf_counter()
                    generate(batch, count)
                    times.append(time.perf_counter() - start)
            ttft = statistics.median(first)
            itl = (statistics.median(whole) - ttft) / (new_tokens - 1)
            points.append({"ttft_ms": ttft * 1e3, "itl_ms": itl * 1e3, "tokens": tokens})
        except Exception as error:
            points.append({"error": f"{type(error).__name__}: {error}"})
    return points


def main(job_file: str, result_file: str) -> None:
    """What runs in the process of its own."""
    vllm: Any = importlib.import_module(VLLM)
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    engine = vllm.LLM(**job["engine"])

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = engine.generate(asked, vllm.SamplingParams(**sampling_options(new_tokens)), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    points = timed_points(generate, job["prompts"], job["new_tokens"], job["repeats"])
    Path(result_file).write_text(json.dumps({"version": vllm.__version__, "points": points}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

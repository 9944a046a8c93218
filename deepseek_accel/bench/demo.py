"""The bundled model, stock and optimized side by side on one prompt."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch

from .. import api, models
from ..errors import AccelError
from ..versions import cache_argument
from .environment import dtype_name, environment, resolve_device, resolve_dtype
from .greedy import cache_bytes, generate, timed
from .shapes import heldout_ids

PROMPT_TOKENS = 2000
SHOWN_CHARACTERS = 300


def prompt_ids(tokenizer: Any, text: str | None, room: int) -> torch.Tensor:
    """[1, T] ids of the text, or of held-out code long enough for the saving to show; at most `room`, the last ones."""
    ids = heldout_ids(tokenizer)[:PROMPT_TOKENS] if text is None else torch.tensor(tokenizer(text).input_ids)
    if len(ids) == 0:
        raise AccelError("the prompt is empty")
    return ids[-room:].long()[None]


def _measure(
    pair: dict[str, Any], prompt: torch.Tensor, new_tokens: int, repeats: int, step: Callable[[str], None]
) -> dict[str, tuple[float, float, Any]]:
    """Name -> (seconds of the first token, seconds per further token, output), medians, taking turns."""
    for name, model in pair.items():
        step(f"warm-up, {name}")
        generate(model, prompt, min(2, new_tokens))
    runs: dict[str, list[Any]] = {name: [] for name in pair}
    for repeat in range(repeats):
        for name, model in pair.items():
            step(f"run {repeat + 1} of {repeats}, {name}")
            runs[name].append(timed(model, prompt, new_tokens, return_dict_in_generate=True))
    result = {}
    for name in pair:
        first, rest, outputs = zip(*runs[name], strict=True)
        result[name] = (statistics.median(first), statistics.median(rest) / (new_tokens - 1), outputs[-1])
    return result


def num_steps(repeats: int) -> int:
    return 4 + 2 * repeats


def run(
    prompt: str | None = None,
    new_tokens: int = 64,
    device_name: str = "auto",
    dtype_text: str | None = None,
    repeats: int = 3,
    step: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Everything `deepseek-accel demo` shows, as plain values. `tokens_equal`: whether both gave the same tokens."""
    if new_tokens < 2 or repeats < 1:
        raise AccelError("at least 2 new tokens and 1 repeat are needed to time a step")
    device = resolve_device(device_name)
    dtype = torch.float32 if dtype_text is None else resolve_dtype(dtype_text, device)
    step("loading the bundled model")
    model, tokenizer = models.load_tiny(dtype=dtype, device=device)
    room = model.config.max_position_embeddings - new_tokens
    if room < 1:
        raise AccelError(f"the bundled model holds {model.config.max_position_embeddings:,} tokens in all")
    ids = prompt_ids(tokenizer, prompt, room).to(device)
    stock = copy.deepcopy(model)
    api.optimize(model)
    measured = _measure({"stock": stock, "optimized": model}, ids, new_tokens, repeats, step)
    report = api.report(model).to_dict()
    step("restoring")
    api.restore(model)
    tokens = {name: output.sequences[0, ids.shape[1] :].tolist() for name, (_, _, output) in measured.items()}
    restored = generate(model, ids, new_tokens)[0, ids.shape[1] :].tolist()
    held = {name: cache_bytes(output[cache_argument()]) for name, (_, _, output) in measured.items()}
    return {
        "environment": environment(device),
        "model": models.TINY,
        "dtype": dtype_name(dtype),
        "prompt_tokens": ids.shape[1],
        "new_tokens": new_tokens,
        "prompt_end": tokenizer.decode(ids[0])[-SHOWN_CHARACTERS:],
        "continuation": tokenizer.decode(tokens["optimized"]),
        "stock_continuation": tokenizer.decode(tokens["stock"]),
        "tokens_equal": tokens["optimized"] == tokens["stock"],
        **{f"{name}_ttft_ms": first * 1e3 for name, (first, _, _) in measured.items()},
        **{f"{name}_itl_ms": itl * 1e3 for name, (_, itl, _) in measured.items()},
        **{f"{name}_cache_bytes": held[name] for name in measured},
        "ttft_ratio": measured["stock"][0] / measured["optimized"][0],
        "itl_ratio": measured["stock"][1] / measured["optimized"][1] if measured["optimized"][1] > 0 else None,
        "report": report,
        "restored_tokens_equal_stock": restored == tokens["stock"],
    }


def exit_code(result: dict[str, Any]) -> int:
    """1 if fp32 tokens differ or the restored model is not stock again, else 0."""
    same = result["tokens_equal"] or result["dtype"] != "float32"
    return 0 if same and result["restored_tokens_equal_stock"] else 1

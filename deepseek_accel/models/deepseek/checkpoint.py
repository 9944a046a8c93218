"""What a checkpoint directory of DeepSeek-MoE holds, against what its config asks for, from the file headers alone.

transformers finds the same faults, but while loading, and tells them in a table with tracebacks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

Shape = tuple[int, ...]


def check(directory: Path, model: Any) -> None:
    """Raise CheckpointError unless the safetensors files there hold what `model`, which may be on "meta", needs.

    Tensors that the model does not know are left to transformers' warning, except experts beyond the last one. A
    directory without safetensors files is not looked at.
    """
    found = stored_shapes(directory)
    if found is None:
        return
    found = {_below(name): shape for name, shape in found.items()}
    stacked = any(name.endswith("mlp.experts.gate_up_proj") for name in found)
    needed = model_shapes(model, stacked=stacked)
    missing = sorted(needed.keys() - found.keys())
    blocks = {_block(name) for name in needed} - {None}
    beyond = sorted(name for name in found.keys() - needed.keys() if _block(name) in blocks)
    wrong = [(name, needed[name], found[name]) for name in needed.keys() & found.keys() if needed[name] != found[name]]
    if missing:
        raise CheckpointError(
            f"{str(directory)!r} lacks {len(missing)} of {len(needed)} tensors: {_some(missing)}. "
            f"Is every *.safetensors file there, and is config.json its own?"
        )
    if beyond:
        raise CheckpointError(f"{str(directory)!r} holds experts that config.json does not have: {_some(beyond)}")
    if wrong:
        name, expected, shape = min(wrong)
        raise CheckpointError(
            f"{str(directory)!r}: {name} is {list(shape)}, and config.json asks for {list(expected)} "
            f"({len(wrong)} such tensors)"
        )


def stored_shapes(directory: Path) -> dict[str, Shape] | None:
    """Name -> shape of every stored tensor, or None where nothing is stored as safetensors.

    Raises CheckpointError if a file of the index is not there, or one cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    index = directory / INDEX
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{str(index)!r} is not an index of safetensors files: {error}") from error
    elif (directory / SINGLE).is_file():
        files = [SINGLE]
    else:
        return None
    shapes: dict[str, Shape] = {}
    for file in files:
        if not (directory / file).is_file():
            raise CheckpointError(f"{str(directory)!r} lacks {file}, which its {INDEX} names")
        try:
            with safe_open(directory / file, framework="pt") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{str(directory / file)!r} cannot be read: {error}") from error
    return shapes


def model_shapes(model: Any, *, stacked: bool = False) -> dict[str, Shape]:
    """Name (without "model.") -> shape of what a checkpoint must hold: one tensor per expert, or `stacked` ones."""
    state = model.state_dict()
    if getattr(model.config, "tie_word_embeddings", False):
        state.pop("lm_head.weight", None)
    shapes: dict[str, Shape] = {}
    for name, tensor in state.items():
        name, shape = _below(name), tuple(tensor.shape)
        block, _, part = name.rpartition(".")
        if stacked or part not in ("gate_up_proj", "down_proj"):
            shapes[name] = shape
            continue
        for expert in range(shape[0]):
            if part == "down_proj":
                shapes[f"{block}.{expert}.down_proj.weight"] = shape[1:]
            else:
                shapes[f"{block}.{expert}.gate_proj.weight"] = (shape[1] // 2, shape[2])
                shapes[f"{block}.{expert}.up_proj.weight"] = (shape[1] // 2, shape[2])
    return shapes


def _below(name: str) -> str:
    """A decoder saved by itself has no "model." before its names, and transformers loads one from the other."""
    return name.removeprefix("model.")


def _block(name: str) -> str | None:
    """The mixture that an expert's tensor belongs to, or None for other tensors."""
    return name.partition(".mlp.experts.")[0] if ".mlp.experts." in name else None


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")

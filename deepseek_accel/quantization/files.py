"""A checkpoint directory: its config, and the tensors of its safetensors files, mapped and read one at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from ..families import NATIVE

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def local_config(directory: str) -> Any:
    """The transformers config of a checkpoint directory; code that comes with the checkpoint is never run.

    Raises CheckpointError saying what is missing.
    """
    path = Path(directory) / "config.json"
    if not Path(directory).is_dir():
        raise CheckpointError(f"no such directory: {directory!r}. Give the directory of a downloaded checkpoint.")
    if not path.is_file():
        raise CheckpointError(f"{directory!r} holds no config.json, so it is not a transformers checkpoint")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} is not valid JSON: {error}") from error
    import transformers

    model_type = stored.get("model_type") if isinstance(stored, dict) else None
    if model_type not in transformers.CONFIG_MAPPING:
        version = f"transformers {transformers.__version__}"
        if isinstance(stored, dict) and "auto_map" in stored:
            raise CheckpointError(
                f"{directory!r} runs on Python code of its own (auto_map in config.json): {version} has no class for "
                f"model_type={model_type!r}, and deepseek-accel never runs code that comes with a checkpoint. "
                f"It works on transformers' own classes. {NATIVE}"
            )
        raise CheckpointError(f"{version} has no class for model_type={model_type!r} of {str(path)!r}")
    try:
        return transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises whatever its validation of a field raises
        raise CheckpointError(f"transformers cannot read {str(path)!r}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError unless the file holds a JSON object."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path} holds {type(stored).__name__}, not an object")
    return stored


class TensorFiles:
    """Every tensor of a directory by name. Opening reads the headers only, and finds files that are cut off."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Raises CheckpointError if a file is missing or damaged, or does not hold what the index says."""
        self.directory = Path(directory)
        self._where: dict[str, Any] = {}
        index = self.directory / INDEX
        if index.is_file():
            listed = read_json(index).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise CheckpointError(f"{index} has no weight_map")
            for file in sorted(set(listed.values())):
                if Path(str(file)).name != file:
                    raise CheckpointError(f"{index} names a file outside the directory: {file!r}")
                self._open(file)
            for name, file in listed.items():
                if self._where.get(name, (None, ""))[1] != file:
                    raise CheckpointError(
                        f"{self.directory / file} has no tensor {name!r}, which {INDEX} says it holds"
                    )
        elif (self.directory / WHOLE).is_file():
            self._open(WHOLE)
        else:
            raise CheckpointError(f"{str(directory)!r} holds neither {WHOLE} nor {INDEX}; only safetensors are read")

    def _open(self, file: str) -> None:
        from safetensors import SafetensorError, safe_open

        path = self.directory / file
        try:
            opened = safe_open(path, framework="pt")
            names = list(opened.keys())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read, it may be cut off: {error}") from error
        for name in names:
            if name in self._where:
                raise CheckpointError(f"tensor {name!r} is both in {self._where[name][1]} and in {file}")
            self._where[name] = opened, file

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def names(self) -> list[str]:
        """In the order of the files."""
        return list(self._where)

    def file_of(self, name: str) -> str:
        file: str = self._where[name][1]
        return file

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name][0].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors calls it: "BF16", "I32"."""
        dtype: str = self._where[name][0].get_slice(name).get_dtype()
        return dtype

    def tensor(self, name: str) -> Tensor:
        """Raises CheckpointError naming the tensor if there is none."""
        if name not in self._where:
            raise CheckpointError(f"{self.directory} has no tensor {name!r}")
        value: Tensor = self._where[name][0].get_tensor(name)
        return value

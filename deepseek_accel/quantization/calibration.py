"""A finished AWQ calibration: the codes of every weight it was made for, and what changes beside them.

On disk a folder: `calibration.json`, and one safetensors file per layer, which is read when it is asked for. In a file,
with NAME of a weight: `NAME:codes` (two a byte, the even input low), `NAME:scales`, `NAME:zeros`, and where there
are any, int8 exponents `NAME:columns` and `NAME:rows`: the weight was multiplied by 2^columns and divided by 2^rows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from .blocks import parameter

FORMAT = "deepseek_accel.awq.1"
INDEX = "calibration.json"
SAMPLES = 256
"""Values of a weight that its digest is made of, evenly spaced from its first."""


def digest(tensor: Tensor) -> str:
    """A short name for a weight's contents, seen at `SAMPLES` places, with its shape and dtype."""
    flat = tensor.detach().reshape(-1)
    seen = flat[:: max(1, flat.numel() // SAMPLES)].cpu().contiguous()
    text = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    return hashlib.sha256(text + seen.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def identity(tensor: Tensor, dtype: torch.dtype) -> dict[str, str]:
    """What an index keeps to know a weight again, of a model whose quantised weights are of `dtype`.

    transformers widens some weights to fp32 as it loads them, routers for one (`_keep_in_fp32_modules`). Where nothing
    is lost they are known by what they were, which is what the files hold.
    """
    narrow = _narrowed(tensor, dtype)
    return {"digest": digest(tensor)} if narrow is None else {"digest": digest(narrow), "widened": str(dtype)[6:]}


def _narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    if tensor.dtype != torch.float32 or dtype == torch.float32:
        return None
    narrow = tensor.detach().to(dtype)
    return narrow if torch.equal(narrow.float(), tensor) else None


def _is_known(tensor: Tensor, entry: dict[str, Any]) -> bool:
    narrow = _narrowed(tensor, getattr(torch, entry["widened"])) if "widened" in entry else None
    return digest(tensor if narrow is None else narrow) == entry["digest"]


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., K] of 0 to 15 -> uint8 [..., ceil(K / 2)]"""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor, size: int) -> Tensor:
    """The inverse of `pack_nibbles` for K = size."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :size]


def layer_file(index: int) -> str:
    return f"layer-{index:05d}.safetensors"


def rescale(tensor: Tensor, columns: Tensor | None, rows: Tensor | None) -> Tensor:
    """tensor * 2^columns / 2^rows, in its own dtype. rows [N] or [E, N] of [..., N, K]; of a norm, its one axis."""
    value = tensor.float()
    if columns is not None:
        value = value * torch.exp2(columns.to(value.device).float()).unsqueeze(-2)
    if rows is not None:
        shift = torch.exp2(-rows.to(value.device).float())
        value = value * (shift if tensor.dim() == 1 else shift.unsqueeze(-1))
    return value.to(tensor.dtype)


class AwqCalibration:
    """What `calibrate_awq` returns, and `MixedPrecision(calibration=...)` takes. `save` and `load` keep it.

    group_size: of every weight. rows: one dict a layer with what was measured, `docs/quantization.md` says what.
    names: the weights it was made for. See the package's docstring for what a pass asks of it.
    """

    def __init__(self, index: dict[str, Any], layers: Mapping[int, Mapping[str, Tensor]], folder: Path | None) -> None:
        """index: as in `calibration.json`. layers: those in memory, by number. folder: where the others are."""
        self._index = index
        self._layers = dict(layers)
        self._folder = folder
        self._open: dict[int, Any] = {}
        self.group_size: int = index["group_size"]
        self.rows: list[dict[str, Any]] = index["rows"]
        self.names = frozenset(name for name, entry in index["weights"].items() if entry["quantized"])
        self.rescaled_names = frozenset(name for row in index["rows"] for name in row["rescaled"])

    def check(self, model: nn.Module) -> None:
        """Raises CheckpointError, naming the first weight that is not what was calibrated. "meta" counts by shape."""
        for name, entry in self._index["weights"].items():
            try:
                weight = parameter(model, name)
            except AttributeError:
                raise CheckpointError(f"the calibration is of another model: this one has no {name}") from None
            self._check_weight(name, weight, entry)

    def _check_weight(self, name: str, weight: Tensor, entry: dict[str, Any]) -> None:
        if list(weight.shape) != entry["shape"]:
            raise CheckpointError(
                f"the calibration is of another model: {name} is {list(weight.shape)} here, {entry['shape']} there"
            )
        if weight.device.type != "meta" and not _is_known(weight, entry):
            raise CheckpointError(
                f"the calibration was made for other weights (or another dtype): {name} differs. Calibrate this model."
            )

    def quantize(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The stored uint8 codes [..., N, K], scales and uint8 zeros [..., N, G] of one weight, where they were stored.

        weight: of the model that was calibrated; raises CheckpointError for another one. KeyError unless in `names`.
        """
        entry = self._index["weights"][name]
        self._check_weight(name, weight, entry)
        codes = unpack_nibbles(self._tensor(name, "codes"), weight.shape[-1])
        return codes, self._tensor(name, "scales"), self._tensor(name, "zeros")

    def stored(self, name: str, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [N, K], scales and zeros [N, G] of one expert of a 3-D weight, read alone."""
        codes, scales, zeros = (self._tensor(name, what, expert) for what in ("codes", "scales", "zeros"))
        return unpack_nibbles(codes, self._index["weights"][name]["shape"][-1]), scales, zeros

    def rescaled(self, name: str, tensor: Tensor) -> Tensor:
        """What a weight in 16 bits must become beside quantised ones: exact powers of two, same dtype."""
        if name not in self.rescaled_names:
            return tensor
        self._check_weight(name, tensor, self._index["weights"][name])
        return rescale(tensor, *self.shifts(name))

    def shifts(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        """int8 exponents (columns, rows) of a weight, None where there are none."""
        known = self._layer(self._index["weights"][name]["layer"]).keys()
        columns, rows = (
            self._tensor(name, what) if f"{name}:{what}" in known else None for what in ("columns", "rows")
        )
        return columns, rows

    def _tensor(self, name: str, what: str, expert: int | None = None) -> Tensor:
        layer, key = self._layer(self._index["weights"][name]["layer"]), f"{name}:{what}"
        if isinstance(layer, dict):
            value: Tensor = layer[key] if expert is None else layer[key][expert]
        else:
            value = layer.get_tensor(key) if expert is None else layer.get_slice(key)[expert]
        return value

    def _layer(self, index: int) -> Any:
        """A dict, or an open safetensors file."""
        if index in self._layers:
            return self._layers[index]
        if index not in self._open:
            assert self._folder is not None  # a layer is in memory or in the folder
            self._open[index] = open_layer(self._folder, index, expected_tensors(self._index, index))
        return self._open[index]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write it as a folder, which is made if missing."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        for index in self._index["layers"]:
            source = self._layer(index)
            keys = source.keys()
            tensors = {k: source[k] if isinstance(source, dict) else source.get_tensor(k) for k in keys}
            write_layer(path, index, tensors, next(row for row in self.rows if row["layer"] == index))
        write_index(path, self._index)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> AwqCalibration:
        """Open a folder that `save` or `calibrate_awq` wrote. Raises CheckpointError if it is not whole."""
        path = Path(folder)
        index = read_index(path)
        if index.get("rows") is None:
            done = sum((path / layer_file(i)).exists() for i in index["layers"])
            raise CheckpointError(
                f"{path}: the calibration is not finished, {done} of {len(index['layers'])} layers are there; "
                "call `calibrate_awq` with this `folder` and the same model and data to go on"
            )
        opened = cls(index, {}, path)
        for number in index["layers"]:
            opened._layer(number)
        return opened

    def __deepcopy__(self, memo: Any) -> AwqCalibration:  # of a model, which carries it; nothing writes to it
        return self

    def __reduce__(self) -> Any:  # open files do not travel; pickle of a model carries its configuration
        return AwqCalibration, (self._index, self._layers, self._folder)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AwqCalibration) and self._index == other._index

    def __hash__(self) -> int:
        return hash((self._index["data"], self.group_size))

    def __repr__(self) -> str:
        return (
            f"AwqCalibration({len(self.names)} weights, {len(self._index['layers'])} layers, group {self.group_size})"
        )


def expected_tensors(index: dict[str, Any], layer: int) -> set[str]:
    """Keys that a layer's file must hold."""
    mine = [name for name, entry in index["weights"].items() if entry["layer"] == layer and entry["quantized"]]
    return {f"{name}:{what}" for name in mine for what in ("codes", "scales", "zeros")}


def open_layer(folder: Path, index: int, expected: Iterable[str]) -> Any:
    """The open safetensors file of a layer. Raises CheckpointError if it is missing, cut off or of other weights."""
    from safetensors import SafetensorError, safe_open

    path = folder / layer_file(index)
    try:
        opened = safe_open(path, framework="pt")
        missing = set(expected) - set(opened.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Delete it and calibrate again.") from error
    if missing:
        raise CheckpointError(f"{path}: it has no {min(missing)}. Delete it and calibrate again.")
    return opened


def layer_row(opened: Any) -> dict[str, Any]:
    """What was measured of a layer, from its open file."""
    row: dict[str, Any] = json.loads(opened.metadata()["row"])
    return row


def write_layer(folder: Path, index: int, tensors: Mapping[str, Tensor], row: dict[str, Any]) -> None:
    """Write a layer's file at once: it is there whole, or not at all."""
    from safetensors.torch import save_file

    path = folder / layer_file(index)
    partial = path.with_suffix(".partial")
    held = {k: v.cpu().contiguous() for k, v in tensors.items()}
    held |= {k: v.clone() for k, v in held.items() if v.dtype == torch.int8}  # weights share their exponents, files not
    save_file(held, partial, metadata={"row": json.dumps(row)})
    partial.replace(path)


def write_index(folder: Path, index: dict[str, Any]) -> None:
    partial = folder / (INDEX + ".partial")
    partial.write_text(json.dumps(index, indent=1), encoding="utf-8")
    partial.replace(folder / INDEX)


def read_index(folder: Path) -> dict[str, Any]:
    """Raises CheckpointError if there is none, or it is of another format."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no AWQ calibration: {INDEX} cannot be read ({error})") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        found = index.get("format") if isinstance(index, dict) else type(index).__name__
        raise CheckpointError(f"{path}: format {found!r}, this version reads {FORMAT!r}")
    return index

"""Read a quantised directory in the layout of AutoAWQ's "gemm" checkpoints: ours, AutoAWQ's, published ones.

Everything that the headers say is checked when the directory is opened: before a model is built, and without reading a
weight. `QuantizedFiles` answers what a calibration answers, so that the pass that packs weights takes it as one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..ops.int4 import why_no_group_size
from .files import TensorFiles, read_json
from .layout import SUFFIXES, from_awq

EXPERT = re.compile(r"(?P<where>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<which>gate|up|down)_proj")
LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")


def check_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The `quantization_config` of a directory. Raises CheckpointError unless it is one this library reads."""
    path = Path(directory) / "config.json"
    if not Path(directory).is_dir():
        raise CheckpointError(f"no such directory: {str(directory)!r}. Give the directory of a downloaded checkpoint.")
    if not path.is_file():
        raise CheckpointError(f"{str(directory)!r} holds no config.json, so it is not a transformers checkpoint")
    known = read_json(path).get("quantization_config")
    if not isinstance(known, dict):
        raise CheckpointError(f"{path} has no quantization_config: not a quantised checkpoint. Use `from_pretrained`.")
    version = known.get("version")
    for key, value, allowed in (
        ("quant_method", known.get("quant_method"), ("awq",)),
        ("bits", known.get("bits", known.get("w_bit")), (4,)),
        ("version", version.lower() if isinstance(version, str) else version, ("gemm",)),
        ("zero_point", known.get("zero_point", True), (True,)),
        ("desc_act", known.get("desc_act", False), (False, None)),
    ):
        if value not in allowed:
            raise CheckpointError(f"{path}: quantization_config says {key}={value!r}; only {allowed[0]!r} is read")
    group_size = known.get("group_size", known.get("q_group_size"))
    if (reason := why_no_group_size(group_size)) is not None:
        raise CheckpointError(f"{path}: {reason}")
    return known | {"group_size": group_size}


class QuantizedFiles:
    """A quantised directory, read weight by weight. See the package's docstring for `quantize` and its companions.

    names: parameters of the model that are whole in four bits. loose: modules in four bits that are no such parameter.
    """

    rescaled_names: frozenset[str] = frozenset()

    def __init__(self, directory: str | os.PathLike[str], device: Any = "cpu") -> None:
        """device: where weights are handed out. Raises CheckpointError naming what is missing or does not fit."""
        self.device = torch.device(device)
        self.group_size: int = check_config(directory)["group_size"]
        self.files = TensorFiles(directory)
        self.modules: dict[str, tuple[int, int]] = {}
        """Module in four bits -> its (outputs, inputs)."""
        for name in self.files.names():
            module, _, last = name.rpartition(".")
            if last == "g_idx":
                raise CheckpointError(f"{name}: groups in the order of activations (act-order) are not read")
            if last in SUFFIXES and module not in self.modules:
                self.modules[module] = self._check(module)
        if not self.modules:
            raise CheckpointError(f"{str(directory)!r} holds no qweight, though its config says it is quantised")
        self.experts: dict[str, int] = {}
        """Name of a layer's experts -> how many of them are stored in four bits."""
        for module in self.modules:
            if match := EXPERT.fullmatch(module):
                self.experts[match["where"]] = max(self.experts.get(match["where"], 0), int(match["expert"]) + 1)
        stacked = {f"{where}.{which}" for where in self.experts for which in ("gate_up_proj", "down_proj")}
        self.names = frozenset(stacked | {f"{m}.weight" for m in self.modules if not EXPERT.fullmatch(m)})

    def _check(self, module: str) -> tuple[int, int]:
        """(outputs, inputs) of a stored weight, after its three tensors were found to fit together."""
        for suffix in SUFFIXES:
            if f"{module}.{suffix}" not in self.files:
                raise CheckpointError(f"{module}.{suffix} is missing, though its companions are there")
        for suffix, allowed in (("qweight", ("I32",)), ("qzeros", ("I32",)), ("scales", ("F16", "BF16", "F32"))):
            if (found := self.files.dtype(f"{module}.{suffix}")) not in allowed:
                raise CheckpointError(f"{module}.{suffix} is of {found}, it should be {allowed[0]}")
        shape = self.files.shape(f"{module}.qweight")
        if len(shape) != 2:
            raise CheckpointError(f"{module}.qweight is {list(shape)}, it should have two dimensions")
        inputs, outputs = shape[0], shape[1] * 8
        if inputs % self.group_size:
            raise CheckpointError(f"{module}.qweight has {inputs} inputs, no multiple of group_size {self.group_size}")
        groups = inputs // self.group_size
        for suffix, expected in (("qzeros", (groups, outputs // 8)), ("scales", (groups, outputs))):
            if (found_shape := self.files.shape(f"{module}.{suffix}")) != expected:
                raise CheckpointError(
                    f"{module}.{suffix} is {list(found_shape)}; with qweight {list(shape)} and group_size "
                    f"{self.group_size} it should be {list(expected)}"
                )
        return outputs, inputs

    def check(self, model: nn.Module) -> None:
        """Raises CheckpointError unless every parameter of `model` is there, in 4 or 16 bits, in its shape."""
        layers = getattr(model.config, "num_hidden_layers", None)
        parameters = dict(model.named_parameters())
        used: set[str] = set()
        config: Any = model.config
        keys: Any = getattr(model, "_tied_weights_keys", None) or {}
        tied: dict[str, str] = dict(keys) if config.tie_word_embeddings else {}
        for name, value in [*parameters.items(), *persistent_buffers(model)]:
            expected = tuple(value.shape)
            if name in self.names:
                found = self._stored_shape(name, expected, used)
            else:
                sources = self.sources(name, expected)
                if sources is None:
                    if name in tied:
                        continue
                    raise CheckpointError(f"the checkpoint has no {name}, which the model needs")
                used |= set(sources)
                found = self._plain_shape(sources, expected)
            if found != expected:
                raise CheckpointError(f"{name} is {list(found)} in the checkpoint, {list(expected)} in the model")
        used |= {name for name, other in tied.items() if name in self.files and self._are_equal(name, other)}
        for name in self.files.names():
            match = LAYER.fullmatch(name)
            beyond = match is not None and layers is not None and int(match[1]) >= layers  # the MTP layer
            if name not in used and not beyond and not name.endswith("rotary_emb.inv_freq"):
                raise CheckpointError(f"the checkpoint has {name}, for which this model has no place")

    def _are_equal(self, name: str, other: str) -> bool:
        """True. Raises CheckpointError if a weight that the config ties to another is stored with other values."""
        if other not in self.files or not torch.equal(self.files.tensor(name), self.files.tensor(other)):
            raise CheckpointError(f"{name} is not {other} in the checkpoint, to which its config ties it")
        return True

    def _stored_shape(self, name: str, expected: tuple[int, ...], used: set[str]) -> tuple[int, ...]:
        where, _, which = name.rpartition(".")
        if where not in self.experts:
            used |= {f"{where}.{suffix}" for suffix in SUFFIXES}
            return self.modules[where]
        parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
        outputs = 0
        for expert in range(expected[0]):
            shapes = []
            for part in parts:
                module = f"{where}.{expert}.{part}"
                if module not in self.modules:
                    raise CheckpointError(
                        f"{module}.qweight is missing, though other experts of the layer are in 4 bits"
                    )
                used |= {f"{module}.{suffix}" for suffix in SUFFIXES}
                shapes.append(self.modules[module])
            if any(shape[1] != expected[-1] for shape in shapes):
                raise CheckpointError(
                    f"{where}.{expert}: inputs {[s[1] for s in shapes]}, the model has {expected[-1]}"
                )
            outputs = sum(shape[0] for shape in shapes)
            if outputs != expected[1]:
                raise CheckpointError(
                    f"{where}.{expert}: outputs {[s[0] for s in shapes]}, the model has {expected[1]}"
                )
        return (self.experts[where], outputs, expected[-1])

    def sources(self, name: str, shape: tuple[int, ...]) -> list[str] | None:
        """Names of the stored 16-bit tensors that make up a parameter, or None if it is not there."""
        where, _, which = name.rpartition(".")
        if name in self.files:
            return [name]
        if len(shape) == 3:
            parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
            stored = [f"{where}.{expert}.{part}.weight" for expert in range(shape[0]) for part in parts]
            return stored if all(one in self.files for one in stored) else None
        return None

    def _plain_shape(self, sources: list[str], expected: tuple[int, ...]) -> tuple[int, ...]:
        if len(sources) == 1:
            return self.files.shape(sources[0])
        first = self.files.shape(sources[0])
        per_expert = len(sources) // expected[0]
        same = all(self.files.shape(one) == first for one in sources)
        return (expected[0], first[0] * per_expert, first[1]) if same else (-1, *first)

    def plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A 16-bit parameter, as stored, on the CPU. Raises CheckpointError for values that are not finite."""
        sources = self.sources(name, shape)
        if sources is None:
            raise CheckpointError(f"the checkpoint has no {name}")
        tensors = [self.files.tensor(one) for one in sources]
        for source, tensor in zip(sources, tensors, strict=True):
            if not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{source} holds a NaN or an infinity")
        if len(tensors) == 1:
            return tensors[0]
        return torch.cat(tensors).view(shape)

    def quantize(self, name: str, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [..., N, K], scales in the dtype of `weight` and zeros [..., N, G] of one of `names`, on `device`."""
        where, _, which = name.rpartition(".")
        if where not in self.experts:
            return self._module(where, weight.dtype)
        parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
        whole: list[Tensor] = []
        for expert in range(self.experts[where]):
            pieces = [self._module(f"{where}.{expert}.{part}", weight.dtype) for part in parts]
            for i, same in enumerate(zip(*pieces, strict=True)):
                if expert == 0:  # written into at once: codes of a layer are a byte each, and large
                    rows = sum(len(piece) for piece in same)
                    whole.append(same[0].new_empty(self.experts[where], rows, same[0].shape[-1]))
                torch.cat(same, out=whole[i][expert])
        codes, scales, zeros = whole
        return codes, scales, zeros

    def _module(self, module: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        stored = [self.files.tensor(f"{module}.{suffix}").to(self.device) for suffix in SUFFIXES]
        try:
            codes, scales, zeros = from_awq(*stored)
        except ValueError as error:
            raise CheckpointError(f"{module}.scales: {error}") from error
        scales = scales.to(dtype)
        if not bool(torch.isfinite(scales).all()):
            raise CheckpointError(f"{module}.scales: a scale is beyond {dtype}")
        return codes, scales, zeros

    def rescaled(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def __deepcopy__(self, memo: Any) -> QuantizedFiles:  # of a model, which carries it; nothing writes to it
        return self

    def __reduce__(self) -> Any:  # open files do not travel; pickle of a model carries its configuration
        return QuantizedFiles, (str(self.files.directory), str(self.device))

    def __repr__(self) -> str:
        return f"QuantizedFiles({str(self.files.directory)!r}, {len(self.modules)} weights, group {self.group_size})"


def persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(name, buffer) of those a checkpoint holds."""
    held = model.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in model.named_buffers() if name in held]

"""Write a quantised copy of a checkpoint directory, in the layout of AutoAWQ's "gemm" checkpoints (see `layout`).

Tensor by tensor from the files, so that memory holds one output file and one weight. Experts are stored one by one,
`...mlp.experts.3.gate_proj.qweight`, as published DeepSeek AWQ checkpoints have them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, PlanError
from ..ops.int4 import why_no_group_size
from .blocks import TARGETS, check_request, is_named
from .calibration import AwqCalibration, rescale
from .files import INDEX, WHOLE, TensorFiles, local_config, read_json
from .layout import to_awq, why_not_stored
from .rounding import nearest
from .search import scale_dtype

WEIGHT = re.compile(
    r"(?P<mlp>(?:model\.)?layers\.(?P<layer>\d+)\.mlp)"
    r"(?P<kind>\.experts\.(?P<expert>\d+)|\.shared_experts|)\.(?P<which>gate|up|down)_proj\.weight"
)
STACKED = re.compile(r"(?:model\.)?layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<which>gate_up|down)_proj")
SHARD_BYTES = 5_000_000_000


@dataclass
class Written:
    """What `write_quantized` did."""

    directory: str
    quantized: int = 0
    """Weights now in four bits; each expert's are counted one by one."""
    kept: dict[str, str] = field(default_factory=dict)
    """Module -> why it stays in 16 bits, of those that targets name."""
    bytes_before: int = 0
    bytes_after: int = 0
    files: int = 0


class _Shards:
    """Collects tensors and writes a file whenever it is full."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self.directory, self.most_bytes = directory, most_bytes
        self.held: dict[str, Tensor] = {}
        self.where: dict[str, int] = {}
        self.count = self.total = self.size = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self.held and self.size + tensor.nbytes > self.most_bytes:
            self._flush()
        self.held[name] = tensor
        self.where[name] = self.count
        self.size += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        from safetensors.torch import save_file

        save_file(self.held, self.directory / f"part-{self.count}", metadata={"format": "pt"})
        self.held, self.size, self.count = {}, 0, self.count + 1

    def finish(self) -> None:
        """Give the files their names, which hold their number, and write the index."""
        self._flush()
        if self.count == 1:
            (self.directory / "part-0").rename(self.directory / WHOLE)
            return
        names = [f"model-{i + 1:05d}-of-{self.count:05d}.safetensors" for i in range(self.count)]
        for i, name in enumerate(names):
            (self.directory / f"part-{i}").rename(self.directory / name)
        index = {"metadata": {"total_size": self.total}, "weight_map": {k: names[i] for k, i in self.where.items()}}
        (self.directory / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


@dataclass(frozen=True)
class _Part:
    """One matrix that may be quantised."""

    name: str
    """Of its weight, as AutoAWQ names it."""
    weight: Tensor
    expert: int | None
    parameter: str
    """The model's parameter it is (a part of)."""
    rows: slice
    """Which of that parameter's outputs."""

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


def check_output(source: str | Path, out: str | Path) -> None:
    """Raises PlanError unless `out` is free to be written."""
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise PlanError(f"{str(out)!r} exists and is not an empty directory; give another one")
    if path.resolve() == Path(source).resolve():
        raise PlanError("the output directory is the model's own")


def open_source(
    source: str | Path, out: str | Path, group_size: int, targets: Collection[str], skip: Collection[str]
) -> tuple[TensorFiles, Any, set[str]]:
    """The files, the config and the names of the model's parameters. Raises as `write_quantized` for everything that
    can be known without reading a weight, which is before a calibration takes its hours."""
    if (reason := why_no_group_size(group_size)) is not None:
        raise PlanError(reason)
    check_request(targets, skip)
    check_output(source, out)
    config = local_config(str(source))
    if (known := getattr(config, "quantization_config", None)) is not None:
        method = known.get("quant_method") if isinstance(known, dict) else known.quant_method
        raise CheckpointError(f"{str(source)!r} is quantised already, as {method}; quantise a 16-bit checkpoint")
    files = TensorFiles(source)
    modules, parameters = set(), set()
    for name in files.names():
        modules.add(name.rpartition(".")[0])
        parameters.add(name)
        for part in _parts(name, torch.empty(files.shape(name), device="meta"), config):
            modules.add(part.module)
            parameters.add(part.parameter)
            _why_kept(part, targets, skip, group_size)
    for pattern in skip:
        if not any(is_named(module, [pattern]) for module in modules):
            raise PlanError(f"skip names {pattern!r}, which no module of the checkpoint is called")
    return files, config, parameters


def write_quantized(
    source: str | Path,
    out: str | Path,
    *,
    calibration: AwqCalibration | None = None,
    group_size: int = 128,
    targets: Collection[str] = TARGETS,
    skip: Collection[str] = (),
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Write the 16-bit checkpoint `source` to `out` with its MLPs and experts in four bits.

    calibration: of a model loaded from `source`; None rounds to nearest. group_size: the calibration's, if given.
    `out` appears when it is whole. Raises PlanError for wrong arguments, CheckpointError for a checkpoint that is
    damaged, quantised already, or does not fit the calibration.
    """
    if calibration is not None and calibration.group_size != group_size:
        raise PlanError(f"the calibration is for groups of {calibration.group_size}, not {group_size}")
    files, config, parameters = open_source(source, out, group_size, targets, skip)
    if calibration is not None and (missing := (calibration.names | calibration.rescaled_names) - parameters):
        raise CheckpointError(f"the calibration is of another model: the checkpoint has no {min(missing)}")
    target = Path(out)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    done = Written(str(out))
    try:
        _write(files, partial, config, calibration, group_size, tuple(targets), tuple(skip), shard_bytes, done)
        if target.exists():
            target.rmdir()  # empty, see above
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return done


def _write(
    files: TensorFiles,
    folder: Path,
    config: Any,
    calibration: AwqCalibration | None,
    group_size: int,
    targets: tuple[str, ...],
    skip: tuple[str, ...],
    shard_bytes: int,
    done: Written,
) -> None:
    from tqdm.auto import tqdm

    shards = _Shards(folder, shard_bytes)
    unconverted: list[str] = []
    for name in tqdm(files.names(), desc="writing", unit="tensor", disable=None):
        tensor = files.tensor(name)
        done.bytes_before += tensor.nbytes
        parts = list(_parts(name, tensor, config))
        if not parts:
            shards.add(name, tensor if calibration is None else calibration.rescaled(name, tensor))
            if tensor.dim() == 2 and "embed" not in name and name.endswith(".weight"):
                unconverted.append(name.removesuffix(".weight"))
        for part in parts:
            why = _why_kept(part, targets, skip, group_size)
            if why is None:
                codes = _codes(part, calibration, group_size)
                try:
                    stored = to_awq(*codes)
                except ValueError as error:
                    raise CheckpointError(f"{part.name} cannot be stored: {error}") from error
                for suffix, value in stored.items():
                    shards.add(f"{part.module}.{suffix}", value)
                done.quantized += 1
                continue
            if why not in ("", "skip"):
                done.kept[part.module] = why
            unconverted.append(part.module)
            shards.add(part.name, _beside(part, calibration))
    if not done.quantized:
        raise PlanError(f"nothing to quantise: targets={targets}, skip={skip}, groups of {group_size} leave no weight")
    shards.finish()
    _copy_rest(files.directory, folder, unconverted, group_size)
    done.bytes_after, done.files = shards.total, shards.count


def _parts(name: str, tensor: Tensor, config: Any) -> Iterator[_Part]:
    """The matrices of a tensor that can be quantised; none of other tensors, or of layers beyond the model's (MTP)."""
    if (match := WEIGHT.fullmatch(name)) and int(match["layer"]) < config.num_hidden_layers:
        if match["expert"] is None:
            yield _Part(name, tensor, None, name, slice(None))
            return
        width = tensor.shape[0]
        stacked = "down_proj" if match["which"] == "down" else "gate_up_proj"
        rows = {"gate": slice(0, width), "up": slice(width, None), "down": slice(None)}[match["which"]]
        yield _Part(name, tensor, int(match["expert"]), f"{match['mlp']}.experts.{stacked}", rows)
    elif (match := STACKED.fullmatch(name)) and int(match["layer"]) < config.num_hidden_layers:
        where = name.rpartition(".")[0]
        for expert, weight in enumerate(tensor):
            if match["which"] == "down":
                yield _Part(f"{where}.{expert}.down_proj.weight", weight.clone(), expert, name, slice(None))
                continue
            width = weight.shape[0] // 2
            for which, rows in (("gate", slice(0, width)), ("up", slice(width, None))):
                yield _Part(f"{where}.{expert}.{which}_proj.weight", weight[rows].clone(), expert, name, rows)


def _why_kept(part: _Part, targets: Collection[str], skip: Collection[str], group_size: int) -> str | None:
    """Why a matrix stays in 16 bits, None if it does not, "" or "skip" if that was asked for."""
    target = "experts" if "experts." in part.name else "mlp"
    if target not in targets:
        return ""
    if is_named(part.module, skip):
        return "skip"
    why = why_not_stored(part.weight.shape[0], part.weight.shape[1], group_size)
    if why is not None and part.expert is not None:
        raise PlanError(f"{part.module} cannot be stored: {why}. Choose another group_size.")
    return why


def _codes(part: _Part, calibration: AwqCalibration | None, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    if calibration is None or part.parameter not in calibration.names:
        try:
            return nearest(_beside(part, calibration), group_size, scale_dtype(part.weight.dtype))
        except ValueError as error:
            raise CheckpointError(f"{part.name}: {error}") from error
    if part.expert is None:
        return calibration.quantize(part.parameter, part.weight)
    codes, scales, zeros = calibration.stored(part.parameter, part.expert)
    return codes[part.rows], scales[part.rows], zeros[part.rows]


def _beside(part: _Part, calibration: AwqCalibration | None) -> Tensor:
    """The weight as it must be in 16 bits."""
    if calibration is None or part.parameter not in calibration.rescaled_names:
        return part.weight
    columns, rows = calibration.shifts(part.parameter)
    if part.expert is not None:  # columns [D] of all experts, or [E, I]; rows [E, N]
        columns = columns[part.expert] if columns is not None and columns.dim() == 2 else columns
        rows = None if rows is None else rows[part.expert][part.rows]
    return rescale(part.weight, columns, rows)


def _copy_rest(source: Path, folder: Path, unconverted: list[str], group_size: int) -> None:
    """Everything but weights, and the config with what was done."""
    for path in sorted(source.iterdir()):
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth") or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
    config = read_json(source / "config.json")
    attention = ["self_attn"] * any(".self_attn." in name for name in unconverted)  # vLLM fuses and renames projections
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": attention + unconverted,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

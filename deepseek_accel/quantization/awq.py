"""AWQ calibration (arXiv 2306.00978): which columns of a weight deserve finer steps, seen from the inputs they meet.

For each layer, in order, on inputs that come from the quantised layers before it:

1. Search s for the columns of gate and up, shared by all experts: s = mean|x|^alpha, alpha from 0 to 1, the one whose
   rounding costs the layer's gate and up outputs least. x / s comes from the norm, divided by s; the router's columns
   are multiplied by s. The same for the columns of each down projection; there the up rows are divided.
2. Clip ranges and round with feedback (`rounding`), gate and up first, then down on what those now give it.
3. Run the layer as it will be, for the next one's inputs, and put the original weights back.

s is rounded to powers of two, so that dividing and multiplying loses nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import families
from ..errors import CheckpointError, PlanError
from ..ops.int4 import why_no_group_size
from .blocks import TARGETS, Block, find_blocks, owner_of, parameter
from .calibration import (
    FORMAT,
    INDEX,
    AwqCalibration,
    expected_tensors,
    identity,
    layer_file,
    layer_row,
    open_layer,
    pack_nibbles,
    read_index,
    rescale,
    unpack_nibbles,
    write_index,
    write_layer,
)
from .search import Found, Inputs, round_mlp, search_columns

LENGTH = 1024
"""Tokens at which calibration texts are cut."""


def calibrate_awq(
    model: nn.Module,
    data: Sequence[Any],
    *,
    tokenizer: Any = None,
    group_size: int = 128,
    targets: Collection[str] = TARGETS,
    skip: Collection[str] = (),
    feedback: bool = True,
    folder: Any = None,
) -> AwqCalibration:
    """Choose 4-bit weights for `model` on the text it will see. The model is left as it was.

    data: texts, which need `tokenizer` and are cut at 1,024 tokens; or token tensors [1, T].
    group_size: neighbouring inputs that share a scale; a multiple of 32.
    targets: "experts" (routed and shared), "mlp" (dense). skip: MLPs to leave out: names of modules or regular
        expressions, matched whole against the MLP's name, parts of it, and the modules around it.
    feedback: let each column make up for the rounding of those before it; False is AWQ as published.
    folder: where finished layers are written. Called again with the same model, data and options, it goes on there; a
        folder of another calibration is an error. None keeps everything in memory.

    Raises PlanError for wrong arguments and for activations that are not finite, CheckpointError for weights that are
    not finite or a folder that does not fit; UnsupportedModelError for an unknown model.
    """
    inner = families.unwrap(model)
    family = families.find(inner)
    if (reason := why_no_group_size(group_size)) is not None:
        raise PlanError(reason)
    if inner.training:
        raise PlanError("the model is in training mode; call `model.eval()` first")
    if "_deepseek_accel" in vars(inner):
        raise PlanError("the model is optimized; call `restore(model)` first")
    blocks = find_blocks(inner, family, targets, skip)
    tokens = token_tensors(data, tokenizer)
    options = {"group_size": group_size, "feedback": feedback}
    index: dict[str, Any] = options | {
        "format": FORMAT,
        "data": hashlib.sha256(b"".join(t.numpy().tobytes() for t in tokens)).hexdigest()[:16],
        "layers": [block.index for block in blocks],
        "weights": {name: entry for block in blocks for name, entry in _entries(inner, block)},
        "rows": None,
    }
    path = None if folder is None else Path(folder)
    if path is not None and (path / INDEX).exists() and _is_finished(path, index):
        return AwqCalibration.load(path)
    finished = {} if path is None else _resume(path, index)
    done: dict[int, dict[str, Tensor]] = {}
    with torch.no_grad():
        rows = list(_run(inner, family, blocks, tokens, options, path, finished, done))
    index["rows"] = rows
    if path is not None:
        write_index(path, index)
    return AwqCalibration(index, done, path)


def token_tensors(data: Any, tokenizer: Any) -> list[Tensor]:
    """Token tensors [1, T] on the CPU, of texts or of such tensors."""
    if isinstance(data, str) or not isinstance(data, Sequence) or not data:
        got = "an empty list" if isinstance(data, list) else type(data).__name__
        raise PlanError(f"data must be a list of texts or of token tensors [1, T], got {got}")
    out = []
    for i, item in enumerate(data):
        if isinstance(item, str):
            if tokenizer is None:
                raise PlanError("data holds texts; pass the model's `tokenizer=` too, or token tensors [1, T]")
            item = tokenizer(item, return_tensors="pt", truncation=True, max_length=LENGTH).input_ids
        if not isinstance(item, Tensor) or item.dim() != 2 or len(item) != 1 or item.is_floating_point():
            found = f"{list(item.shape)} of {item.dtype}" if isinstance(item, Tensor) else type(item).__name__
            raise PlanError(f"data[{i}] must be a text or a tensor [1, T] of token ids, it is {found}")
        if item.shape[1]:
            out.append(item.long().cpu())
    if not out:
        raise PlanError("data holds no token")
    return out


def _entries(model: nn.Module, block: Block) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, entry of the index) of every weight a block's calibration concerns."""
    quantized = [name for mlp in block.mlps for name in mlp.names]
    dtype = parameter(model, quantized[0]).dtype
    for name in (*quantized, block.norm, *block.others):
        weight = parameter(model, name)
        if weight.device.type == "meta":
            raise PlanError(f"{name} is not in memory (device 'meta'); load the model without offloading to disk")
        parts = weight if weight.dim() == 3 else [weight]  # one expert at a time
        if name in quantized and not all(bool(torch.isfinite(part).all()) for part in parts):
            raise CheckpointError(f"{name} holds a NaN or an infinity")
        entry = {"layer": block.index, "quantized": name in quantized, "shape": list(weight.shape)}
        yield name, entry | identity(weight, dtype)


def _is_finished(folder: Path, index: dict[str, Any]) -> bool:
    """Whether a folder holds this very calibration, whole. Raises CheckpointError if it holds another."""
    known = read_index(folder)
    for key, value in index.items():
        if key != "rows" and known.get(key) != value:
            raise CheckpointError(
                f"{folder} holds a calibration with other {key}; use another folder, or delete this one to start anew"
            )
    return known.get("rows") is not None


def _resume(folder: Path, index: dict[str, Any]) -> dict[int, Any]:
    """Open files of finished layers. Starts the folder if there is none of it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / INDEX).exists():
        write_index(folder, index)
        return {}
    return {
        number: open_layer(folder, number, expected_tensors(index, number))
        for number in index["layers"]
        if (folder / layer_file(number)).exists()
    }


def _run(
    model: Any,
    family: Any,
    blocks: list[Block],
    tokens: list[Tensor],
    options: dict[str, Any],
    folder: Path | None,
    finished: dict[int, Any],
    done: dict[int, dict[str, Tensor]],
) -> Iterator[dict[str, Any]]:
    """Calibrate layer after layer; yields the row of each. What is not written to `folder` goes to `done`."""
    from tqdm.auto import tqdm

    layers = family.layers(model)
    states, calls = _record(family.decoder(model), layers, tokens)
    by_index = {block.index: block for block in blocks}
    for i in tqdm(range(blocks[-1].index + 1), desc="calibrating", unit="layer", disable=None):
        block = by_index.get(i)
        if block is None:
            states = [_call(layers[i], s, c) for s, c in zip(states, calls[i], strict=True)]
            continue
        if i in finished:
            tensors = {key: finished[i].get_tensor(key) for key in finished[i].keys()}  # noqa: SIM118 a file, no dict
            row = layer_row(finished[i])
            expected = None
        else:
            inputs, expected = _inputs(block, states, calls[i])
            tensors, row = _calibrate(model, block, inputs, **options)
            del inputs
        with _installed(model, block, tensors, options["group_size"]):
            states, actual = _outputs(block, states, calls[i])
        if expected is not None:
            row["output_snr_db"] = _snr(expected, actual)
            if folder is not None:
                write_layer(folder, i, tensors, row)
        if folder is None:
            done[i] = {key: value.cpu() for key, value in tensors.items()}
        yield row


def _record(decoder: Any, layers: list[Any], tokens: list[Tensor]) -> tuple[list[Tensor], list[list[dict[str, Any]]]]:
    """(the first layer's input per sequence, per layer and sequence the other arguments of the layer's call)."""
    states: list[Tensor] = []
    calls: list[list[dict[str, Any]]] = [[] for _ in layers]

    def remember(index: int) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kwargs = dict(kwargs)
            hidden = args[0] if args else kwargs.pop("hidden_states")
            if index == 0:
                states.append(hidden)
            calls[index].append({"args": args[1:], "kwargs": kwargs})

        return hook

    hooks = [layer.register_forward_pre_hook(remember(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        device = decoder.get_input_embeddings().weight.device
        for ids in tokens:
            decoder(input_ids=ids.to(device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return states, calls


def _call(layer: Any, state: Tensor, call: dict[str, Any]) -> Tensor:
    output = layer(state, *call["args"], **call["kwargs"])
    result: Tensor = output[0] if isinstance(output, tuple) else output
    return result


def _outputs(block: Block, states: list[Tensor], calls: list[dict[str, Any]]) -> tuple[list[Tensor], list[Tensor]]:
    """Per sequence (output of the layer, of its MLP)."""
    inner: list[Tensor] = []
    hook = block.layer.mlp.register_forward_hook(lambda module, args, output: inner.append(output))
    try:
        outer = [_call(block.layer, s, c) for s, c in zip(states, calls, strict=True)]
    finally:
        hook.remove()
    return outer, inner


def _inputs(block: Block, states: list[Tensor], calls: list[dict[str, Any]]) -> tuple[dict[str, Inputs], list[Tensor]]:
    """(what each MLP of the block meets, outputs of the whole MLP) with the weights as they are."""
    met: dict[str, list[tuple[Tensor, ...]]] = {mlp.where: [] for mlp in block.mlps}

    def remember(where: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            met[where].append(tuple(x.reshape(-1, x.shape[-1]) for x in (*args, *kwargs.values())))

        return hook

    hooks = [m.module.register_forward_pre_hook(remember(m.where), with_kwargs=True) for m in block.mlps]
    try:
        _, expected = _outputs(block, states, calls)
    finally:
        for hook in hooks:
            hook.remove()
    joined = {where: Inputs(*map(torch.cat, zip(*every, strict=True))) for where, every in met.items()}
    return joined, expected


def _calibrate(
    model: Any, block: Block, inputs: dict[str, Inputs], group_size: int, feedback: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors as in the file of a layer, and what was measured."""
    weights = {name: parameter(model, name) for mlp in block.mlps for name in mlp.names}
    alpha, columns = search_columns(block.mlps, weights, inputs, group_size)
    tensors: dict[str, Tensor] = {}
    found = Found()
    for mlp in block.mlps:
        try:
            tensors |= round_mlp(mlp, weights, inputs[mlp.where], columns, group_size, feedback, found)
        except ValueError as error:
            raise PlanError(
                f"{mlp.where} cannot be calibrated: {error}. Activations beyond fp16's range are the usual cause: "
                "load the model in bfloat16 or float32."
            ) from error
    if bool(columns.any()):
        tensors[f"{block.norm}:rows"] = columns
        tensors |= {f"{name}:columns": columns for name in block.others}
    tensors = {key: pack_nibbles(v) if key.endswith(":codes") else v for key, v in tensors.items()}
    shifted = sorted({key.rpartition(":")[0] for key in tensors if key.endswith((":rows", ":columns"))})
    row = {"layer": block.index, "tokens": next(iter(inputs.values())).count, "alpha": alpha, "rescaled": shifted}
    return tensors, row | found.row()


@contextmanager
def _installed(model: Any, block: Block, tensors: dict[str, Tensor], group_size: int) -> Iterator[None]:
    """The layer as it will be: quantised values in the dtype of the weights. Puts the original objects back."""
    names = [name for mlp in block.mlps for name in mlp.names]
    kept: list[tuple[Any, str, Any]] = []
    try:
        for name in (*names, block.norm, *block.others):
            owner, attribute = owner_of(model, name)
            old = getattr(owner, attribute)
            if name in names:
                new = _values(tensors, name, old, group_size)
            else:
                new = rescale(old, tensors.get(f"{name}:columns"), tensors.get(f"{name}:rows"))
            kept.append((owner, attribute, old))
            owner._parameters[attribute] = nn.Parameter(new, requires_grad=False)
        yield
    finally:
        for owner, attribute, old in kept:
            owner._parameters[attribute] = old


def _values(tensors: dict[str, Tensor], name: str, like: Tensor, group_size: int) -> Tensor:
    """The values of a quantised weight, in the dtype and on the device of `like`; one expert after another."""
    out = torch.empty_like(like)
    parts = [tensors[f"{name}:{what}"] for what in ("codes", "scales", "zeros")]
    for e in range(len(like)) if like.dim() == 3 else (...,):
        codes, scales, zeros = (part[e].to(like.device) for part in parts)  # type: ignore[index]
        codes = unpack_nibbles(codes, like.shape[-1]).float()
        zero, scale = (x.float().repeat_interleave(group_size, -1)[..., : like.shape[-1]] for x in (zeros, scales))
        out[e] = ((codes - zero) * scale).to(out.dtype)  # type: ignore[index]
    return out


def _snr(expected: list[Tensor], actual: list[Tensor]) -> float:
    """10 log10 of the energy of the expected outputs over that of the difference."""
    signal = sum(float(x.double().square().sum()) for x in expected)
    noise = sum(float((x.double() - y.double()).square().sum()) for x, y in zip(expected, actual, strict=True))
    return float(10 * torch.log10(torch.tensor(signal / max(noise, 1e-300))))

"""Load checkpoints: a quantised one straight into packed weights, without a 16-bit copy of what is in four bits; others
through transformers, but whole or not at all."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import models
from .api import optimize
from .config import OptimizeConfig
from .errors import CheckpointError, PlanError, UnsupportedModelError
from .passes.base import Pass
from .passes.mixed_precision import MixedPrecision
from .quantization.blocks import owner_of
from .quantization.files import local_config
from .quantization.read import QuantizedFiles, check_config, persistent_buffers

LAYER = re.compile(r"model\.layers\.(\d+)\.")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_directory(directory: str | os.PathLike[str], dtype: Any = "auto") -> Any:
    """The model of a checkpoint directory in transformers' layout, on the CPU, in eval mode. No code of it is run.

    Raises CheckpointError if tensors are missing: transformers would draw them at random and go on. Tensors that no
    parameter takes are warned of, but for those of MTP layers, for which transformers has no modules.
    """
    from transformers import AutoModelForCausalLM

    with models.no_mtp_warning():
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, trust_remote_code=False, local_files_only=True, output_loading_info=True
        )
    models.require_tensors(directory, type(model), info)
    layers = model.config.num_hidden_layers
    unused = [k for k in sorted(info["unexpected_keys"]) if not ((m := LAYER.match(k)) and int(m[1]) >= layers)]
    if unused:
        warnings.warn(
            f"{str(directory)!r}: {len(unused)} tensors have no place in {type(model).__name__}, such as {unused[0]}",
            stacklevel=2,
        )
    return model.eval()


def load_quantized(
    directory: str | os.PathLike[str],
    *,
    device: Any = None,
    dtype: Any = "auto",
    config: Iterable[Pass] | None = None,
) -> Any:
    """The model of a quantised directory, optimized, in eval mode.

    directory: in the layout of AutoAWQ's "gemm" checkpoints, as `deepseek-accel quantize` and AutoAWQ write it.
    device: where to put it; None is the CPU. dtype: of activations and of what is in 16 bits; "auto" is what the
        checkpoint's config says. Stored scales are fp16; in bf16 they are rounded to 8 bits.
    config: the passes besides MixedPrecision; None for every pass that keeps the numbers up to rounding.

    `restore` raises: there are no 16-bit weights to go back to. Raises CheckpointError naming the tensor that is
    missing, damaged or of a layout that is not read; nothing is kept then.
    """
    check_config(directory)  # first: what follows would complain of its consequences
    model_config = local_config(str(directory))
    place = torch.device("cpu" if device is None else device)
    files = QuantizedFiles(directory, place)
    wanted = _dtype(dtype, model_config)
    model = _skeleton(model_config, wanted)
    files.check(model)
    _fill(model, files, place, wanted)
    model.config._name_or_path = str(directory)
    if (Path(directory) / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(directory)
    optimize(model, _passes(model, files, config))
    left = [name for name, value in [*model.named_parameters(), *model.named_buffers()] if value.is_meta]
    if left:
        raise CheckpointError(f"{left[0]} is stored in four bits where this library keeps 16 bits; it cannot be loaded")
    return model


def _dtype(dtype: Any, config: Any) -> torch.dtype:
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float16
    for name, value in DTYPES.items():
        if dtype in (name, value):
            return value
    raise PlanError(f'dtype must be "auto" or one of {", ".join(DTYPES)}, got {dtype!r}')


def _skeleton(config: Any, dtype: torch.dtype) -> Any:
    """The model with parameters on "meta" and buffers that are real."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    del config.quantization_config
    try:
        with init_empty_weights(include_buffers=False):
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    except ValueError as error:
        raise UnsupportedModelError(f"transformers has no language model for it: {error}") from error


def _keeps_fp32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether transformers keeps this parameter in fp32 whatever the dtype of the model."""
    kept = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept += getattr(model, "_keep_in_fp32_modules", None) or ()
    return any(re.search(rf"(?:^|\.){pattern}(?:$|\.)", name) for pattern in kept)


def _fill(model: Any, files: QuantizedFiles, device: torch.device, dtype: torch.dtype) -> None:
    """Read what is in 16 bits. Weights in four bits stay on "meta", but for those the pass does not pack."""
    model.tie_weights()
    for name, value in [*model.named_parameters(), *persistent_buffers(model)]:
        owner, attribute = owner_of(model, name)
        kind = torch.float32 if _keeps_fp32(model, name, dtype) else dtype
        if name in files.names:
            if not name.endswith(".kv_b_proj.weight"):  # absorbed attention reads its rows as they are
                if value.dtype != dtype:
                    raise CheckpointError(f"{name} is stored in four bits; it is kept in {value.dtype} by transformers")
                continue
            new = _unpacked(files, name, value, kind)
        else:
            new = files.plain(name, tuple(value.shape)).to(device, kind if value.is_floating_point() else None)
        if attribute in owner._buffers:
            owner._buffers[attribute] = new
        else:
            owner._parameters[attribute] = nn.Parameter(new, requires_grad=False)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    model.tie_weights()


def _unpacked(files: QuantizedFiles, name: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    codes, scales, zeros = files.quantize(name, like)
    zero, scale = (x.float().repeat_interleave(files.group_size, -1) for x in (zeros, scales))
    return ((codes.float() - zero) * scale).to(dtype)


def _passes(model: Any, files: QuantizedFiles, config: Iterable[Pass] | None) -> OptimizeConfig:
    """MixedPrecision for exactly what is stored in four bits, and the passes asked for."""
    others = OptimizeConfig.lossless().passes if config is None else tuple(config)
    if any(isinstance(p, MixedPrecision) for p in others):
        raise PlanError("load_quantized makes the MixedPrecision pass itself, from the checkpoint; leave it out")
    stored = {name.rpartition(".")[0] for name in files.names} | set(files.experts)
    targets = ["experts", "mlp"]
    targets += ["attention"] * any(".self_attn." in name for name in stored)
    targets += ["lm_head"] * ("lm_head" in stored)
    kept = [name for name, module in model.named_modules() if _may_be_packed(name, module) and name not in stored]
    kept += [name for name in stored if name.endswith("kv_b_proj")]
    mixed = MixedPrecision(
        group_size=files.group_size,
        targets=tuple(targets),
        skip=tuple(re.escape(name) for name in kept),
        calibration=files,
        originals="drop",
    )
    return OptimizeConfig((mixed, *others), allow_skips=True)


def _may_be_packed(name: str, module: Any) -> bool:
    return isinstance(module, nn.Linear) or hasattr(module, "gate_up_proj")

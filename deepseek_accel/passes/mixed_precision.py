"""Pack weights in four bits: routed and shared experts and dense MLPs; the rest keeps the model's dtype.

A linear layer stays the object it was: `_accel_weight` holds the packed form, its `forward` computes with that, and its
`weight` becomes an empty parameter, so that whoever asks still learns device and dtype. Experts keep their two packed
tensors in the same way. Undo puts the same parameters back.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from ..errors import AccelError, PlanError
from ..families.base import Family
from ..generation.lines import packed_name, packed_weight
from ..journal import forward_slot
from ..ops.choice import why_not_triton
from ..ops.int4 import DTYPES, Int4Weight, pack, round_to_nearest, why_no_group_size
from ..ops.int4_linear import int4_linear
from ..plan import Context, Edit, Note, Skip
from ..quantization.blocks import TARGETS as CALIBRATED
from ..quantization.blocks import is_named
from ..quantization.calibration import AwqCalibration
from ..quantization.samples import Samples
from ..watch import count, why_foreign
from .base import Pass
from .experts import MOVED, experts_forward, why_not_fused

TARGETS = ("experts", "mlp", "attention", "lm_head")
MLP = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "q_a_proj", "q_b_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "o_proj")
EXPERTS = ("gate_up_proj", "down_proj")


class Part(NamedTuple):
    """A module and which of its parameters are to be packed."""

    where: str
    module: Any
    parameters: tuple[str, ...]
    layer: str
    """The plan's row."""


def linear_forward(linear: Any, input: torch.Tensor, counters: Counter[str]) -> torch.Tensor:
    """input [.., K] -> [.., N]; the forward of a linear layer whose weight is packed."""
    weight = packed_weight(linear)
    if weight is None:
        raise AccelError("this linear layer has lost its packed weight; call `restore(model)`")
    count(counters, "mixed_precision: packed linear")
    autocast = torch.is_autocast_enabled(input.device.type)
    if autocast:
        input = input.to(weight.dtype)
    try:
        out = int4_linear(input.reshape(-1, input.shape[-1]), weight, linear.bias)
    except ValueError as error:
        raise AccelError(f"{error}. {MOVED}") from error
    if autocast:
        out = out.to(torch.get_autocast_dtype(input.device.type))  # as a linear layer of torch gives
    return out.view(*input.shape[:-1], out.shape[1])


def refuse_to_save(model: Any, *args: Any, drops: bool, **kwargs: Any) -> None:
    """In place of `save_pretrained`."""
    first = (
        'Its 16-bit weights were dropped (originals="drop"): save the checkpoint it was loaded from.'
        if drops
        else "Call `restore(model)` first to save the 16-bit weights."
    )
    raise AccelError(
        "a model with packed weights is not saved by `save_pretrained`, which would leave them out. "
        f"{first} A quantized directory is written by `deepseek-accel quantize MODEL_DIR OUT_DIR`."
    )


@dataclass
class Kept:
    """The parameter that a packed weight replaces."""

    device: torch.device
    drops: bool

    def bring_back(self, parameter: nn.Parameter) -> None:
        if parameter.device != self.device:
            parameter.data = parameter.data.to(self.device)


def take_away(parameter: nn.Parameter, drops: bool, device: torch.device) -> nn.Parameter:
    """What stands for a parameter that is packed. A GPU's own goes to host memory, also to be dropped when all are
    packed: an error in between can then still be undone. Others stay where they are."""
    stand_in = nn.Parameter(torch.empty(0, dtype=parameter.dtype, device=device), requires_grad=False)
    send_to_host(parameter, drops)
    return stand_in


def send_to_host(parameter: nn.Parameter, drops: bool) -> None:
    """Move a GPU's parameter to host memory, pinned unless it is to be dropped."""
    data = parameter.data
    if data.is_cuda:
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=not drops)
        parameter.data = host.copy_(data)


def packed(parameter: nn.Parameter, name: str, group_size: int, calibration: Any, device: torch.device) -> Int4Weight:
    """The packed form, on `device`, of the parameter `name`. Raises PlanError if its numbers cannot be packed."""
    weight = parameter.detach()
    try:
        if calibration is not None and name in calibration.names:
            codes, scales, zeros = calibration.quantize(name, weight)
            return pack(codes.to(device), scales.to(device), zeros.to(device), group_size)
        if weight.dim() == 2:
            return pack(*round_to_nearest(weight, group_size), group_size)
        experts = [pack(*round_to_nearest(expert, group_size), group_size) for expert in weight]  # fp32 one at a time
    except ValueError as error:
        raise PlanError(f"{name} cannot be packed: {error}") from error
    words = torch.stack([expert.words for expert in experts])
    groups = torch.stack([expert.groups for expert in experts])
    return dataclasses.replace(experts[0], words=words, groups=groups)


def rescaled(calibration: Any, name: str, parameter: nn.Parameter, drops: bool) -> nn.Parameter:
    """What a parameter that stays in 16 bits becomes. The old one waits as those that are packed do: experts that are
    left out are most of a model."""
    new = nn.Parameter(calibration.rescaled(name, parameter.detach()), requires_grad=parameter.requires_grad)
    send_to_host(parameter, drops)
    return new


def packed_bytes(model: nn.Module) -> int:
    """Of all packed weights of a model."""
    return sum(
        value.nbytes for module in model.modules() for value in vars(module).values() if isinstance(value, Int4Weight)
    )


def why_not_packed(module: Any, names: tuple[str, ...], tied: set[int]) -> str | None:
    """Why the named parameters of this module stay as they are, or None."""
    if names == EXPERTS:
        if (reason := why_not_fused(module)) is not None:
            return reason
    elif type(module) is not nn.Linear:
        return f"it is a {type(module).__module__}.{type(module).__name__}, not a plain linear layer"
    elif (reason := why_foreign(module)) is not None:
        return reason
    for name in names:
        parameter = module._parameters.get(name)
        if type(parameter) is not nn.Parameter:
            return f"its {name} is not a plain parameter"
        if parameter.dtype not in DTYPES:
            return f"its {name} is of {parameter.dtype}"
        if parameter.is_meta and "_hf_hook" in vars(module):
            return f"its {name} is offloaded"
        if id(parameter) in tied:
            return f"its {name} is shared with another module"
    return None


def parts(model: Any, family: Family, targets: tuple[str, ...], names: dict[int, str]) -> Iterator[Part | Skip]:
    """What `targets` name, in the model's order."""
    for i, layer in enumerate(family.layers(model)):
        row = f"layers.{i}"
        if "attention" in targets:
            attention: Any = layer.self_attn
            for name in ATTENTION:
                if name in attention._modules:
                    linear = attention._modules[name]
                    yield Part(names[id(linear)], linear, ("weight",), row)
            if "kv_b_proj" in attention._modules:
                yield Skip(names[id(attention.kv_b_proj)], "absorbed attention reads its rows as they are")
        mlp: Any = layer.mlp
        is_mixture = hasattr(mlp, "experts") and hasattr(mlp, "gate")
        dense = mlp._modules.get("shared_experts") if is_mixture else mlp
        if ("experts" if is_mixture else "mlp") not in targets:
            continue
        if is_mixture:
            yield Part(names[id(mlp.experts)], mlp.experts, EXPERTS, row)
        for name in MLP if dense is not None else ():
            if (linear := dense._modules.get(name)) is not None:
                yield Part(names[id(linear)], linear, ("weight",), row)
    if "lm_head" in targets:
        if (head := model._modules.get("lm_head")) is None:
            yield Skip("lm_head", "this model has none")
        else:
            yield Part("lm_head", head, ("weight",), "lm_head")


@dataclass(frozen=True)
class MixedPrecision(Pass):
    """Experts and dense MLPs in four bits, by groups along the inputs.

    bits: 4. group_size: inputs that share a scale and a zero, a multiple of 32; the last group may be short.
    method: "awq", by a calibration, or "rtn", round to nearest. targets: of "experts" (routed and shared), "mlp"
    (dense), "attention", "lm_head". skip: names of modules that stay, or regular expressions of such: matched whole,
    against a module's name, its last parts ("down_proj", "layers.1"), and the modules around it. calibration, for
    "awq": what `calibrate_awq` gives, where it was saved, or what it is to be made on when the model is optimized:
    texts, for the tokenizer of the model's checkpoint, or token tensors [1, T]. originals: "host" keeps the replaced
    weights in host memory for `restore`, "drop" frees them.
    """

    effect: ClassVar[str] = "lossy"

    bits: int = 4
    group_size: int = 128
    method: str = "awq"
    targets: tuple[str, ...] = ("experts", "mlp")
    skip: tuple[str, ...] = ()
    calibration: Any = None
    originals: str = "host"

    def __post_init__(self) -> None:
        if isinstance(self.calibration, (str, os.PathLike)):
            object.__setattr__(self, "calibration", AwqCalibration.load(self.calibration))
        elif isinstance(self.calibration, (list, tuple)):
            object.__setattr__(self, "calibration", Samples(self.calibration))
        if self.bits != 4:
            raise PlanError(f"bits must be 4, got {self.bits!r}")
        if reason := why_no_group_size(self.group_size):
            raise PlanError(reason)
        for name, value, allowed in (
            ("method", self.method, ("awq", "rtn")),
            ("originals", self.originals, ("host", "drop")),
        ):
            if value not in allowed:
                raise PlanError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        for name in ("targets", "skip"):
            given: Any = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(one, str) for one in given):
                raise PlanError(f"{name} must be a sequence of strings, got {given!r}")
            object.__setattr__(self, name, tuple(given))
        if unknown := [target for target in self.targets if target not in TARGETS]:
            raise PlanError(f"unknown targets {unknown}; there are {', '.join(TARGETS)}")
        if not self.targets:
            raise PlanError(f"targets must not be empty; there are {', '.join(TARGETS)}")
        self._patterns()

    def _patterns(self) -> list[re.Pattern[str]]:
        try:
            return [re.compile(pattern) for pattern in self.skip]
        except re.error as error:
            raise PlanError(f"skip holds {error.pattern!r}, which is no regular expression: {error}") from error

    def options(self) -> dict[str, Any]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if isinstance(self.calibration, Samples):
            fields["calibration"] = list(self.calibration.items)
        return fields

    def prepared(self, model: nn.Module) -> MixedPrecision:
        if not isinstance(self.calibration, Samples):
            return self
        targets = [target for target in self.targets if target in CALIBRATED]
        made = self.calibration.calibrate(model, self.group_size, targets)
        return dataclasses.replace(self, calibration=made)

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        if self.method == "awq" and self.calibration is None:
            yield Skip(
                "calibration",
                'method="awq" needs one: `calibration = calibrate_awq(model, data)`, then '
                '`MixedPrecision(calibration=calibration)`. Without data: method="rtn", round to nearest.',
            )
            return
        calibration = self._calibration(model)
        if isinstance(self.calibration, Samples):
            yield Note(f"calibrated first, on {len(self.calibration.tokens(model))} samples")
        names = {id(module): name for name, module in model.named_modules()}
        patterns = self._patterns()
        for pattern in patterns:
            if not any(is_named(name, [pattern]) for name in names.values()):
                raise PlanError(f"skip names {pattern.pattern!r}, which no module of this model is called")
        seen = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        tied = {number for number, times in seen.items() if times > 1}
        # where packed weights of a model go whose own were never read (a calibration may hold the codes)
        device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("meta"))
        done: dict[str, list[str]] = {}
        replaced: set[str] = set()
        for part in parts(model, family, self.targets, names):
            if is_named(part.where, patterns):
                continue
            if isinstance(part, Skip):
                yield part
            elif (reason := why_not_packed(part.module, part.parameters, tied)) is not None:
                yield Skip(part.where, reason)
            else:
                done.setdefault(part.layer, []).append(part.where.rpartition(f"{part.layer}.")[2])
                replaced |= {f"{part.where}.{name}" for name in part.parameters}
                yield from self._edits(part, calibration, context, device)
        if calibration is not None:
            yield from self._rescaled(model, calibration, replaced)
        for name, module in model.named_modules() if done else ():
            if hasattr(module, "save_pretrained"):  # the decoder inside has one too
                refuse = partial(partial, refuse_to_save, module, drops=self.originals == "drop")
                yield Edit(module, "save_pretrained", refuse, f"{name}.save_pretrained".lstrip("."))
        yield from self._notes(done, model)

    def _calibration(self, model: nn.Module) -> Any:
        if self.method == "rtn":
            if self.calibration is not None:
                raise PlanError('method="rtn" takes no calibration; leave it out, or write method="awq"')
            return None
        calibration = self.calibration
        if isinstance(calibration, Samples):
            if not set(self.targets) & set(CALIBRATED):
                raise PlanError(
                    f"targets {self.targets} have nothing that is calibrated: {', '.join(CALIBRATED)}. "
                    'Write method="rtn".'
                )
            return None  # it is made when the model is optimized; the plan has the same weights
        if not hasattr(calibration, "quantize"):
            raise PlanError(
                "calibration must be what `calibrate_awq` returns, or a list of texts or of token tensors, got "
                f"{type(calibration).__name__}"
            )
        if calibration.group_size != self.group_size:
            raise PlanError(
                f"the calibration is for groups of {calibration.group_size}, not {self.group_size}; "
                f"write group_size={calibration.group_size}"
            )
        calibration.check(model)
        return calibration

    def _edits(self, part: Part, calibration: Any, context: Context, device: torch.device) -> Iterator[Edit]:
        module, drops = part.module, self.originals == "drop"
        for name in part.parameters:
            parameter, where = module._parameters[name], f"{part.where}.{name}"
            target = device if parameter.is_meta else parameter.device
            build = partial(packed, parameter, where, self.group_size, calibration, target)
            yield Edit(module, packed_name(name), build, where)
            kept = Kept(parameter.device, drops)
            yield Edit(module, name, partial(take_away, parameter, drops, target), where, kept)
        if part.parameters == EXPERTS:
            if not context.has("experts"):  # else that pass writes this slot
                implementation = module.config._experts_implementation
                compute = partial(
                    partial, experts_forward, module, implementation=implementation, counters=context.counters
                )
                yield Edit(module, forward_slot(module), compute, part.where)
        else:
            compute = partial(partial, linear_forward, module, counters=context.counters)
            yield Edit(module, forward_slot(module), compute, part.where)

    def _rescaled(self, model: nn.Module, calibration: Any, replaced: set[str]) -> Iterator[Edit]:
        """What stays in 16 bits, but must follow the scales of the calibration."""
        for where in sorted(set(calibration.rescaled_names) - replaced):
            owner, _, name = where.rpartition(".")
            module = model.get_submodule(owner)
            parameter, drops = module._parameters.get(name), self.originals == "drop"
            if type(parameter) is not nn.Parameter:
                raise PlanError(
                    f"{where} stays in 16 bits and must follow the scales of the calibration, but {owner} is a "
                    f"{type(module).__module__}.{type(module).__name__}, the rest of which would not. Merge or unload "
                    'an adapter first, or write method="rtn".'
                )
            kept = Kept(parameter.device, drops)
            yield Edit(module, name, partial(rescaled, calibration, where, parameter, drops), where, kept)

    def stretch(self, name: str) -> torch.Tensor | None:
        """[D]: what the inputs of the parameter `name` are divided by once the calibration is folded in, or None."""
        if (
            self.calibration is None
            or isinstance(self.calibration, Samples)
            or name not in self.calibration.rescaled_names
        ):
            return None
        columns, _ = self.calibration.shifts(name)
        return None if columns is None else torch.exp2(columns.float())

    def _notes(self, done: dict[str, list[str]], model: nn.Module) -> Iterator[Note]:
        for layer, where in done.items():
            yield Note(f"{layer}: {', '.join(where)}")
        if not done:
            return
        why = why_not_triton(next(model.parameters()).device)
        yield Note(f"implementation: {'Triton kernels' if why is None else f'unpacked for torch ({why})'}")
        kept = "kept in host memory" if self.originals == "host" else "dropped: no `restore`"
        yield Note(f"{self.method}, groups of {self.group_size}; originals {kept}")


PASS = MixedPrecision

"""What a model's numbers depend on besides its prompt, so that only a model that would make kept pages uses them.

Weights are compared three ways, since none alone sees everything: which tensors there are and where they lie, the count
that torch keeps of writes to each, and `PROBES` of each one's values. The last sees what the first two do not: writes
through `.data` and fused optimizers, which torch does not count, as long as they reach more than a few values.
"""

from __future__ import annotations

import types
import weakref
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn

from ..watch import is_called
from .lines import packed_name

PROBES = 32
"""Values of each tensor that are compared, evenly spaced from its first."""

PACKED = tuple(packed_name(name) for name in ("weight", "gate_up_proj", "down_proj"))
"""Attributes of modules that hold weights in four bits."""

_PLAIN = frozenset((bool, int, float, str, type(None)))
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial)


class Fingerprint:
    """One model at one moment.

    tensors: parameters, buffers and packed weights, in the order of modules. values: some of their contents. state:
    numbers, names and switches of the modules, active adapters among them; hashable.
    """

    def __init__(self, model: nn.Module, earlier: Fingerprint | None = None) -> None:
        """earlier: of the same model; what did not change since is not worked out again.

        Raises ValueError with the reason if torch does not say what the model is made of.
        """
        if is_called(model):  # sees hooks on all modules of the process too
            raise ValueError("a module is hooked")
        state: list[Any] = []
        tensors: list[torch.Tensor] = []
        before = {} if earlier is None else earlier._read
        self._read: dict[int, tuple[list[Any], list[Any]]] = {}
        """By the number of a module: the objects that were its attributes, which so keep their numbers, and what they
        say."""
        for module in _modules(model):
            known = vars(module)
            if (known["_forward_hooks"] or known["_forward_pre_hooks"] or "_hf_hook" in known) and is_called(module):
                raise ValueError("a module is hooked")
            for table in (known["_parameters"], known["_buffers"]):
                if table:
                    tensors += table.values()
            for name in PACKED:
                if (packed := known.get(name)) is not None:
                    tensors += packed.tensors()
            kind = type(module)
            # functions are held, not numbered: another one may get the number of one that is gone
            state += (kind, kind.forward)
            if (config := known.get("config")) is not None:
                state.append(getattr(config, "rope_interleave", None))  # read anew in every call
            home = kind.__module__
            said = before.get(id(module))
            if said is None or len(said[0]) != len(known) or not all(map(is_, said[0], known.values())):
                said = list(known.values()), _own_state(known, home)
            if module is not model:  # which holds who keeps this
                self._read[id(module)] = said
            state += said[1]
            if not home.startswith(("torch.", "transformers.")):
                state.append(_containers(known))  # of an adapter: scales, which weights are active or merged
        tensors = [tensor for tensor in tensors if tensor is not None]
        try:
            self.marks = _marks(tensors)
            self.values = _probe(tensors)
        except (RuntimeError, NotImplementedError) as error:  # inference tensors count no writes, others have no memory
            raise ValueError("its weights are of a kind whose changes torch does not count") from error
        self.state = tuple(state)
        self._tensors = [weakref.ref(tensor) for tensor in tensors]

    def is_unwritten(self) -> bool:
        """Whether torch has counted no write to any of the tensors since. Sees less than a new `Fingerprint`."""
        tensors = [tensor for reference in self._tensors if (tensor := reference()) is not None]
        return len(tensors) == len(self._tensors) and self.marks == _marks(tensors)

    def has_tensors_of(self, other: Fingerprint) -> bool:
        """Whether every weight is the same object with the same contents as then."""
        return (
            self.marks == other.marks
            and self.values == other.values
            and all(mine() is then() is not None for mine, then in zip(self._tensors, other._tensors, strict=True))
        )


def _modules(model: nn.Module) -> Iterator[Any]:
    """Every module, in a fixed order; `nn.Module.modules` takes three times as long."""
    waiting: list[Any] = [model]
    while waiting:
        module = waiting.pop()
        yield module
        if children := module._modules:
            waiting += [child for child in children.values() if child is not None]


def _own_state(known: dict[str, Any], home: str) -> list[Any]:
    """A module's functions, switches, numbers and names: the same as long as they are the same objects."""
    state = [known["training"], *(value for value in known.values() if isinstance(value, _FUNCTIONS))]
    if not home.startswith("torch."):
        state += [value for value in known.values() if type(value) in _PLAIN]
    return state


def _containers(known: dict[str, Any]) -> str:
    """The lists and dicts of plain values among a module's attributes."""
    return repr([(name, value) for name, value in known.items() if type(value) in (list, tuple, dict, set)])


def _marks(tensors: list[torch.Tensor]) -> list[int]:
    """Where each tensor lies, and how often torch has seen it written."""
    return [tensor.data_ptr() for tensor in tensors] + [tensor._version for tensor in tensors]


@torch.inference_mode()
def _probe(tensors: list[torch.Tensor]) -> list[bytes]:
    """`PROBES` values of each tensor, in one copy to the host per dtype and device."""
    groups: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if (size := tensor.numel()) == 0:
            continue
        if not tensor.is_contiguous():  # what lies between its values in memory may be compared too
            size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        count = min(size, PROBES)
        groups[tensor.dtype, tensor.device].append(tensor.as_strided((count,), (size // count,)))
    return [torch.cat(samples).view(torch.uint8).cpu().numpy().tobytes() for samples in groups.values()]

"""One file per model family, named after the Hugging Face `config.model_type`. There is no registry to edit."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from torch import nn

from ..errors import UnsupportedModelError
from .base import Family

NATIVE = (
    "Load it with `AutoModelForCausalLM.from_pretrained(path)` and without `trust_remote_code=True`, "
    "so that transformers uses its own class."
)


def known() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")


def unwrap(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper or a `torch.compile` wrapper, or `model` itself."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def check_is_module(model: Any) -> None:
    """Raise UnsupportedModelError unless `model` is a torch module."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"expected a loaded transformers model, got {type(model).__name__!r}. "
            "Load one first: `AutoModelForCausalLM.from_pretrained(path)`."
        )


def find(model: nn.Module) -> Family:
    """The family of an unwrapped model. Raises UnsupportedModelError with what to do instead."""
    check_is_module(model)
    name, module = type(model).__name__, type(model).__module__
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if isinstance(getattr(model, "module", None), nn.Module) and model_type is None:
        raise UnsupportedModelError(
            f"{name} wraps another model. Call `optimize(model.module)`, best before wrapping it."
        )
    if module.startswith("transformers_modules"):
        raise UnsupportedModelError(f"{name} was loaded from remote code ({module}). {NATIVE}")
    if model_type is None:
        raise UnsupportedModelError(
            f"{name} is not a transformers model (model_type=None); this version knows {', '.join(known())}."
        )
    if model_type not in known():
        raise UnsupportedModelError(
            f"no family file for model_type={model_type!r} ({name}); this version knows {', '.join(known())}."
        )
    family: Family = importlib.import_module(f"{__name__}.{model_type}").FAMILY
    decoder = family.decoder(model)
    if not any(c.__module__ == family.modeling_module for c in type(decoder).__mro__):
        raise UnsupportedModelError(
            f"{name} says model_type={model_type!r}, but {type(decoder).__module__}.{type(decoder).__name__} "
            f"is not the class of {family.modeling_module}. {NATIVE}"
        )
    return family

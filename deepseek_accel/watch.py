"""Who watches a module, so that its work must not be done without calling it, and whether it is what it was."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from .journal import forward_slot

# Where the classes come from whose forward we know: transformers, torch, and the models of this package.
NATIVE = ("transformers.", "torch.nn.", f"{__package__}.models.")


def needs_gradients(module: nn.Module, *inputs: torch.Tensor) -> bool:
    """Whether autograd will want this call's gradients, for which our kernels have no backward."""
    return torch.is_grad_enabled() and (
        any(x.requires_grad for x in inputs) or any(p.requires_grad for p in module.parameters())
    )


def count(counters: Counter[str], what: str) -> None:
    """Count one call. Not while torch.compile traces: it would compile anew for every value of the counter."""
    if not torch.compiler.is_compiling():
        counters[what] += 1


def why_foreign(module: Any) -> str | None:
    """Why this module's forward is not the one of transformers or of our models, so that it must run, or None."""
    if not type(module).__module__.startswith(NATIVE):
        return f"its class {type(module).__module__}.{type(module).__name__} is not of transformers"
    if not type(module).forward.__module__.startswith(NATIVE):
        return f"the forward of its class was replaced by {type(module).forward.__module__}"
    forward = vars(module).get(forward_slot(module))
    if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
        return "its forward was replaced"
    return None


def has_listeners(module: nn.Module) -> bool:
    """Whether someone hooked this module. transformers leaves its own recording hooks in place once they were used."""
    hooks = module._forward_hooks
    if not hooks and not _global_forward_hooks:
        return False
    return bool(_global_forward_hooks) or any(
        getattr(hook, "__module__", "") != "transformers.utils.output_capturing" for hook in hooks.values()
    )


def is_silu(activation: Any) -> bool:
    """Whether an activation module is SiLU and nothing else: not replaced, hooked or wrapped."""
    return (
        type(activation).__name__ in ("SiLU", "SiLUActivation")
        and why_foreign(activation) is None
        and not is_called(activation)
    )


def is_called(module: nn.Module) -> bool:
    """Whether torch's or accelerate's hooks watch this module, so that its work must not be done without calling it."""
    watched = module._forward_pre_hooks or _global_forward_pre_hooks or not _only_places(vars(module).get("_hf_hook"))
    return bool(watched) or has_listeners(module)


def _only_places(hook: Any) -> bool:
    """Whether accelerate's hook does nothing but move inputs to where the module's weights stay, as a `device_map`
    over several GPUs hooks every module. Who reads the weights instead checks where they are."""
    if hook is None:
        return True
    kind = type(hook)
    return (kind.__module__, kind.__name__) == ("accelerate.hooks", "AlignDevicesHook") and not (
        hook.offload or hook.io_same_device
    )


def is_plain(linear: Any, like: torch.Tensor) -> bool:
    """Whether `linear` is nothing but its weight: not wrapped, quantized, hooked, offloaded or of another dtype."""
    if type(linear) is not nn.Linear or nn.Linear.forward.__module__ != "torch.nn.modules.linear" or is_called(linear):
        return False
    slot = forward_slot(linear)
    own = vars(linear).get(slot)
    if own is not None and getattr(own, "__func__", None) is not nn.Linear.forward:
        return False  # accelerate leaves the class's own forward on the instance when it removes a hook
    if slot != "forward" and getattr(getattr(linear.forward, "func", None), "__module__", None) != "accelerate.hooks":
        return False  # somebody's function above accelerate's
    weight: Any = linear._parameters.get("weight")
    return (
        type(weight) in (nn.Parameter, torch.Tensor)  # not a quantized or sharded tensor in disguise
        and weight.is_contiguous()
        and weight.dtype == like.dtype
        and weight.device == like.device
    )


def stands_in(forward: Any) -> bool:
    """Whether this is one of the functions that passes write in place of a module's forward."""
    return isinstance(forward, partial) and forward.func.__module__.startswith(f"{__package__}.")


def why_replaced(module: Any) -> str | None:
    """`why_foreign`, for a module whose forward may also be one of ours."""
    return None if stands_in(vars(module).get(forward_slot(module))) else why_foreign(module)

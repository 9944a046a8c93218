"""Which calls of `generate` are left to transformers, from their arguments alone.

What transformers makes of a call's generation config takes it, by release, up to milliseconds, and `generate` itself
asks again. So the answer to the last call is remembered for calls that differ in nothing it depends on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Arguments of `generate` itself, which its config does not take.
NOT_OF_THE_CONFIG = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "custom_generate",
    "trust_remote_code",
    "tokenizer",
    "assistant_tokenizer",
)
_PLAIN = frozenset((bool, int, float, str, type(None)))
DECIDES_NOTHING = frozenset(
    (
        *("max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "temperature", "top_p", "repetition_penalty"),
        "stop_strings",  # looked at apart
    )
)
"""Options that often differ from call to call and mean the same to whoever runs it."""


@dataclass
class Decision:
    """What was decided last."""

    known: tuple[tuple[dict[str, Any], ...] | None, str | None] = (None, None)
    """What it depended on, if that can be said, and why it is not ours. Replaced as a whole: threads may share it."""


def why_stock_loop(model: Any, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why this call of `generate` is left to transformers, or None. decision: the model's, read and written."""
    from transformers import GenerationMixin
    from transformers.generation import utils

    if kwargs.get("custom_generate") is not None:
        return "custom_generate"
    if kwargs.get("assistant_model") is not None or kwargs.get("cache_implementation") == "paged":
        return "an assistant or batched generation"
    if kwargs.get("synced_gpus") or len(args) > 2:
        return "synced_gpus or positional arguments"
    if utils.is_deepspeed_zero3_enabled() or utils.is_fsdp_managed_module(model):
        return "weights sharded over processes"
    if model.device.type == "meta":
        return "offloaded weights"
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(model.device.type):
        return "torch.compile or autocast"
    for name in ("_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        if getattr(type(model), name) is not getattr(GenerationMixin, name) or name in vars(model):
            return f"{name} was replaced"
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    rest = {name: value for name, value in kwargs.items() if name not in NOT_OF_THE_CONFIG}
    grounds = _grounds(model, given, rest)
    known, reason = decision.known
    if grounds is None or known is None or not all(map(_are_same, known, grounds)):
        reason = _why_not_ours(model._prepare_generation_config(given, **rest)[0])
        decision.known = grounds, reason
    if reason is None and kwargs.get("tokenizer") is None and stop_strings(model, given, rest) is not None:
        return "stop strings without a tokenizer"
    return reason


def _why_not_ours(config: Any) -> str | None:
    """Why a call with this config, as transformers has prepared it, is not ours."""
    from transformers.generation.utils import GenerationMode

    if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"{config.get_generation_mode().value.replace('_', ' ')}"
    if config.output_attentions or config.output_hidden_states:
        return "attentions or hidden states wanted"
    if config.token_healing or config.is_assistant:
        return "token healing or assisting another model"
    return None


def stop_strings(model: Any, given: Any, kwargs: dict[str, Any]) -> Any:
    """The strings that end a call, from its arguments, the config given with it or the model's."""
    known = [config.stop_strings for config in (given, model.generation_config) if config is not None]
    return kwargs.get("stop_strings", next((found for found in known if found is not None), None))


def _grounds(model: Any, given: Any, rest: dict[str, Any]) -> tuple[dict[str, Any], ...] | None:
    """What `_why_not_ours` depends on, copied as deep as the configs' own attributes; None if that cannot be said.

    An attribute that is changed in place (a list, say) decides nothing by what is in it, only by being there.
    """
    from transformers import GenerationConfig, GenerationMixin

    ours, prepare = model.generation_config, "_prepare_generation_config"
    replaced = getattr(type(model), prepare) is not getattr(GenerationMixin, prepare) or prepare in vars(model)
    if replaced or type(ours) is not GenerationConfig or (given is not None and type(given) is not GenerationConfig):
        return None  # what such a one depends on nobody knows
    if rest.keys() & {"defaults_only", "allow_custom_entries"}:
        return None  # taken by whoever applies the options
    known = vars(ours).keys() | vars(GenerationConfig()).keys() | (vars(given).keys() if given is not None else set())
    named = {name: value for name, value in rest.items() if name in known and name not in DECIDES_NOTHING}
    if not all(type(value) in _PLAIN for value in named.values()):
        return None
    configs = (vars(ours), vars(model.config), {} if given is None else vars(given))
    asked = {"prepare": getattr(GenerationMixin, prepare), "mode": GenerationConfig.get_generation_mode}
    return (*map(dict, configs), named, asked | {"given": given is not None})


def _are_same(known: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether two dicts have the same names and objects, or plain values that are equal."""
    if known.keys() != now.keys():
        return False
    return all(
        mine is other or (type(mine) in _PLAIN and type(other) is type(mine) and mine == other)
        for mine, other in zip(known.values(), map(now.__getitem__, known), strict=True)
    )

"""For authors of passes and families: tiny random models, a picture of a model's state, and the accuracy rule.

Every weight is drawn with std 0.1: with the 0.02 transformers uses, a rotary position off by one moves logits by less
than bf16 noise. All dimensions differ, so that a swap of two shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_EXPERTS: dict[str, Any] = dict(
    moe_intermediate_size=32,
    n_routed_experts=16,
    n_shared_experts=1,
    num_experts_per_tok=4,
    first_k_dense_replace=1,
)
_MOE: dict[str, Any] = _EXPERTS | dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=24,
    head_dim=8,
    max_position_embeddings=2560,
)
_DENSE: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
_TOKENS: dict[str, Any] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)


def _yarn(mscale: float) -> dict[str, Any]:
    return dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=40.0,
        original_max_position_embeddings=64,
        beta_fast=32,
        beta_slow=1,
        mscale=mscale,
        mscale_all_dim=mscale,
    )


FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek": _DENSE | _EXPERTS | dict(num_key_value_heads=4, n_shared_experts=2, moe_intermediate_size=48),
    "deepseek_v2": _MOE | dict(q_lora_rank=None, topk_method="group_limited_greedy", rope_parameters=_yarn(0.707)),
    "deepseek_v3": _MOE | dict(q_lora_rank=48, norm_topk_prob=True, rope_parameters=_yarn(1.0)),
    "deepseek_v32": _MOE
    | dict(q_lora_rank=48, index_n_heads=2, index_head_dim=16, index_topk=6, rope_parameters=_yarn(1.0)),
    "llama": _DENSE,
    "qwen2": _DENSE,
}
"""model_type -> the arguments of its tiny config."""


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """The config of a tiny model of the family, with `overrides` on top."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**FAMILIES[model_type], **_TOKENS, **overrides})


def tiny_model(model_type: str, *, seed: int = 0, attn_implementation: str | None = None, **overrides: Any) -> Any:
    """A tiny random causal language model of the family, fp32, in eval mode. Router biases are not zero."""
    from transformers import AutoModelForCausalLM

    kwargs = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides), **kwargs)
    return randomize(model, seed).eval()


def randomize(model: Any, seed: int = 0, std: float = 0.1) -> Any:
    """Draw every weight with `std`, norms around one, router biases with 0.05."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * std

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(parameter, std) + (1.0 if "norm" in name else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(draw(buffer, 0.05))
    return model


def picture(model: nn.Module) -> dict[str, Any]:
    """Everything `optimize` could change: types, attribute names and identities, hooks, configs. Compare with `==`."""
    config, generation = getattr(model, "config", None), getattr(model, "generation_config", None)
    out: dict[str, Any] = {
        "config": config and config.to_dict(),
        "private": config and {k: v for k, v in vars(config).items() if k.startswith("_")},
        "generation": generation and generation.to_dict(),
    }
    for name, module in model.named_modules():
        state = vars(module)
        out[name] = (
            type(module),
            sorted(state),
            [{k: id(v) for k, v in state[table].items()} for table in ("_parameters", "_buffers", "_modules")],
            {hooks: len(state[hooks]) for hooks in state if hooks.endswith("_hooks")},
            {k: id(v) for k, v in state.items() if not k.startswith("_") and not isinstance(v, (bool, int, float))},
        )
    return out


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max|actual - expected| / max|expected|, in float64."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def assert_accurate(
    ours: torch.Tensor,
    stock: torch.Tensor,
    exact: torch.Tensor,
    *,
    factor: float = 2.0,
    floor: float = 1e-6,
    describe: Callable[[], str] = lambda: "",
) -> None:
    """Our error against a float64 result may be at most `factor` times stock torch's error in the same dtype.

    ours, stock: the same quantity, computed in the dtype under test. exact: computed in float64. floor: relative error
    that is always allowed, for cases where stock happens to be exact.
    """
    error, allowed = relative_error(ours, exact), factor * relative_error(stock, exact) + floor
    assert error <= allowed, f"relative error {error:.3g} exceeds {allowed:.3g} {describe()}"

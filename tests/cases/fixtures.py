"""What the case tests share: prompts, forced and greedy runs, PEFT adapters, the tolerance."""

import warnings
from typing import Any

import torch

from deepseek_accel import report
from deepseek_accel.cache import paged_cache
from deepseek_accel.families import find, unwrap
from deepseek_accel.passes.kv_cache import cache_argument
from deepseek_accel.testing import relative_error

CACHE = cache_argument()
"""What the installed transformers calls the cache argument."""
MLA = ("deepseek_v2", "deepseek_v3")
FAST = ("deepseek", "deepseek_v2", "deepseek_v3", "llama", "qwen2")
TOLERANCE = 1e-4
"""Relative error allowed in fp32; the noise measured is below 3e-6."""

torch.set_num_threads(1)


def tokens(length: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    """[rows, length] random token ids, none of them special."""
    return torch.randint(2, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed_once(model: Any, ids: torch.Tensor, prefill: int, cache: Any = None) -> torch.Tensor:
    """Logits [B, T, V] of `ids`: the first `prefill` tokens in one call, then one by one on the same cache."""
    logits = []
    for chunk in ids.split([prefill, *[1] * (ids.shape[1] - prefill)], 1):
        out = model(chunk, **{CACHE: cache}, use_cache=True)
        cache = out[CACHE]
        logits.append(out.logits)
    return torch.cat(logits, 1)


def feed(model: Any, ids: torch.Tensor, prefill: int, cache: Any = None) -> torch.Tensor:
    """`feed_once`; without a cache, on the model's own one, and an optimized model must say the same on a paged one."""
    logits = feed_once(model, ids, prefill, cache)
    inner = unwrap(model)
    if cache is None and report(model).optimized and inner.dtype == torch.float32 and not find(inner).extra_cache:
        error = relative_error(feed_once(model, ids, prefill, paged_cache(model)), logits)
        assert error <= TOLERANCE, f"on a paged cache: relative error {error:.3g}"
    return logits


@torch.no_grad()
def whole(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V] of one call without a cache."""
    return model(ids, use_cache=False).logits


def greedy(model: Any, ids: torch.Tensor, count: int = 6, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` tokens generate picks, and the logits [B, count, V] it picked them by."""
    out = model.generate(
        ids, max_new_tokens=count, do_sample=False, output_logits=True, return_dict_in_generate=True, **kwargs
    )
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    assert (error := relative_error(actual, expected)) <= tolerance, f"relative error {error:.3g}"


def assert_generates_as(model: Any, stock: Any, ids: torch.Tensor, count: int = 6) -> None:
    """Same tokens and logits from generate, prefill and every decode step."""
    (picked, logits), (expected_picked, expected) = greedy(model, ids, count), greedy(stock, ids, count)
    assert_same(logits, expected)
    assert torch.equal(picked, expected_picked)


def count(model: Any, beginning: str) -> int:
    """How often the paths whose name begins so have run since `optimize`."""
    return sum(n for key, n in report(model).counters.items() if key.startswith(beginning))


def lora(model: Any, targets: list[str], seed: int = 0, name: str = "default", **options: Any) -> Any:
    """`model` in PEFT with an adapter that moves logits visibly; the same seed gives the same weights."""
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads attributes transformers 5.24 renamed
        if isinstance(model, PeftModel):
            model.add_adapter(name, config)
        else:
            model = get_peft_model(model, config, adapter_name=name)
    draw_adapter(model, seed, name)
    return model.eval()


@torch.no_grad()
def draw_adapter(model: Any, seed: int, name: str = "default") -> None:
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        if "lora_" in key and f".{name}." in f"{key}.":
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

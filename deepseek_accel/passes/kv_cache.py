"""Give `model.generate()` a paged cache when the caller passes none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from ..cache.entries import check_dtype, entry_bytes
from ..cache.eviction import Policy, spelled, to_policy
from ..cache.pages import check_page_options
from ..errors import PlanError
from ..families.base import Family
from ..generation.lines import LENGTH_DEPENDENT_ROPE
from ..generation.reuse import Prefixes
from ..plan import Context, Edit, Note, Skip
from ..versions import cache_argument
from .base import Pass

# How many of the tokens still to come a call reserves memory for at once. Reserving all of `max_length` would take
# memory that most calls never use; the pool grows by half when this runs out.
RESERVED_NEW_TOKENS = 256


def prepare_cache(
    model: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
    *,
    page_size: int,
    max_pages: int | None,
    counters: Counter[str],
    dtype: str | None = None,
    eviction: Policy | None = None,
) -> None:
    """In place of `_prepare_cache_for_generation`: a paged cache, unless the caller chose a cache, a kind, or none."""
    from ..cache import paged_cache

    name = cache_argument()
    if model_kwargs.get(name) is not None:
        reason = "the caller passed a cache"
    elif generation_config.use_cache is False:
        reason = "use_cache=False"
    elif generation_config.cache_implementation not in (None, "dynamic"):
        reason = f"cache_implementation={generation_config.cache_implementation!r}"
    else:
        counters["kv_cache: paged generate calls"] += 1
        prompt = model_kwargs.get("attention_mask")
        prompt_length = prompt.shape[-1] if isinstance(prompt, torch.Tensor) else 1
        reserve = min(max_cache_length, prompt_length + RESERVED_NEW_TOKENS)
        reserve = max(0, reserve)
        options: dict[str, Any] = {"dtype": dtype, "eviction": eviction}
        cache = paged_cache(model, page_size, max_pages, reserve_tokens=reserve, counters=counters, **options)
        cache.may_reuse = True
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[name] = cache
        return
    counters[f"kv_cache: stock generate calls ({reason})"] += 1
    type(model)._prepare_cache_for_generation(
        model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    )


def why_no_prefixes(model: Any, family: Family, context: Context) -> str | None:
    """Why `generate` of this model cannot keep prefixes, or None."""
    if not all(context.has(name) for name in ("attention", "layers")):
        return "it needs the attention and layers passes, whose loop knows the prompt"
    if any(family.sliding_window(attention) is not None for attention in family.attentions(model)):
        return "layers with a sliding window give back the pages that it would keep"
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        return f"{parameters['rope_type']} rotary embeddings depend on how long the prompt is"
    if len({p.device for p in model.parameters()}) > 1:
        return "its weights lie on several devices"
    return None


def why_no_eviction(model: Any, family: Family, context: Context) -> str | None:
    """Why the cache of this model cannot forget tokens, or None."""
    if not context.has("attention"):
        return "it needs the attention pass, which knows which tokens are held"
    if any(family.sliding_window(attention) is not None for attention in family.attentions(model)):
        return "layers with a sliding window forget by themselves"
    return None


@dataclass(frozen=True)
class KVCache(Pass):
    """Keys and values, or latents, in fixed-size pages.

    page_size: tokens per page, a power of two >= 16. max_pages: most pages in one block table of a `generate` call, or
    None to grow; more raises CacheFullError before anything is written. Layers on another device or with another
    sliding window have a block table of their own; a page takes memory in every layer of its table.
    dtype: None to keep what the model computes, bit for bit; "fp8_e4m3" or "fp8_e5m2" to round it to 8 bits with a
    scale per token (and head): about half the bytes, and lossy. The rotary key of latent attention is not rounded.
    eviction: None to hold all tokens, or a policy of `deepseek_accel.cache` that forgets some: `Window(...)`,
    `TopAttention(...)`, `Entropy(...)`; in a mapping or JSON {"top_attention": {"budget": 1024}}. Lossy.
    reuse_prefix: keep full pages after a call, for later calls whose prompts begin with the same tokens. All calls of
    the model then share `max_pages`. prefix_bytes: how much may be kept, or None for a quarter of the GPU memory that
    is free at the first call (1 GiB on a CPU).
    """

    effect: ClassVar[str] = "exact"
    page_size: int = 64
    max_pages: int | None = None
    dtype: str | None = None
    eviction: Any = None
    reuse_prefix: bool = False
    prefix_bytes: int | None = None

    def __post_init__(self) -> None:
        check_page_options(self.page_size, self.max_pages)
        check_dtype(self.dtype)
        object.__setattr__(self, "eviction", to_policy(self.eviction))
        if self.eviction is not None and self.reuse_prefix:
            raise PlanError("a cache that evicts keeps no prefixes for later calls: choose eviction or reuse_prefix")
        if not isinstance(self.reuse_prefix, bool):
            raise PlanError(
                f"reuse_prefix must be True or False, got {self.reuse_prefix!r}; say with prefix_bytes how much to keep"
            )
        size: Any = self.prefix_bytes
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise PlanError(f"prefix_bytes must be a positive number of bytes or None, got {size!r}")
        if size is not None and not self.reuse_prefix:
            raise PlanError("prefix_bytes says how much reuse_prefix keeps; set reuse_prefix=True, or leave it out")
        if self.reuse_prefix:  # a prompt that is computed in two parts rounds differently than in one
            object.__setattr__(self, "effect", "rounding")

    @property
    def lossy(self) -> bool:
        return self.dtype is not None or self.eviction is not None

    def options(self) -> dict[str, Any]:
        return super().options() | {"eviction": spelled(self.eviction)}

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        if family.extra_cache:
            yield Skip(family.model_type, f"its cache also holds {family.extra_cache}")
            return
        if not hasattr(model, "_prepare_cache_for_generation"):
            yield Skip(type(model).__name__, "it does not generate; pass `paged_cache(model)` to its forward instead")
            return
        eviction = self.eviction
        if eviction is not None and (reason := why_no_eviction(model, family, context)) is not None:
            yield Skip("eviction", reason)
            eviction = None
        build = partial(
            partial,
            prepare_cache,
            model,
            page_size=self.page_size,
            max_pages=self.max_pages,
            counters=context.counters,
            dtype=self.dtype,
            eviction=eviction,
        )
        yield Edit(model, "_prepare_cache_for_generation", build, "generate")
        if self.dtype is not None:
            before = KVCache().describe(model, family)["bytes_per_token_and_layer"]
            after = self.describe(model, family)["bytes_per_token_and_layer"]
            yield Note(
                f"{self.dtype}: {after} bytes per token and layer instead of {before}; keys and values are rounded"
            )
        if eviction is not None:
            yield Note(f"at most {eviction.budget} tokens per sequence are held, the mean over layers: {eviction!r}")
        if self.reuse_prefix:
            yield from self._reuse(model, family, context)
        if not context.has("attention"):
            yield Note("without the attention pass, pages are gathered for every step")

    def _reuse(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        if (reason := why_no_prefixes(model, family, context)) is not None:
            yield Skip("reuse_prefix", reason)
            return
        build = partial(Prefixes, self.page_size, self.max_pages, self.prefix_bytes, context.counters)
        yield Edit(model, "_accel_prefixes", build, "generate")
        yield Note("full pages are kept for later calls")

    def describe(self, model: Any, family: Family) -> dict[str, Any]:
        attention = family.attentions(model)[0]
        if latent := family.attention == "mla":
            sizes = (1, attention.kv_lora_rank, attention.qk_rope_head_dim)
        else:
            config = model.config.get_text_config(decoder=True)
            sizes = (config.num_key_value_heads, attention.head_dim, attention.head_dim)
        size = entry_bytes(check_dtype(self.dtype), latent, sizes, model.dtype)
        facts: dict[str, Any] = {"bytes_per_token_and_layer": size, "page_size": self.page_size}
        facts |= {} if self.dtype is None else {"dtype": self.dtype}
        edit = vars(model).get("_prepare_cache_for_generation")
        applied = isinstance(edit, partial) and edit.func is prepare_cache
        eviction = edit.keywords["eviction"] if applied else self.eviction  # it may have been skipped
        facts |= {} if eviction is None else {"eviction": repr(eviction)}
        prefixes = vars(model).get("_accel_prefixes")
        return facts if prefixes is None else facts | prefixes.facts()


PASS = KVCache

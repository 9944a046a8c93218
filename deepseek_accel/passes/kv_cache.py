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
from ..cache.pages import check_page_options
from ..families.base import Family
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
        cache = paged_cache(model, page_size, max_pages, dtype=dtype, reserve_tokens=reserve, counters=counters)
        if generation_config.is_assistant:
            cache.activate_past_recording()
        model_kwargs[name] = cache
        return
    counters[f"kv_cache: stock generate calls ({reason})"] += 1
    type(model)._prepare_cache_for_generation(
        model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    )


@dataclass(frozen=True)
class KVCache(Pass):
    """Keys and values, or latents, in fixed-size pages.

    page_size: tokens per page, a power of two >= 16. max_pages: most pages in one block table of a `generate` call, or
    None to grow; more raises CacheFullError before anything is written. Layers on another device or with another
    sliding window have a block table of their own; a page takes memory in every layer of its table.
    dtype: None to keep what the model computes, bit for bit; "fp8_e4m3" or "fp8_e5m2" to round it to 8 bits with a
    scale per token (and head): about half the bytes, and lossy. The rotary key of latent attention is not rounded.
    """

    effect: ClassVar[str] = "exact"
    page_size: int = 64
    max_pages: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_page_options(self.page_size, self.max_pages)
        check_dtype(self.dtype)

    @property
    def lossy(self) -> bool:
        return self.dtype is not None

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        if family.extra_cache:
            yield Skip(family.model_type, f"its cache also holds {family.extra_cache}")
            return
        if not hasattr(model, "_prepare_cache_for_generation"):
            yield Skip(type(model).__name__, "it does not generate; pass `paged_cache(model)` to its forward instead")
            return
        build = partial(
            partial,
            prepare_cache,
            model,
            page_size=self.page_size,
            max_pages=self.max_pages,
            counters=context.counters,
            dtype=self.dtype,
        )
        yield Edit(model, "_prepare_cache_for_generation", build, "generate")
        if self.dtype is not None:
            before = KVCache().describe(model, family)["bytes_per_token_and_layer"]
            after = self.describe(model, family)["bytes_per_token_and_layer"]
            yield Note(
                f"{self.dtype}: {after} bytes per token and layer instead of {before}; keys and values are rounded"
            )
        if not context.has("attention"):
            yield Note("without the attention pass, pages are gathered for every step")

    def describe(self, model: Any, family: Family) -> dict[str, Any]:
        attention = family.attentions(model)[0]
        if latent := family.attention == "mla":
            sizes = (1, attention.kv_lora_rank, attention.qk_rope_head_dim)
        else:
            config = model.config.get_text_config(decoder=True)
            sizes = (config.num_key_value_heads, attention.head_dim, attention.head_dim)
        size = entry_bytes(check_dtype(self.dtype), latent, sizes, model.dtype)
        facts = {"bytes_per_token_and_layer": size, "page_size": self.page_size}
        return facts | ({} if self.dtype is None else {"dtype": self.dtype})


PASS = KVCache

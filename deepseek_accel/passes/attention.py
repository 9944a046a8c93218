"""Attend over the cached latents directly, and over pages without gathering them.

Hugging Face's own attention forward stays in place. Three instance attributes change: `expand_kv` hands latents
through, a private copy of the config selects the attention function below, and `_accel_attention` holds what that
function needs to know. Whatever the fast path does not cover runs the attention the model was loaded with.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..families.base import Family
from ..generation.lines import absorbed_weights
from ..generation.reach import Reach
from ..generation.reach import attend_grouped as attend_cached_keys
from ..generation.reach import attend_latents as attend_cached_latents
from ..ops.choice import why_not_triton
from ..ops.mla_attention import absorb_query, dense_latent_attention, project_values
from ..plan import Context, Edit, Note, Skip
from ..watch import count, has_listeners, is_plain, needs_gradients, why_foreign
from .base import Pass

INTERFACE = "deepseek_accel"


class Seam:
    """What one attention module needs besides its weights: the config it came with, and where to count."""

    def __init__(self, stock_config: Any, kind: str, counters: Counter[str]) -> None:
        self.stock_config, self.kind, self.counters = stock_config, kind, counters
        register_interface()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register_interface()  # a pickled model may be loaded in a process that has optimized nothing yet

    @property
    def stock_implementation(self) -> str:
        """What the model would use now; follows `model.set_attn_implementation(...)`."""
        return self.stock_config._attn_implementation or "eager"

    def count(self, what: str) -> None:
        count(self.counters, f"attention: {what}")


def register_interface() -> None:
    """Make our name known to transformers. Nothing uses it but the private configs of optimized modules."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if INTERFACE not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(INTERFACE, attention_interface)


def private_config(config: Any) -> Any:
    """A copy whose attention name is ours. The model's own config, and so its masks, stay as they are."""
    config = copy.copy(config)
    config._attn_implementation_internal = INTERFACE
    return config


def keep_latent(module: nn.Module, latent: Any, k_rope: Any) -> tuple[Any, Any]:
    """In place of `expand_kv`: the attention function below expands, or does not need to."""
    return latent, k_rope


def attention_interface(
    module: Any,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function of an optimized module.

    query [B, H, S, D]; key and value: `Pages` from our cache, else what the stock forward passes (latents
    [B, 1, T, C] and rotary keys [B, 1, T, R] for latent attention). Returns ([B, S, H, V], weights or None).
    """
    seam: Seam = module._accel_attention
    scale = module.scaling if scaling is None else scaling
    attend = attend_latents if seam.kind == "mla" else attend_grouped
    if not hasattr(key, "pool"):
        return attend(module, seam, query, key, value, attention_mask, scale, dropout, kwargs)
    result = attend(module, seam, query, key, value, key.narrow(attention_mask), scale, dropout, kwargs)
    key.settle(query.shape[2])
    return result


def attend_latents(
    module: Any,
    seam: Seam,
    query: torch.Tensor,
    key: Any,
    value: Any,
    mask: Any,
    scale: float,
    dropout: float,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Multi-head latent attention: absorbed where that reads and computes less, else expanded as Hugging Face does."""
    paged = hasattr(key, "pool")
    num_keys = key.length if paged else key.shape[-2]
    stock_reason = why_stock(module, seam, query, num_keys, mask, dropout, kwargs)
    reason = stock_reason or why_expand(module, query, query.shape[2], num_keys)
    indices = kwargs.get("indices")
    if reason is not None:
        seam.count(f"expanded ({reason})")
        latent, k_rope = key.gather() if paged else (key, value)
        if paged:
            watch_latents(module, query, key, latent, k_rope, mask, scale)
        if indices is not None:
            mask, kwargs = sparse_mask(mask, indices, query, num_keys), kwargs | {"indices": None}
        key, value = type(module).expand_kv(module, latent, k_rope)
        width = value.shape[-1]
        flash = seam.stock_implementation == "sdpa" and (mask is None or query.device.type == "cpu")
        if flash and stock_reason is None:
            # torch's flash kernels want values as wide as keys; zeros on the right change no other column
            value = F.pad(value, (0, max(0, key.shape[-1] - width)))
        attend = stock_attention(module, seam)
        out, weights = attend(module, query, key, value, mask, scaling=scale, dropout=dropout, **kwargs)
        return out[..., :width], weights
    seam.count("absorbed")
    w_uk, w_uv = absorbed_weights(module)
    q_nope, q_rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
    q_latent, q_rope = absorb_query(q_nope, w_uk), q_rope.transpose(1, 2)
    if paged:
        reach = Reach.of_pages(key, query.shape[2], mask)
        return attend_cached_latents(q_latent, q_rope, key, reach, scale, w_uv), None
    causal = mask is None and query.shape[2] > 1
    out = dense_latent_attention(q_latent, q_rope, key, value, scale, mask, causal, indices)
    return project_values(out, w_uv), None


def attend_grouped(
    module: Any,
    seam: Seam,
    query: torch.Tensor,
    key: Any,
    value: Any,
    mask: Any,
    scale: float,
    dropout: float,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Grouped-query attention: straight from the pages on a GPU, else gathered and handed to the stock attention."""
    if hasattr(key, "pool"):
        reason = why_stock(module, seam, query, key.length, mask, dropout, kwargs) or why_gather(query)
        if reason is None:
            seam.count("paged")
            reach = Reach.of_pages(key, query.shape[2], mask)
            out = attend_cached_keys(query.transpose(1, 2), key, reach, scale, key.num_heads, key.value_dim)
            return out, None
        pages, (key, value) = key, key.gather()
        pages.watch(query.transpose(1, 2), key, scale, query.shape[2] > 1, mask)
        seam.count(f"gathered ({reason})")
    else:
        seam.count("stock (not a paged cache)")
    return stock_attention(module, seam)(module, query, key, value, mask, scaling=scale, dropout=dropout, **kwargs)


def watch_latents(
    module: Any, query: torch.Tensor, pages: Any, latent: torch.Tensor, k_rope: torch.Tensor, mask: Any, scale: float
) -> None:
    """Let a cache that evicts see what the last of the queries [B, H, S, N + R] attend to."""
    if pages.watches:
        nope, rope = query[:, :, -pages.MOST_WATCHED :].split(
            [module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1
        )
        absorbed = absorb_query(nope, absorbed_weights(module)[0])
        watched = torch.cat((absorbed, rope.transpose(1, 2)), -1)
        pages.watch(watched, torch.cat((latent, k_rope), -1), scale, query.shape[2] > 1, mask)


def why_stock(
    module: Any, seam: Seam, query: torch.Tensor, num_keys: int, mask: Any, dropout: float, kwargs: dict[str, Any]
) -> str | None:
    """Why this call must run the attention the model was loaded with, or None if ours computes the same."""
    if needs_gradients(module, query):
        return "gradients"
    if dropout:
        return "dropout"
    implementation = seam.stock_implementation
    if implementation == "eager" and (
        kwargs.get("output_attentions") or seam.stock_config.output_attentions or has_listeners(module)
    ):
        return "attention weights wanted"
    if implementation not in ("eager", "sdpa") and (query.shape[2] > 1 or mask is not None):
        return f"mask of {implementation}"
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[1] == 1):
        return "mask differs by head"
    if mask is not None and mask.shape[-1] != num_keys:
        return "mask of another length than the keys"
    if mask is None and query.shape[2] not in (1, num_keys):
        return "mask aligned to the first key"
    if kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None:
        return "biased scores"
    return None


def why_expand(module: Any, like: torch.Tensor, num_queries: int, num_keys: int) -> str | None:
    """Why expanding the latents is right or cheaper than absorbing the projection into query and output, or None."""
    if not is_plain(module.kv_b_proj, like) or module.kv_b_proj.bias is not None:
        return "kv_b_proj is wrapped, quantized, hooked or elsewhere"
    # multiply-adds per head and row: what is expanded or absorbed costs C (N + V) a token, then each score and value
    c, r = module.kv_lora_rank, module.qk_rope_head_dim
    n, v = module.qk_nope_head_dim, module.v_head_dim
    absorbed = num_queries * (c * (n + v) + num_keys * (2 * c + r))
    expanded = num_keys * (c * (n + v) + num_queries * (n + r + v))
    return "prefill" if expanded <= absorbed else None


def why_gather(query: torch.Tensor) -> str | None:
    """Why pages are gathered for this call, or None if the kernel reads them in place."""
    if (reason := why_not_triton(query.device)) is not None:
        return reason
    if query.shape[2] > 16:
        return "prefill"
    if query.dtype == torch.float64:
        return "float64"
    return None


def stock_attention(module: Any, seam: Seam) -> Any:
    """The attention function the stock forward would have chosen."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    forward_module = next(c.__module__ for c in type(module).__mro__ if c.__module__.startswith("transformers.models."))
    eager = sys.modules[forward_module].eager_attention_forward  # type: ignore[attr-defined]
    return ALL_ATTENTION_FUNCTIONS.get_interface(seam.stock_implementation, eager)


def sparse_mask(mask: Any, indices: torch.Tensor, query: torch.Tensor, num_keys: int) -> torch.Tensor:
    """`mask` narrowed to the keys of `indices` [B, S, K], as V3.2's own forward builds it for eager and sdpa."""
    batch, _, queries, _ = query.shape
    picked = torch.zeros(batch, queries, num_keys + 1, dtype=torch.bool, device=query.device)
    picked = picked.scatter(-1, indices.long().where(indices >= 0, num_keys), True)[:, None, :, :num_keys]
    if mask is None:
        visible = torch.ones(queries, num_keys, dtype=torch.bool, device=query.device)
        return picked & (visible.tril() if queries > 1 else visible)
    if mask.dtype == torch.bool:
        return mask & picked
    return mask.masked_fill(~picked, torch.finfo(mask.dtype).min)


@dataclass(frozen=True)
class Attention(Pass):
    """Absorbed latent attention for decoding, grouped-query attention from pages, stock attention for the rest."""

    def plan(self, model: nn.Module, family: Family, context: Context) -> Iterator[Edit | Skip | Note]:
        if (reason := family.why_no_attention()) is not None:
            yield Skip(family.model_type, reason)
            return
        for attention in family.attentions(model):
            where = f"layers.{attention.layer_idx}.self_attn"
            if (reason := why_foreign(attention)) is not None:
                yield Skip(where, reason)
                continue
            config = attention.config
            yield Edit(attention, "_accel_attention", partial(Seam, config, family.attention, context.counters), where)
            yield Edit(attention, "config", partial(private_config, config), where)
            if family.attention == "mla":
                yield Edit(attention, "expand_kv", partial(partial, keep_latent, attention), where)
        yield Note(implementation(family, context, next(model.parameters()).device))


PREFILL = "prefill of single layers: stock"


def implementation(family: Family, context: Context, device: torch.device) -> str:
    """How attention will run, for the plan."""
    why = why_not_triton(device)
    if why is None and (family.extra_cache or not context.has("kv_cache")):
        why = "the kernels read pages, which the kv_cache pass makes"
    if family.attention == "mla":
        return f"decoding: {'Triton kernels' if why is None else f'absorbed, in torch ({why})'}; {PREFILL}"
    return f"decoding: Triton kernels; {PREFILL}" if why is None else f"stock attention on gathered keys ({why})"


PASS = Attention

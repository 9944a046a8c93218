"""A transformers cache whose layers keep their entries in fixed-size pages.

A layer's entry is one vector per token: for latent attention the latent and the rotary key (C + R values), for
grouped-query attention the keys of all heads, then the values of all heads.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from .. import families
from ..errors import CacheFullError, PlanError, UnsupportedModelError
from ..ops.key_mass import KeyScores
from ..versions import crop_takes_length
from .entries import Entries, check_dtype
from .eviction import Policy, to_policy
from .pages import PagePool, PageTable, check_page_options
from .shared import SharedPages, SharedPool


@dataclass(frozen=True)
class Pages:
    """What a layer's `update` hands to our attention in place of gathered keys and values."""

    pool: PagePool
    storage: torch.Tensor
    """[num_pages, page_size, width], as `format` stores them."""
    length: int
    """Keys held per row, counted from the first token still held."""
    format: Entries
    fresh: tuple[torch.Tensor, torch.Tensor] | None
    """The keys and values just written, if nothing was held before them: as they were computed."""

    @property
    def fp8(self) -> str | None:
        return self.format.fp8

    @property
    def num_heads(self) -> int:
        return self.format.num_heads

    @property
    def value_dim(self) -> int:
        return self.format.value_dim

    watches: ClassVar[bool] = False
    """Whether it wants to know what queries attend to, as a cache that evicts does."""

    is_alone: ClassVar[bool] = False
    """Whether other layers' pages hold other tokens."""

    def positions(self, device: torch.device) -> torch.Tensor:
        """[T] or [B, T]: where in its sequence each token held stands, counted from the first one still held."""
        return torch.arange(self.length, device=device)

    def narrow(self, mask: Any) -> Any:
        """The stock mask over the tokens that are held: all that it is over."""
        return mask

    def watch(self, *arguments: Any) -> None:
        """Nothing: all tokens stay."""

    def key_scores(self) -> KeyScores:
        raise NotImplementedError("all tokens stay: nothing is scored")

    def settle(self, count: int) -> None:
        """After attention of a call of `count` tokens. Nothing: all tokens stay."""

    @property
    def address(self) -> None:
        """Pages in hand are read where `storage` is; see `generation.reach.Held`."""
        return None

    def entries(self) -> torch.Tensor:
        """[B, T, width] in sequence order: a view of the pages where one row lies in consecutive pages, else a copy.

        FP8 entries are decoded.
        """
        flat, offset = self.storage.flatten(0, 1), self.pool.offset
        if (run := self.pool.run(offset, offset + self.length)) is not None:
            return self.format.decode(flat[run].unsqueeze(0))
        pages = self.storage[self.pool.block_table().long()]
        return self.format.decode(pages.flatten(1, 2)[:, : self.length])

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, heads, T, key_dim] and values [B, heads, T, value_dim], as a stock cache layer returns them."""
        if self.fresh is not None:
            return self.fresh
        heads, key_dim, value_dim = self.num_heads, self.format.key_dim, self.value_dim
        keys, values = self.entries().split([heads * key_dim, heads * value_dim], -1)
        return (
            keys.unflatten(-1, (heads, key_dim)).transpose(1, 2),
            values.unflatten(-1, (heads, value_dim)).transpose(1, 2),
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"paged keys have no {name!r}: this cache was made for an optimized model and met an attention that does "
            "not read pages. Make a cache for that model with `deepseek_accel.cache.paged_cache(model)`."
        )


class Reader:
    """The attention module a layer serves, held weakly. Copies of a cache serve the same module."""

    def __init__(self, module: Any) -> None:
        self._module = weakref.ref(module)

    def reads_pages(self) -> bool:
        return getattr(self._module(), "_accel_attention", None) is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> Reader:
        return self

    def __reduce__(self) -> tuple[Callable[[], Reader], tuple[()]]:
        return _no_reader, ()  # a pickled cache gathers


def _no_reader() -> Reader:
    reader = object.__new__(Reader)
    reader._module = lambda: None  # type: ignore[assignment]
    return reader


class Place(NamedTuple):
    """What layers must have in common to share a block table."""

    device: torch.device
    window: int | None = None
    alone: int | None = None
    """The number of a layer that shares with no other."""


class Pools:
    """The pools of one cache: one per `Place`."""

    def __init__(
        self,
        page_size: int,
        max_pages: int | None,
        reserve_tokens: int,
        counters: Counter[str],
        fp8: str | None = None,
        is_latent: bool = False,
    ) -> None:
        self.page_size, self.max_pages, self.reserve_tokens = page_size, max_pages, reserve_tokens
        self.counters, self.fp8, self.is_latent = counters, fp8, is_latent
        self.by_place: dict[Place, PagePool] = {}
        self.all: list[PagePool] = []
        # by number, not by layer object: with a cycle, the memory of a cache would wait for Python's collector
        self.lengths: dict[int, int] = {}
        self.shared: SharedPages | None = None
        """Where pages come from that other caches may hold too, if any."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"shared": None}  # a copy shares nothing

    def at(self, place: Place, num_rows: int) -> PagePool:
        if place not in self.by_place:
            shared = self.shared
            if shared is not None and place == Place(shared.device) and shared.serves():
                pool: PagePool = shared.pool(num_rows, self.reserve_tokens)
            else:
                table = PageTable(self.page_size, self.max_pages)
                pool = PagePool(table, num_rows, place.device, place.window, self.reserve_tokens, self.counters)
            self.by_place[place] = pool
            self.all.append(pool)
        return self.by_place[place]

    def extend(self, pool: PagePool, start: int, stop: int, keep: bool) -> None:
        """Extend `pool`, after making sure that every pool can follow."""
        if self.max_pages is not None:
            for other in self.all:
                other.check(start, stop, keep)
        pool.drop_unseen(start, keep)
        pool.extend(start, stop)

    def check_new(self, place: Place, num_rows: int, count: int) -> None:
        """Raise what the first update of a layer would, before anything is made for it."""
        if (pool := self.by_place.get(place)) is not None:
            pool.check_rows(num_rows)
        else:
            table = PageTable(self.page_size, self.max_pages)
            table.start(num_rows)
            table.check(0, count)

    def trim(self, pool: PagePool) -> None:
        """Give back the pages of `pool` that no layer reaches any more."""
        pool.trim(max((self.lengths[layer] for layer in pool.storages), default=0))

    def discard(self, pool: PagePool) -> None:
        self.all.remove(pool)
        self.by_place = {place: other for place, other in self.by_place.items() if other is not pool}


class PagedLayer(CacheLayerMixin):
    """One layer of a `PagedCache`. Layers of a cache share block tables; each has its own pages."""

    is_compileable = False  # True would make `generate` torch.compile the model on a GPU
    is_croppable = True
    supports_early_init = False  # the shapes of latent and rotary key differ, and early initialization knows only one

    def __init__(self, layer: int, pools: Pools, window: int | None, reader: Reader) -> None:
        self.is_initialized = False
        self.is_sliding = window is not None
        self.window, self.record_past = window, False
        self._layer, self._pools, self._reader = layer, pools, reader
        self.length = 0

    @property
    def length(self) -> int:
        """Tokens held per row."""
        return self._pools.lengths[self._layer]

    @length.setter
    def length(self, tokens: int) -> None:
        self._pools.lengths[self._layer] = tokens

    def __repr__(self) -> str:
        return f"PagedLayer(tokens={self.length}, page_size={self._pools.page_size})"

    def _place(self, device: torch.device) -> Place:
        return Place(device, self.window)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.num_heads, self.key_dim = key_states.shape[1], key_states.shape[-1]
        self.value_dim = value_states.shape[-1]
        self.pool = self._pools.at(self._place(self.device), key_states.shape[0])
        sizes = (self.num_heads, self.key_dim, self.value_dim)
        self.format = Entries(*sizes, self.dtype, self._pools.fp8, self._pools.is_latent)
        self.pool.add_layer(self._layer, self.format.width, self.format.storage_dtype)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write new entries and return all of them.

        key_states [B, heads, S, key_dim], value_states [B, heads, S, value_dim]. Returns keys and values as stock
        layers do, or `Pages` twice if the attention module of this layer reads pages.
        Pages hold values, not autograd graphs: gradients reach the tokens of this call only.
        Raises CacheFullError before anything changes, ValueError if the number of rows does not match.
        """
        rows, _, count, _ = key_states.shape
        start = self.length
        if not self.is_initialized:
            return self._first_update(key_states, value_states)
        self._check_shape(key_states, value_states)
        if start and key_states.requires_grad and torch.is_grad_enabled():
            warnings.warn(
                "A paged cache holds values, not autograd graphs: no gradient will reach the tokens of earlier calls. "
                "Pass a DynamicCache to train through several calls.",
                stacklevel=2,
            )
        self._extend(rows, count)
        if count:
            self._write(key_states.detach(), value_states.detach(), start, self.length)
        pages = self._pages((key_states, value_states) if start == 0 else None)
        return (pages, pages) if self._reader.reads_pages() else pages.gather()

    def _first_update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Any:
        """`update` of a layer that holds nothing yet. If it fails, for want of memory say, nothing stays behind."""
        place = self._place(key_states.device)
        self._pools.check_new(place, key_states.shape[0], key_states.shape[2])
        known = list(self._pools.all)
        try:
            self.lazy_initialization(key_states, value_states)
            return self.update(key_states, value_states)
        except BaseException:
            self._close()
            pool = self._pools.by_place.get(place)
            if pool is not None:
                pool.storages.pop(self._layer, None)
                if pool not in known:
                    self._pools.discard(pool)
            raise

    def append(self, rows: int, count: int) -> tuple[Pages, torch.Tensor]:
        """Make room for `count` more tokens per row, which the caller writes itself.

        Returns the pages with the new tokens counted in, and the tokens' slots [rows * count] in the flat storage.
        The layer must hold tokens already. Raises as `update`.
        """
        start = self.length
        self._extend(rows, count)
        return self._pages(), self.pool.slots(start, self.length)

    def _check_shape(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if keys.device != self.device:
            raise ValueError(f"this layer's pages are on {self.device}, the new keys on {keys.device}")
        given = (keys.shape[1], keys.shape[-1], values.shape[-1])
        held = (self.num_heads, self.key_dim, self.value_dim)
        if given != held:
            raise ValueError(
                f"this cache holds entries of (heads, key, value) sizes {held}, the new ones have {given}: "
                "it was filled by another model. Make one for this model with `paged_cache(model)`."
            )

    def _extend(self, rows: int, count: int) -> None:
        self.pool.check_rows(rows)
        self._pools.extend(self.pool, self.length, self.length + count, self.record_past)
        self.length += count

    def _write(self, keys: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> None:
        flat = self.pool.storages[self._layer].flatten(0, 1)
        keys, values = keys.transpose(1, 2).flatten(2), values.transpose(1, 2).flatten(2)
        run = self.pool.run(start, stop)
        if run is None:
            flat.index_copy_(0, self.pool.slots(start, stop), self.format.encode(keys, values).flatten(0, 1))
        elif self.format.fp8 is not None:
            flat[run] = self.format.encode(keys[0], values[0])
        else:
            flat[run, : keys.shape[-1]] = keys[0]
            flat[run, keys.shape[-1] :] = values[0]

    def _pages(self, fresh: tuple[torch.Tensor, torch.Tensor] | None = None) -> Pages:
        length = self.length - self.pool.offset
        storage = self.pool.storages[self._layer]
        return Pages(self.pool, storage, length, self.format, fresh)

    @property
    def keys(self) -> torch.Tensor | None:
        """[B, heads, T, key_dim], or None before the first update."""
        return self._pages().gather()[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        """[B, heads, T, value_dim], or None before the first update."""
        return self._pages().gather()[1] if self.is_initialized else None

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1 if self.window is None else self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        offset = self.pool.offset_at(self.length, self.record_past) if self.is_initialized else 0
        return self.length + query_length - offset, offset

    def activate_past_recording(self) -> None:
        """Keep tokens that fall out of the window until the next `crop`."""
        self.record_past = True

    # One layer alone leaves the table it shares with the others; `PagedCache` does the same for all of them at once.

    def _leave(self) -> None:
        if len(self.pool.storages) > 1:
            self.pool = self.pool.split(self._layer)
            self._pools.all.append(self.pool)

    def crop(self, tokens_to_remove: int) -> None:
        length = _length_after_crop(self.length, tokens_to_remove)
        self._check_crop(length)
        self._shorten(length)
        if self.is_initialized:
            self._pools.trim(self.pool)

    def _first_needed(self, length: int) -> int:
        return 0 if self.window is None else max(0, length - self.window + 1)

    def _check_crop(self, length: int) -> None:
        if self.is_initialized and self.pool.offset > self._first_needed(length):
            raise RuntimeError(
                "the tokens before the crop have left the sliding window. "
                "Call `cache.activate_past_recording()` before the tokens that may be taken back."
            )

    def _shorten(self, length: int) -> None:
        self.length = length
        if self.is_initialized:
            self.pool.drop_before(self._first_needed(length))

    def reset(self) -> None:
        """Forget every token and every row."""
        if self.is_initialized:
            self._leave()
            self._pools.discard(self.pool)
        self._close()

    def _close(self) -> None:
        """Hold nothing, and keep no memory alive."""
        self.length, self.is_initialized = 0, False
        self.__dict__.pop("pool", None)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._select([i for i in range(self.pool.num_rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self._select(_row_numbers(indices, self.pool.num_rows))

    def _select(self, rows: Sequence[int]) -> None:
        if self.is_initialized:
            self._leave()
            self.pool.select(rows)


class PagedCache(DynamicCache):
    """A transformers cache of paged layers; make one with `paged_cache`.

    It is a `DynamicCache` to code that asks, since it grows as one and stands where `generate` would have made one.
    """

    layers: list[Any]

    def __init__(self, pools: Pools, windows: Sequence[int | None], readers: Sequence[Any]) -> None:
        self._pools = pools
        self.may_reuse = False
        """Whether `generate` made this cache itself, so that it may begin with pages of earlier calls."""
        pairs = enumerate(zip(windows, readers, strict=True))
        Cache.__init__(self, layers=[self._layer(number, window, Reader(reader)) for number, (window, reader) in pairs])

    policy: Policy | None = None
    """Which tokens are forgotten, if any are."""

    def _layer(self, number: int, window: int | None, reader: Reader) -> PagedLayer:
        return PagedLayer(number, self._pools, window, reader)

    @property
    def page_size(self) -> int:
        return self._pools.page_size

    @property
    def fp8(self) -> str | None:
        """ "e4m3" or "e5m2" if pages hold FP8 entries."""
        return self._pools.fp8

    @property
    def length(self) -> int:
        """Tokens held per row."""
        return int(self.layers[0].length)

    @property
    def is_recording(self) -> bool:
        return any(layer.record_past for layer in self.layers)

    @property
    def pool(self) -> PagePool:
        """The one pool of all layers. Raises ValueError where layers differ in device or window, or hold nothing."""
        (pool,) = self._pools.all
        return pool

    def open(
        self, rows: int, sizes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: torch.device, count: int
    ) -> None:
        """Let every layer that holds nothing yet take `rows` rows of entries; `append` of the layers then works.

        sizes: (heads, key size, value size) of a token's entry, by layer. Raises as a layer's `update` with `count`
        tokens would, before anything is made.
        """
        empty = [pair for pair in zip(self.layers, sizes, strict=True) if not pair[0].is_initialized]
        for layer, _ in empty:
            self._pools.check_new(layer._place(device), rows, count)
        for layer, (heads, key_size, value_size) in empty:
            layer.lazy_initialization(
                torch.empty(rows, heads, 0, key_size, dtype=dtype, device=device),
                torch.empty(rows, heads, 0, value_size, dtype=dtype, device=device),
            )

    @property
    def pools(self) -> list[PagePool]:
        """One for each device and window that layers hold tokens on."""
        return list(self._pools.all)

    def share(self, pages: SharedPages) -> None:
        """Take pages from these, which other caches of the model use too. For a cache that holds nothing yet."""
        self._pools.shared = pages

    def begin_with(self, rows: Sequence[list[int]]) -> None:
        """Begin with these pages of `share`'s, equally many per row, each held for this cache."""
        shared = self._pools.shared
        assert shared is not None
        pool = self._pools.at(Place(shared.device), len(rows))
        assert isinstance(pool, SharedPool)
        pool.begin_with(rows)  # from here on they go when the pool goes
        assert shared.dtype is not None
        self.open(len(rows), shared.sizes, shared.dtype, shared.device, 0)
        self.commit(len(rows[0]) * self.page_size)

    def reserve(self, stop: int, ahead: int = 0) -> int:
        """Take pages for the tokens before `stop`, and if they are to be had for `ahead` more; says up to which token.

        The caller writes the entries itself and then calls `commit`. Raises CacheFullError if not even `stop` fits.
        """
        pool = self.pool
        try:
            pool.extend(self.length, stop + ahead)
            return stop + ahead
        except CacheFullError:
            pool.extend(self.length, stop)
            return stop

    def begin_padding(self, starts: torch.Tensor) -> None:
        """The first starts [B] int32 tokens of each row are padding. A cache that holds all tokens need not know."""

    def pages(self, length: int) -> list[Pages]:
        """Each layer's pages as if it held `length` tokens per row; rows that hold fewer are the caller's business."""
        return [Pages(x.pool, x.pool.storages[x._layer], length - x.pool.offset, x.format, None) for x in self.layers]

    def commit(self, length: int) -> None:
        """Every layer holds `length` tokens per row now; pages beyond are given back."""
        for layer in self.layers:
            layer.length = length
        for pool in self._pools.all:
            self._pools.trim(pool)

    @property
    def pages_in_use(self) -> int:
        """Pages held now; a page of layers that share a table counts once."""
        return sum(pool.table.pages_in_use for pool in self._pools.all)

    def bytes_held(self) -> int:
        """Bytes of all pages in use, over all layers."""
        return sum(pool.bytes_held() for pool in self._pools.all)

    def bytes_reserved(self) -> int:
        """Bytes of device memory taken, pages not in use included."""
        return sum(pool.bytes_reserved() for pool in self._pools.all)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens of every row and give their pages back."""
        lengths = [_length_after_crop(layer.length, tokens_to_remove) for layer in self.layers]
        for layer, length in zip(self.layers, lengths, strict=True):
            layer._check_crop(length)
        for layer, length in zip(self.layers, lengths, strict=True):
            layer._shorten(length)
        for pool in self._pools.all:
            self._pools.trim(pool)

    def reset(self) -> None:
        """Forget every token and every row, so that the next call may have another batch size."""
        for layer in self.layers:
            layer._close()
        self._pools.by_place.clear()
        self._pools.all.clear()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row i continues from the old row `beam_idx[i]`. Pages are shared, not copied, until one row writes."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        rows = self._pools.all[0].num_rows if self._pools.all else 0
        self._select([i for i in range(rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self._pools.all:
            self._select(_row_numbers(indices, self._pools.all[0].num_rows))

    def _select(self, rows: Sequence[int]) -> None:
        for pool in self._pools.all:
            pool.select(rows)


def _row_numbers(indices: Any, num_rows: int) -> list[int]:
    """Plain row numbers of whatever indexes a batch dimension: a tensor of numbers, a bool mask, a slice, a list."""
    return torch.arange(num_rows)[indices.cpu() if isinstance(indices, torch.Tensor) else indices].tolist()


def _length_after_crop(length: int, tokens_to_remove: int) -> int:
    tokens_to_remove = int(tokens_to_remove)  # assisted decoding may pass a tensor
    if tokens_to_remove > 0:
        if not crop_takes_length():
            raise ValueError(
                f"`crop({tokens_to_remove})` is not supported. "
                "Pass a negative number to remove that many tokens from the end."
            )
        return min(length, tokens_to_remove)
    return max(0, length + tokens_to_remove)


def paged_cache(
    model: Any,
    page_size: int = 64,
    max_pages: int | None = None,
    *,
    dtype: str | None = None,
    eviction: Policy | None = None,
    reserve_tokens: int = 0,
    counters: Counter[str] | None = None,
) -> PagedCache:
    """A paged cache for `model`, optimized or not, to be passed to `model(...)` or `model.generate(...)`.

    page_size: tokens per page, a power of two >= 16. max_pages: most pages in one block table before CacheFullError;
    None grows. Layers on another device or with another window have a table of their own. dtype: None to store what
    the model computes, or "fp8_e4m3" or "fp8_e5m2" to round it to 8 bits (docs/kv_cache.md). eviction: None to hold all
    tokens, or a policy of this package (`Window`, `TopAttention`, `Entropy`) that forgets some; the model must have
    been optimized with the attention pass. reserve_tokens: memory to take at once, in tokens per sequence; more is
    taken as needed.

    Raises UnsupportedModelError if the model's cache holds more than keys and values, PlanError on a bad size, dtype or
    policy, and where a policy cannot work.
    """
    check_page_options(page_size, max_pages)
    eviction = to_policy(eviction)
    fp8 = check_dtype(dtype)
    if not isinstance(reserve_tokens, int) or reserve_tokens < 0:
        raise PlanError(f"reserve_tokens must be an integer >= 0, got {reserve_tokens!r}")
    inner = families.unwrap(model)
    family = families.find(inner)
    if family.extra_cache:
        raise UnsupportedModelError(
            f"the cache of {family.model_type} also holds {family.extra_cache}, which pages do not hold; "
            "use the cache transformers makes"
        )
    attentions = family.attentions(inner)
    counters = Counter() if counters is None else counters
    windows = [family.sliding_window(a) for a in attentions]
    if eviction is None:
        pools = Pools(page_size, max_pages, reserve_tokens, counters, fp8, family.attention == "mla")
        return PagedCache(pools, windows, attentions)
    from .evicting import EvictingCache

    if any(window is not None for window in windows):
        raise PlanError("eviction and sliding windows both forget tokens: a model with such layers takes no policy")
    if any(getattr(a, "_accel_attention", None) is None for a in attentions):
        raise PlanError(
            "a cache that evicts needs attention that knows which tokens are held: optimize the model first, with the "
            "attention pass"
        )
    reserve_tokens = min(reserve_tokens, eviction.budget)
    pools = Pools(page_size, max_pages, reserve_tokens, counters, fp8, family.attention == "mla")
    return EvictingCache(pools, attentions, eviction)


def one_layer_cache(like: PagedCache, attention: Any) -> PagedCache:
    """A new cache of one layer for `attention`, with pages of like's size, in the dtype that is computed."""
    pools = Pools(like.page_size, None, 0, Counter(), None, like._pools.is_latent)
    return PagedCache(pools, [None], [attention])

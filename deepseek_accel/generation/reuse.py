"""Prefixes that are computed once: between the calls of one model's `generate`, and between the rows of one call."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.prefix import chain
from ..cache.shared import Guest, SharedPages, SharedPool
from ..versions import cache_argument
from ..watch import count
from .fingerprint import Fingerprint

MAX_STATES = 16
"""So many states of adapters and switches are told apart at a time; the one used longest ago goes first."""
CPU_BYTES = 1 << 30
GPU_SHARE = 4
"""What may be kept by default: `CPU_BYTES`, or one part in `GPU_SHARE` of the GPU memory free at the first call."""


class Prefixes:
    """What one optimized model keeps between calls, and what it was computed with."""

    def __init__(self, page_size: int, max_pages: int | None, budget_bytes: int | None, counters: Counter[str]) -> None:
        self.page_size, self.max_pages, self.budget_bytes = page_size, max_pages, budget_bytes
        self.counters = counters
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._shared: SharedPages | None = None
        self._seen: Fingerprint | None = None
        self._latest: Fingerprint | None = None
        self._states: dict[tuple[Any, ...], int] = {}
        self._num_states = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # pages belong to the weights they were computed with, not to a copy of the model
        return Prefixes, (self.page_size, self.max_pages, self.budget_bytes, self.counters)

    def pages_for(self, model: nn.Module, device: torch.device) -> tuple[SharedPages, Guest, bytes]:
        """The pages of the model as it is now, a guest's place there, and the key that its prefixes' chain starts from.

        Pages of other weights are forgotten; caches that still use them keep them alive. Raises ValueError with the
        reason if it cannot be told whether kept pages are still true, or in which order they are used.
        """
        with self._lock:
            now = Fingerprint(model, self._latest)
            self._latest = now
            known = self._shared
            if known is None or self._seen is None or known.device != device or not now.has_tensors_of(self._seen):
                if known is not None:
                    self.counters["kv_cache: kept prefixes forgotten (other weights)"] += 1
                self._start()
                budget = default_budget(device) if self.budget_bytes is None else self.budget_bytes
                known = SharedPages(device, self.page_size, self.max_pages, budget, self.counters)
                self._shared, self._seen = known, now
            if (guest := known.enter()) is None:
                raise ValueError("a cache of another CUDA stream is alive")
            return known, guest, self._root(now.state)

    def still(self, shared: SharedPages) -> bool:
        """Whether the weights are those that `shared` was filled with, as far as torch counts writes."""
        return shared is self._shared and self._seen is not None and self._seen.is_unwritten()

    def _root(self, state: tuple[Any, ...]) -> bytes:
        number = self._states.pop(state, None)
        if number is None:
            number = self._num_states
            self._num_states += 1
            if len(self._states) >= MAX_STATES:
                del self._states[next(iter(self._states))]
        self._states[state] = number  # the last one used stands last
        return hashlib.sha256(f"{self.page_size} tokens, state {number}".encode()).digest()

    def settle(self) -> None:
        """After a call: give back memory beyond what may be kept."""
        if (shared := self._shared) is not None:
            shared.settle()

    def forget(self) -> None:
        """Give everything back. Caches that are alive keep what they hold."""
        with self._lock:
            self._start()

    def facts(self) -> dict[str, int]:
        """For the report."""
        shared = self._shared
        kept = (0, 0, 0) if shared is None else (len(shared.kept), shared.kept_bytes(), shared.bytes_reserved())
        return dict(zip(("kept_pages", "kept_bytes", "pool_bytes"), kept, strict=True))


def default_budget(device: torch.device) -> int:
    """Bytes that kept pages may take if nobody says how many."""
    return CPU_BYTES if device.type != "cuda" else int(torch.cuda.mem_get_info(device)[0]) // GPU_SHARE


def begin_reuse(model: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Reuse | None:
    """Let the cache of this call begin with kept pages. None if the model keeps none or the call cannot use them."""
    prefixes: Prefixes | None = vars(model).get("_accel_prefixes")
    cache = kwargs.get(cache_argument())
    if prefixes is None or not getattr(cache, "may_reuse", False):
        return None
    reason = why_no_reuse(model, cache, input_ids, config, kwargs)
    if reason is None:
        try:
            return Reuse(prefixes, *prefixes.pages_for(model, model.device), cache, input_ids)
        except ValueError as error:
            reason = str(error)
    count(prefixes.counters, f"kv_cache: no prefix reuse ({reason})")
    return None


def why_no_reuse(model: Any, cache: Any, input_ids: Tensor, config: Any, kwargs: dict[str, Any]) -> str | None:
    """Why the entries of this call's prompt may depend on more than its token ids and the model, or None."""
    if not len(input_ids):
        return "no rows"
    if model.training:
        return "training mode"
    if cache.is_recording or any(layer.is_initialized for layer in cache.layers):
        return "the cache is not new, or records what leaves it"
    if config.prefill_chunk_size is not None:
        return "prefill_chunk_size"
    allowed = {"attention_mask", "position_ids", "logits_to_keep", "use_cache", cache_argument()}
    if extra := sorted(name for name, value in kwargs.items() if name not in allowed and value is not None):
        return f"the forward is given {', '.join(extra)}"
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    # as `decode._cached` finds out whether the prompt is the whole sequence
    if (getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]) != input_ids.shape[1]:
        return "an attention mask of another length"
    if mask is not None and (mask.shape != input_ids.shape or not bool(mask.all())):
        return "padded prompts"
    if positions is not None:
        plain = torch.arange(input_ids.shape[1], device=positions.device)
        if positions.shape[-1] != len(plain) or not bool((positions == plain).all()):
            return "position ids of the caller"
    return None


class Reuse:
    """What one call takes from the kept pages and leaves there.

    input_ids: [B, T], the whole prompt, without padding. At least its last token is left to compute.
    """

    def __init__(
        self, prefixes: Prefixes, shared: SharedPages, guest: Guest, root: bytes, cache: Any, input_ids: Tensor
    ) -> None:
        self.prefixes, self.shared, self.root, self.cache = prefixes, shared, root, cache
        self._guest = guest  # held for as long as this call may take pages
        self.input_ids, self.counters = input_ids, prefixes.counters
        self.keys: list[list[bytes]] = [[] for _ in input_ids]
        """Of every full page of every row."""
        self._read(input_ids)
        cache.share(shared)
        pages = shared.take([keys[: self._most] for keys in self.keys])
        self.counters["kv_cache: calls that looked for a kept prefix"] += 1
        if pages and pages[0]:
            cache.begin_with(pages)
            self.counters["kv_cache: calls that found a kept prefix"] += 1
            self.counters["kv_cache: prompt tokens taken from kept pages"] += len(pages) * cache.length

    @property
    def _most(self) -> int:
        """Pages that lie before the prompt's last token."""
        return (self.input_ids.shape[1] - 1) // self.shared.page_size

    def _read(self, ids: Tensor) -> None:
        """Add the keys of the pages that `ids` [B, T] fill."""
        size = self.shared.page_size
        known = len(self.keys[0]) if self.keys else 0
        if ids.shape[1] // size <= known:
            return
        made: dict[tuple[bytes, bytes], list[bytes]] = {}
        rows = ids[:, known * size :].to("cpu", torch.int64).contiguous().numpy()
        for keys, row in zip(self.keys, rows, strict=True):
            new = keys[-1] if keys else self.root, row.tobytes()
            if new not in made:
                made[new] = list(chain(*new, 8 * size))
            keys += made[new]

    def fill(self, prefill: Callable[[Tensor], Any]) -> None:
        """Compute what rows have in common once. `prefill` adds ids [rows, S] to the cache.

        Afterwards all rows are there, and the prompt from the cache's length on is left to compute.
        """
        everyone = list(range(len(self.keys)))
        current = everyone
        for rows, pages in self._stages():
            current = self._become(current, rows)
            begin, end = self.cache.length, pages * self.shared.page_size
            prefill(self.input_ids[rows, begin:end])
            saved = (len(everyone) - len(rows)) * (end - begin)
            self.counters["kv_cache: prompt tokens shared within a batch"] += saved
        self._become(current, everyone)

    def _stages(self) -> Iterator[tuple[list[int], int]]:
        """(rows, pages): rows that stand for all of them as far as they agree; compute these up to that page."""
        held, most = self.cache.length // self.shared.page_size, self._most
        if len(self.keys) < 2 or most <= held:
            return
        common = next((i for i in range(held, most) if len({keys[i] for keys in self.keys}) > 1), most)
        if common > held:
            yield [0], common
        first = {keys[most - 1]: row for row, keys in reversed(list(enumerate(self.keys)))}
        if common < most and len(first) < len(self.keys):
            yield sorted(first.values()), most

    def _become(self, current: list[int], rows: list[int]) -> list[int]:
        """Make the cache's rows, which stand for the prompt's rows `current`, stand for `rows`. No page moves."""
        held = self.cache.length // self.shared.page_size
        if current != rows and held:
            stands = {self.keys[row][held - 1]: i for i, row in enumerate(current)}
            self.cache.batch_select_indices([stands[self.keys[row][held - 1]] for row in rows])
        return rows

    def keep(self, ids: Tensor) -> None:
        """Keep the full pages of the cache, which holds the first tokens of ids [B, T]."""
        layers, pools = self.cache.layers, self.cache.pools
        if not self.prefixes.still(self.shared) or len({layer.length for layer in layers}) != 1:
            return
        if len(pools) != 1 or not isinstance(pools[0], SharedPool):
            return
        self._read(ids[:, : self.cache.length])
        full = self.cache.length // self.shared.page_size
        sizes = [(layer.num_heads, layer.key_dim, layer.value_dim) for layer in layers]
        try:
            self.shared.keep(pools[0], [keys[:full] for keys in self.keys], sizes, layers[0].dtype)
        except torch.OutOfMemoryError:  # what was generated matters more
            self.counters["kv_cache: prefixes not kept (out of memory)"] += 1

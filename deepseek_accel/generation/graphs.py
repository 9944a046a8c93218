"""Whole decoding steps as CUDA graphs, one per batch bucket and way of choosing the next token.

What differs from call to call lives in device buffers that the graph reads: tokens, lengths, block tables, and the
address of each layer's pages. So a graph serves every prompt, context length and cache, also one that grows.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..ops.advance import advance
from ..ops.choice import prebuild
from ..ops.mla_attention import graph_splits
from ..ops.next_token import next_token
from ..ops.router import make_counters
from .join_graphs import JoinBuffers, addressed, join_class, table_pages
from .join_graphs import record as record_join
from .prompt_graphs import PromptBuffers, size_class
from .prompt_graphs import record as record_prompt
from .reach import Reach
from .sampling import MAX_EOS_TOKENS, Choice
from .segments import Segments, recorded
from .step import Place, Stepper
from .upload import upload

POSTS = 4
"""Steps whose results the host may still have to read; the loop lets it lag by one."""
MAX_CHOOSING_GRAPHS = 16
"""So many graphs that choose the next token themselves are kept, over all buckets and ways; the one used longest ago
goes first."""


@dataclass
class Buffers:
    """What the graphs of one bucket read and write. Rows from `live` on are idle: no tokens, no pages, no experts."""

    tokens: torch.Tensor
    """[B] int64: the tokens a step starts from; a graph that chooses writes the next ones here."""
    lengths: torch.Tensor
    first_positions: torch.Tensor
    """[B] int32: cache length minus position id."""
    starts: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    live: torch.Tensor
    unfinished: torch.Tensor
    """[B] bool: rows that have not met an end-of-sequence token."""
    eos: torch.Tensor
    """[MAX_EOS_TOKENS] int64, unused ones -1."""
    pad: torch.Tensor
    """[1] int64."""
    posts: torch.Tensor
    """[POSTS, B + 1] int64 in pinned memory: each step's tokens and whether any row goes on, for the host to read."""
    count: torch.Tensor
    """[1] int32: steps since the call began."""
    counters: torch.Tensor
    """What the router's programs count themselves with; of these buffers alone."""

    @classmethod
    def make(cls, batch: int, num_pages: int, device: torch.device) -> Buffers:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            tokens=zeros(batch, dtype=torch.int64),
            lengths=zeros(batch),
            first_positions=zeros(batch),
            starts=zeros(batch),
            block_table=zeros(batch, num_pages),
            slots=zeros(batch, dtype=torch.int64),
            positions=zeros(batch, dtype=torch.int64),
            live=zeros(1),
            unfinished=zeros(batch, dtype=torch.bool),
            eos=zeros(MAX_EOS_TOKENS, dtype=torch.int64).fill_(-1),
            pad=zeros(1, dtype=torch.int64),
            posts=torch.zeros(POSTS, batch + 1, dtype=torch.int64, pin_memory=device.type == "cuda"),
            count=zeros(1),
            counters=make_counters(device),
        )


class _Captured(NamedTuple):
    graph: Segments
    logits: torch.Tensor
    """[B, vocabulary], where the graph leaves them."""


class NoRoom(torch.OutOfMemoryError):
    """There is no memory to capture a graph. Reaches a caller only where a graph must be made anew within a call."""

    def __init__(self) -> None:
        super().__init__(
            "no memory to capture a CUDA graph for a longer context; use fewer rows, or optimize without CUDAGraphs"
        )


class StepGraphs:
    """The graphs of one model. At most one `generate` uses them at a time; `try_lease` says whether it may."""

    def __init__(self, batch_sizes: tuple[int, ...], counters: Counter[str]) -> None:
        self.batch_sizes, self.counters = batch_sizes, counters
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self.leases = 0
        """How often they were leased: who comes back and finds one more than its own lease finds its buffers as it
        left them."""
        self._last_use: torch.cuda.Event | None = None
        self._drop()

    def _drop(self) -> None:
        if self._last_use is not None:
            self._last_use.synchronize()  # a step that still runs posts into buffers that go now
        self._identity: Any = None
        self._buffers: dict[Any, Buffers] = {}
        self._graphs: dict[tuple[Any, Any], _Captured] = {}
        self._prompt_buffers: PromptBuffers | None = None
        self._join_buffers: dict[tuple[int, int], JoinBuffers] = {}
        self._prompts: dict[Any, _Captured] = {}
        self._met: set[Any] = set()
        self._refused: set[Any] = set()
        self.addresses: torch.Tensor | None = None
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __del__(self) -> None:
        # a step that still runs posts into pinned memory, which must not become somebody else's before it is done
        last_use: torch.cuda.Event | None = vars(self).get("_last_use")
        try:  # no `contextlib`, which may be gone when a process ends
            if last_use is not None:
                last_use.synchronize()
        except RuntimeError:  # a device that failed
            pass

    def __getstate__(self) -> dict[str, Any]:
        return {"batch_sizes": self.batch_sizes, "counters": self.counters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()  # graphs belong to the weights they were captured with, not to a copy

    def __deepcopy__(self, memo: dict[int, Any]) -> StepGraphs:
        return StepGraphs(self.batch_sizes, memo.get(id(self.counters), self.counters))

    @property
    def num_graphs(self) -> int:
        return len(self._graphs) + len(self._prompts)

    def bytes_held(self) -> int:
        """Device memory of the graphs' shared pool."""
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(self._pool))

    def bucket(self, batch: int) -> int | None:
        """The smallest size that holds `batch` rows, or None if none does."""
        return min((size for size in self.batch_sizes if size >= batch), default=None)

    def try_lease(self) -> bool:
        leased = self._lock.acquire(blocking=False)
        self.leases += leased
        return leased

    def release(self, device: torch.device) -> None:
        """Give the lease back, after work on the current stream of `device`, the model's."""
        try:
            self._last_use = torch.cuda.Event()
            self._last_use.record(torch.cuda.current_stream(device))
        finally:
            self._lock.release()

    def run(self, stepper: Stepper, batch: int, cache: Any, starts: list[int], choice: Choice | None) -> GraphRun:
        """Set the buffers up for a `generate` of `batch` rows whose prompt `cache` holds. Needs the lease."""
        bucket = self.bucket(batch)
        assert bucket is not None
        self._follow(stepper, cache)
        kind: type[GraphRun] = GraphRun
        if cache.policy is not None:
            from .evicting_graphs import EvictingRun

            kind = EvictingRun
        with torch.inference_mode(False), torch.no_grad():
            return kind(self, stepper, bucket, batch, cache, starts, choice)

    def _follow(self, stepper: Stepper, cache: Any) -> None:
        """Come after the last use, which may be on another stream; drop graphs of other weights."""
        device = stepper.model.device
        if self._last_use is not None:
            torch.cuda.current_stream(device).wait_event(self._last_use)
        layout = getattr(stepper.attention.config, "rope_interleave", None)
        identity = (device, stepper.identity, layout, cache.page_size, cache.fp8)
        if identity != self._identity:
            self._drop()
            self._identity = identity
        if self.addresses is None:
            with torch.inference_mode(False), torch.no_grad():
                size = len(stepper.model.layers)
                self.addresses = torch.zeros(size, dtype=torch.int64, device=device)
                self._pool = torch.cuda.graph_pool_handle()

    def prompt(self, stepper: Stepper, count: int, cache: Any) -> Callable[..., torch.Tensor]:
        """What runs a prompt of `count` tokens in one row, as `prefill` takes it. Needs the lease until it has run.

        A class of sizes is captured when it is met again, so that one call alone does not pay for that. Until then, and
        where there is no memory, its launches are those of the graph, one by one: bits do not change with the call.
        """
        size = size_class(count)
        assert size is not None
        self._follow(stepper, cache)
        return partial(self._run_prompt, stepper, size)

    def _run_prompt(
        self, stepper: Stepper, size: int, input_ids: torch.Tensor, positions: torch.Tensor, held: list[Any],
        slots: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        with self._recording(stepper, held) as addresses:
            if self._prompt_buffers is None:
                self._prompt_buffers = PromptBuffers.make(stepper.model.device)
            self._prompt_buffers.set(input_ids, positions, slots)
            step = partial(record_prompt, stepper, size, self._prompt_buffers, addresses, held[0])
            return self._replay_prompt(size, stepper, step)

    def join(self, stepper: Stepper, cache: Any, starts: torch.Tensor | None) -> Callable[..., torch.Tensor]:
        """What adds a few tokens to each row of a cache that holds some, as `prefill` takes it; else as `prompt`."""
        self._follow(stepper, cache)
        return partial(self._run_join, stepper, cache, starts)

    def _run_join(
        self, stepper: Stepper, cache: Any, starts: torch.Tensor | None, input_ids: torch.Tensor,
        positions: torch.Tensor, held: list[Any], slots: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        batch, count = input_ids.shape
        rows, size = self.bucket(batch), join_class(count)
        assert rows is not None and size is not None
        device, num_pages = stepper.model.device, table_pages(stepper, cache)
        with self._recording(stepper, held) as addresses:
            buffers = self._join_buffers.get((rows, size))
            if buffers is None or buffers.block_table.shape[1] < num_pages:
                if self._prompts.pop((rows, size), None) is not None:
                    self._renew_pool()
                buffers = self._join_buffers[rows, size] = JoinBuffers.make(rows, size, num_pages, device)
            buffers.set(input_ids, positions, slots, held[0], starts)
            step = partial(record_join, stepper, buffers, addresses, held)
            return self._replay_prompt((rows, size), stepper, step)[:batch]

    @contextmanager
    def _recording(self, stepper: Stepper, held: list[Any]) -> Iterator[torch.Tensor]:
        """Tell the device where the pages are. The addresses [layers] int64."""
        assert self.addresses is not None
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(stepper.model.device):
            self.addresses.copy_(upload([pages.storage.data_ptr() for pages in held], stepper.model.device))
            yield self.addresses

    def _replay_prompt(self, key: Any, stepper: Stepper, step: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The logits of `step`, by the graph of its class if there is one."""
        found = self._captured_prompt(key, stepper, step)
        if found is None:
            return step()
        found.graph.replay()
        self.counters["cuda_graphs: prompts replayed"] += 1
        return found.logits.clone()

    def _captured_prompt(self, key: Any, stepper: Stepper, step: Callable[[], torch.Tensor]) -> _Captured | None:
        """The graph of a class, captured now if it was met before; None: run `step` without."""
        if key not in self._met:
            self._met.add(key)
            with prebuild(stepper.model.device):
                step()
        elif key not in self._prompts and key not in self._refused:
            try:
                # the run before the capture writes what the replay writes again
                self._prompts[key] = self._capture(key, stepper, step, (), in_segments=True)
                self.counters["cuda_graphs: prompts captured"] += 1
            except NoRoom:
                self.counters["cuda_graphs: prompts without graph (out of memory)"] += 1
        return self._prompts.get(key)

    def buffers(
        self, bucket: Any, num_pages: int, device: torch.device, make: Callable[[int, torch.device], Buffers]
    ) -> Buffers:
        """The buffers of a bucket, with room for `num_pages` pages per row. Larger ones need new graphs.

        bucket: a batch size, with what else tells kinds of graphs apart. make: how to make buffers for so many pages.
        """
        known = self._buffers.get(bucket)
        if known is None or known.block_table.shape[1] < num_pages:
            if known is not None and self._last_use is not None:
                self._last_use.synchronize()  # a step that still runs posts into the old ones
            for key in [key for key in self._graphs if key[0] == bucket]:
                del self._graphs[key]
            if known is not None:
                self._renew_pool()
            known = self._buffers[bucket] = make(num_pages, device)
        return known

    def _renew_pool(self) -> None:
        """After graphs were dropped: a pool without a graph left in it cannot be captured into."""
        if not self._graphs and not self._prompts:
            self._pool = torch.cuda.graph_pool_handle()

    def captured(self, bucket: Any, run: GraphRun, choice: Choice | None) -> _Captured:
        key = (bucket, None if choice is None else choice.key)
        found = self._graphs.pop(key, None)
        if found is None:
            sampling = [known for known in self._graphs if known[1] is not None]
            if choice is not None and len(sampling) >= MAX_CHOOSING_GRAPHS:
                del self._graphs[sampling[0]]
            buffers = run.buffers
            written = (buffers.live, buffers.tokens, buffers.unfinished, buffers.count)
            found = self._capture(key, run.stepper, partial(run.record, choice), written)
            self.counters["cuda_graphs: captured"] += 1
        self._graphs[key] = found  # the last one used stands last
        return found

    def _capture(
        self, key: Any, stepper: Stepper, record: Callable[[], torch.Tensor], written: tuple[torch.Tensor, ...],
        in_segments: bool = False,
    ) -> _Captured:  # fmt: skip
        """`_record`. NoRoom if there is no memory, and from then on for this key."""
        if key not in self._refused:
            try:
                return self._record(stepper, record, written, in_segments)
            except torch.OutOfMemoryError:
                self._refused.add(key)
        raise NoRoom()  # out here nothing holds the tensors of what failed

    def _record(
        self, stepper: Stepper, record: Callable[[], torch.Tensor], written: tuple[torch.Tensor, ...], in_segments: bool
    ) -> _Captured:
        """Run `record` once, so that kernels and libraries are loaded, then record it, in several graphs if the host
        will wait for each replay before the next.

        written: buffers that it changes, first the one that says how many rows are live. They keep what they hold, and
        no row is live in that run. None: `record` may run twice.
        """
        device = stepper.model.device
        if self._stream is None:  # one for all captures: libraries keep a workspace per stream
            self._stream = torch.cuda.Stream(device)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(device))
        state = torch.cuda.get_rng_state(device)
        try:
            with torch.cuda.stream(stream):
                kept = [tensor.clone() for tensor in written]
                try:
                    if written:
                        written[0].zero_()
                    with prebuild(device):
                        record()
                    record()
                finally:
                    for tensor, value in zip(written, kept, strict=True):
                        tensor.copy_(value)
                    stream.synchronize()
                with recorded(self._pool, stream) as segments:
                    if in_segments:
                        stepper.between = segments.cut
                    logits = record()
        finally:
            stepper.between = None
            torch.cuda.set_rng_state(state, device)
            torch.cuda.current_stream(device).wait_stream(stream)
        return _Captured(segments, logits)


class GraphRun:
    """One `generate` on the graphs of its bucket."""

    def __init__(
        self,
        graphs: StepGraphs,
        stepper: Stepper,
        bucket: int,
        batch: int,
        cache: Any,
        starts: list[int],
        choice: Choice | None,
    ) -> None:
        self.graphs, self.stepper, self.bucket, self.batch, self.cache = graphs, stepper, bucket, batch, cache
        self.starts, self.choice = starts, choice
        self._version: Any = None
        self._storages: list[torch.Tensor] = []
        self._captured: _Captured | None = None
        self.buffers = self._find_buffers()

    def _key(self) -> Any:
        """What tells the graphs of this kind from others."""
        return self.bucket

    def _make_buffers(self, num_pages: int, device: torch.device) -> Buffers:
        return Buffers.make(self.bucket, num_pages, device)

    def _find_buffers(self) -> Any:
        return self.graphs.buffers(self._key(), self._most_pages(), self.stepper.model.device, self._make_buffers)

    def _most_pages(self) -> int:
        return table_pages(self.stepper, self.cache)

    def finish(self) -> None:
        """After the last step, while the lease is held."""

    def begin(
        self, tokens: torch.Tensor, positions: torch.Tensor, unfinished: torch.Tensor, eos: list[int], pad: torch.Tensor
    ) -> None:
        """tokens [batch]: what the first step starts from; positions [batch] int64: their position ids; unfinished
        [batch] bool. eos and pad: used by a graph that chooses."""
        buffers, batch, length = self.buffers, self.batch, self.cache.length
        buffers.live.fill_(batch)
        buffers.count.zero_()
        buffers.tokens[:batch].copy_(tokens)
        buffers.lengths.zero_()
        buffers.lengths[:batch].fill_(length)
        buffers.first_positions[:batch].copy_(length - positions)
        buffers.starts.zero_()
        buffers.starts[:batch].copy_(torch.tensor(self.starts, dtype=torch.int32))
        buffers.unfinished.zero_()
        buffers.unfinished[:batch].copy_(unfinished)
        buffers.eos.copy_(torch.tensor(eos + [-1] * (MAX_EOS_TOKENS - len(eos))))
        buffers.pad.copy_(pad.view(1))
        self._set_pages()

    def _held(self) -> list[torch.Tensor]:
        """Each layer's storage, whose address the device was told."""
        return self._storages

    def _set_pages(self) -> None:
        """Tell the device where the pages are, if that changed."""
        pool = self.cache.pool
        if self._version == pool.table.version:
            return
        table = pool.block_table()
        if table.shape[1] > self.buffers.block_table.shape[1]:
            old = self.buffers
            device = self.stepper.model.device
            self.buffers = self._find_buffers()
            torch.cuda.current_stream(device).synchronize()  # a step that still runs posts into the old buffers
            for name, value in vars(old).items():
                if name != "block_table":
                    getattr(self.buffers, name).copy_(value)
            self._captured = None
        self.buffers.block_table[: self.batch, : table.shape[1]].copy_(table)
        storages = [pool.storages[layer] for layer in sorted(pool.storages)]
        if [s.data_ptr() for s in storages] != [s.data_ptr() for s in self._storages]:
            assert self.graphs.addresses is not None
            self.graphs.addresses.copy_(torch.tensor([storage.data_ptr() for storage in storages]))
            self._storages = storages
        self._version = pool.table.version

    def step(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Launch the next step; its pages must be reserved. tokens [batch]: what it starts from, unless the last step
        chose them. Returns its logits [batch, vocabulary], which the next step overwrites."""
        self._set_pages()
        if tokens is not None:
            self.buffers.tokens[: self.batch].copy_(tokens)
        captured = self.capture()
        captured.graph.replay()
        return captured.logits[: self.batch]

    def capture(self) -> _Captured:
        """The graph; recorded now, if it is not there."""
        if self._captured is None:
            with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(self.stepper.model.device):
                self._captured = self.graphs.captured(self._key(), self, self.choice)
        return self._captured

    def record(self, choice: Choice | None) -> torch.Tensor:
        """The step itself, on the buffers: run once to warm up, once more to be captured."""
        buffers, stepper = self.buffers, self.stepper
        model, pool = stepper.model, self.cache.pool
        advance(
            buffers.lengths,
            buffers.live,
            buffers.block_table,
            pool.page_size,
            buffers.first_positions,
            buffers.slots,
            buffers.positions,
        )
        rotation = stepper.rotation(model.embedding[:1, None], buffers.positions.unsqueeze(1))
        heads, kv_heads = stepper.num_heads
        reach = Reach(
            buffers.block_table,
            buffers.lengths,
            buffers.block_table.shape[1] * pool.page_size,
            causal=False,
            starts=buffers.starts,
            num_splits=graph_splits(self.bucket, heads, model.device, kv_heads, fp8=self.cache.fp8),
        )
        place = Place((self.bucket, 1), rotation, buffers.slots, reach, buffers.live, buffers.counters)
        assert self.graphs.addresses is not None
        pages = addressed(self._held(), self.graphs.addresses, self.cache.fp8)
        return self.choose(stepper.run(buffers.tokens.unsqueeze(1), pages, [place] * len(pages)), choice)

    def choose(self, logits: torch.Tensor, choice: Choice | None) -> torch.Tensor:
        """The end of a step: the next tokens, if the graph chooses them."""
        buffers = self.buffers
        if choice is not None:
            greedy = choice.is_greedy
            if not greedy:
                buffers.tokens.copy_(choice.pick(logits))
            next_token(
                logits if greedy else None,
                buffers.tokens,
                buffers.unfinished,
                buffers.live,
                buffers.eos,
                buffers.pad,
                buffers.posts,
                buffers.count,
            )
        return logits

"""Runs tokens of the engine's rows through the model: pieces of long prompts, several short ones together, and steps.

Short pieces and steps meet the keys in the pages as a decoding step does; a long piece expands them, as a prompt does
(`generation/join_graphs.py` says which is cheaper when). Where the model has CUDA graphs and nobody else uses them,
steps, short pieces and the beginnings of prompts are graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..cache.paged import Pages
from ..generation.counting import EXPANDED, count_layers, reads_pages
from ..generation.graphs import GraphRun, NoRoom, StepGraphs
from ..generation.join_graphs import GRAPH_TOKENS, joins
from ..generation.prefill import ACTIVATION_BYTES, run_pieces
from ..generation.prompt_graphs import size_class
from ..generation.ragged import RaggedRows
from ..generation.ragged_graphs import RaggedGraphs
from ..generation.step import Stepper
from ..generation.upload import upload
from ..ops.choice import prebuild, uses_triton
from .rows import Rows

SHORT_SIZES = (1, 8, 16, 32, 64, 128)
"""Tokens per row of pieces that run together: few sizes, since each is a graph."""


class OneRow:
    """One row's pages, as `prefill` asks for a pool."""

    def __init__(self, rows: Rows, row: int) -> None:
        self.device, self.page_size = rows.device, rows.page_size
        self._pages = rows.rows[row]
        self._table = upload([self._pages], self.device, torch.int32)

    def block_table(self) -> Tensor:
        return self._table

    def run(self, first: int, last: int) -> slice | None:
        """Where the tokens [first, last) lie, if their pages follow each other."""
        size = self.page_size
        pages = self._pages[first // size : -(-last // size)]
        if not pages or pages != list(range(pages[0], pages[0] + len(pages))):
            return None
        begin = pages[0] * size + first % size
        return slice(begin, begin + last - first)

    def slots(self, first: int, last: int) -> Tensor:
        position = torch.arange(first, last, device=self.device)
        return self._table[0, position // self.page_size].long() * self.page_size + position % self.page_size


class _Ragged(RaggedRows):
    """`RaggedRows` on rows whose pages the engine has seen to."""

    def reserve(self, stop: int) -> None:
        """Nothing: there are pages for every token that is run."""


class _StepRun(GraphRun):
    """A decoding step as the graph that `generate` uses too when it chooses tokens by itself."""

    _loaded: tuple[Any, ...] = ()

    def load(self, rows: list[int], lengths: list[int], tokens: Tensor, untouched: bool) -> None:
        """rows: their numbers; lengths: tokens that each holds; tokens [R]: what the step starts from. untouched:
        nobody has used the buffers since the last step, in which every row has become one token longer."""
        tables = [self.cache.rows[row] for row in rows]
        width = max(len(table) for table in tables)
        if width > self.buffers.block_table.shape[1]:
            self.buffers, self._captured, untouched = self._find_buffers(), None, False
        buffers, count, device = self.buffers, len(rows), tokens.device
        buffers.tokens[:count].copy_(tokens)
        now = (self.cache.version, rows, lengths)
        if untouched and now == self._loaded:
            self._loaded = (self.cache.version, rows, [length + 1 for length in lengths])
            return
        padded = [[length, *table, *[0] * (width - len(table))] for length, table in zip(lengths, tables, strict=True)]
        given = upload(padded, device, torch.int32)
        buffers.lengths.zero_()
        buffers.lengths[:count].copy_(given[:, 0])
        buffers.block_table[:count, :width].copy_(given[:, 1:])
        buffers.first_positions.zero_()
        buffers.starts.zero_()
        buffers.live.fill_(count)
        # storages move only with the version
        assert self.graphs.addresses is not None
        self.graphs.addresses.copy_(upload([storage.data_ptr() for storage in self._held()], device))
        self._loaded = (self.cache.version, rows, [length + 1 for length in lengths])

    def _held(self) -> list[Tensor]:
        # none are held on to: those that have moved would keep their memory until this bucket runs again
        return [self.cache.storages[layer] for layer in sorted(self.cache.storages)]

    def _set_pages(self) -> None:
        """Nothing: `load` has."""


class Compute:
    """One model's line on one engine's rows."""

    def __init__(self, stepper: Stepper, rows: Rows, graphs: StepGraphs | None, counters: Counter[str]) -> None:
        self.stepper, self.rows, self.counters = stepper, rows, counters
        self.device = stepper.model.device
        self._graphs = graphs if uses_triton(self.device) else None
        self._leased = False
        self._steps: Counter[tuple[str, str]] = Counter()
        """Runs since the last `tell_counters`, by what they were and how they attended."""
        self._absorbed = reads_pages(stepper.model)
        # one row more than there are: it takes rows that are all there is to come in their own order
        self._ragged = _Ragged(stepper, rows, torch.zeros(len(rows.rows) + 1, dtype=torch.int64))
        self._built: set[Any] = set()
        self._runs: dict[int, _StepRun] = {}
        self._last_step = (-1, -1)
        """The bucket of the last step that was a graph, and the number of the lease it ran in."""

    # The lease on the model's graphs, for the time of one step

    def __enter__(self) -> Compute:
        if self._graphs is not None and self._graphs.try_lease():
            self._leased = True
            try:
                self._graphs._follow(self.stepper, self.rows)
            except BaseException:
                self.__exit__()
                raise
            self._ragged.graphs = {False: RaggedGraphs(self._graphs, "engine", self.stepper, self.rows)}
        return self

    def __exit__(self, *error: Any) -> None:
        self._ragged.graphs = {}
        if self._leased and self._graphs is not None:
            self._leased = False
            self._graphs.release(self.device)

    # What runs

    def tell_counters(self) -> None:
        """Add what has run to the model's counters. Going over all layers takes a while: not in every step."""
        for (step, attention), times in self._steps.items():
            count_layers(self.counters, self.stepper, times, step, attention)
        self._steps.clear()
        name = "kv_cache: most pages in use"
        self.counters[name] = max(self.counters[name], self.rows.most_in_use)

    def together(self, remaining: Sequence[int]) -> int:
        """How many of the next pieces, of so many tokens each, run as one; 0: the first one runs alone."""
        found = 0
        for i, _ in enumerate(remaining, 1):
            size = short_size(max(remaining[:i]))
            if size is None or i * size > GRAPH_TOKENS or not joins(self.stepper.model, i, size):
                break
            found = i
        return found

    def pieces(self, rows: list[int], starts: list[int], tokens: list[list[int]]) -> Tensor:
        """Add short pieces to rows that hold `starts` tokens: the last token's logits [R, vocabulary]."""
        self._steps["layers: fused prefill", self._absorbed] += 1
        size = max(map(len, tokens))
        if self._graphs is not None:
            size = short_size(size) or size
        given = upload([[part[0]] * (size - len(part)) + part for part in tokens], self.device)
        return self._run_ragged(given, [len(part) for part in tokens], rows, starts)

    def piece(self, row: int, start: int, tokens: list[int]) -> Tensor:
        """Add a long piece to a row that holds `start` tokens: the last token's logits [1, vocabulary]."""
        self._steps["layers: fused prefill", EXPANDED] += 1
        pool, stop = OneRow(self.rows, row), start + len(tokens)
        held: list[Any] = [
            Pages(pool, self.rows.storages[i], stop, each, None)  # type: ignore[arg-type]
            for i, each in enumerate(self.rows.entries)
        ]
        ids = upload([tokens], self.device)
        positions, slots = torch.arange(start, stop, device=self.device)[None], pool.slots(start, stop)
        graphs = self._graphs if self._leased and start == 0 and size_class(len(tokens)) is not None else None
        if graphs is not None:
            return graphs.prompt(self.stepper, len(tokens), self.rows)(ids, positions, held, slots)

        def run() -> Tensor:
            return run_pieces(self.stepper, ids, [(pages, slots) for pages in held], None, positions, ACTIVATION_BYTES)

        return self._built_once(("piece", start > 0, len(tokens).bit_length()), run)

    def step(self, rows: list[int], lengths: list[int], tokens: Tensor) -> Tensor:
        """One more token of each row: its logits [R, vocabulary], to be read before the next call. tokens [R], on the
        device."""
        self._steps["layers: fused step", self._absorbed] += 1
        graphs = self._graphs
        bucket = graphs.bucket(len(rows)) if graphs is not None and self._leased else None
        if graphs is not None and bucket is not None:
            try:
                return self._graph_step(graphs, bucket, rows, lengths, tokens)
            except NoRoom:
                self.counters["engine: steps without graph (out of memory)"] += 1
        return self._run_ragged(tokens[:, None], [1] * len(rows), rows, lengths, graphs=False)

    def _graph_step(
        self, graphs: StepGraphs, bucket: int, rows: list[int], lengths: list[int], tokens: Tensor
    ) -> Tensor:
        run = self._runs.get(bucket)
        if run is None or run.buffers is not graphs._buffers.get(bucket):
            with torch.inference_mode(False):
                run = self._runs[bucket] = _StepRun(graphs, self.stepper, bucket, bucket, self.rows, [], None)
        untouched = self._last_step == (bucket, graphs.leases - 1)
        self._last_step = (-1, -1)
        run.load(rows, lengths, tokens, untouched)
        logits = run.step()
        self._last_step = (bucket, graphs.leases)
        self.counters["cuda_graphs: replays"] += 1
        return logits[: len(rows)]

    def _run_ragged(
        self, given: Tensor, counts: list[int], rows: list[int], starts: list[int], *, graphs: bool = True
    ) -> Tensor:
        ragged = self._ragged
        for row, start in zip(rows, starts, strict=True):
            ragged.lengths[row] = start
        known, ragged.graphs = ragged.graphs, ragged.graphs if graphs else {}
        try:

            def run() -> Tensor:
                return ragged.run(given, counts, rows)[1][:, -1]

            if ragged.graphs:  # which build their kernels themselves
                return run()
            return self._built_once(("ragged", len(rows).bit_length(), given.shape[1]), run)
        finally:
            ragged.graphs = known

    def _built_once(self, key: Any, run: Callable[[], Tensor]) -> Tensor:
        """`run`, whose kernels are built at once if calls of this kind have not been seen."""
        if key not in self._built:
            with prebuild(self.device) if uses_triton(self.device) else nullcontext():
                if uses_triton(self.device):
                    run()
            self._built.add(key)
        return run()


def short_size(tokens: int) -> int | None:
    """The smallest of `SHORT_SIZES` that holds so many, or None."""
    return next((size for size in SHORT_SIZES if size >= tokens), None)

"""Runs of ragged rows as CUDA graphs: checking guesses, and the steps of a draft.

One graph for each number of tokens per row, up to `EXACT_SIZES` and in `join_graphs.CLASSES` beyond, and each bucket of
rows. As in the graphs of joins a size is captured when it is met again, and until then runs as the graph would, launch
by launch. Lengths, first keys, slots and tables are the rows' own and live on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..ops.mla_attention import graph_splits
from ..ops.router import make_counters
from .graphs import StepGraphs
from .join_graphs import addressed, join_class, table_pages
from .reach import Reach
from .step import Place, Stepper, head_step
from .upload import upload

EXACT_SIZES = 9
"""So many guesses and a token. Up to here a filled-up column would cost more than a graph of its own."""


@dataclass
class RaggedBuffers:
    """What the graphs of a bucket and size read. Rows without tokens are idle: no keys, no experts."""

    tokens: torch.Tensor
    """[B, S] int64."""
    embedded: torch.Tensor
    """[B, S, D], what runs instead of the tokens' embeddings in graphs that are told so."""
    numbers: torch.Tensor
    """[2 B S + 2 B + 1] int64: positions, slots, lengths, first keys, live tokens."""
    lengths: torch.Tensor
    starts: torch.Tensor
    live: torch.Tensor
    block_table: torch.Tensor
    addresses: torch.Tensor
    """[layers] int64: where each layer's pages are."""
    counters: torch.Tensor
    known: tuple[Any, ...] = ()
    """What the table and the addresses were copied from, of whose pages."""
    owner: Callable[[], Any] = lambda: None
    """Whose, as a weak reference: another pool may be given the number, the version and the addresses of one that is
    gone."""

    @classmethod
    def make(cls, rows: int, size: int, num_pages: int, stepper: Stepper) -> RaggedBuffers:
        model, device = stepper.model, stepper.model.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            tokens=zeros(rows, size),
            embedded=zeros(rows, size, model.embedding.shape[1], dtype=model.dtype),
            numbers=zeros(2 * rows * size + 2 * rows + 1),
            lengths=zeros(rows, dtype=torch.int32),
            starts=zeros(rows, dtype=torch.int32),
            live=zeros(1, dtype=torch.int32),
            block_table=zeros(rows, num_pages, dtype=torch.int32),
            addresses=zeros(len(model.layers)),
            counters=make_counters(device),
        )

    def set(
        self, given: torch.Tensor, positions: list[list[int]], slots: list[list[int]], lengths: list[int],
        starts: list[int], pool: Any, rows: list[int], held: list[Any],
    ) -> None:  # fmt: skip
        """given [R, S] tokens or [R, S, D] embedded ones, R and S at most the buffers'; the lists are of those rows."""
        batch, size = self.tokens.shape
        count, width = given.shape[:2]
        fill, idle = size - width, batch - count
        target = self.tokens if given.dim() == 2 else self.embedded
        target[:count, fill:] = given
        target[:count, :fill] = given[:, :1]
        numbers = [number for row in positions for number in [row[0]] * fill + row] + [0] * (idle * size)
        numbers += [number for row in slots for number in [-1] * fill + row] + [-1] * (idle * size)
        numbers += [*lengths, *[0] * idle, *starts, *[0] * idle, count * size]
        self.numbers.copy_(upload(numbers, self.numbers.device))
        tail = self.numbers[2 * batch * size :]
        self.lengths.copy_(tail[:batch])
        self.starts.copy_(tail[batch:-1])
        self.live.copy_(tail[-1:])
        known = (pool.table.version, tuple(rows), tuple(pages.storage.data_ptr() for pages in held))
        if known != self.known or self.owner() is not pool:
            table = pool.block_table()
            self.block_table[:count, : table.shape[1]] = table[upload(rows, table.device)]
            self.addresses.copy_(upload(list(known[-1]), table.device))
            self.known, self.owner = known, weakref.ref(pool)


def record(
    stepper: Stepper, buffers: RaggedBuffers, held: list[Any], embedded: bool, every: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the buffers' tokens: hidden states [B, S, D] after the last layer, and the logits of `every` one, or of each
    row's last. held: pages of each layer, for their shape and format."""
    rows, size = buffers.tokens.shape
    model, (heads, kv_heads) = stepper.model, stepper.num_heads
    reach = Reach(
        buffers.block_table,
        buffers.lengths,
        buffers.block_table.shape[1] * held[0].pool.page_size,
        causal=size > 1,
        starts=buffers.starts,
        num_splits=graph_splits(rows, heads, model.device, kv_heads, size, held[0].fp8),
    )
    positions, slots = buffers.numbers[: 2 * rows * size].view(2, rows, size)
    rotation = stepper.rotation(model.embedding[:1, None], positions)
    place = Place((rows, size), rotation, slots.reshape(-1), reach, buffers.live, buffers.counters)
    x = buffers.embedded.flatten(0, 1) if embedded else F.embedding(buffers.tokens.flatten(), model.embedding)
    pages = addressed([each.storage for each in held], buffers.addresses, held[0].fp8)
    x = stepper.layers(x, pages, [place] * len(pages))
    hidden = x.view(rows, size, -1)
    logits = head_step(model, x if every else hidden[:, -1].contiguous())
    return hidden, logits.view(rows, -1, logits.shape[-1])


class RaggedGraphs:
    """The graphs of one kind of run, among those of a model. Needs the lease on them for as long as it is used."""

    def __init__(self, graphs: StepGraphs, kind: str, stepper: Stepper, cache: Any) -> None:
        self.graphs, self.kind, self.stepper, self.cache = graphs, kind, stepper, cache

    def run(
        self, given: torch.Tensor, positions: list[list[int]], slots: list[list[int]], lengths: list[int],
        starts: list[int], rows: list[int], held: list[Any], every: bool,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
        """As `record` for rows and columns that are no filling; None where no graph is as large. What it returns
        stands until the next run."""
        graphs, stepper, device = self.graphs, self.stepper, self.stepper.model.device
        width = given.shape[1]
        size, bucket = width if width <= EXACT_SIZES else join_class(width), graphs.bucket(len(rows))
        if size is None or bucket is None:
            return None
        key = (self.kind, bucket, size, given.dim() == 3, every)
        num_pages = table_pages(stepper, self.cache)
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            kept: dict[Any, Any] = graphs._join_buffers
            buffers: RaggedBuffers | None = kept.get(key)
            if buffers is None or buffers.block_table.shape[1] < num_pages:
                if graphs._prompts.pop(key, None) is not None:
                    graphs._renew_pool()
                buffers = kept[key] = RaggedBuffers.make(bucket, size, num_pages, stepper)
            buffers.set(given, positions, slots, lengths, starts, self.cache.pool, rows, held)
            step: Any = partial(record, stepper, buffers, held, given.dim() == 3, every)
            found: Any = graphs._captured_prompt(key, stepper, step)
            if found is None:
                hidden, logits = step()
            else:
                found.graph.replay()
                graphs.counters["cuda_graphs: speculative runs replayed"] += 1
                hidden, logits = found.logits
        some = slice(len(rows))
        return hidden[some, size - width :], logits[some, -width:] if every else logits[some]

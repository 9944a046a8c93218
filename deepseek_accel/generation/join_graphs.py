"""A few tokens per row that join what a cache holds, also as CUDA graphs, one per rows and size class.

They meet the keys as the token of a decoding step does: latents are not expanded, pages are read in place. With S
queries of N + R numbers and T keys of rank C, expanding costs T C (N + V) products per head, and staying absorbed
S T (2 C - N - V) more, so that few queries are better off absorbed: up to C (N + V) / (2 C - N - V), 170 for DeepSeek.

Rows are filled up on the left, with copies of their first new token that see fewer keys and are written nowhere: the
queries of a graph are the row's last ones then, whatever their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..ops.key_mass import KeyScores
from ..ops.mla_attention import graph_splits
from ..ops.router import make_counters
from .lines import LatentAttention, Model
from .reach import Reach
from .step import Place, Stepper

CLASSES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Tokens per row."""
GRAPH_TOKENS = 1024
"""Of all rows. Beyond, the GPU is busy for longer than the host needs to launch."""
SCRATCH_BYTES = 1 << 30
"""What queries and results in the latent space may take."""


def joins(model: Model, rows: int, count: int) -> bool:
    """Whether `count` new tokens in each of `rows` rows meet the keys absorbed, rather than as a prompt's piece."""
    attention = model.layers[0].attention
    if count > CLASSES[-1]:
        return False
    if not isinstance(attention, LatentAttention):
        return True
    heads, nope, rank = attention.w_uk.shape
    expanded = nope + attention.w_uv.shape[1]
    # queries, and results as fp32 parts and merged
    scratch = heads * rank * (2 * attention.w_uk.element_size() + 4)
    return count * (2 * rank - expanded) <= rank * expanded and rows * count * scratch <= SCRATCH_BYTES


def join_class(count: int) -> int | None:
    """The smallest class that holds `count` tokens per row, or None."""
    return next((size for size in CLASSES if size >= count), None)


def table_pages(stepper: Stepper, cache: Any) -> int:
    """Pages of the longest context the model is made for, so that few calls need larger tables."""
    longest = getattr(stepper.attention.config, "max_position_embeddings", 4096)
    held = max((len(row) for row in cache.pool.table.rows), default=0)
    size = max(-(-longest // cache.page_size), 1)
    while size < held + 1:
        size *= 2
    return size


class AddressedPages(NamedTuple):
    """A layer's pages as a graph knows them: by an address that is read when the graph runs."""

    storage: torch.Tensor
    address: torch.Tensor
    fp8: str | None

    @property
    def watches(self) -> bool:
        return False

    def watch(self, query: torch.Tensor, keys: torch.Tensor, scale: float, causal: bool, mask: Any) -> None:
        raise NotImplementedError("a graph's own kernels watch")

    def key_scores(self) -> KeyScores:
        raise NotImplementedError("a graph's scores are in its reach")

    def gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("a graph reads pages in place")


def addressed(storages: list[torch.Tensor], addresses: torch.Tensor, fp8: str | None) -> list[AddressedPages]:
    """Of each layer; addresses [layers] int64."""
    return [AddressedPages(*pair, fp8) for pair in zip(storages, addresses.split(1), strict=True)]


@dataclass
class JoinBuffers:
    """What the graph of some rows and size class reads. Rows without tokens are idle: no keys, no experts."""

    tokens: torch.Tensor
    """[B, S] int64."""
    positions: torch.Tensor
    slots: torch.Tensor
    """[B, S] int64; -1 where a row is filled up."""
    lengths: torch.Tensor
    """[B] int32, the new tokens included."""
    starts: torch.Tensor
    block_table: torch.Tensor
    live: torch.Tensor
    """[1] int32: tokens, those filled up included, of rows that are not idle."""
    counters: torch.Tensor

    @classmethod
    def make(cls, rows: int, size: int, num_pages: int, device: torch.device) -> JoinBuffers:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            tokens=zeros(rows, size, dtype=torch.int64),
            positions=zeros(rows, size, dtype=torch.int64),
            slots=zeros(rows, size, dtype=torch.int64),
            lengths=zeros(rows),
            starts=zeros(rows),
            block_table=zeros(rows, num_pages),
            live=zeros(1),
            counters=make_counters(device),
        )

    def set(
        self, input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, pages: Any,
        starts: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """input_ids [B, S], positions [1 or B, S], slots [B * S]: the new tokens; pages: of any layer, with them."""
        batch, count = input_ids.shape
        size, table = self.tokens.shape[1], pages.pool.block_table()
        for buffer, given in ((self.tokens, input_ids), (self.positions, positions)):
            buffer[:batch, size - count :] = given
            buffer[:batch, : size - count] = given[:, :1]
        self.slots.fill_(-1)
        self.slots[:batch, size - count :] = slots.view(batch, count)
        self.lengths.zero_()
        self.lengths[:batch] = pages.length
        self.starts.zero_()
        if starts is not None:
            self.starts[:batch] = starts
        self.block_table[:batch, : table.shape[1]] = table
        self.live.fill_(batch * size)


def record(stepper: Stepper, buffers: JoinBuffers, addresses: torch.Tensor, held: list[Any]) -> torch.Tensor:
    """Run the buffers' tokens: run once to warm up, once more to be captured. Logits [B, vocabulary].

    addresses [layers] int64: where each layer's pages are. held: pages of each layer, for their shape and format.
    """
    rows, size = buffers.tokens.shape
    heads, kv_heads = stepper.num_heads
    reach = Reach(
        buffers.block_table,
        buffers.lengths,
        buffers.block_table.shape[1] * held[0].pool.page_size,
        causal=size > 1,
        starts=buffers.starts,
        num_splits=graph_splits(rows, heads, stepper.model.device, kv_heads, size, held[0].fp8),
    )
    rotation = stepper.rotation(stepper.model.embedding[:1, None], buffers.positions)
    place = Place((rows, size), rotation, buffers.slots.view(-1), reach, buffers.live, buffers.counters)
    pages = addressed([pages.storage for pages in held], addresses, held[0].fp8)
    return stepper.run(buffers.tokens, pages, [place] * len(pages))

"""Short prompts of one row as CUDA graphs, one per size class: the host's launches would take longer than the GPU.

A prompt runs in the smallest class that holds it. What is behind its end is computed and left out: attention is causal,
the router gives idle tokens no experts, and negative slots are written nowhere. Entries are made in a buffer of the
graph and copied from there, layer by layer, to wherever the cache's pages are when the graph runs.

Letters as in `prefill.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..ops.entry_copy import entry_copy
from ..ops.router import make_counters
from .prefill import ACTIVATION_BYTES, Span, layer_step
from .step import Stepper, head_step

CLASSES = (32, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
"""Tokens. H200, V2-Lite: 1,024 tokens keep the GPU busy for 15 ms and the host for 40; from about 3,000 on the host is
faster."""


class PromptBuffers(NamedTuple):
    """What the graphs of prompts read. They share it: one runs at a time."""

    tokens: torch.Tensor
    """[most] int64; behind the end any valid ids."""
    positions: torch.Tensor
    slots: torch.Tensor
    """[most] int64; -1 behind the end."""
    live: torch.Tensor
    """[1] int32: tokens of the prompt."""
    last: torch.Tensor
    """[1] int64: the index of its last token."""
    counters: torch.Tensor

    @classmethod
    def make(cls, device: torch.device) -> PromptBuffers:
        def zeros(count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        most = CLASSES[-1]
        return cls(zeros(most), zeros(most), zeros(most), zeros(1, torch.int32), zeros(1), make_counters(device))

    def set(self, input_ids: torch.Tensor, position_ids: torch.Tensor, slots: torch.Tensor) -> None:
        """input_ids, position_ids and slots of a prompt, all of one size."""
        count = input_ids.numel()
        self.tokens[:count].copy_(input_ids.view(-1))
        self.positions[:count].copy_(position_ids.view(-1))
        self.slots.fill_(-1)
        self.slots[:count].copy_(slots)
        self.live.fill_(count)
        self.last.fill_(count - 1)


class _Staged(NamedTuple):
    """A layer's entries until they are copied to its pages."""

    storage: torch.Tensor
    """[1, S, width], as `format` stores them."""
    format: Any

    @property
    def fp8(self) -> str | None:
        fp8: str | None = self.format.fp8
        return fp8


def size_class(count: int) -> int | None:
    """The smallest class that holds `count` tokens, or None."""
    return next((size for size in CLASSES if size >= count), None)


def record(stepper: Stepper, size: int, buffers: PromptBuffers, addresses: torch.Tensor, like: Any) -> torch.Tensor:
    """Run a prompt of class `size` on the buffers: run once to warm up, once more to be captured. Logits [1, V].

    addresses [layers] int64: where each layer's pages are. like: pages of one layer, for their width and format.
    """
    model = stepper.model
    tokens = buffers.tokens[:size]
    hidden = F.embedding(tokens, model.embedding)
    staging = like.storage.new_empty(1, size, like.storage.shape[-1])
    own = torch.arange(size, device=hidden.device)
    span = Span(
        shape=(1, size),
        first=0,
        slots=own,
        own=slice(0, size),
        earlier=[],
        rotation=stepper.rotation(hidden[None, :1], buffers.positions[None, :size]),
        starts=None,
        live=buffers.live,
        counters=buffers.counters,
    )
    for number, (layer, address) in enumerate(zip(model.layers, addresses.split(1), strict=True)):
        stepper.begin_layer(number)
        hidden = layer_step(layer, hidden, _Staged(staging, like.format), span, size, ACTIVATION_BYTES)
        entry_copy(staging[0], staging, buffers.slots[:size], address=address)
    return head_step(model, hidden.index_select(0, buffers.last))

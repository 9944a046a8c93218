"""Decoding steps as CUDA graphs over a cache that evicts: every layer has its own pages, lengths, positions and scores.

Once a layer's budget is full a new token takes the place of another, chosen on the device at the start of a step
(`ops/claim.py`) by what the attention kernels of earlier steps left (`ops/key_mass.py`). So the graph never changes.
What the cache knows of its tokens is in the run's buffers from `begin` to `finish`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..cache.eviction import DECAY
from ..ops.claim import claim
from ..ops.key_mass import KeyScores, ScoreGroup
from ..ops.mla_attention import graph_splits
from .graphs import Buffers, GraphRun
from .join_graphs import addressed
from .reach import Reach
from .sampling import Choice
from .step import Place

SCORES_BYTES = 1 << 25
"""Scores of all heads that wait for the launch they share with other layers': few enough to stay in the L2."""


@dataclass
class EvictingBuffers(Buffers):
    """L layers, B rows, W pages, R = W * page size entries. `lengths` and `slots` of `Buffers` are not used."""

    layer_tables: torch.Tensor
    """[L, B, W] int32."""
    layer_slots: torch.Tensor
    """[L, B] int64."""
    held: torch.Tensor
    """[L, B] int32."""
    seen: torch.Tensor
    """[L, B] int32."""
    limits: torch.Tensor
    """[L] int32."""
    protected: torch.Tensor
    """[L] int32."""
    token_positions: torch.Tensor
    """[L, B, R] int32."""
    scores: torch.Tensor
    """[L, B, R] fp32."""

    @classmethod
    def make_for(cls, layers: int, batch: int, pages: int, page_size: int, device: torch.device) -> EvictingBuffers:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            **vars(Buffers.make(batch, pages, device)),
            layer_tables=zeros(layers, batch, pages),
            layer_slots=zeros(layers, batch, dtype=torch.int64),
            held=zeros(layers, batch),
            seen=zeros(layers, batch),
            limits=zeros(layers),
            protected=zeros(layers),
            token_positions=zeros(layers, batch, pages * page_size),
            scores=zeros(layers, batch, pages * page_size, dtype=torch.float32),
        )


class EvictingRun(GraphRun):
    """One `generate` on the graphs of its bucket and kind of policy, without padding."""

    buffers: EvictingBuffers

    def _key(self) -> Any:
        return self.bucket, self.cache.policy.scores, self.cache.policy.sinks

    def _make_buffers(self, num_pages: int, device: torch.device) -> Buffers:
        layers = len(self.stepper.model.layers)
        return EvictingBuffers.make_for(layers, self.bucket, num_pages, self.cache.page_size, device)

    def _most_pages(self) -> int:
        """Pages of the largest budget, or more, so that few calls need larger tables."""
        most = max(self.cache.budgets())
        return 1 << max(-(-most // self.cache.page_size) - 1, 0).bit_length()

    def begin(
        self, tokens: torch.Tensor, positions: torch.Tensor, unfinished: torch.Tensor, eos: list[int], pad: torch.Tensor
    ) -> None:
        self._versions: list[Any] = [None] * len(self.stepper.model.layers)
        self.launched = 0
        buffers, batch = self.buffers, self.batch
        for layer, kept in enumerate(self.cache.kept):
            buffers.held[layer].zero_()
            buffers.held[layer, :batch] = kept.held
            buffers.seen[layer] = kept.seen
            buffers.token_positions[layer, :batch, : kept.held].copy_(kept.positions[:, : kept.held])
            buffers.scores[layer, :batch, : kept.held].copy_(kept.scores[:, : kept.held])
        budgets = self.cache.budgets()
        buffers.limits.copy_(torch.tensor(budgets, dtype=torch.int32))
        protected = [self.cache.policy.protected(budget) for budget in budgets]
        buffers.protected.copy_(torch.tensor(protected, dtype=torch.int32))
        super().begin(tokens, positions, unfinished, eos, pad)

    def _set_pages(self) -> None:
        changed = False
        for layer, kept in enumerate(self.cache.kept):
            if self._versions[layer] != kept.pool.table.version:
                table = kept.pool.block_table()
                self.buffers.layer_tables[layer, : self.batch, : table.shape[1]].copy_(table)
                self._versions[layer], changed = kept.pool.table.version, True
        if changed:
            self._storages = [kept.pool.storages[kept.layer] for kept in self.cache.kept]
            assert self.graphs.addresses is not None
            self.graphs.addresses.copy_(torch.tensor([storage.data_ptr() for storage in self._storages]))

    def step(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().step(tokens)
        self.launched += 1
        return logits

    def finish(self) -> None:
        """Give what the steps made of the cache's tokens back to it."""
        steps, self.launched = getattr(self, "launched", 0), 0
        if steps:
            for layer, kept in enumerate(self.cache.kept):
                buffers, batch = self.buffers, self.batch
                kept.follow(steps, buffers.token_positions[layer, :batch], buffers.scores[layer, :batch])

    def _score_groups(self, heads: int) -> list[ScoreGroup]:
        """The layers in order, as many together as leave their scores in `SCORES_BYTES`."""
        layers, batch, room = self.buffers.scores.shape
        size = min(layers, max(1, SCORES_BYTES // (4 * batch * heads * room)))
        pairs = zip(self.buffers.scores.split(size), self.buffers.held.split(size), strict=True)
        return [ScoreGroup(*pair) for pair in pairs]

    def record(self, choice: Choice | None) -> torch.Tensor:
        buffers, stepper, cache = self.buffers, self.stepper, self.cache
        model, policy = stepper.model, cache.policy
        claim(
            buffers.scores,
            buffers.token_positions,
            buffers.held,
            buffers.seen,
            buffers.limits,
            buffers.protected,
            buffers.live,
            buffers.layer_tables,
            cache.page_size,
            policy.sinks,
            buffers.first_positions,
            buffers.layer_slots,
            buffers.positions,
        )
        rotation = stepper.rotation(model.embedding[:1, None], buffers.positions.unsqueeze(1))
        heads, kv_heads = stepper.num_heads
        splits = graph_splits(self.bucket, heads, model.device, kv_heads, fp8=cache.fp8)
        groups = self._score_groups(heads) if policy.scores is not None else []
        places = []
        for index in range(len(model.layers)):
            watch = None
            if groups:
                group = groups[index // len(groups[0].scores)]
                watch = KeyScores(buffers.scores[index], DECAY, policy.scores == "entropy", buffers.live, group)
            reach = Reach(
                buffers.layer_tables[index],
                buffers.held[index],
                buffers.scores.shape[2],
                causal=False,
                num_splits=splits,
                watch=watch,
            )
            slots = buffers.layer_slots[index]
            places.append(Place((self.bucket, 1), rotation, slots, reach, buffers.live, buffers.counters))
        assert self.graphs.addresses is not None
        pages = addressed(self._storages, self.graphs.addresses, cache.fp8)
        return self.choose(stepper.run(buffers.tokens.unsqueeze(1), pages, places), choice)

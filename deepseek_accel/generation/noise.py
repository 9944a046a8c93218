"""The random numbers of sampled tokens, by the place of the token, so that a draft can use those of the target.

`sampling.draw` picks the largest p / e with e exponentially distributed. A draft that picks with its own p and the same
e guesses what the target will pick; the target's pick does not depend on the guess. So the tokens are those of plain
sampling with the same seed, whatever the draft is: its distribution is the target's, exactly. Two distributions of
total variation distance d agree with probability at least (1 - d) / (1 + d) (Daliri, Musco, Suresh, "Coupling without
communication and drafter-invariant speculative decoding", arXiv 2408.07978); rejection sampling reaches 1 - d, but its
output depends on the draft.
"""

from __future__ import annotations

from typing import Any

import torch

NOISE_BYTES = 1 << 28
"""What the numbers between the row that is furthest behind and the one furthest ahead may take."""


class Noise:
    """Exponential numbers [B, vocabulary] of each new token's place, drawn in the order of the places."""

    def __init__(self, batch: int, vocabulary: int, device: torch.device) -> None:
        self._shape, self._device = (batch, vocabulary), device
        self._drawn: dict[int, torch.Tensor] = {}
        self._states: dict[int, Any] = {0: self._state()}
        self._next = 0

    @property
    def most_places(self) -> int:
        """So many places may be held at a time."""
        return max(64, NOISE_BYTES // (4 * self._shape[0] * self._shape[1]))

    def at(self, place: int) -> torch.Tensor:
        """[B, vocabulary] of the new token number `place`."""
        self._draw(place + 1)
        return self._drawn[place]

    def _draw(self, places: int) -> None:
        while self._next < places:
            self._drawn[self._next] = torch.empty(self._shape, device=self._device).exponential_(1)
            self._next += 1
            self._states[self._next] = self._state()

    def forget(self, before: int) -> None:
        """No place before this one will be asked for again."""
        for place in [place for place in self._drawn if place < before]:
            del self._drawn[place], self._states[place]

    def rewind(self, places: int) -> None:
        """Leave torch's generator as if only the first `places` had been drawn: as plain sampling leaves it."""
        self._draw(places)
        self._restore(self._states[places])

    def _state(self) -> Any:
        if self._device.type != "cuda":
            return torch.random.get_rng_state()
        return torch.cuda.default_generators[self._index].get_offset()

    def _restore(self, state: Any) -> None:
        if self._device.type != "cuda":
            torch.random.set_rng_state(state)
        else:
            torch.cuda.default_generators[self._index].set_offset(state)

    @property
    def _index(self) -> int:
        return torch.cuda.current_device() if self._device.index is None else self._device.index

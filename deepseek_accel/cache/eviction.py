"""Which tokens a cache may forget: policies, and how a budget is divided among layers.

A new policy is one frozen dataclass with the fields and methods of `Policy`, here or anywhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from ..errors import PlanError

DECAY = 0.997
"""What is left of a score after each query."""
FLOOR = 8
"""A layer gets at least 1 / FLOOR of the mean budget: what few queries did not look at may be looked at yet."""


SCORES = (None, "mass", "entropy")
"""What `Policy.scores` may be."""


@runtime_checkable
class Policy(Protocol):
    """What the cache asks of a policy. Tokens are counted per sequence and layer."""

    sinks: int
    """The first so many tokens of a sequence are never forgotten."""

    @property
    def budget(self) -> int:
        """Tokens held, the mean over layers: the sum over layers is never more than this times their number."""

    @property
    def scores(self) -> str | None:
        """What a key is scored by: "mass", the attention it receives; "entropy", what it adds to the entropy of the
        attention it takes part in; None: the oldest goes first, and no attention is watched."""

    def protected(self, budget: int) -> int:
        """How many of the newest tokens a layer with `budget` tokens never forgets."""

    def divide(self, profiles: torch.Tensor | None, page_size: int, num_layers: int) -> list[int]:
        """Tokens each layer may hold. profiles [layers, bins]: see `divide_by_reach`; None if nothing was watched."""


@dataclass(frozen=True)
class Window:
    """The first `sinks` tokens and the newest `recent` ones, in every layer (StreamingLLM, arXiv 2309.17453).

    Tokens keep their true positions.
    """

    sinks: int = 4
    recent: int = 1024
    scores: ClassVar[None] = None

    def __post_init__(self) -> None:
        _check(self, sinks=0, recent=1)

    @property
    def budget(self) -> int:
        return self.sinks + self.recent

    def protected(self, budget: int) -> int:
        return self.recent

    def divide(self, profiles: torch.Tensor | None, page_size: int, num_layers: int) -> list[int]:
        return [self.budget] * num_layers


@dataclass(frozen=True)
class _Scored:
    """The mean over layers is `budget`; how much of it a layer gets follows from how far back it looks.

    Of a layer's tokens the first `sinks` and the newest are kept, at least `recent` and at least RECENT_SHARE of what
    the layer holds; of the rest those with the highest scores.
    """

    budget: int = 1024
    sinks: int = 4
    recent: int = 64
    RECENT_SHARE: ClassVar[float] = 0.875

    def __post_init__(self) -> None:
        _check(self, budget=1, sinks=0, recent=1)
        if self.budget < self.sinks + self.recent:
            raise PlanError(
                f"a budget of {self.budget} tokens does not hold {self.sinks} sinks and {self.recent} recent tokens; "
                f"give at least budget={self.sinks + self.recent}"
            )

    def protected(self, budget: int) -> int:
        return max(self.recent, min(int(self.RECENT_SHARE * budget), budget - self.sinks))

    def divide(self, profiles: torch.Tensor | None, page_size: int, num_layers: int) -> list[int]:
        if profiles is None:
            return [self.budget] * num_layers
        least = max(self.sinks + self.recent, self.budget // FLOOR)
        return divide_by_reach(profiles, self.budget, page_size, least)


@dataclass(frozen=True)
class TopAttention(_Scored):
    """Keys that received the most attention: the mean over heads, summed over the last queries of a prompt and over all
    decoded ones (H2O, arXiv 2306.14048; observation window as in SnapKV, arXiv 2404.14469)."""

    scores: ClassVar[str] = "mass"


@dataclass(frozen=True)
class Entropy(_Scored):
    """Keys that add the most to the entropy of the attention they take part in: the sum of -p log p over queries, the
    mean over heads, where `TopAttention` sums p."""

    scores: ClassVar[str] = "entropy"


def _check(policy: Any, **least: int) -> None:
    for name, smallest in least.items():
        value = getattr(policy, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise PlanError(f"{name} of {type(policy).__name__} must be an integer >= {smallest}, got {value!r}")


POLICIES: dict[str, type] = {"window": Window, "top_attention": TopAttention, "entropy": Entropy}
"""By their names in a configuration file: `{"top_attention": {"budget": 2048}}`."""


def to_policy(eviction: Any) -> Policy | None:
    """None, a policy, or the one that a mapping of one name to its fields describes. Raises PlanError otherwise."""
    if eviction is None:
        return None
    if isinstance(eviction, Policy) and not isinstance(eviction, type):
        if eviction.scores not in SCORES:
            kinds = ", ".join(map(repr, SCORES))
            raise PlanError(f"scores of {type(eviction).__name__} must be one of {kinds}; got {eviction.scores!r}")
        return eviction
    if isinstance(eviction, Mapping):
        fields = next(iter(eviction.values()), None)
        if len(eviction) != 1 or not isinstance(fields, Mapping) or next(iter(eviction)) not in POLICIES:
            raise PlanError(
                f"eviction as a mapping names one policy ({', '.join(POLICIES)}) and its fields, such as "
                f"{{'top_attention': {{'budget': 1024}}}}; got {dict(eviction)!r}"
            )
        policy = POLICIES[next(iter(eviction))]
        known = [field.name for field in dataclasses.fields(policy)]
        if extra := sorted(set(fields) - set(known)):
            raise PlanError(f"{policy.__name__} has no {', '.join(extra)}; it has {', '.join(known)}")
        made: Policy = policy(**fields)
        return made
    given = f"{eviction.__name__} without brackets" if isinstance(eviction, type) else repr(eviction)
    raise PlanError(
        f"eviction must be None or a policy of deepseek_accel.cache, Window(...), TopAttention(...) or Entropy(...); "
        f"got {given}"
    )


def spelled(policy: Policy | None) -> Any:
    """What `to_policy` reads: a mapping for the policies of this file, anything else as it is."""
    name = next((name for name, known in POLICIES.items() if type(policy) is known), None)
    return policy if name is None else {name: dataclasses.asdict(policy)}  # type: ignore[call-overload]


def divide_by_reach(profiles: torch.Tensor, budget: int, page_size: int, least: int) -> list[int]:
    """Tokens per layer, in whole pages, so that the attention that falls beyond them is least, summed over layers.

    profiles [layers, bins]: attention mass by distance between query and key, in bins of `page_size` tokens, the
    nearest first. The sum over layers is at most budget x layers. A layer gets `least` tokens at any rate.

    Mass is made to fall with distance first: a bin counts as much as the largest one behind it, since a page can only
    be reached by holding those before it. Then the largest bins of all layers are taken together. If there is room for
    all bins, or for no more than `least` in each layer, every layer gets the same.
    """
    num_layers, bins = profiles.shape
    total, floor = num_layers * budget // page_size, -(-least // page_size)
    if total <= num_layers * floor or total >= num_layers * bins or bins <= floor:
        return [budget] * num_layers
    falling = profiles.double().flip(-1).cummax(-1).values.flip(-1)
    falling[:, :floor] = torch.inf
    # ties, as of empty bins, go to the nearest, and then to the first layer: the result is the same on every device
    order = sorted((-value, bin, layer) for layer, row in enumerate(falling.tolist()) for bin, value in enumerate(row))
    chosen = [0] * num_layers
    for _, _, layer in order[:total]:
        chosen[layer] += 1
    return [count * page_size for count in chosen]


def reach_profile(mass: torch.Tensor, ages: torch.Tensor, page_size: int, bins: int) -> torch.Tensor:
    """[bins] fp64: attention mass by distance. mass [B, T]; ages [B, T]: tokens from a key to the last query."""
    where = (ages.clamp_min(0) // page_size).clamp_max(bins - 1).flatten().long()
    # whole numbers, whose sum does not depend on the order in which a GPU adds them
    parts = (mass.double().flatten() * 2**40).round().long()
    return parts.new_zeros(bins).index_add_(0, where, parts).double() / 2**40

"""Text or tokens that an AWQ calibration is made on when the model is optimized."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..errors import PlanError
from .awq import calibrate_awq, token_tensors
from .calibration import AwqCalibration


class Samples:
    """Texts, for the model's own tokenizer, or token tensors [1, T]. Equal if all of them are."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = tuple(items)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Samples)
            and len(self.items) == len(other.items)
            and all(map(_is_same, self.items, other.items))
        )

    def __hash__(self) -> int:
        return hash(len(self.items))

    def __repr__(self) -> str:
        return f"{len(self.items)} samples"

    def tokens(self, model: Any) -> list[torch.Tensor]:
        """[1, T] each. Raises PlanError if an item is neither a text nor such a tensor, or no tokenizer is found."""
        texts = any(isinstance(item, str) for item in self.items)
        return token_tensors(self.items, _tokenizer_of(model) if texts else None)

    def calibrate(self, model: Any, group_size: int, targets: Collection[str]) -> AwqCalibration:
        return calibrate_awq(model, self.tokens(model), group_size=group_size, targets=targets)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and bool(one == other)


def _tokenizer_of(model: Any) -> Any:
    """The tokenizer beside the checkpoint that the model was loaded from."""
    from transformers import AutoTokenizer

    where = getattr(model.config, "_name_or_path", "")
    try:
        if not where:
            raise OSError("the model was not loaded from a checkpoint")
        return AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError, KeyError) as error:
        raise PlanError(
            "calibration holds texts, and the model's tokenizer is not to be found "
            f"({(str(error).splitlines() or [type(error).__name__])[0]}). Pass token tensors [1, T], or what "
            "`calibrate_awq(model, texts, tokenizer=tokenizer)` returns."
        ) from error

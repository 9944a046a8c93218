"""Calibration text from files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import PlanError
from .awq import LENGTH


def windows(files: Sequence[str | os.PathLike[str]], tokenizer: Any, count: int) -> list[Tensor]:
    """At most `count` pieces [1, T] of up to 1,024 tokens, spread evenly over the files. No piece spans two files.

    Raises PlanError if a file cannot be read, none holds a token, or `count` is below 1.
    """
    if count < 1:
        raise PlanError(f"samples must be at least 1, got {count}")
    pieces: list[Tensor] = []
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read {str(file)!r} as text: {error}") from error
        tokens = torch.tensor(tokenizer(text, verbose=False).input_ids, dtype=torch.long)
        pieces += [piece[None] for piece in tokens.split(LENGTH) if len(piece)]
    if not pieces:
        raise PlanError("the text files hold no token")
    step = max(1.0, len(pieces) / count)
    return [pieces[int(i * step)] for i in range(min(count, len(pieces)))]

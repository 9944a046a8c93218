"""The bundled model: a small trained DeepSeek-V3, its draft model, and held-out text to measure quality on.

`examples/train_tiny_deepseek.py` made them; docs/models.md says what they are and what was measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

_DATA = Path(__file__).parent / "data"
TINY, TINY_DRAFT = "deepseek-tiny", "deepseek-tiny-draft"


def path(name: str = TINY) -> Path:
    """The checkpoint directory of a bundled model, for `from_pretrained`. Raises ValueError on another name."""
    if name not in (TINY, TINY_DRAFT):
        raise ValueError(f"no bundled model {name!r}; there are {TINY!r} and {TINY_DRAFT!r}")
    return _DATA / name


@contextmanager
def no_mtp_warning() -> Iterator[None]:
    """The checkpoint stores the MTP layer as published ones do; transformers has no module for it and would warn."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def require_tensors(directory: Any, cls: type, info: dict[str, Any]) -> None:
    """Raise CheckpointError if parameters of a model had no tensors: transformers draws them at random and goes on.

    info: what `from_pretrained(..., output_loading_info=True)` gives beside the model, a `cls`.
    """
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"{str(directory)!r} has no tensors for {len(missing)} parameters of {cls.__name__}, such as {missing[0]}. "
            "Is every file of the checkpoint there?"
        )


def load_tiny(name: str = TINY, *, dtype: Any = "auto", device: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    """(model, tokenizer) of a bundled model, through transformers' own `from_pretrained`, in eval mode.

    name: "deepseek-tiny" (DeepSeek-V3 architecture, 9.2 M parameters) or "deepseek-tiny-draft" (Llama, 0.65 M).
    dtype: as in `from_pretrained`; "auto" is bf16, as stored. device: where to put the model; None is the CPU.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = path(name)
    with no_mtp_warning():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **kwargs).eval()
        tokenizer = AutoTokenizer.from_pretrained(directory)
    return (model if device is None else model.to(device)), tokenizer


def heldout_documents() -> list[str]:
    """Source files the bundled model never saw, from the CPython standard library (licence beside the file)."""
    return (_DATA / "heldout.txt").read_text(encoding="utf-8").split("\n\f\n")

"""Build the byte-level BPE tokenizer and the token files that train_tiny_deepseek.py reads.

The text is Python source: the standard library of the interpreter that runs this, then any package folders named on
the command line (name permissively licensed ones only). Every 50th file of the standard library is held out.

    python examples/build_corpus.py OUT_DIR [PACKAGE_DIR ...]

OUT_DIR receives bpe.json, tokenizer/ (for `AutoTokenizer`), train.npy and held.npy (uint16 token ids) and held.txt.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

SKIPPED = ("site-packages", "lib2to3", "idlelib", "cjkencodings", "__pycache__")
"""Parts of a path: installed packages, tests of other encodings, and code that is nearly all tables."""
SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|pad|>"]
BEGIN, END = 0, 1
VOCABULARY = 2048
HELD_OUT_EVERY = 50


def sources(root: Path, skipped: tuple[str, ...]) -> Iterator[str]:
    """Texts of the Python files below `root`, in order of path: ASCII only, between 200 and 200,000 characters."""
    for path in sorted(root.rglob("*.py")):
        if any(part in path.as_posix() for part in skipped):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if 200 < len(text) < 200_000 and text.isascii():
            yield text


def collect(package_dirs: list[Path], budget: int) -> tuple[list[str], list[str]]:
    """(training texts of at most `budget` characters, held-out texts). The order is shuffled with a fixed seed."""
    standard_library = Path(sysconfig.get_path("stdlib"))
    files = list(sources(standard_library, SKIPPED))
    held = files[::HELD_OUT_EVERY]
    candidates = [text for index, text in enumerate(files) if index % HELD_OUT_EVERY]
    for directory in package_dirs:
        is_library = directory == standard_library
        candidates += sources(directory, SKIPPED if is_library else SKIPPED[1:])  # packages live in site-packages
    random.Random(0).shuffle(candidates)
    kept: list[str] = []
    size = 0
    for text in candidates:
        if size + len(text) <= budget:
            kept.append(text)
            size += len(text)
    held_size = sum(map(len, held))
    print(
        f"{len(files)} stdlib files, {len(kept)} training files, {size / 1e6:.1f} MB, held-out {held_size / 1e6:.2f} MB"
    )
    return kept, held


def train_tokenizer(texts: list[str], out: Path) -> ByteLevelBPETokenizer:
    """Train the tokenizer on `texts` and save it both raw and as transformers loads it."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, min_frequency=2, special_tokens=SPECIAL_TOKENS)
    tokenizer.save(str(out / "bpe.json"))
    begin, end, pad = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(out / "bpe.json"),
        bos_token=begin,
        eos_token=end,
        pad_token=pad,
        padding_side="left",
        model_max_length=4096,
    )
    fast.save_pretrained(out / "tokenizer")
    return tokenizer


def encode(tokenizer: ByteLevelBPETokenizer, texts: list[str]) -> np.ndarray:
    """All texts in one row of uint16 token ids, each between a begin and an end token."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids += [BEGIN, *encoding.ids, END]
    return np.array(ids, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write to; made if it is missing")
    parser.add_argument("packages", type=Path, nargs="*", help="folders with more Python source to train on")
    parser.add_argument("--megabytes", type=float, default=56, help="most training text, in MB (default: %(default)s)")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    kept, held = collect(arguments.packages, int(arguments.megabytes * 1e6))
    tokenizer = train_tokenizer(kept, out)
    counts = {}
    for name, texts in (("train", kept), ("held", held)):
        tokens = encode(tokenizer, texts)
        np.save(out / f"{name}.npy", tokens)
        counts[name] = len(tokens)
    (out / "held.txt").write_text("\n\x00".join(held), encoding="utf-8")
    print("train tokens", counts["train"], "held tokens", counts["held"])


if __name__ == "__main__":
    main()

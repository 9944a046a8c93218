"""A paged cache made by hand: prefill in chunks, take tokens back, continue one prompt four ways.

Transformers' own DynamicCache holds latents too, so for one sequence both hold about the same: pages round the length
up to whole pages. The pages pay when tokens are taken back and when sequences share a prompt.

    python examples/long_context_cache.py
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from deepseek_accel import optimize
from deepseek_accel.cache import paged_cache
from deepseek_accel.models import heldout_documents, load_tiny
from deepseek_accel.versions import cache_argument

PROMPT, CHUNK, TAKEN_BACK, COPIES = 2000, 256, 500, 4


@torch.no_grad()
def prefill(model: Any, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits of the last token [B, vocabulary], `CHUNK` tokens at a time."""
    for chunk in tokens.split(CHUNK, dim=1):
        logits = model(chunk, logits_to_keep=1, **{cache_argument(): cache}).logits
    return logits[:, -1]


def dynamic_bytes(cache: DynamicCache) -> int:
    """Bytes of the keys and values, here latents and rotary keys, that a stock cache holds."""
    return sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))


def show(what: str, paged: Any, dynamic: DynamicCache) -> None:
    print(f"{what:<24} paged {paged.bytes_held():>9,} bytes, DynamicCache {dynamic_bytes(dynamic):>9,} bytes")


def main() -> None:
    model, tokenizer = load_tiny(dtype=torch.float32)
    text = "".join(heldout_documents())
    tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=PROMPT).input_ids
    dynamic = DynamicCache(config=model.config)
    expected = prefill(model, tokens, dynamic)

    optimize(model)
    paged = paged_cache(model, page_size=64)
    actual = prefill(model, tokens, paged)
    print(f"{tokens.shape[1]} tokens in chunks of {CHUNK}, {paged.pages_in_use} pages of {paged.page_size}")
    print("next token equal:", torch.equal(actual.argmax(-1), expected.argmax(-1)))
    show("after the prompt:", paged, dynamic)

    paged.crop(-TAKEN_BACK)
    dynamic.crop(-TAKEN_BACK)
    show(f"{TAKEN_BACK} tokens taken back:", paged, dynamic)
    again = prefill(model, tokens[:, -TAKEN_BACK:], paged)
    print("same next token after writing them again:", torch.equal(again.argmax(-1), expected.argmax(-1)))
    restored = prefill(model, tokens[:, -TAKEN_BACK:], dynamic)
    assert torch.equal(restored.argmax(-1), expected.argmax(-1))

    paged.batch_repeat_interleave(COPIES)
    dynamic.batch_repeat_interleave(COPIES)
    show(f"{COPIES} rows of one prompt:", paged, dynamic)
    firsts = actual.topk(COPIES).indices.view(COPIES, 1)  # each row goes on with another token
    ours = prefill(model, firsts, paged)
    theirs = prefill(model, firsts, dynamic)
    show("each row one token more:", paged, dynamic)
    print("next tokens of the rows equal:", torch.equal(ours.argmax(-1), theirs.argmax(-1)))


if __name__ == "__main__":
    main()

"""Many prompts through one optimized model: continuous batching in this process, no server.

Requests come and go while others run, each with its own sampling, seed and end; one that fails does not stop the
others. In fp32 greedy tokens are those of `model.generate`, one prompt at a time.

    python examples/batched_generation.py
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import torch

from deepseek_accel import Attention, FusedExperts, FusedLayers, KVCache, optimize
from deepseek_accel.engine import Engine
from deepseek_accel.models import heldout_documents, load_tiny

PROMPTS, NEW_TOKENS = 24, 32


def prompts(tokenizer: Any) -> list[list[int]]:
    """Token ids of `PROMPTS` beginnings of held-out code, from 32 tokens up, each longer than the one before."""
    tokens = [token for text in heldout_documents() for token in tokenizer(text, verbose=False).input_ids]
    return [tokens[500 * i : 500 * i + 32 + 8 * i] for i in range(PROMPTS)]


def one_by_one(model: Any, rows: list[list[int]]) -> list[list[int]]:
    """What `model.generate` makes of each prompt alone."""
    out = []
    for row in rows:
        ids = torch.tensor([row])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        out.append(whole[0, len(row) :].tolist())
    return out


async def two_at_once(engine: Engine, rows: list[list[int]]) -> list[str]:
    """From asyncio: each call is a request of its own, and they share steps."""
    calls = (engine.agenerate(row, max_new_tokens=NEW_TOKENS, do_sample=False) for row in rows)
    return [result.text for result in await asyncio.gather(*calls)]


def main() -> None:
    model, tokenizer = load_tiny(dtype=torch.float32)
    optimize(model, [Attention(), FusedExperts(), FusedLayers(), KVCache()])
    rows = prompts(tokenizer)
    start = time.perf_counter()
    expected = one_by_one(model, rows)
    alone = time.perf_counter() - start

    with Engine(model, tokenizer, max_batch=16) as engine:
        start = time.perf_counter()
        results = engine.generate(rows, max_new_tokens=NEW_TOKENS, do_sample=False)
        together = time.perf_counter() - start
        print("tokens equal:", [result.tokens for result in results] == expected)
        count = sum(len(result.tokens) for result in results)
        print(f"{count} tokens: {count / alone:.0f} a second one prompt at a time, {count / together:.0f} together")
        waits = sorted(result.times.first_token - result.times.submitted for result in results)
        print(f"first token after {waits[0] * 1000:.0f} to {waits[-1] * 1000:.0f} ms")

        print("pieces:", end="")
        for piece in engine.stream("class Parser:\n", max_new_tokens=16, do_sample=False):
            print("", repr(piece), end="", flush=True)
        print()

        settings = [{"temperature": 0.5}, {"temperature": 1.0, "top_p": 0.9}, {"num_beams": 4}]
        drawn = engine.generate([rows[0]] * 3, seeds=[1, 2, 3], options=settings, max_new_tokens=16, do_sample=True)
        for setting, result in zip(settings, drawn, strict=True):
            print(setting, repr(result.text) if result.error is None else type(result.error).__name__)
        again = engine.submit(rows[0], seed=1, temperature=0.5, max_new_tokens=16, do_sample=True)
        print("same seed, same tokens:", again.result().tokens == drawn[0].tokens)

        long = engine.submit(rows[0], max_new_tokens=1000, min_new_tokens=1000)
        next(iter(long))
        long.cancel()
        print("cancelled:", long.result().finish_reason == "cancelled")

        print("asyncio:", len(asyncio.run(two_at_once(engine, rows[:2]))), "texts")
        facts = engine.facts()
        print("still running:", facts["running"], "waiting:", facts["waiting"])


if __name__ == "__main__":
    main()

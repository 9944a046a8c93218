"""Class graph-growth: torch.compile around an optimized model must not compile anew for every token."""

import copy
from collections import Counter

import pytest
import torch
from support import config, prompt, stock
from transformers import DynamicCache, StaticCache

from deepseek_accel import optimize
from deepseek_accel.testing import relative_error
from deepseek_accel.versions import cache_argument

CACHE = cache_argument()
STEPS = 12
EXTRA_COMPILES = 8
"""More compilations than the unpatched model takes that are put up with; they come with the first calls, not later."""


def decode(model, make_cache):
    """(compilations after each call, logits of every call): a prompt and single tokens, for two prompt lengths."""
    counts, compiled = [], Counter()

    def backend(graph, inputs):
        compiled["all"] += 1
        return graph.forward

    torch._dynamo.reset()
    forward = torch.compile(model.forward, backend=backend)
    logits = []
    with torch.no_grad():
        for length in (23, 9):
            cache, ids = make_cache(model), prompt(length)
            for chunk in (ids, *prompt(STEPS, seed=1).split(1, 1)):
                logits.append(forward(chunk, use_cache=True, **{CACHE: cache}).logits[:, -1])
                counts.append(compiled["all"])
    torch._dynamo.reset()
    return counts, torch.cat(logits)


CACHES = {
    "static": lambda model: StaticCache(config=model.config, max_cache_len=64),
    "dynamic": lambda model: DynamicCache(config=model.config),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_G04_compilations_stop(model_type, kind):
    """A number that changes with every step, the cache's length say, is compiled in."""
    theirs = stock(model_type)
    ours = optimize(copy.deepcopy(theirs), config())
    expected_counts, expected = decode(theirs, CACHES[kind])
    counts, logits = decode(ours, CACHES[kind])
    first, again = counts[: STEPS + 1], counts[STEPS + 1 :]
    assert first[4:] == first[4:5] * len(first[4:]), f"still compiling after step 3: {first}"
    assert again[4:] == again[4:5] * len(again[4:]), f"still compiling after step 3 of another prompt: {again}"
    assert counts[-1] <= expected_counts[-1] + EXTRA_COMPILES, (counts, expected_counts)
    assert relative_error(logits, expected) <= 1e-4

"""Greedy generation of a fixed length through `model.generate`: untimed with logits, or timed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..versions import cache_argument
from .accuracy import Sample, furthest_choice
from .measure import seconds


@contextlib.contextmanager
def endless(model: Any) -> Iterator[None]:
    """Generation that only the token count ends, so that every run has the same length."""
    config = model.generation_config
    before = config.eos_token_id
    config.eos_token_id = None
    try:
        yield
    finally:
        config.eos_token_id = before


def generate(model: Any, prompt: torch.Tensor, new_tokens: int, **options: Any) -> Any:
    """Greedy continuation of prompt [B, S], always `new_tokens` long."""
    mask = torch.ones_like(prompt)
    with endless(model), torch.no_grad():
        return model.generate(prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **options)


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds, ours or one of transformers'."""
    if hasattr(cache, "bytes_held"):
        return int(cache.bytes_held())
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors)


def sample(model: Any, prompt: torch.Tensor, new_tokens: int) -> Sample:
    """A continuation with its logits, untimed."""
    output = generate(model, prompt, new_tokens, return_dict_in_generate=True, output_logits=True)
    logits = torch.stack([step.float().cpu() for step in output.logits], 1)
    return Sample(output.sequences[:, prompt.shape[1] :].cpu(), logits, cache_bytes(output[cache_argument()]))


def furthest(model: Any, prompt: torch.Tensor, tokens: list[int]) -> float:
    """`furthest_choice` of N tokens behind prompt [1, S], by the logits of one pass of `model` over all of them."""
    new = torch.tensor(tokens)
    ids = torch.cat((prompt, new[None, :-1].to(prompt.device)), 1)
    with torch.no_grad():
        output = model(input_ids=ids, logits_to_keep=len(new), use_cache=False)
    return furthest_choice(new, output.logits[0].float().cpu())


class Clock:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, value: Any) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        pass


def timed(model: Any, prompt: torch.Tensor, new_tokens: int, **options: Any) -> tuple[float, float, Any]:
    """Seconds to the first token, seconds that `new_tokens` - 1 further ones take, and what a call of them returns.

    On a GPU these are the times of a call of one token, and the difference of two calls that go on from its cache, of
    `new_tokens` and of one: reading the clock after every token would make the host wait for each, and the time of a
    prompt varies more than all further tokens take. On a CPU both are read within one run.
    """
    if prompt.device.type == "cpu":
        clock, start = Clock(), time.perf_counter()
        output = generate(model, prompt, new_tokens, streamer=clock, **options)
        _, first, *_, last = clock.moments  # the prompt itself is streamed before the tokens
        return first - start, last - first, output
    whole = generate(model, prompt, new_tokens, **options)
    options["return_dict_in_generate"] = True
    first, output = seconds(lambda: generate(model, prompt, 1, **options), prompt.device)
    short, output = go_on(model, output, 1, **options)
    long, output = go_on(model, output, new_tokens, **options)
    return first, long - short, whole


def go_on(model: Any, output: Any, new_tokens: int, **options: Any) -> tuple[float, Any]:
    """Seconds of a call that continues what an earlier one returned, from its cache, and what it returns."""
    cache, ids = {cache_argument(): output[cache_argument()]}, output.sequences
    options["return_dict_in_generate"] = True
    return seconds(lambda: generate(model, ids, new_tokens, **options, **cache), ids.device)

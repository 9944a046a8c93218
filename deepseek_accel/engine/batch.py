"""`generate_batch` in transformers' form: its arguments, its ids of requests and its output objects."""

from __future__ import annotations

import copy
from typing import Any

from ..errors import AccelError
from .engine import Engine, check_prompts, token_ids
from .requests import Result


def generate_batch(
    model: Any,
    inputs: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """inputs: token ids of every prompt -> {request id: transformers' `GenerationOutput`}, in the order of inputs.

    options: those of `Engine.submit`, for all prompts; without max_new_tokens the default of `generate` counts. A
    request that fails has the status FAILED and says why in `error`. `warmup` has no meaning here: graphs are captured
    when they are needed. Raises AccelError, before anything runs, on options that the engine does not take.
    """
    check_prompts(inputs)
    if not len(inputs):
        return {}
    config = model.generation_config if generation_config is None else generation_config
    copies = options.pop("num_return_sequences", None) or config.num_return_sequences or 1
    if (config.num_return_sequences or 1) > 1:
        generation_config = copy.deepcopy(config)
        generation_config.num_return_sequences = 1
    own = {name: value for name, value in options.items() if name not in ("stop_strings", "seeds")}
    with Engine(model) as engine:
        # what no request may ask for is the caller's mistake, not one of a request
        engine._options.draft(generation_config, None, options.get("stop_strings"), own)
        prompts = [prompt for prompt in inputs for _ in range(copies)]
        results = _finished(engine, prompts, generation_config, options, progress_bar)
    outputs = {}
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        parent, child = f"req_{i // copies}", i % copies
        name = parent if child == copies - 1 else f"{parent}__child#{child}"
        outputs[name] = _output(name, prompt, result, record_timestamps)
    return outputs


def _finished(engine: Engine, prompts: list[Any], config: Any, options: dict[str, Any], bar: bool) -> list[Result]:
    from tqdm import tqdm

    seeds = options.pop("seeds", None)
    with tqdm(total=len(prompts), desc="generate_batch", unit="request", disable=not bar) as progress:
        return engine.generate(prompts, config, seeds=seeds, **options, each=lambda _: progress.update(1))


def _output(name: str, prompt: Any, result: Result, record_timestamps: bool) -> Any:
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

    times = result.times
    return GenerationOutput(
        request_id=name,
        prompt_ids=_ids(prompt),
        generated_tokens=list(result.tokens),
        error=None if result.error is None else f"{type(result.error).__name__}: {result.error}",
        status=RequestStatus.FINISHED if result.error is None else RequestStatus.FAILED,
        created_time=times.submitted,
        lifespan=(times.admitted if times.admitted is not None else -1, times.finished or -1),
        timestamps=list(result.token_times) if record_timestamps else None,
    )


def _ids(prompt: Any) -> list[int]:
    """Of the output; empty for a prompt that was refused because it is no list of ids: its `error` says so."""
    try:
        return [] if isinstance(prompt, str) else token_ids(prompt)
    except AccelError:
        return []

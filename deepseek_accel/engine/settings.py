"""What one request asks for, from `generate`'s own options: checked when it is submitted, never later."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import AccelError
from .choosing import Sampling, sampling_of

logger = logging.getLogger(__name__)

GIVEN_TO_GENERATE = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")
"""Options of `generate` that its config does not take, and that a request may have."""
MAX_STOPS = 16
"""Sets of stop strings that are kept ready; each takes a row of numbers for every token of the vocabulary."""
ALLOWED_MODES = ("greedy_search", "sample")
REFUSED = {
    "return_dict_in_generate": "a request's result is a `Result`",
    "output_scores": "scores are not kept",
    "output_logits": "logits are not kept",
    "output_attentions": "attentions are not kept",
    "output_hidden_states": "hidden states are not kept",
    "token_healing": "prompts are taken as they are",
    "cache_implementation": "requests share the engine's pages",
    "prefill_chunk_size": "prompts are cut by `Engine(prefill_tokens=...)`",
}
"""Values of the config that a request may not set, and why."""


@dataclass
class Settings:
    """Of one request whose prompt is known."""

    max_new_tokens: int
    eos: frozenset[int]
    sampling: Sampling
    """How the next token is chosen, as far as that is the same for all requests."""
    processors: Any
    """What a request runs on its own logits instead, or None."""
    criteria: tuple[Any, ...]
    stop: StopStrings | None
    max_time: float | None
    streamer: Any
    seed: int


@dataclass
class Draft:
    """`Settings` that wait for the prompt."""

    config: Any
    has_max_length: bool
    has_min_length: bool
    given: dict[str, Any]
    stop: StopStrings | None
    seed: int

    def settle(self, model: Any, prompt: Sequence[int]) -> Settings:
        """Raises AccelError, or whatever a processor raises when it is made."""
        config = self.config
        if not prompt:
            raise AccelError("the prompt has no tokens; a request needs at least one")
        size = model.get_input_embeddings().weight.shape[0]
        if wrong := [token for token in (min(prompt), max(prompt)) if not 0 <= token < size]:
            raise AccelError(f"the prompt has the token {wrong[0]}; the model knows 0 to {size - 1}")
        if config.pad_token_id is None:
            config.pad_token_id = 0  # nothing is padded here; without one transformers would warn of its choice
        host = torch.device("cpu")
        model._prepare_special_tokens(config, True, device=host)
        eos = config._eos_token_tensor
        ends = frozenset(() if eos is None else eos.flatten().tolist())
        model._prepare_generated_length(
            generation_config=config,
            has_default_max_length=not self.has_max_length,
            has_default_min_length=not self.has_min_length,
            model_input_name="input_ids",
            input_ids_length=len(prompt),
            inputs_tensor=torch.empty(1, len(prompt), dtype=torch.int64),
        )
        most = config.max_length - len(prompt)
        if most < 1:
            raise AccelError(
                f"the prompt has {len(prompt)} tokens and max_length is {config.max_length}: nothing is left to "
                "generate. Raise max_length, or pass max_new_tokens."
            )
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if positions is not None and config.max_length > positions:
            _warn_of_positions(positions)
        # on the host first: on a GPU, making their tensors waits for the step that runs
        processors = self._processors(model, prompt, host)
        sampling = sampling_of(processors, bool(config.do_sample))
        if sampling is None and model.device != host:
            model._prepare_special_tokens(config, True, device=model.device)
            processors = self._processors(model, prompt, model.device)
        return Settings(
            max_new_tokens=most,
            eos=ends,
            sampling=sampling or Sampling(bool(config.do_sample)),
            processors=None if sampling is not None else processors,
            criteria=tuple(self.given.get("stopping_criteria") or ()),
            stop=self.stop,
            max_time=config.max_time,
            streamer=self.given.get("streamer"),
            seed=self.seed,
        )

    def _processors(self, model: Any, prompt: Sequence[int], device: torch.device) -> Any:
        return model._get_logits_processor(
            generation_config=self.config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([list(prompt)], device=device),
            prefix_allowed_tokens_fn=self.given.get("prefix_allowed_tokens_fn"),
            logits_processor=self.given.get("logits_processor"),
            device=device,
            model_kwargs={},
        )


@functools.cache
def _warn_of_positions(positions: int) -> None:
    """Once: a request is computed all the same, as `generate` does, but may take long and make no sense."""
    logger.warning("a request may get longer than the %d positions that the model was made for", positions)


@dataclass
class Options:
    """Reads the options of requests to one engine."""

    model: Any
    tokenizer: Any
    _stops: dict[tuple[str, ...], StopStrings] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def draft(self, config: Any, seed: int | None, stop_strings: Any, options: dict[str, Any]) -> Draft:
        """Raises AccelError on what the engine cannot do, and what transformers raises on a wrong value."""
        options = dict(options)
        given = {name: options.pop(name) for name in GIVEN_TO_GENERATE if options.get(name) is not None}
        options = {name: value for name, value in options.items() if name not in GIVEN_TO_GENERATE}
        for name in ("max_length", "min_length"):
            if options.get(name, ...) is None:
                del options[name]
        if (most := options.get("max_new_tokens")) is not None and (isinstance(most, str) or most < 1):
            raise AccelError(f"max_new_tokens must be at least 1, got {most!r}")
        known = self.model.generation_config
        has_length = {
            name: any(length is not None for length in (options.get(name), getattr(config, name, None),
                                                        getattr(known, name)))
            for name in ("max_length", "min_length")
        }  # fmt: skip
        prepared, rest = self.model._prepare_generation_config(config, **options)
        self._refuse(prepared, rest)
        strings = stop_strings if stop_strings is not None else prepared.stop_strings
        prepared.stop_strings = None
        if seed is None:
            # from torch's generator, so that torch.manual_seed makes a run repeatable
            seed = int(torch.randint(1 << 62, ())) if prepared.do_sample else 0
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise AccelError(f"seed must be an integer >= 0 or None, got {seed!r}")
        stop = None if strings is None else self._stop(strings)
        return Draft(prepared, has_length["max_length"], has_length["min_length"], given, stop, seed)

    def _refuse(self, config: Any, rest: dict[str, Any]) -> None:
        unknown = sorted(name for name, value in rest.items() if value is not None and value is not False)
        unknown = [name for name in unknown if name != "use_cache"]
        if unknown:
            raise AccelError(
                f"a request to the engine does not take {', '.join(unknown)}. It takes a prompt, what a "
                f"GenerationConfig holds, seed, stop_strings, and {', '.join(GIVEN_TO_GENERATE)}."
            )
        mode = config.get_generation_mode()
        if mode not in ALLOWED_MODES:
            raise AccelError(f"the engine does greedy search and sampling, not {mode.value.replace('_', ' ')}; "
                             "use model.generate for that")  # fmt: skip
        if (config.num_return_sequences or 1) > 1:
            raise AccelError("num_return_sequences must be 1: submit the prompt as often, with a seed each")
        if config.guidance_scale is not None and config.guidance_scale != 1:
            raise AccelError("the engine does no classifier-free guidance; use model.generate for that")
        for name, reason in REFUSED.items():
            value = getattr(config, name, None)
            if value not in (None, False) and not (name == "cache_implementation" and value == "dynamic"):
                raise AccelError(f"the engine does not take {name}={value!r}: {reason}")
        if config.use_cache is False:
            raise AccelError("the engine does not take use_cache=False: requests share its pages")

    def _stop(self, strings: Any) -> StopStrings:
        if self.tokenizer is None:
            raise AccelError("stop_strings need a tokenizer: Engine(model, tokenizer)")
        wanted = (strings,) if isinstance(strings, str) else tuple(strings)
        if not wanted or not all(isinstance(each, str) and each for each in wanted):
            raise AccelError(f"stop_strings must be a string or a list of strings that are not empty, got {strings!r}")
        with self._lock:
            stop = self._stops.pop(wanted, None) or StopStrings(self.tokenizer, wanted)
            self._stops[wanted] = stop  # the last one used stands last
            if len(self._stops) > MAX_STOPS:
                del self._stops[next(iter(self._stops))]
            return stop


class StopStrings:
    """transformers' own criterion, asked only about tokens that can end one of the strings: it takes a fifth of a
    millisecond, and most tokens cannot."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...]) -> None:
        from transformers import StopStringCriteria

        self._criterion = criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=list(strings))
        first = criterion.max_valid_positions * criterion.num_stop_strings
        ends = (criterion.embedding_vec[:, first:-1] > 0).any(1)
        self._last = len(ends) - 1
        """What ids beyond the vocabulary stand for."""
        self._ends = frozenset(ends.nonzero().flatten().tolist())
        self._lock = threading.Lock()

    @property
    def num_tokens(self) -> int:
        """So many tokens at the end of a sequence are looked at."""
        return int(self._criterion.maximum_token_len)

    def met(self, tail: Callable[[int], list[int]], token: int) -> bool:
        """Whether a sequence that ends in `token` ends in one of the strings. tail: its last so many tokens."""
        if min(token, self._last) not in self._ends:
            return False
        with self._lock:
            return bool(self._criterion(torch.tensor([tail(self.num_tokens)]), None)[0])

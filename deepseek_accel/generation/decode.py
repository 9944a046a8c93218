"""The decoding loop: what `GenerationMixin._sample` computes, on straight-line steps, without waiting for the device.

`generate` prepares everything as ever (prompt, cache, processors, criteria) and hands over to `_SampleLoop`, in
transformers' `custom_generate` form. On a GPU the host looks for the end of a sequence one step behind: the next step
is launched before it asks whether the last one ended everything. What that step computed is then dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..families.base import Family
from ..ops.choice import prebuild, why_not_triton
from ..versions import cache_argument
from ..watch import count
from .counting import EXPANDED, count_layers, reads_pages
from .graphs import StepGraphs
from .handover import Decision, stop_strings, why_stock_loop
from .join_graphs import GRAPH_TOKENS, joins
from .lines import LENGTH_DEPENDENT_ROPE, Model, Watched, read_model
from .loop_steps import Board, EagerSteps, GraphSteps, side_by_side
from .prefill import entry_sizes, even_slices, prefill
from .prompt_graphs import size_class
from .reuse import Reuse, begin_reuse
from .sampling import MAX_EOS_TOKENS, choice_of, draw
from .step import Stepper

SPECULATES_NOT = "speculative: stock loop"
EVICTING_PIECE = 4096
"""Prompt tokens between which a cache that evicts makes room: it holds its budget and this many at most."""
BUILD_TOKENS = 8192
"""The largest prompt that kernels are built with; larger ones use the same."""


@dataclass
class Loop:
    """What `generate` of one optimized model needs besides the model."""

    family: Family
    counters: Counter[str]
    built: set[tuple[Any, ...]] = field(default_factory=set)
    """Kinds of prompts whose kernels this process has built."""
    decision: Decision = field(default_factory=Decision)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"built": set(), "decision": Decision()}


def generate(model: Any, loop: Loop, /, *args: Any, **kwargs: Any) -> Any:
    """In place of `model.generate`: the same, through our loop where it can. All names are the caller's to use."""
    stock = type(model).generate
    if reason := why_stock_loop(model, loop.decision, args, kwargs):
        count(loop.counters, f"layers: stock loop ({reason})")
        for name, what in (("_accel_prefixes", "kv_cache: no prefix reuse"), ("_accel_speculation", SPECULATES_NOT)):
            if name in vars(model):
                count(loop.counters, f"{what} ({reason})")
        return stock(model, *args, **kwargs)
    kwargs = _with_stop_strings(model, args, kwargs)
    streamer = kwargs.get("streamer")  # `generate` puts the prompt to it; a callable gets none of its own
    result = stock(model, *args, **kwargs, custom_generate=_SampleLoop(loop, streamer))
    if (prefixes := vars(model).get("_accel_prefixes")) is not None:
        prefixes.settle()
    return result


def _with_stop_strings(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` with stop strings as a stopping criterion: a callable `custom_generate` makes `generate` lose the
    tokenizer that it would make one with."""
    from transformers import StoppingCriteriaList, StopStringCriteria

    strings = stop_strings(model, args[1] if len(args) > 1 else kwargs.get("generation_config"), kwargs)
    if strings is None:
        return kwargs
    kwargs = dict(kwargs)
    criterion = StopStringCriteria(tokenizer=kwargs["tokenizer"], stop_strings=strings)
    kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), criterion])
    kwargs["stop_strings"] = None
    return kwargs


class _SampleLoop:
    """A `custom_generate` whose signature adds no names: `generate` would take them out of the caller's arguments."""

    def __init__(self, loop: Loop, streamer: Any) -> None:
        self._loop, self._streamer = loop, streamer

    def __call__(
        self,
        _model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """input_ids [B, T] -> [B, T + new tokens], or the output object, as `GenerationMixin._sample` returns them."""
        model, loop, streamer = _model, self._loop, self._streamer
        reuse = begin_reuse(model, input_ids, generation_config, model_kwargs)
        try:
            stepper, starts = _prepare(model, loop, input_ids, generation_config, model_kwargs)
        except Watched as reason:
            count(loop.counters, f"layers: stock loop ({reason})")
            if "_accel_speculation" in vars(model):
                count(loop.counters, f"{SPECULATES_NOT} ({reason})")
            model_kwargs.pop("synced_gpus", None)
            result = type(model)._sample(
                model, input_ids, logits_processor, stopping_criteria, generation_config, streamer=streamer,
                **model_kwargs,
            )  # fmt: skip
            if reuse is not None:
                reuse.keep(result if isinstance(result, torch.Tensor) else result.sequences)
            return result
        count(loop.counters, "layers: decoding loops")
        speculation = vars(model).get("_accel_speculation")
        sampling = (_Sampling if speculation is None else speculation.sampling)(
            model, stepper, loop, logits_processor, stopping_criteria, generation_config, streamer, reuse
        )
        return sampling.run(input_ids, starts, model_kwargs)


def _prepare(
    model: Any, loop: Loop, input_ids: torch.Tensor, config: Any, kwargs: dict[str, Any]
) -> tuple[Stepper, list[int] | None]:
    """The model read as a straight line, and the first key each row sees (None: all see all). Or `Watched`."""
    cache: Any = kwargs.get(cache_argument())
    if not hasattr(cache, "reserve"):
        raise Watched("not a paged cache")
    if not config.use_cache or cache.is_recording:
        raise Watched("the cache is not used, or records what leaves it")
    if input_ids.device != model.device:
        raise Watched("the prompt is on another device")
    if not len(input_ids):
        raise Watched("no rows")
    if model.training:
        raise Watched("training mode")
    line = read_model(model, loop.family)
    if reason := _why_not_cache(cache, line):
        raise Watched(reason)
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        raise Watched(f"{parameters['rope_type']} rotary embeddings")
    allowed = {"attention_mask", "position_ids", "inputs_embeds", "logits_to_keep", "use_cache", cache_argument()}
    if extra := sorted(name for name, value in kwargs.items() if name not in allowed and value is not None):
        raise Watched(f"the forward is given {', '.join(extra)}")
    if kwargs.get("inputs_embeds") is None and input_ids.shape[1] <= _cached(input_ids, config, kwargs):
        raise Watched("nothing new in the prompt")
    mask = kwargs.get("attention_mask")
    starts = None
    if mask is not None:
        if mask.dim() != 2:
            raise Watched("the attention mask is not [B, T]")
        visible = mask.bool()
        if not bool((visible[:, 1:] >= visible[:, :-1]).all() & visible[:, -1].all()):
            raise Watched("the attention mask hides more than the left of a row")
        starts = visible.int().argmax(1).tolist()
        starts = starts if any(starts) else None
    attention = loop.family.attentions(model)[0]
    return Stepper(line, loop.family, attention), starts


def _why_not_cache(cache: Any, line: Model) -> str | None:
    """Why the straight line cannot write into this cache, or None. All layers write where the first one does."""
    if len(cache.layers) != len(line.layers) or any(layer.window is not None for layer in cache.layers):
        return "the cache was made for another model"
    pairs = zip(cache.layers, line.layers, strict=True)
    held = [(layer, entry_sizes(step.attention)) for layer, step in pairs if layer.is_initialized]
    if any((layer.num_heads, layer.key_dim, layer.value_dim) != sizes for layer, sizes in held):
        return "the cache holds entries of another shape"
    if any((layer.device, layer.dtype) != (line.device, line.dtype) for layer, _ in held):
        return "the cache is elsewhere or of another dtype"
    pools = {id(layer.pool) for layer, _ in held}
    if len({layer.length for layer in cache.layers}) > 1 or (cache.policy is None and len(pools) > 1):
        return "the layers of the cache were changed one by one"
    return None


def why_no_graph(graphs: StepGraphs, batch: int, device: torch.device) -> str | None:
    """Why no graph can run `batch` rows on `device` now, or None, and then the lease on the graphs is held."""
    if why_not_triton(device) is not None:
        return f"the model is on {device} now"
    if graphs.bucket(batch) is None:
        return f"batch of {batch}"
    if torch.cuda.is_current_stream_capturing():
        return "inside a capture"
    return None if graphs.try_lease() else "another generate uses them"


def _cached(input_ids: torch.Tensor, config: Any, kwargs: dict[str, Any]) -> int:
    """How many of the prompt's tokens the cache holds already: all that it holds, or none if only new ones are given.

    The mask, if as long as the prompt, says that the prompt is the whole sequence, as in `_prefill`.
    """
    mask = kwargs.get("attention_mask")
    length = mask.shape[1] if mask is not None else getattr(config, "_mask_length", -1)
    return int(kwargs[cache_argument()].get_seq_length()) if length == input_ids.shape[1] else 0


@dataclass
class _Sampling:
    """One call of the loop."""

    model: Any
    stepper: Stepper
    loop: Loop
    processors: Any
    criteria: Any
    config: Any
    streamer: Any
    reuse: Reuse | None
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    _eos_tokens: list[int] | None = None

    def run(self, input_ids: torch.Tensor, starts: list[int] | None, kwargs: dict[str, Any]) -> Any:
        cache = kwargs[cache_argument()]
        logits, positions = self._prefill(input_ids, starts, cache, kwargs)
        if self.reuse is not None:
            self.reuse.keep(input_ids)
        held = cache.length
        try:
            ids, steps = self._decode(input_ids, logits, positions, cache, starts)
            held += steps
        finally:
            cache.commit(held)
        if self.reuse is not None:
            self.reuse.keep(ids)
        if self.streamer is not None:
            self.streamer.end()
        if not self.config.return_dict_in_generate:
            return ids
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=tuple(self.scores) if self.config.output_scores else None,
            logits=tuple(self.logits) if self.config.output_logits else None,
            **{cache_argument(): cache},
        )

    def _prefill(
        self, input_ids: torch.Tensor, starts: list[int] | None, cache: Any, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [B, vocabulary] of the last position, position ids [B] of the next). Fills `cache`."""
        positions = kwargs.get("position_ids")
        if positions is not None:
            positions = positions.to(self.stepper.model.device)  # as the mask they come from, they may be on the host
        following = None if positions is None else positions[..., -1] + 1
        if (reason := self._why_stock_prefill(input_ids, kwargs)) is None:
            if self.reuse is not None:
                self.reuse.fill(partial(self._fill, cache))
            input_ids = input_ids[:, _cached(input_ids, self.config, kwargs) :]
            if positions is not None:
                positions = positions[..., -input_ids.shape[1] :]
            first = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=input_ids.device)
            logits = self._fill(cache, input_ids, first, positions)
        else:
            count(self.loop.counters, f"layers: stock prefills ({reason})")
            logits = self.model._prefill(input_ids, self.config, kwargs).logits[:, -1]
        if following is None:
            following = torch.tensor(cache.length, device=logits.device)
        return logits, following.expand(len(logits)).clone()

    def _run_prefill(
        self,
        input_ids: torch.Tensor,
        cache: Any,
        starts: torch.Tensor | None,
        positions: torch.Tensor | None,
        with_graphs: bool = True,
    ) -> torch.Tensor:
        """Add a prompt, or what follows what the cache holds, and return the last position's logits."""
        if cache.policy is not None and with_graphs:
            return self._prefill_in_pieces(input_ids, cache, starts, positions)
        stepper, (rows, count) = self.stepper, input_ids.shape
        graphs: StepGraphs | None = vars(self.model).get("_accel_graphs") if with_graphs else None
        joined = self._joins(cache, input_ids)
        run = partial(prefill, stepper, input_ids, cache, starts, positions)
        if joined:
            short = rows * count <= GRAPH_TOKENS
        else:
            short = rows == 1 and starts is None and not cache.get_seq_length() and size_class(count) is not None
        if graphs is None or not short or why_no_graph(graphs, rows, input_ids.device) is not None:
            return run(instead=partial(stepper.join, starts=starts) if joined else None)
        try:
            if joined:
                return run(instead=graphs.join(stepper, cache, starts))
            return run(instead=graphs.prompt(stepper, count, cache))
        finally:
            graphs.release(stepper.model.device)

    def _joins(self, cache: Any, input_ids: torch.Tensor) -> bool:
        """Whether these tokens meet the cache's keys as a step's do, rather than as a prompt's piece."""
        return bool(cache.get_seq_length()) and cache.policy is None and joins(self.stepper.model, *input_ids.shape)

    def _prefill_in_pieces(
        self, input_ids: torch.Tensor, cache: Any, starts: torch.Tensor | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """Of a cache that evicts: after each piece the layers forget what is beyond their budgets."""
        past = cache.get_seq_length()
        if self._follows(cache, input_ids):
            return self._follow(input_ids, cache, starts, positions)
        try:
            begin, count = 0, input_ids.shape[1]
            while begin < count:
                size = next(even_slices(count - begin, cache.most_at_once(len(input_ids), EVICTING_PIECE))).stop
                piece = slice(begin, begin + size)
                place = None if positions is None else positions[..., piece]
                logits = prefill(self.stepper, input_ids[:, piece], cache, starts, place)
                cache.settle()
                begin += size
        except BaseException:
            if not past:
                cache.reset()
            raise
        return logits

    def _follows(self, cache: Any, input_ids: torch.Tensor) -> bool:
        """Whether this is one token on top of a cache that evicts. It may take the place of any entry there, so that it
        is not the last one, as a prompt's piece must be."""
        return cache.policy is not None and input_ids.shape[1] == 1 and cache.get_seq_length() > 0

    def _follow(
        self, input_ids: torch.Tensor, cache: Any, starts: torch.Tensor | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """Add input_ids [B, 1] as a decoding step does."""
        past, tokens = cache.get_seq_length(), input_ids[:, 0]
        place = torch.tensor(past, device=tokens.device) if positions is None else positions[:, 0]
        try:
            return self.stepper.step(tokens, place.expand(len(tokens)), cache, starts)
        except BaseException:
            cache.commit(past)
            raise

    def _fill(
        self,
        cache: Any,
        input_ids: torch.Tensor,
        starts: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add the tokens input_ids [B, S] to `cache`: the last ones' logits."""
        expands = not (self._joins(cache, input_ids) or self._follows(cache, input_ids))
        self._build_prefill(input_ids, cache, starts, positions)
        logits = self._run_prefill(input_ids, cache, starts, positions)
        self._count(1, "layers: fused prefill", EXPANDED if expands else self._absorbed)
        return logits

    def _build_prefill(
        self, input_ids: torch.Tensor, cache: Any, starts: torch.Tensor | None, positions: torch.Tensor | None
    ) -> None:
        """On a GPU, build the kernels of prompts of about this size at once, if they have not been needed before.

        What is not ours runs for real, so that a long prompt is built for by its beginning.
        """
        past, (batch, count) = cache.get_seq_length(), input_ids.shape
        size = (past > 0, batch > 1, (batch * count).bit_length(), starts is not None, cache.fp8)
        if why_not_triton(input_ids.device) is not None or size in self.loop.built or cache.policy is not None:
            return
        most = max(1, BUILD_TOKENS // batch)
        with prebuild(input_ids.device):
            first = None if positions is None else positions[..., :most]
            self._run_prefill(input_ids[:, :most], cache, starts, first, with_graphs=False)
        if past:
            cache.commit(past)
        else:
            cache.reset()
        self.loop.built.add(size)

    def _why_stock_prefill(self, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> str | None:
        if kwargs.get("inputs_embeds") is not None:
            return "inputs_embeds"
        if self.config.prefill_chunk_size is not None:
            return "prefill_chunk_size"
        return None

    def _decode(
        self,
        input_ids: torch.Tensor,
        logits: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        starts: list[int] | None,
    ) -> tuple[torch.Tensor, int]:
        """(all token ids, how many steps stand)."""
        batch = logits.shape[0]
        graphs: StepGraphs | None = vars(self.model).get("_accel_graphs")
        if self._is_long(input_ids.shape[1] + 1):
            graphs = None  # the one token is chosen without a step
        reason = "padded rows in a cache that evicts" if cache.policy is not None and starts is not None else None
        if graphs is None or (reason := reason or why_no_graph(graphs, batch, logits.device)) is not None:
            if graphs is not None:
                count(self.loop.counters, f"cuda_graphs: eager loop ({reason})")
            return self._loop(input_ids, logits, EagerSteps(self.stepper, cache, positions, starts))
        run = None
        try:
            simple = self._ends_simply() and not self._keeps_scores()
            choice = choice_of(self.processors, self._samples()) if simple else None
            eager = EagerSteps(self.stepper, cache, positions, starts)
            try:
                run = graphs.run(self.stepper, batch, cache, starts or [0] * batch, choice)
            except torch.OutOfMemoryError:
                count(self.loop.counters, "cuda_graphs: eager loop (out of memory)")
            if run is None:
                return self._loop(input_ids, logits, eager)
            # a graph that does not choose needs no end tokens, and there may be more than it has room for
            eos = [] if choice is None else self._eos()
            steps = GraphSteps(run, eager, eos, self._pad(), self._samples(), self.loop.counters)
            return self._loop(input_ids, logits, steps)
        finally:
            if run is not None:
                run.finish()
            graphs.release(self.stepper.model.device)

    def _loop(self, input_ids: torch.Tensor, logits: torch.Tensor, steps: Any) -> tuple[torch.Tensor, int]:
        """Choose, look whether that ends it, step; on a GPU look after the next step is launched."""
        lags = logits.device.type == "cuda"
        board: Any = Board(logits.device, logits.shape[0])
        unfinished = torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
        needs_ids = not self._ends_simply() or len(self.processors) > 0
        columns: list[torch.Tensor] = []
        ids, produced, taken = input_ids, 0, 0
        while True:
            if not taken or not steps.chooses:
                tokens = self._choose(ids, logits, unfinished)
                if needs_ids:
                    ids = torch.cat((ids, tokens[:, None]), 1)
                unfinished = unfinished & ~self._ended(ids, tokens)
                board.post(tokens, unfinished.any().view(1))
            produced += 1
            full = self._is_full(input_ids.shape[1] + produced)
            if full or not lags:
                going = self._read(board, columns)
                if full or not going:
                    break
            logits = steps.step(tokens, unfinished)
            taken += 1
            if lags and not self._read(board, columns):
                steps.take_back()
                taken -= 1
                break
            if steps.chooses:
                board = steps
        self._count(taken, "layers: fused step", self._absorbed)
        if taken and steps.counter:
            self.loop.counters[steps.counter] += taken
        return torch.cat((input_ids, side_by_side(columns, input_ids)), 1), taken

    def _read(self, board: Any, columns: list[torch.Tensor]) -> bool:
        """Take the oldest tokens from the board, for the result and the streamer; whether any row goes on."""
        tokens, on_host, going = board.read(self.streamer is not None)
        columns.append(tokens)
        if self.streamer is not None:
            self.streamer.put(on_host)
        return going

    def _choose(self, ids: torch.Tensor, logits: torch.Tensor, unfinished: torch.Tensor) -> torch.Tensor:
        """logits [B, vocabulary] -> next tokens [B]: processors and choice as in `_sample`."""
        if len(self.processors) or self._samples() or self._keeps_scores():
            raw = logits.to(torch.float32, copy=True)
            scores = self.processors(ids, raw)
            if self.config.return_dict_in_generate and self.config.output_scores:
                self.scores.append(scores)
            if self.config.return_dict_in_generate and self.config.output_logits:
                self.logits.append(raw)
        else:
            scores = logits
        if not self._samples():
            tokens = scores.argmax(-1)
        elif scores.device.type == "cuda":
            tokens = draw(scores.softmax(-1))
        else:
            tokens = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        if any(hasattr(criterion, "eos_token_id") for criterion in self.criteria):
            tokens = torch.where(unfinished, tokens, self._pad())
        return tokens

    def _ended(self, ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[B] bool: the rows that these tokens end, the limits of `_is_full` aside."""
        if not self._ends_simply():
            keeps = self.config.return_dict_in_generate and self.config.output_scores
            ended: torch.Tensor = self.criteria(ids, tuple(self.scores) if keeps else None)
            return ended
        ended = torch.zeros_like(tokens, dtype=torch.bool)
        for criterion in self.criteria:
            if hasattr(criterion, "eos_token_id"):
                ended = ended | torch.isin(tokens, criterion.eos_token_id.to(tokens.device))
        return ended

    def _ends_simply(self) -> bool:
        """Whether all criteria are length, time and end-of-sequence tokens, which need no token ids."""
        from transformers.generation import stopping_criteria as known

        simple = (known.MaxLengthCriteria, known.EosTokenCriteria, known.MaxTimeCriteria)
        return all(type(criterion) in simple for criterion in self.criteria) and len(self._eos()) <= MAX_EOS_TOKENS

    def _is_full(self, length: int) -> bool:
        """Whether the host alone knows that this is the end."""
        from transformers.generation.stopping_criteria import MaxTimeCriteria

        timed = (criterion for criterion in self.criteria if type(criterion) is MaxTimeCriteria)
        return self._is_long(length) or any(bool(criterion(torch.empty(1, 0), None)) for criterion in timed)

    def _is_long(self, length: int) -> bool:
        from transformers.generation.stopping_criteria import MaxLengthCriteria

        return any(type(each) is MaxLengthCriteria and length >= each.max_length for each in self.criteria)

    def _eos(self) -> list[int]:
        if self._eos_tokens is None:
            found = [criterion.eos_token_id for criterion in self.criteria if hasattr(criterion, "eos_token_id")]
            self._eos_tokens = [token for tokens in found for token in tokens.tolist()]
        return self._eos_tokens

    def _pad(self) -> torch.Tensor:
        pad = self.config._pad_token_tensor
        return torch.zeros((), dtype=torch.int64, device=self.stepper.model.device) if pad is None else pad

    def _samples(self) -> bool:
        return bool(self.config.do_sample)

    def _keeps_scores(self) -> bool:
        return bool(self.config.return_dict_in_generate and (self.config.output_scores or self.config.output_logits))

    @property
    def _absorbed(self) -> str:
        """What counts attention that reads the pages."""
        return reads_pages(self.stepper.model)

    def _count(self, times: int, step: str, attention: str) -> None:
        count_layers(self.loop.counters, self.stepper, times, step, attention)

"""Whole models through `model.generate`: stock against optimized, in one process, on the same weights and prompts.

TTFT is the time of one token, ITL that of one more: (time of N tokens - time of 1 token) / (N - 1). Both are medians of
the repeats; `greedy.timed` says how the two times are taken.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .. import api, families
from ..config import OptimizeConfig
from ..errors import AccelError
from ..ops.adaptive_topk import BATCH_TOKENS
from ..passes.adaptive_topk import AdaptiveTopK, droppings
from ..passes.mixed_precision import MixedPrecision
from . import gating, greedy, peers, soak
from .accuracy import CHECKED_TOKENS, Sample, compare, stock_noise
from .environment import environment, resolve_device, resolve_dtype
from .floor import cache_of, counted_experts, expected_experts, step_bytes
from .measure import copy_bandwidth, peak_above_weights
from .record import Keep, forget
from .rows import OK, SKIPPED, STOCK, WRONG, Options, Row, by_point, failed_rows, first_line, new_row
from .shapes import Point, Subject, chosen_config, load, variants

Step = Callable[[str], None]


@dataclass
class Times:
    """What the repeats of one variant gave."""

    first: list[float] = field(default_factory=list)
    """Seconds to the first token."""
    rest: list[float] = field(default_factory=list)
    """Seconds from the first token to the last."""
    tokens: list[torch.Tensor] = field(default_factory=list)
    gating: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None
    prefill_peak_bytes: int | None = None


class PointRun:
    """All variants at one point. An error of one variant is its row's text; the others go on."""

    def __init__(
        self, subject: Subject, point: Point, options: Options, configs: dict[str, Any], *, prepared: bool = False
    ) -> None:
        """prepared: the model is optimized with the one config, a lossy one, already, and stays so."""
        self.subject, self.model, self.point, self.options = subject, subject.model, point, options
        self.configs, self.device, self.prepared = configs, subject.model.device, prepared
        dtype = self.model.dtype
        self.exact = dtype == torch.float32
        self.prompt = subject.prompt(point)
        self.rows = {name: new_row(options, point, name, dtype) for name in configs}
        self.times = {name: Times() for name in configs}
        self.stock: Sample | None = None
        self.noise: torch.Tensor | None = None
        self.experts: float | None = None

    def run(self, step: Step, keep: Callable[[list[Row]], None] = lambda rows: None) -> list[Row]:
        """keep: told the rows that are done after each of them."""
        if self.prepared:
            for dropping in droppings(self.model, families.find(self.model)):
                dropping.restart()  # what other points counted
        else:
            self._sample_stock()
        # On a CPU the variants take turns, so that whatever else the machine does meets all of them. On a GPU a turn
        # would capture graphs anew.
        done: list[Row] = []
        visits = self.options.repeats if self.device.type == "cpu" else 1
        for visit in range(visits):
            for name, row in self.rows.items():
                if visit == 0:
                    step(f"{self.options.model} {self.point} {name}")
                if row.status == OK:
                    self._visit(name, self.options.repeats // visits, first=visit == 0)
                if visit == visits - 1:
                    self._fill(name)
                    self._ratios()
                    done.append(row)
                    keep(done)
        return done

    def _sample_stock(self) -> None:
        count = min(CHECKED_TOKENS, self.options.new_tokens)
        try:
            with counted_experts(self.model, self.point.batch) as counts:
                self.stock = greedy.sample(self.model, self.prompt, count)
            # A prompt of one token routes as many tokens as a decode step: its call is counted too, and right to be.
            self.experts = statistics.fmean(counts) if counts else None
            if not self.exact and not self.options.only_stock:
                self.noise = stock_noise(self.model, self.prompt, self.stock)
        except torch.OutOfMemoryError:
            self.stock = None
        release(self.device)

    def _visit(self, name: str, repeats: int, *, first: bool) -> None:
        row = self.rows[name]
        try:
            with contextlib.nullcontext() if self.prepared else applied(self.model, self.configs[name]):
                if not first or self._may_time(name):
                    self._time(self.times[name], repeats)
        except Exception as error:
            row.fail(error)
        release(self.device)

    def _may_time(self, name: str) -> bool:
        row = self.rows[name]
        if name == STOCK:
            return True
        report = api.report(self.model)
        if all(p["status"] == "skipped" for p in report.passes):
            row.status = SKIPPED
            row.detail = "; ".join(reason for p in report.passes for reason in p["skipped"]) or "nothing to apply"
            return False
        row.kv_bytes_per_token_and_layer = report.cache.get("bytes_per_token_and_layer")
        row.weight_bytes = report.parameter_bytes
        if self._is_lossy(name):
            row.detail = "lossy: not compared with stock"
            return True
        if self.stock is None:
            row.detail = "not checked: stock ran out of memory"
            return True
        ours = greedy.sample(self.model, self.prompt, self.stock.tokens.shape[1])
        verdict = compare(self.stock, ours, self.noise)
        row.accuracy, row.detail = verdict.to_dict(), verdict.why
        if not verdict.ok:
            row.status = WRONG
        return verdict.ok

    def _is_lossy(self, name: str) -> bool:
        config = self.configs[name]
        return config is not None and any(p.lossy for p in config.passes)

    def _time(self, times: Times, repeats: int) -> None:
        model, prompt, count = self.model, self.prompt, self.options.new_tokens
        if self.device.type == "cuda":
            greedy.generate(model, prompt, min(4, count))
            greedy.timed(model, prompt, 2)  # kernels of calls that go on from a cache
            torch.cuda.reset_peak_memory_stats(self.device)
            greedy.generate(model, prompt, 1)
            times.prefill_peak_bytes = peak_above_weights(model)
            torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(repeats):
            first, rest, output = greedy.timed(model, prompt, count)
            times.gating = api.report(model).gating
            times.first.append(first)
            times.rest.append(rest)
            times.tokens.append(output[:, prompt.shape[1] :].cpu())
        times.peak_bytes = peak_above_weights(model)

    def _fill(self, name: str) -> None:
        row, times, count = self.rows[name], self.times[name], self.options.new_tokens
        if row.status != OK or not times.rest:
            return
        if (wrong := self._wrong_tokens(name)) is not None:
            row.status, row.detail = WRONG, wrong
            return
        if self.exact and row.accuracy is not None and STOCK in self.times:
            row.detail = f"{times.tokens[0].numel()} tokens equal"
        if self.configs[name] is None:
            row.weight_bytes = sum(p.nbytes for p in self.model.parameters())
        first = statistics.median(times.first)
        itl = statistics.median(times.rest) / (count - 1)
        row.ttft_ms, row.itl_ms = first * 1e3, itl * 1e3
        row.tokens_per_second = self.point.batch / itl if itl > 0 else None
        row.peak_bytes_above_weights = times.peak_bytes
        row.prefill_peak_bytes_above_weights = times.prefill_peak_bytes
        row.experts_per_token = times.gating.get("experts_per_token")
        row.experts_per_step = self.experts
        counts_prompt = 1 < self.prompt.numel() <= BATCH_TOKENS  # such a prompt is one of the steps that were counted
        if distinct := [n for n in times.gating.get("experts_read_per_step_by_layer", ()) if n is not None]:
            row.experts_per_step = None if counts_prompt else statistics.fmean(distinct)
        row.first_tokens = None if self.stock is None else self.stock.tokens[:, 0].tolist()
        family = families.find(self.model)
        if self.stock is not None and row.kv_bytes_per_token_and_layer is None:
            held = self.point.prompt_length + self.stock.tokens.shape[1] - 1
            tokens = self.point.batch * held * len(family.layers(self.model))
            row.kv_bytes_per_token_and_layer = self.stock.cache_bytes / tokens
        if distinct and counts_prompt:
            return  # nobody knows what a step must read
        context = self.point.prompt_length + count / 2
        kv_bytes = cache_of(self.configs[name]).describe(self.model, family)["bytes_per_token_and_layer"]
        experts = row.experts_per_step
        if experts is None:
            experts = expected_experts(self.model, self.point.batch)
        read = step_bytes(self.model, self.point.batch, context, kv_bytes, experts)
        row.floor_ms = read / copy_bandwidth(self.device) * 1e3
        row.floor_ratio = row.itl_ms / row.floor_ms

    def _wrong_tokens(self, name: str) -> str | None:
        """What is wrong with the tokens of the timed runs, or None."""
        tokens = self.times[name].tokens
        if name == STOCK or self.stock is None:
            return None
        checked = self.stock.tokens.shape[1]
        if any(not torch.equal(tokens[0][:, :checked], other[:, :checked]) for other in tokens[1:]):
            return "the timed runs gave different tokens each time"
        if self._is_lossy(name):
            return None
        expected = self.times[STOCK].tokens[0] if STOCK in self.times and self.times[STOCK].tokens else None
        if expected is None:
            expected = self.stock.tokens
        if self.exact and any(not torch.equal(t[:, : expected.shape[1]], expected) for t in tokens):
            return "the timed run's tokens differ from stock's"
        return None

    def _ratios(self) -> None:
        stock = self.rows.get(STOCK)
        for row in self.rows.values():
            if stock is not None and stock.ttft_ms and stock.itl_ms and row.ttft_ms and row.itl_ms:
                row.ttft_ratio, row.itl_ratio = stock.ttft_ms / row.ttft_ms, stock.itl_ms / row.itl_ms


@contextlib.contextmanager
def applied(model: Any, config: Any) -> Iterator[None]:
    """`model` optimized with `config`, or left alone for None; stock again afterwards."""
    if config is not None:
        api.optimize(model, config)
    try:
        yield
    finally:
        api.restore(model)


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run(
    options: Options, step: Step = lambda text: None, subject: Subject | None = None, keep: Keep = forget
) -> dict[str, Any]:
    """Measure every point; returns {"environment": ..., "rows": [...]}, ready for JSON.

    step: told what is measured next, once per row. subject: a model to use instead of loading `options.model`.
    keep: told the rows so far after each of them.
    Raises AccelError on options that are wrong. A device, model or point that does not work is a row that says so.
    """
    configs = options.configs()
    try:
        device = resolve_device(options.device) if subject is None else subject.model.device
    except AccelError as error:
        return _result(torch.device("cpu"), failed_rows(options, list(configs), error))
    try:
        dtype = resolve_dtype(options.dtype, device)
        if subject is None:
            step(f"loading {options.model}")
            subject = load(options.model, device, dtype)
    except torch.OutOfMemoryError as error:
        return _result(device, failed_rows(options, list(configs), error))
    if options.adaptive:
        step("calibrating the routers on random tokens")
        configs |= gating.variants(subject.model, options.adaptive, chosen_config(options.passes))
    rows: list[Row] = []
    for point in options.points:
        try:
            tell = partial(_tell, keep, device, tuple(rows))
            rows += PointRun(subject, point, options, configs).run(step, tell)
        except Exception as error:  # whatever a point does, the others are measured
            rows += failed_rows(replace(options, points=(point,)), list(configs), error)
            release(device)
    if options.int4:
        tell = partial(_tell, keep, device, tuple(rows))
        rows = by_point(rows + packed_rows(subject, options, configs, step, tell), options.points)
    soaked = soak_optimized(subject, options, step) if options.soak else None
    if options.peers:
        step("vLLM on the same weights")
        rows = peers.with_peers(rows, subject, options)
    return _result(device, rows) | ({} if soaked is None else {"soak": soaked})


def packed_rows(
    subject: Subject, options: Options, configs: dict[str, Any], step: Step, keep: Callable[[list[Row]], None]
) -> list[Row]:
    """Rows of everything chosen, and of the adaptive variants, with weights in four bits too.

    Packing takes longer than measuring, so all points share one.
    """
    rows: list[Row] = []
    chosen = chosen_config(options.passes)
    adaptive = {name: config for name, config in configs.items() if config is not None and _has_adaptive(config)}
    for name, config in ({"": chosen} | adaptive).items():
        name = f"int4 {name}".rstrip()
        config = OptimizeConfig((*config.passes, MixedPrecision(method="rtn", targets=options.int4)), allow_skips=True)
        step(f"{options.model} {name}: packing the weights")
        try:
            with applied(subject.model, config):
                for point in options.points:
                    rows += PointRun(subject, point, options, {name: config}, prepared=True).run(step)
                    keep(rows)
        except Exception as error:
            done = {(row.batch, row.prompt_length) for row in rows if row.variant == name}
            missing = [p for p in options.points if (p.batch, p.prompt_length) not in done]
            rows += failed_rows(replace(options, points=tuple(missing)), [name], error)
        release(subject.model.device)
    return rows


def _has_adaptive(config: OptimizeConfig) -> bool:
    return any(isinstance(p, AdaptiveTopK) for p in config.passes)


def soak_optimized(subject: Subject, options: Options, step: Step) -> dict[str, Any]:
    """`soak.run` on the model with every chosen pass, or why it stopped."""
    try:
        with applied(subject.model, variants(options.passes, ablate=False).popitem()[1]):
            return soak.run(subject, options.points, options.new_tokens, options.soak, step)
    except Exception as error:
        return {"calls": options.soak, "error": first_line(error)}
    finally:
        release(subject.model.device)


def _result(device: torch.device, rows: list[Row]) -> dict[str, Any]:
    facts = environment(device)
    with contextlib.suppress(RuntimeError):  # a device that broke down cannot be measured
        facts["copy_bytes_per_second"] = copy_bandwidth(device)
    return {"environment": facts, "rows": [asdict(row) for row in rows]}


def _tell(keep: Keep, device: torch.device, before: Sequence[Row], done: Sequence[Row]) -> None:
    keep(_result(device, [*before, *done]))


def exit_code(rows: Sequence[dict[str, Any]]) -> int:
    """3 if a result was wrong, 1 if nothing could be measured, else 0."""
    states = {row["status"] for row in rows}
    return 3 if WRONG in states else 0 if states & {OK, SKIPPED} else 1

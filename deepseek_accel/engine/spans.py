"""One OpenTelemetry span per request, with its phases as children. Made when the request ends, from its times."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..errors import AccelError

if TYPE_CHECKING:
    from .requests import Result


class Spans:
    """deepseek_accel.request, with the children queue, prefill and decode.

    Attributes follow OpenTelemetry's names for generative models where there are some. They hold no prompts and no
    texts, but what an error says. Each request is a trace of its own.
    Raises AccelError if opentelemetry-api is missing.
    """

    def __init__(self, tracer_provider: Any = None) -> None:
        """tracer_provider: of the OpenTelemetry SDK, or None for the global one, set before or after this."""
        try:
            from opentelemetry import context, trace
        except ImportError as error:
            raise AccelError("spans need OpenTelemetry: pip install opentelemetry-api opentelemetry-sdk") from error
        self._trace, self._root = trace, context.Context()
        self._tracer = trace.get_tracer("deepseek_accel.engine", tracer_provider=tracer_provider)

    def record(self, result: Result) -> None:
        """Spans of a request that has ended. Nothing happens where nobody records them."""
        times, trace = result.times, self._trace
        if times.finished is None:
            return
        shift = time.time_ns() - time.perf_counter_ns()  # from the times' clock to that of the world

        def at(seconds: float) -> int:
            return int(seconds * 1e9) + shift

        start = at(times.submitted)
        request = self._tracer.start_span("deepseek_accel.request", context=self._root, start_time=start)
        if not request.is_recording():
            return
        request.set_attributes(
            {
                "gen_ai.usage.input_tokens": result.num_prompt_tokens,
                "gen_ai.usage.output_tokens": len(result.tokens),
                "gen_ai.response.finish_reasons": [result.finish_reason],
                "deepseek_accel.request_id": result.id,
                "deepseek_accel.cached_tokens": result.num_cached_tokens,
                "deepseek_accel.preemptions": result.num_preemptions,
            }
        )
        inside = trace.set_span_in_context(request)
        begun: float | None = times.submitted
        for name, ended in (("queue", times.admitted), ("prefill", times.first_token), ("decode", times.finished)):
            if begun is None:
                break
            child = self._tracer.start_span(f"deepseek_accel.{name}", context=inside, start_time=at(begun))
            if name == "decode":
                child.set_attribute("gen_ai.usage.output_tokens", len(result.tokens))
            child.end(at(times.finished if ended is None else ended))
            begun = ended
        if result.error is not None:
            request.record_exception(result.error)
            request.set_status(trace.StatusCode.ERROR, f"{type(result.error).__name__}: {result.error}")
        request.end(at(times.finished))


def spans_if_installed(tracer_provider: Any = None) -> Spans | None:
    """`Spans`, or None without OpenTelemetry."""
    try:
        return Spans(tracer_provider)
    except AccelError:
        return None

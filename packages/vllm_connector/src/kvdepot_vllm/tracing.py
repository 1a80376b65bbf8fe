"""Adds spans of the depot's work to the trace of a request.

With `--otlp-traces-endpoint`, vLLM passes on the trace context of a request (`trace_headers`), has an exporter in the
engine core's process, and brings OpenTelemetry. Otherwise there are no spans, and nothing is imported. Times are the
scheduler's: a span ends in the step that learns of the end.
"""

from functools import cache
from importlib import import_module
from typing import Any

from kvdepot_vllm.engine import EngineRequest


@cache
def _tracing() -> tuple[Any, Any] | None:
    """Return the tracer and the reader of trace headers; None without OpenTelemetry."""
    try:
        trace = import_module("opentelemetry.trace")
        headers = import_module("opentelemetry.trace.propagation.tracecontext")
    except ImportError:
        return None
    return trace.get_tracer("kvdepot"), headers.TraceContextTextMapPropagator()


def start_span(name: str, request: EngineRequest, **attributes: int) -> Any:
    """Begin a span in a request's trace; None if it has none. Attribute names get the prefix `kvdepot.`."""
    if not request.trace_headers:
        return None
    tracing = _tracing()
    if tracing is None:
        return None
    tracer, propagator = tracing
    context = propagator.extract(carrier=request.trace_headers)
    named = {f"kvdepot.{key}": value for key, value in attributes.items()}
    return tracer.start_span(name, context=context, attributes={"gen_ai.request.id": request.request_id, **named})


def end_span(span: Any, **attributes: int | bool) -> None:
    """End a span that `start_span` returned."""
    if span is not None:
        for key, value in attributes.items():
            span.set_attribute(f"kvdepot.{key}", value)
        span.end()

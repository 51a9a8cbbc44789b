"""Spans of OpenTelemetry for programs: a span a run, and below it one for each request and each tool.

A request to a server carries its span in the header traceparent, so that the server's span is its child.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from ramify.lang.trace.calls import Call
from ramify.messages import Generate
from ramify.spans import (
    input_messages,
    operation_of,
    output_messages,
    phase_attributes,
    request_attributes,
    set_failed,
    token_attributes,
    tracer_of,
)

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


class _Settings:
    tracer: Any = None
    """The tracer of all programs of this process; None while spans are off."""
    texts = False


_settings = _Settings()


def enable_otel(provider: TracerProvider | None = None, *, texts: bool = False) -> None:
    """Send spans of OpenTelemetry for all programs that this process runs from now on.

    Args:
        provider: The provider of the tracer. None: the one that the application has set, or if it has set
            none, one that sends spans by OTLP over HTTP as the variables OTEL_* say.
        texts: Whether spans have the texts of prompts, outputs and arguments of tools.

    Raises `InvalidRequest` if opentelemetry is not installed (``pip install 'ramify-llm[otel]'``).
    """
    _settings.tracer, _settings.texts = tracer_of(provider), texts


def begin_program(call: Call, program: str) -> None:
    """Begin the span of a run. Its parent is the span of the surrounding program's step, or else the current
    span of the caller."""
    if _settings.tracer is not None:
        _begin(
            call,
            f"invoke_workflow {call.name}",
            {
                "gen_ai.operation.name": "invoke_workflow",
                "gen_ai.workflow.name": call.name,
                "ramify.program.id": program,
            },
        )


def end_program(call: Call, error: BaseException | None) -> None:
    """End the span of a run, which has the tokens of all its requests."""
    span, call.span = call.span, None
    if span is not None:
        span.set_attributes(token_attributes(call.usage))
        if error is not None:
            set_failed(span, error.__cause__ or error)
        span.end()


@contextlib.contextmanager
def request_span(call: Call, request: Generate, model: str) -> Iterator[None]:
    """A ``with`` block with the span of the request of `call` as the current span. The span ends with the
    block, with what is known of `call` then."""
    if _settings.tracer is None:
        yield
        return
    attributes = request_attributes(request, model)
    with _current(call, f"{operation_of(request)} {model}", attributes, client=True) as span:
        try:
            yield
        finally:
            span.set_attributes(token_attributes(call.own_usage) | phase_attributes(call.own_usage))
            if call.finish is not None:
                span.set_attribute("gen_ai.response.finish_reasons", (call.finish.reason,))
            if call.resent:
                span.set_attribute("ramify.resent", call.resent)
            if call.stored:
                span.set_attribute("ramify.stored", True)
            if _settings.texts:
                reason = call.finish.reason if call.finish is not None else ""
                span.set_attribute("gen_ai.input.messages", input_messages(request))
                texts = output_messages(call.thinking or "", call.text, reason)
                span.set_attribute("gen_ai.output.messages", texts)


@contextlib.contextmanager
def tool_span(call: Call) -> Iterator[None]:
    """A ``with`` block with the span of the tool's call `call` as the current span."""
    if _settings.tracer is None:
        yield
        return
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call.name}
    if _settings.texts:
        attributes["gen_ai.tool.call.arguments"] = call.arguments or ""
    with _current(call, f"execute_tool {call.name}", attributes):
        yield


@contextlib.contextmanager
def program_context(call: Call) -> Iterator[None]:
    """A ``with`` block with the span of the program of `call` as the current span, for a task that serves the
    whole program."""
    if _settings.tracer is None:
        yield
        return
    from opentelemetry import trace

    while call.kind != "program" and call.parent is not None:
        call = call.parent
    with trace.use_span(call.span or trace.INVALID_SPAN, end_on_exit=False):
        yield


def add_headers(headers: MutableMapping[str, str]) -> None:
    """Add the headers that name the current span, such as traceparent; none while spans are off."""
    if _settings.tracer is not None:
        from opentelemetry import propagate

        propagate.inject(headers)


@contextlib.contextmanager
def _current(call: Call, name: str, attributes: dict[str, Any], *, client: bool = False) -> Iterator[Any]:
    from opentelemetry import trace

    span = _begin(call, name, attributes, client=client)
    try:
        with trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            yield span
    except BaseException as error:
        set_failed(span, error)
        raise
    finally:
        call.span = None
        span.end()


def _begin(call: Call, name: str, attributes: dict[str, Any], *, client: bool = False) -> Any:
    from opentelemetry import trace

    above = call.parent
    while above is not None and above.span is None:
        above = above.parent
    call.span = _settings.tracer.start_span(
        name,
        context=None if above is None else trace.set_span_in_context(above.span),
        kind=trace.SpanKind.CLIENT if client else trace.SpanKind.INTERNAL,
        attributes=attributes,
    )
    return call.span

"""OpenTelemetry: the tracer, and the attributes of a request's span.

Names follow the semantic conventions for generative AI (github.com/open-telemetry/semantic-conventions-genai,
as of the conventions 1.44). Attributes that they lack begin with ``ramify.``. Opentelemetry's packages are an
extra, ``ramify-llm[otel]``, and are imported only where spans are asked for.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.errors import InvalidRequest, RamifyError
from ramify.messages import Generate, Usage

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider

PROVIDER = "ramify"
"""The value of gen_ai.provider.name."""
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
"""Sampling options that the conventions name as we do."""
_USAGE = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens",
    "evicted_tokens": "ramify.evicted_tokens",
    "forced_tokens": "ramify.forced_tokens",
    "draft_tokens": "ramify.draft_tokens",
    "accepted_tokens": "ramify.accepted_tokens",
    "retractions": "ramify.retractions",
}
"""Field of `Usage` → attribute. The first two are always set, the others unless they are 0."""


def tracer_of(provider: TracerProvider | None = None) -> Tracer:
    """A tracer of `provider`. None: of the provider that the application has set, or if it has set none, of
    one that sends spans by OTLP over HTTP as the variables OTEL_* say.

    Raises `InvalidRequest` if opentelemetry is not installed, or if a variable asks for another exporter.
    """
    try:
        from opentelemetry import trace
    except ModuleNotFoundError:
        raise _not_installed() from None
    if provider is None:
        # Until an application sets a provider there is a proxy, whose spans are dropped.
        there = trace.get_tracer_provider()
        provider = _exporting() if isinstance(there, trace.ProxyTracerProvider) else there
    return provider.get_tracer("ramify", schema_url="https://opentelemetry.io/schemas/1.44.0")


@functools.cache
def _exporting() -> TracerProvider:
    """The provider of this process, which it shares with all libraries. Its last spans are sent at exit."""
    for variable, known in (
        ("OTEL_TRACES_EXPORTER", ("otlp",)),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", ("http/protobuf",)),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", ("http/protobuf",)),
    ):
        if (value := os.environ.get(variable)) and value not in known:
            raise InvalidRequest(
                f"{variable} is {value!r}; spans are sent by OTLP over HTTP only: {', '.join(known)}.",
                field="otel",
                remedy="Unset it, and let OTEL_EXPORTER_OTLP_ENDPOINT name a port for HTTP, usually 4318.",
            )
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError:
        raise _not_installed() from None
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "ramify"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider


def _not_installed() -> InvalidRequest:
    return InvalidRequest(
        "otel needs the packages of OpenTelemetry, which are not installed.",
        field="otel",
        remedy="Install them: pip install 'ramify-llm[otel]'.",
    )


def operation_of(request: Generate) -> str:
    """The value of gen_ai.operation.name."""
    if request.pooling is not None:
        return "embeddings"
    return "text_completion" if request.chat is None else "chat"


def request_attributes(request: Generate, model: str) -> dict[str, Any]:
    """The attributes of a request that has been sent to `model`."""
    sampling, hint = request.sampling, request.hint
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation_of(request),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.id": request.rid,
    }
    for name in _SAMPLING:
        if (value := getattr(sampling, name)) is not None:
            found[f"gen_ai.request.{name}"] = value
    if sampling.stop:
        found["gen_ai.request.stop_sequences"] = sampling.stop
    if request.constraint is not None:
        found["ramify.constraint"] = request.constraint.kind
    if request.decide is not None:
        found["ramify.questions"] = len(request.decide.questions)
    if hint is not None:
        found["ramify.program.id"] = hint.program
        found["ramify.program.name"] = hint.name
        found["ramify.program.path"] = hint.path
    return found


def phase_attributes(usage: Usage) -> dict[str, Any]:
    """The seconds of the phases of a request that has ended with this usage."""
    return {f"ramify.{name}": seconds for name, seconds in (usage.phases or {}).items()}


def token_attributes(usage: Usage) -> dict[str, Any]:
    """The tokens of a request, or of a program, that has ended with this usage."""
    return {
        attribute: value
        for name, attribute in _USAGE.items()
        if (value := getattr(usage, name))
        or attribute.endswith(("usage.input_tokens", "usage.output_tokens"))
    }


def set_failed(span: Span, error: BaseException) -> None:
    """Set the status of `span` and error.type: the code of a `RamifyError`, or the class. The error's message
    is left out, since it may quote fields of the request."""
    from opentelemetry.trace import Status, StatusCode

    kind = error.code if isinstance(error, RamifyError) else type(error).__qualname__
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, kind))


def input_messages(request: Generate) -> str:
    """The prompt as the value of gen_ai.input.messages: JSON text. A prompt that is no chat is one message of
    the user, with token ids in parts of the type token_ids."""
    if request.chat is None:
        parts = [
            {"type": "text", "content": segment}
            if isinstance(segment, str)
            else {"type": "token_ids", "content": segment}
            for segment in request.prompt
        ]
        return _json([{"role": "user", "parts": parts}])
    messages = []
    for turn in request.chat:
        parts = [{"type": "reasoning", "content": turn.reasoning}] if turn.reasoning else []
        if turn.role == "tool":
            parts.append({"type": "tool_call_response", "id": turn.tool_call_id, "response": turn.content})
        elif turn.content:
            parts.append({"type": "text", "content": turn.content})
        parts += [
            {"type": "tool_call", "id": one.id, "name": one.name, "arguments": one.arguments}
            for one in turn.tool_calls
        ]
        messages.append({"role": turn.role, "parts": parts})
    return _json(messages)


def output_messages(reasoning: str, text: str, finish: str) -> str:
    """The output as the value of gen_ai.output.messages: JSON text."""
    parts = [{"type": kind, "content": of} for kind, of in (("reasoning", reasoning), ("text", text)) if of]
    return _json([{"role": "assistant", "parts": parts, "finish_reason": finish}])


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()

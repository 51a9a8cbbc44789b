"""A generation's log line and its span."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ramify.logs import REQUEST_ID, fields
from ramify.messages import Generate, TextChunk, Usage
from ramify.runtime.config import ServerConfig
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
from ramify.text import plain

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger("ramify.server")


@dataclass(slots=True)
class Incoming:
    """A HTTP request that is being handled, if spans are on."""

    spans: int = 0
    """Number of spans of its generations."""


INCOMING: ContextVar[Incoming | None] = ContextVar("incoming", default=None)


class Telemetry:
    """Makes the log lines and the spans of a server's generations. `model` is the id of the model for
    clients."""

    def __init__(self, config: ServerConfig, model: str) -> None:
        self._model = model
        self._texts = config.log_texts
        self._tracer = tracer_of() if config.otel else None

    def begin(
        self, request: Generate, endpoint: str, client: str, user: str | None, key: str = ""
    ) -> Generation:
        """A record of `request`, by the API key named `key`, to be ended by `Generation.end`. Its span is
        a child of the span that the HTTP request's traceparent names."""
        made = Generation(request, endpoint, client, user, key, request.lora or self._model)
        if self._texts:
            made.chunks = []
        if self._tracer is not None:
            from opentelemetry.trace import SpanKind

            made.span = self._tracer.start_span(
                f"{operation_of(request)} {made.model}",
                kind=SpanKind.SERVER,
                attributes=request_attributes(request, made.model)
                | {"http.route": endpoint, "ramify.client": client, "ramify.request_id": REQUEST_ID.get()},
            )
            if key:
                made.span.set_attribute("ramify.key", key)
            if (incoming := INCOMING.get()) is not None:
                incoming.spans += 1
        return made


@dataclass(slots=True, eq=False)
class Generation:
    """A generation that runs."""

    request: Generate
    endpoint: str
    client: str
    user: str | None
    key: str
    model: str
    span: Span | None = None
    chunks: list[TextChunk] | None = field(default=None, repr=False)
    """The chunks of the output; None unless texts are asked for."""

    def add_chunk(self, chunk: TextChunk) -> None:
        if self.chunks is not None:
            self.chunks.append(chunk)

    def end(
        self,
        status: int,
        finish: str,
        usage: Usage,
        first_token_s: float | None,
        total_s: float,
        failure: BaseException | None,
    ) -> None:
        """Log the line of the generation, and end its span. `first_token_s`: None without a token."""
        texts: dict[str, Any] = {}
        if self.chunks is not None:
            reasoning = "".join([chunk.reasoning for chunk in self.chunks])
            text = "".join([chunk.text for chunk in self.chunks])
            texts = {
                "gen_ai.input.messages": input_messages(self.request),
                "gen_ai.output.messages": output_messages(reasoning, text, finish),
            }
        if self.span is not None:
            self.span.set_attributes(
                token_attributes(usage)
                | phase_attributes(usage)
                | texts
                | {
                    "gen_ai.response.model": self.model,
                    "gen_ai.response.finish_reasons": (finish,),
                    "http.response.status_code": status,
                }
            )
            if first_token_s is not None:
                self.span.set_attribute("gen_ai.response.time_to_first_chunk", first_token_s)
            if failure is not None:
                set_failed(self.span, failure)
            self.span.end()
        if logger.isEnabledFor(logging.INFO):
            self._log(status, finish, usage, first_token_s, total_s, texts)

    def _log(
        self,
        status: int,
        finish: str,
        usage: Usage,
        first_token_s: float | None,
        total_s: float,
        texts: dict[str, Any],
    ) -> None:
        request, hint = self.request, self.request.hint
        questions = 0 if request.decide is None else len(request.decide.questions)
        told = usage.prompt_tokens > 0  # the first chunk tells it; some end before
        logger.info(
            "rid=%s endpoint=%s status=%d finish=%s prompt=%s cached=%s output=%d ttft=%s total=%.3fs%s",
            plain(request.rid),
            self.endpoint,
            status,
            finish,
            usage.prompt_tokens if told else "-",
            usage.cached_tokens if told else "-",
            usage.completion_tokens,
            "-" if first_token_s is None else f"{first_token_s:.3f}s",
            total_s,
            (f" questions={questions}" if questions else "") + (f" user={self.user!r}" if self.user else ""),
            extra=fields(
                message="generation",
                rid=request.rid,
                program=hint and hint.program,
                program_name=hint and hint.name,
                client=self.client,
                key=self.key,
                user=self.user,
                model=self.model,
                endpoint=self.endpoint,
                status=status,
                finish=finish,
                prompt_tokens=usage.prompt_tokens if told else None,
                cached_tokens=usage.cached_tokens if told else None,
                output_tokens=usage.completion_tokens,
                questions=questions or None,
                first_token_s=first_token_s,
                total_s=total_s,
                **(usage.phases or {}),
                **{name.replace("gen_ai.", "").replace(".", "_"): text for name, text in texts.items()},
            ),
        )

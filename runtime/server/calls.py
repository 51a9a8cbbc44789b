"""The endpoint ``POST /v1/calls``: one call of a program, sent by Ramify's own client as runtime structs.

``request`` is a `Generate` with a prompt of segments, or with a chat and questions about it. ``model`` is the
model's name. ``fingerprint`` is that of the model that the program started on: the prompt may contain token
ids of that model, so a server that has another model by now refuses the request.

The response is a stream of events ``{"chunks": [ramify.messages.TextChunk]}``, ended by ``[DONE]``. An error
before the first event is sent as a response with its own status. A later error is sent as an event
``{"error": …}``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import Generate, TextChunk
from ramify.priority import checked_priority
from ramify.runtime.server.body import read_body
from ramify.runtime.server.fields import decode
from ramify.runtime.server.params import check_hint, check_segments
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.runtime.server.sse import DONE, EventStream, event

router = Router()

PATH = "/v1/calls"
UNSUPPORTED = ("chat", "tools", "template_kwargs", "thinking")
"""Fields of `Generate` that are refused, since programs write the turns of a chat themselves. A chat is taken
with questions, which are written into its turns."""


class _StrictGenerate(Generate, frozen=True, kw_only=True, tag="Generate", forbid_unknown_fields=True):
    """A `Generate` that refuses unknown fields, such as those of newer clients."""


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request: _StrictGenerate
    model: str = ""
    fingerprint: str = ""


@router.post(PATH, any_key=True)
async def answer_call(request: Request) -> Response:
    service = Service.serving(request)
    body: _Body = decode(await read_body(request), _Body, "")
    _check(body.request, service)
    service.check_name(body.model)
    if body.fingerprint not in ("", service.frontend.info.fingerprint):
        raise InvalidRequest(
            f"The program began on another model than this server has now: {service.frontend.info.name}.",
            field="fingerprint",
            remedy="Run it again.",
        )
    return EventStream(_events(service.generate(body.request, PATH)))


def _check(generate: Generate, service: Service) -> None:
    """Raise `InvalidRequest` for a wrong value of a field that the frontend does not check."""
    for field in UNSUPPORTED:
        if getattr(generate, field) and (field != "chat" or generate.decide is None):
            raise UnsupportedField(
                f"{field} is not taken here.", field=field, remedy="Use /v1/chat/completions."
            )
    if not generate.rid:
        raise InvalidRequest("rid is empty.", field="rid")
    if generate.chat is not None and generate.prompt:
        raise UnsupportedField("prompt has no effect beside chat.", field="prompt", remedy="Leave it out.")
    if generate.chat is None:
        check_segments(generate.prompt, "prompt", service.frontend.info.vocab_size)
    checked_priority(generate.priority)
    if generate.hint is not None:
        check_hint(generate.hint, "hint")


async def _events(stream: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            data = event({"chunks": (chunk,)})
            yield data if chunk.finish is None else data + DONE

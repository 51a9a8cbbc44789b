"""``POST /v1/calls``: a request of a program as Ramify's own client sends it, in the words of the runtime.

The body:

- ``request``: `ramify.messages.Generate`, with a prompt of segments. A client that shows nobody the text as
  it comes asks for few chunks (`every_s`): an event takes as long as the rest of a short call.

The answer is a stream of events ``{"chunks": [ramify.messages.TextChunk]}``, ended by ``[DONE]``. An error
comes in its place with its own status, after the first event as an event ``{"error": …}``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import Generate, TextChunk
from ramify.runtime.server.fields import decode, read_body
from ramify.runtime.server.params import check_hint, check_segments
from ramify.runtime.server.service import Service
from ramify.runtime.server.sse import DONE, EventStream, event

router = APIRouter()

PATH = "/v1/calls"
NOT_TAKEN = ("chat", "tools", "template_kwargs", "preambles")
"""Of a `Generate`: programs write the turns of a chat themselves."""


class _Asked(Generate, frozen=True, kw_only=True, tag="Generate", forbid_unknown_fields=True):
    """The same, from a client that may be newer than we are."""


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    request: _Asked


async def call(request: Request) -> Response:
    service = Service.of(request)
    body: _Body = decode(await read_body(request), _Body, "")
    _check(body.request, service)
    return EventStream(_events(service.generate(body.request, PATH)))


# Not `router.post`, which would spend more on its arguments than the whole call takes here.
router.add_route(PATH, call, methods=["POST"])


def _check(asked: Generate, service: Service) -> None:
    """What the frontend does not look at."""
    for field in NOT_TAKEN:
        if getattr(asked, field):
            raise UnsupportedField(
                f"{field} is not taken here.", field=field, remedy="Use /v1/chat/completions."
            )
    if not asked.rid:
        raise InvalidRequest("rid is empty.", field="rid")
    check_segments(asked.prompt, "prompt", service.frontend.info.vocab_size)
    if asked.hint is not None:
        check_hint(asked.hint, "hint")


async def _events(stream: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(stream) as chunks:
        async for chunk in chunks:
            told = event(msgspec.json.encode({"chunks": (chunk,)}))
            yield told if chunk.finish is None else told + DONE

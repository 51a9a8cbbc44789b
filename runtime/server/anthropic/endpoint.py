"""Anthropic's Messages API: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, and its list of
models."""

from __future__ import annotations

import datetime
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Literal, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from ramify.errors import NotFound, UnsupportedField
from ramify.messages import HELD_S, Generate, TextChunk
from ramify.runtime.server.anthropic.cache import CacheMarks
from ramify.runtime.server.anthropic.options import take_format, take_thinking, take_tools
from ramify.runtime.server.anthropic.turns import take_turns
from ramify.runtime.server.anthropic.writer import PING, MessageWriter, failed
from ramify.runtime.server.errors import of_anthropic
from ramify.runtime.server.fields import Fields, json_response
from ramify.runtime.server.leases import hint_of
from ramify.runtime.server.models import ServedModel, served_model, served_models
from ramify.runtime.server.openai.bodies import Body
from ramify.runtime.server.openai.chat import Chat, Dialect, take_chat, without_generation_prompt
from ramify.runtime.server.openai.request import lora_of, refuse_abort
from ramify.runtime.server.params import COMMON, explained, take_priority, take_sampling
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.runtime.server.sse import EventStream, read_all, while_connected
from ramify.runtime.server.tables.anthropic import COUNT_TOKENS, MESSAGES, METADATA

router = Router()

_SPELLING = COMMON | {"max_tokens": "max_tokens", "stop_sequences": "stop"}


@router.post(MESSAGES.path, any_key=True)
async def messages(request: Request) -> Response:
    asked, headers = await parse_body(request, MESSAGES, _parse_message)
    request_id = f"req_{asked.generation.rid.removeprefix('msg_')}"
    request.scope["request_id"] = request_id
    headers["request-id"] = request_id
    service, chat = Service.serving(request), asked.chat
    chunks = explained(
        service.generate(asked.generation, MESSAGES.path, asked.user),
        chat.explain,
        {"prompt": "messages", "stop": "stop_sequences"},
        chat.tell,
    )
    events = _events(chunks, asked.writer)
    if asked.stream:
        return EventStream(events, failed, headers, lambda: PING)
    await while_connected(request.receive, read_all(events))
    return json_response(asked.writer.message, headers)


@router.post(COUNT_TOKENS.path, any_key=True)
async def count_tokens(request: Request) -> Response:
    prompt, headers = await parse_body(request, COUNT_TOKENS, _parse_count)
    # Chat templates write special tokens themselves.
    (found,) = await Service.serving(request).tokenize([prompt], special=False)
    return json_response({"input_tokens": len(found.ids)}, headers)


class _Asked(NamedTuple):
    """A parsed request for a message."""

    chat: Chat
    generation: Generate
    writer: MessageWriter
    stream: bool
    user: str | None


def _parse_message(service: Service, fields: Fields) -> _Asked:
    rid = f"msg_{service.frontend.new_rid()}"
    model, lora = _take_model(service, fields)
    marks = CacheMarks()
    chat = _take_chat(service, fields, marks, rid)
    max_tokens: int = fields.need("max_tokens", int)
    sampling = take_sampling(
        fields,
        _SPELLING,
        unlimited="Give a number; it is cut to the room in the context.",
        **service.sampling_defaults,
    )
    thinking = fields.take_object("thinking")
    omitted = thinking is not None and thinking.take("display", str) == "omitted"
    metadata = fields.take_object("metadata")
    user: str | None = None
    if metadata is not None:
        user = metadata.take("user_id", str)
        metadata.finish(METADATA)
    fields.take("service_tier", Literal["auto", "standard_only"])
    stream: bool = fields.take("stream", bool, False)
    scope: str = fields.take("cache_salt", str, "")
    generation = msgspec.structs.replace(
        chat.request,
        sampling=sampling,
        scope=scope,
        hint=hint_of(fields, scope, rid, lease_s=marks.lease_s),
        lora=lora,
        every_s=0.0 if stream else HELD_S,
        priority=take_priority(fields),
        flow=rid,
    )
    fields.finish(MESSAGES.whole)
    message: Body = {
        "id": rid,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }
    writer = MessageWriter(message, chat.turn_format, marks, max_tokens, omitted=omitted)
    return _Asked(chat, generation, writer, stream, user)


def _parse_count(service: Service, fields: Fields) -> Generate:
    _take_model(service, fields)
    chat = _take_chat(service, fields, CacheMarks(), service.frontend.new_rid())
    fields.finish(COUNT_TOKENS.whole)
    return chat.request


async def _events(
    chunks: AsyncGenerator[TextChunk, None], writer: MessageWriter
) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            refuse_abort(chunk.finish)
            if events := writer.push(chunk):
                yield events


def _take_model(service: Service, fields: Fields) -> tuple[str, str]:
    """(the model, the LoRA adapter that it names or "")."""
    model: str = fields.take("model", str) or service.model_name
    try:
        return model, lora_of(service, model)
    except NotFound as error:
        error.message = f"model: {model} is not served here."
        raise


def _take_chat(service: Service, fields: Fields, marks: CacheMarks, rid: str) -> Chat:
    """Take the chat. If its last turn is an assistant's, the answer continues this turn."""
    dialect = Dialect(
        turns="messages",
        take_turns=partial(take_turns, marks=marks),
        take_format=take_format,
        take_tools=partial(take_tools, marks=marks),
        take_reasoning=take_thinking,
    )
    chat = take_chat(fields, service.frontend.info.chat_format, dialect, rid)
    if not chat.request.chat or chat.request.chat[-1].role != "assistant":
        return chat
    thinking = fields.take_object("thinking")
    if thinking is not None and thinking.take("type", str) == "enabled":
        raise _not_continued("thinking", "Thinking comes before the answer")
    if chat.found is not None:
        raise _not_continued(chat.found[0], "A format holds for a whole answer")
    if chat.turn_format.channels:
        raise _not_continued("messages", "This model thinks before each answer")
    return without_generation_prompt(chat, continued=True)


def _not_continued(field: str, reason: str) -> UnsupportedField:
    return UnsupportedField(
        f"{reason}, so an answer that messages begin cannot be continued.",
        field=field,
        remedy="Leave it out, or let messages end with a user's.",
    )


class _AnthropicRoute(Route):
    """A route of requests that name a version of Anthropic's API. OpenAI's has the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if of_anthropic(scope) else (Match.NONE, {})


_models = Router(_AnthropicRoute)


@_models.get("/v1/models", any_key=True)
async def list_models(request: Request) -> Response:
    served = await served_models(request)
    cards = [_card(request, one, name) for one in served for name in one.names]
    return json_response(
        {
            "data": cards,
            "has_more": False,
            "first_id": cards[0]["id"] if cards else None,
            "last_id": cards[-1]["id"] if cards else None,
        }
    )


@_models.get("/v1/models/{model:path}", any_key=True)
async def get_model(request: Request, model: str) -> Response:
    served = await served_model(request, model)
    lora = "" if served.service is None else lora_of(served.service, model)
    name = lora or (model if model in served.names else served.identity)
    return json_response(_card(request, served, name))


def _card(request: Request, served: ServedModel, name: str) -> Body:
    service = Service.serving(request)
    started = datetime.datetime.fromtimestamp(service.started_at, datetime.UTC)
    length = served.context_length or 0
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": started.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": min(length, service.config.max_output_tokens or length),
    }


router.routes += _models.routes

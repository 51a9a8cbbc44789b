"""OpenAI's Responses API: ``POST /v1/responses``.

A request continues a stored response or conversation, or has the whole conversation as ``input``, with the
items of earlier responses.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from ramify.errors import InvalidRequest, PromptTooLong, UnsupportedField
from ramify.messages import TextChunk
from ramify.runtime.server.errors import log_error
from ramify.runtime.server.fields import Fields, json_response
from ramify.runtime.server.leases import client_program
from ramify.runtime.server.openai.bodies import Body
from ramify.runtime.server.openai.chat import Dialect, take_chat
from ramify.runtime.server.openai.output_format import take_text_format
from ramify.runtime.server.openai.request import (
    ParsedRequest,
    parse_request,
    refuse_abort,
    take_header,
    with_top_logprobs,
)
from ramify.runtime.server.openai.responses.input import take_input
from ramify.runtime.server.openai.responses.store import ResponseStore, Storage, take_storage
from ramify.runtime.server.openai.responses.tools import take_response_tools
from ramify.runtime.server.openai.responses.writer import ResponseWriter
from ramify.runtime.server.params import OPENAI_SPELLING, take_sampling
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.runtime.server.sse import EventStream, read_all, while_connected
from ramify.runtime.server.tables.responses import RESPONSES
from ramify.sampling_params import SamplingParams
from ramify.text import quoted

logger = logging.getLogger("ramify.server")

router = Router()

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
"""The two values of ``include`` that have an effect: `LOGPROBS` and `ENCRYPTED`."""
IGNORED_INCLUDE = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Values of ``include`` about items that no response of this server has."""

MAX_METADATA = 16
"""Maximum number of pairs of ``metadata``. The two limits below are in characters. All three are OpenAI's."""
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

_SPELLING = OPENAI_SPELLING | {"max_output_tokens": "max_tokens"}


@router.post(RESPONSES.path, any_key=True)
async def responses(request: Request) -> Response:
    parse = functools.partial(_parse, stored_by(request))
    (parsed, writer, storage), headers = await parse_body(request, RESPONSES, parse)
    (stream,) = parsed.streams
    events = _events(stream, writer, storage, Service.serving(request))
    if parsed.stream:
        events = _fail_in_stream(events, writer, request.scope)
        return EventStream(events, writer.failed, headers, writer.keep_alive)
    await while_connected(request.receive, read_all(events))
    return json_response(writer.response, headers)


def stored_by(request: Request) -> ResponseStore | None:
    """The store of the application; None if it stores nothing."""
    store: ResponseStore | None = request.app.state.responses
    return store


async def end_leases(service: Service, store: ResponseStore) -> None:
    """End the leases of what is not stored any more. If that fails, the next call tries again: the answer to
    the client is complete."""
    for program in [*store.ended]:
        try:
            await service.end_in_engine(program)
        except Exception as error:
            logger.warning("The leases of %s cannot be ended now: %s", program, error)
            return
        store.ended.pop(program, None)


def _parse(
    store: ResponseStore | None, service: Service, fields: Fields
) -> tuple[ParsedRequest, ResponseWriter, Storage]:
    header = take_header(service, fields, "resp_")
    storage = take_storage(store, fields, header["id"])
    chat_format = service.frontend.info.chat_format
    dialect = Dialect(
        turns="input",
        take_turns=functools.partial(take_input, storage=storage),
        take_format=take_text_format,
        take_tools=lambda fields, tool_format: take_response_tools(
            fields,
            tool_format,
            storage.additional_tools,  # which `take_turns` has found
        ),
    )
    chat = take_chat(fields, chat_format, dialect, header["id"])
    storage.take_own(fields, header["id"])
    included = take_included(fields)
    sampling = _take_logprobs(
        fields, included, take_sampling(fields, _SPELLING, least_tokens=1, **service.sampling_defaults)
    )
    metadata = take_metadata(fields)
    if client_program(fields):
        storage.program = ""
    parsed = parse_request(
        service,
        fields,
        header,
        [chat.request],
        sampling,
        RESPONSES,
        explain=chat.explain,
        tell=chat.tell,
        spelled={"prompt": "input", "max_tokens": "max_output_tokens"},
        session=storage.program,
        lease_s=math.inf if storage.program else None,  # `max_lease_s` bounds it
    )
    response = _initial_response(header, fields, sampling, metadata) | storage.echo()
    writer = ResponseWriter(response, chat.turn_format, chat.tool_use, encrypted=ENCRYPTED in included)
    return parsed, writer, storage


async def _events(
    stream: AsyncGenerator[TextChunk, None], writer: ResponseWriter, storage: Storage, service: Service
) -> AsyncGenerator[bytes, None]:
    storage.begin()
    try:
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                refuse_abort(chunk.finish)
                events = writer.push(chunk)
                if chunk.finish is not None:  # before the client learns of the end, and continues it
                    storage.save(writer.response)
                    storage.end()
                if events:
                    yield events
    finally:
        storage.end()
        if storage.store is not None:
            await end_leases(service, storage.store)


async def _fail_in_stream(
    events: AsyncGenerator[bytes, None], writer: ResponseWriter, scope: Scope
) -> AsyncGenerator[bytes, None]:
    """`events`, in which a prompt that is too long fails by an event. Codex shortens the conversation after
    this event, and takes the status 400 for a fault of its own."""
    async with aclosing(events):
        try:
            async for data in events:
                yield data
        except PromptTooLong as error:
            log_error(scope, error.status, str(error), error.field)
            yield writer.failed(error)


def take_included(fields: Fields) -> list[str]:
    included: list[str] = fields.take("include", list[str], [])
    for index, name in enumerate(included):
        if name in IGNORED_INCLUDE:
            fields.leave_out(f"include[{name}]", f"include[{index}]")
        elif name not in (LOGPROBS, ENCRYPTED):
            raise UnsupportedField(
                f"include[{index}] is {quoted(name)}; only {LOGPROBS} and {ENCRYPTED} have an effect.",
                field=f"include[{index}]",
            )
    return included


def _take_logprobs(fields: Fields, included: list[str], sampling: SamplingParams) -> SamplingParams:
    top: int | None = fields.take("top_logprobs", int)
    if LOGPROBS in included:
        return with_top_logprobs(sampling, top)
    if top:
        raise InvalidRequest(f"top_logprobs needs {LOGPROBS} in include.", field="top_logprobs")
    return sampling


def take_metadata(fields: Fields) -> dict[str, str]:
    """OpenAI's ``metadata``: pairs of texts that are only kept."""
    pairs: dict[str, str] = fields.take("metadata", dict[str, str], {})
    if len(pairs) > MAX_METADATA:
        raise InvalidRequest(
            f"metadata has {len(pairs)} pairs; at most {MAX_METADATA} are taken.", field="metadata"
        )
    for key, value in pairs.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            most = f"a key has at most {MAX_METADATA_KEY} characters, and a value {MAX_METADATA_VALUE}"
            raise InvalidRequest(f"metadata: {most}.", field="metadata")
    return pairs


def _initial_response(
    header: Body, fields: Fields, sampling: SamplingParams, metadata: dict[str, str]
) -> Body:
    """The response before its first token, which repeats options of the request."""

    def echoed(field: str, default: str) -> msgspec.Raw:
        # The client's JSON text, put on one line, as the data of an event may have no line breaks.
        return msgspec.Raw(msgspec.json.format((fields.take_text(field) or default).encode(), indent=-1))

    response = {
        "object": "response",
        "created_at": header["created"],
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.take("instructions", str),
        "max_output_tokens": sampling.max_tokens,
        "metadata": metadata,
        "output": [],
        "parallel_tool_calls": fields.take("parallel_tool_calls", bool, True),
        "prompt_cache_key": fields.take("prompt_cache_key", str),
        "prompt_cache_retention": fields.take("prompt_cache_retention", str),
        "reasoning": echoed("reasoning", "null"),
        "safety_identifier": fields.take("safety_identifier", str),
        "temperature": sampling.temperature,
        "text": echoed("text", '{"format":{"type":"text"}}'),
        "tool_choice": echoed("tool_choice", '"auto"'),
        "tools": echoed("tools", "[]"),
        "top_logprobs": sampling.logprobs or 0,
        "top_p": sampling.top_p,
        "usage": None,
        "user": fields.take("user", str),
        "background": False,
        "truncation": "disabled",
    }
    named = {name: value for name, value in header.items() if name != "created"}
    return named | response

"""/api/chat, /api/generate, /api/embed and /api/embeddings of Ollama's API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.fill import Fill
from ramify.messages import HELD_S, Generate, Segment, TextChunk
from ramify.runtime.frontend.embeddings import pooling_for, vector_of
from ramify.runtime.generation import GenerationResult
from ramify.runtime.models.names import keep_alive_s
from ramify.runtime.server.body import peek_body
from ramify.runtime.server.fields import Fields, decode, json_response
from ramify.runtime.server.leases import hint_of
from ramify.runtime.server.models import LOAD_NS, Models, several_models
from ramify.runtime.server.ollama.messages import CHAT, GENERATE, take_format
from ramify.runtime.server.ollama.options import ignore_options, take_model, take_options
from ramify.runtime.server.ollama.writer import AnswerWriter, error_line, line
from ramify.runtime.server.openai.chat import Chat, take_chat
from ramify.runtime.server.openai.request import refuse_abort, take_logprobs
from ramify.runtime.server.openai.turn_parser import TurnFormat
from ramify.runtime.server.params import explain_by_field, explained, take_prompts
from ramify.runtime.server.parsing import Parser, parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import KEY, Service
from ramify.runtime.server.sse import EventStream, collect, while_connected
from ramify.runtime.server.tables import ollama as tables
from ramify.runtime.server.tables.rows import Endpoint
from ramify.sampling_params import SamplingParams

router = Router()


class LineStream(EventStream):
    """Sends lines of JSON as they come. An error after the first line is the last line."""

    media_type = "application/x-ndjson"


class _Answer(NamedTuple):
    """A parsed and checked request."""

    chunks: AsyncGenerator[TextChunk, None] | None
    """The chunks of the generation; None without a prompt, which loads the model on Ollama."""
    writer: AnswerWriter
    stream: bool


@router.post("/api/chat", uses_model=False, any_key=True)
async def chat(request: Request) -> Response:
    return await _respond(request, tables.CHAT, _parse_chat)


@router.post("/api/generate", uses_model=False, any_key=True)
async def generate(request: Request) -> Response:
    return await _respond(request, tables.GENERATE, _parse_generate)


async def _respond(request: Request, endpoint: Endpoint, parse: Parser[_Answer]) -> Response:
    if (models := several_models(request)) is not None:
        if (unloaded := await _unload(models, request)) is not None:
            return unloaded
        await models.acquire(request)
    (chunks, writer, stream), headers = await parse_body(request, endpoint, parse)
    writer.load_ns = request.scope.get(LOAD_NS, 0)
    if chunks is None:
        return json_response(writer.loaded(), headers)
    if stream:
        return LineStream(_lines(chunks, writer), error_line, headers, keep_alive=bytes)
    (result,) = await while_connected(request.receive, collect([chunks]))
    refuse_abort(result.finish)
    return json_response(writer.whole(result), headers)


class _Unload(msgspec.Struct):
    """Fields of a body without a prompt whose `keep_alive` is 0, which asks to unload the model."""

    keep_alive: str | float
    model: str = ""
    prompt: str = ""
    suffix: str = ""
    messages: list[msgspec.Raw] = []


async def _unload(models: Models, request: Request) -> Response | None:
    """Unload the model if the body asks for it; None if it does not. Raises `NotAllowed` unless the key is an
    operator's: an unload makes the requests of all keys wait."""
    try:
        asked: _Unload = decode(await peek_body(request), _Unload, "")
    except InvalidRequest:
        return None
    if asked.prompt or asked.suffix or asked.messages or keep_alive_s(asked.keep_alive) != 0:
        return None
    model = await while_connected(request.receive, models.find_allowed(asked.model))
    KEY.get().check_operator(f"unload the model {model!r}")
    await while_connected(request.receive, models.pool.unload(model))
    writer = AnswerWriter(asked.model or model, TurnFormat(), chat=request.url.path == tables.CHAT.path)
    return json_response(writer.loaded() | {"done_reason": "unload"})


def _parse_chat(service: Service, fields: Fields) -> _Answer:
    parsed = take_chat(fields, service.frontend.info.chat_format, CHAT, service.frontend.new_rid())
    empty = not fields.take("messages", list[Any])
    return _parse_rest(service, fields, parsed, tables.CHAT, "messages", empty=empty)


def _parse_generate(service: Service, fields: Fields) -> _Answer:
    prompt: str = fields.take("prompt", str, "")
    chat_format, rid = service.frontend.info.chat_format, service.frontend.new_rid()
    suffix: str = fields.take("suffix", str, "")
    if fields.take("raw", bool, False) or suffix or chat_format is None:
        found = take_format(fields)
        text = Generate(
            rid=rid,
            prompt=(prompt,),
            fill=Fill(suffix) if suffix else None,
            constraint=None if found is None else found[1],
        )
        parsed = Chat(request=text, turn_format=TurnFormat(), found=found, tool_use=None)
    else:
        parsed = take_chat(fields, chat_format, GENERATE, rid)
    return _parse_rest(service, fields, parsed, tables.GENERATE, "prompt", empty=not (prompt or suffix))


def _parse_rest(
    service: Service,
    fields: Fields,
    parsed: Chat,
    endpoint: Endpoint,
    prompt: str,
    *,
    empty: bool,
) -> _Answer:
    """Parse the remaining fields. `prompt` is the name of the field with the prompt. If that is `empty`,
    nothing is generated."""
    model, lora = take_model(service, fields)
    stream: bool = fields.take("stream", bool, True)
    sampling = take_logprobs(fields, take_options(service, fields))
    kept: Any = fields.take("keep_alive", Any)
    if not service.keeps_alive:
        if empty and kept is not None and keep_alive_s(kept) == 0:
            raise UnsupportedField(
                "keep_alive is 0, which asks to unload the model; it is loaded for as long as this server"
                " runs.",
                field="keep_alive",
                remedy="Stop the server, or start it with --keep-alive.",
            )
        fields.ignore({"keep_alive": None})
    fields.finish(endpoint.whole)
    writer = AnswerWriter(model, parsed.turn_format, chat=endpoint is tables.CHAT)
    if empty:
        return _Answer(None, writer, stream)
    generation = msgspec.structs.replace(
        parsed.request,
        sampling=sampling,
        lora=lora,
        every_s=0.0 if stream else HELD_S,
        flow=parsed.request.rid,
        hint=hint_of(fields, "", parsed.request.rid),
    )
    spelled = {"prompt": prompt, "max_tokens": "options.num_predict", "stop": "options.stop"}
    chunks = explained(service.generate(generation, endpoint.path), parsed.explain, spelled, parsed.tell)
    return _Answer(chunks, writer, stream)


async def _lines(
    chunks: AsyncGenerator[TextChunk, None], writer: AnswerWriter
) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            refuse_abort(chunk.finish)
            for body in writer.push(chunk):
                yield line(body)


class _Embeddings(NamedTuple):
    """A parsed and checked request for embeddings."""

    streams: list[AsyncGenerator[TextChunk, None]]
    model: str
    dimensions: int | None


@router.post("/api/embed", any_key=True)
async def embed(request: Request) -> Response:
    started = time.perf_counter_ns()
    (streams, model, dimensions), headers = await parse_body(request, tables.EMBED, _parse_embed)
    results = await _results(request, streams)
    vectors = [vector_of(result.embedding, dimensions, normalize=True).tolist() for result in results]
    tokens = sum(result.usage.prompt_tokens for result in results)
    load: int = request.scope.get(LOAD_NS, 0)
    total = time.perf_counter_ns() - started + load
    body = {"model": model, "embeddings": vectors, "total_duration": total, "load_duration": load}
    return json_response(body | {"prompt_eval_count": tokens}, headers)


@router.post("/api/embeddings", any_key=True)
async def embeddings(request: Request) -> Response:
    """The older endpoint, for one text. Its embedding is not normalised."""
    parsed, headers = await parse_body(request, tables.EMBEDDINGS, _parse_embeddings)
    (result,) = await _results(request, parsed.streams)
    vector = vector_of(result.embedding, None, normalize=False)
    return json_response({"embedding": vector.tolist()}, headers)


async def _results(
    request: Request, streams: Sequence[AsyncGenerator[TextChunk, None]]
) -> list[GenerationResult]:
    results = await while_connected(request.receive, collect(streams))
    for result in results:
        refuse_abort(result.finish)
    return results


def _parse_embed(service: Service, fields: Fields) -> _Embeddings:
    texts, _ = take_prompts(fields, "input", service.frontend.info.vocab_size)
    return _parse_embedding(service, fields, tables.EMBED, "input", texts)


def _parse_embeddings(service: Service, fields: Fields) -> _Embeddings:
    text: str = fields.need("prompt")
    return _parse_embedding(service, fields, tables.EMBEDDINGS, "prompt", [text])


def _parse_embedding(
    service: Service, fields: Fields, endpoint: Endpoint, field: str, texts: Sequence[Segment]
) -> _Embeddings:
    rid = service.frontend.new_rid()
    model, lora = take_model(service, fields)
    service.check_count(len(texts))
    pooling = pooling_for(service.frontend.info, fields.take("pooling", str))
    dimensions: int | None = fields.take("dimensions", int) if field == "input" else None
    ignore_options(service, fields)
    fields.take("keep_alive", Any)  # `Models.acquire` has read it
    if not service.keeps_alive:
        fields.ignore({"keep_alive": None})
    fields.finish(endpoint.whole)
    streams = []
    for index, text in enumerate(texts):
        generation = Generate(
            rid=f"{rid}-{index}" if len(texts) > 1 else rid,
            prompt=(text,),
            pooling=pooling,
            sampling=SamplingParams(max_tokens=0),
            lora=lora,
            flow=rid,
        )
        chunks = service.generate(generation, endpoint.path)
        streams.append(explained(chunks, explain_by_field(None), {"prompt": field}))
    return _Embeddings(streams, model, dimensions)

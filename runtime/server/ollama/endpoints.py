"""/api/chat, /api/generate, /api/embed and /api/embeddings of Ollama's API."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import HELD_S, Generate, TextChunk
from ramify.runtime.frontend.embeddings import pooling_for, vector_of
from ramify.runtime.server.fields import Fields, json_response, read_fields
from ramify.runtime.server.ollama.messages import CHAT, GENERATE, take_format
from ramify.runtime.server.ollama.options import ignore_options, take_model, take_options
from ramify.runtime.server.ollama.writer import AnswerWriter, error_line, line
from ramify.runtime.server.openai.chat import Chat, take_chat
from ramify.runtime.server.openai.request import refuse_abort, with_top_logprobs
from ramify.runtime.server.openai.turn_parser import TurnFormat
from ramify.runtime.server.params import explained, take_prompts
from ramify.runtime.server.service import Service
from ramify.runtime.server.sse import EventStream, collect, while_connected
from ramify.sampling_params import SamplingParams

router = APIRouter()

_IMAGES = "This server reads and writes text alone."
UNSUPPORTED = {"template": "The model's own chat template is used.", "images": _IMAGES}
UNSUPPORTED_CHAT = UNSUPPORTED | {
    "system": "Write a message of the role system.",
    "prompt": "Use messages, or /api/generate.",
}
UNSUPPORTED_GENERATE = UNSUPPORTED | {
    "context": "Use /api/chat, and send the conversation as messages.",
    "suffix": "",
    "tools": "Use /api/chat.",
    "messages": "Use /api/chat.",
    "system": "With raw the prompt is sent as it is.",
    "think": "With raw the prompt is sent as it is.",
    **dict.fromkeys(("width", "height", "steps"), _IMAGES),
}


class LineStream(EventStream):
    """Sends lines of JSON as they come. An error after the first line is the last line."""

    media_type = "application/x-ndjson"


@router.post("/api/chat")
async def chat(request: Request) -> Response:
    service = Service.serving(request)
    fields = await read_fields(request)
    parsed = take_chat(fields, service.frontend.info.chat_format, CHAT, service.frontend.new_rid())
    empty = not fields.take("messages", list[Any])
    return await _respond(request, fields, parsed, UNSUPPORTED_CHAT, "messages", empty=empty)


@router.post("/api/generate")
async def generate(request: Request) -> Response:
    service = Service.serving(request)
    fields = await read_fields(request)
    prompt: str = fields.take("prompt", str, "")
    chat_format, rid = service.frontend.info.chat_format, service.frontend.new_rid()
    if fields.take("raw", bool, False) or chat_format is None:
        found = take_format(fields)
        text = Generate(rid=rid, prompt=(prompt,), constraint=None if found is None else found[1])
        parsed = Chat(request=text, turn_format=TurnFormat(), found=found, tool_use=None)
    else:
        parsed = take_chat(fields, chat_format, GENERATE, rid)
    return await _respond(request, fields, parsed, UNSUPPORTED_GENERATE, "prompt", empty=not prompt)


async def _respond(
    request: Request, fields: Fields, parsed: Chat, unsupported: dict[str, str], prompt: str, *, empty: bool
) -> Response:
    """Take the remaining fields, and answer. `prompt` is the name of the field with the prompt. Nothing is
    generated if the prompt is `empty`, which loads the model on Ollama."""
    service, path = Service.serving(request), request.url.path
    model, lora = take_model(service, fields)
    stream: bool = fields.take("stream", bool, True)
    sampling = _take_logprobs(fields, take_options(service, fields))
    if empty and _is_zero(fields.take("keep_alive", Any)):
        raise UnsupportedField(
            "keep_alive is 0, which asks to unload the model; it is loaded for as long as this server runs.",
            field="keep_alive",
            remedy="Stop the server.",
        )
    fields.ignore({"keep_alive": None})
    fields.refuse_rest(unsupported)
    headers = service.tell_ignored(fields.ignored)
    writer = AnswerWriter(model, parsed.turn_format, chat=prompt == "messages")
    if empty:
        return json_response(writer.loaded(), headers)
    generation = msgspec.structs.replace(
        parsed.request,
        sampling=sampling,
        lora=lora,
        every_s=0.0 if stream else HELD_S,
        flow=parsed.request.rid,
    )
    spelled = {"prompt": prompt, "max_tokens": "options.num_predict"}
    chunks = explained(service.generate(generation, path), parsed.explain, spelled, parsed.tell)
    if stream:
        return LineStream(_lines(chunks, writer), error_line, headers)
    (result,) = await while_connected(request.receive, collect([chunks]))
    refuse_abort(result.finish)
    return json_response(writer.whole(result), headers)


async def _lines(
    chunks: AsyncGenerator[TextChunk, None], writer: AnswerWriter
) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            refuse_abort(chunk.finish)
            for body in writer.push(chunk):
                yield line(body)


def _take_logprobs(fields: Fields, sampling: SamplingParams) -> SamplingParams:
    top: int | None = fields.take("top_logprobs", int)
    if fields.take("logprobs", bool, False):
        return with_top_logprobs(sampling, top)
    if top:
        raise InvalidRequest("top_logprobs needs logprobs: true.", field="top_logprobs")
    return sampling


def _is_zero(duration: Any) -> bool:
    """Whether `duration`, a number of seconds or a text such as "0s" or "5m", is zero."""
    return re.fullmatch(r"[0.]+[a-zµ]*", str(duration)) is not None


@router.post("/api/embed")
async def embed(request: Request) -> Response:
    started = time.perf_counter_ns()
    fields = await read_fields(request)
    dimensions: int | None = fields.take("dimensions", int)
    vectors, tokens, model, headers = await _embedded(request, fields, "input", dimensions)
    body = {"model": model, "embeddings": vectors, "total_duration": time.perf_counter_ns() - started}
    return json_response(body | {"load_duration": 0, "prompt_eval_count": tokens}, headers)


@router.post("/api/embeddings")
async def embeddings(request: Request) -> Response:
    """The older endpoint, for one text. Its embedding is not normalised."""
    fields = await read_fields(request)
    vectors, _, _, headers = await _embedded(request, fields, "prompt", normalize=False)
    return json_response({"embedding": vectors[0]}, headers)


async def _embedded(
    request: Request, fields: Fields, field: str, dimensions: int | None = None, *, normalize: bool = True
) -> tuple[list[list[float]], int, str, dict[str, str]]:
    """(embeddings of the texts in `field`, number of their tokens, the model's name, headers of the
    response)."""
    service, path = Service.serving(request), request.url.path
    info, rid = service.frontend.info, service.frontend.new_rid()
    model, lora = take_model(service, fields)
    prompts, several = take_prompts(fields, field, info.vocab_size)
    if several and field == "prompt":
        raise InvalidRequest("prompt must be a text.", field="prompt", remedy="Use /api/embed.")
    service.check_count(len(prompts))
    pooling = pooling_for(info, fields.take("pooling", str))
    ignore_options(service, fields)
    # A text that is too long is refused, whatever `truncate` is.
    fields.ignore({"keep_alive": None, "truncate": None})
    fields.refuse_rest()
    headers = service.tell_ignored(fields.ignored)
    streams = []
    for index, prompt in enumerate(prompts):
        generation = Generate(
            rid=f"{rid}-{index}" if several else rid,
            prompt=(prompt,),
            pooling=pooling,
            sampling=SamplingParams(max_tokens=0),
            lora=lora,
            flow=rid,
        )
        chunks = service.generate(generation, path)
        streams.append(explained(chunks, lambda error: None, {"prompt": field}))
    results = await while_connected(request.receive, collect(streams))
    vectors = []
    for result in results:
        refuse_abort(result.finish)
        vectors.append(vector_of(result.embedding, dimensions, normalize=normalize).tolist())
    return vectors, sum(result.usage.prompt_tokens for result in results), model, headers

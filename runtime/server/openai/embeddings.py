"""OpenAI's ``POST /v1/embeddings``, with ``pooling`` and ``normalize`` beyond that API."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from typing import Any, Literal, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ramify.errors import UnsupportedField
from ramify.messages import Generate, TextChunk
from ramify.runtime.frontend.embeddings import pooling_for, vector_of
from ramify.runtime.generation import GenerationResult
from ramify.runtime.server.fields import Fields, json_response
from ramify.runtime.server.openai.request import (
    parse_request,
    refuse_abort,
    take_header,
)
from ramify.runtime.server.params import explain_by_field, take_prompts
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.runtime.server.sse import collect, while_connected
from ramify.runtime.server.tables.openai import EMBEDDING
from ramify.sampling_params import SamplingParams

router = Router()

Encoding = Literal["float", "base64"]


class _Parsed(NamedTuple):
    """A parsed and checked request."""

    streams: list[AsyncGenerator[TextChunk, None]]
    model: str
    encoding: Encoding
    dimensions: int | None
    normalize: bool


@router.post(EMBEDDING.path, any_key=True)
async def embeddings(request: Request) -> Response:
    parsed, headers = await parse_body(request, EMBEDDING, _parse)
    results = await while_connected(request.receive, collect(parsed.streams))
    data = []
    for index, result in enumerate(results):
        refuse_abort(result.finish)
        vector = vector_of(result.embedding, parsed.dimensions, normalize=parsed.normalize)
        shown: Any = vector.tolist()
        if parsed.encoding == "base64":
            shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": shown})
    body = {"object": "list", "data": data, "model": parsed.model, "usage": _usage(results)}
    return json_response(body, headers)


def _parse(service: Service, fields: Fields) -> _Parsed:
    header = take_header(service, fields, "embd-")
    prompts, _ = take_prompts(fields, "input", service.frontend.info.vocab_size)
    service.check_count(len(prompts))
    encoding: Encoding = fields.take("encoding_format", Encoding, "float")
    dimensions: int | None = fields.take("dimensions", int)
    pooling = pooling_for(service.frontend.info, fields.take("pooling", str))
    normalize: bool = fields.take("normalize", bool, True)
    parsed = parse_request(
        service,
        fields,
        header,
        [Generate(rid=header["id"], prompt=(prompt,), pooling=pooling) for prompt in prompts],
        SamplingParams(max_tokens=0),
        EMBEDDING,
        explain=explain_by_field(None),
        spelled={"prompt": "input"},
    )
    if parsed.stream:
        raise UnsupportedField("Embeddings are not streamed.", field="stream")
    return _Parsed(parsed.streams, header["model"], encoding, dimensions, normalize)


def _usage(results: list[GenerationResult]) -> dict[str, Any]:
    tokens = sum(result.usage.prompt_tokens for result in results)
    cached = sum(result.usage.cached_tokens for result in results)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }

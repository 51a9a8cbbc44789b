"""``POST /infill``: fills in the middle between two texts, as editors ask for it (llama.cpp's server API)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from ramify.fill import Fill
from ramify.messages import HELD_S, Finish, Generate, TextChunk, Usage
from ramify.runtime.server.fields import Fields, json_response
from ramify.runtime.server.openai.bodies import Body, Timings, timings_body
from ramify.runtime.server.openai.request import lora_of, refuse_abort
from ramify.runtime.server.params import explain_by_field, explained, take_sampling
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.runtime.server.sse import EventStream, collect, event, while_connected
from ramify.runtime.server.tables.llamacpp import INFILL, INPUT_EXTRA

router = Router()

_SPELLING = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
}


class Infill(NamedTuple):
    """A parsed request."""

    chunks: AsyncGenerator[TextChunk, None]
    model: str
    stream: bool
    timings_per_token: bool
    response_fields: Sequence[str]


@router.post("/infill", any_key=True)
async def infill(request: Request) -> Response:
    parsed, headers = await parse_body(request, INFILL, _parse)
    if parsed.stream:
        return EventStream(_events(parsed), headers=headers)
    (result,) = await while_connected(request.receive, collect([parsed.chunks]))
    refuse_abort(result.finish)
    assert result.finish is not None
    body = last_body(parsed, result.finish, result.usage, result.text, result.ids)
    return json_response(body, headers)


def _parse(service: Service, fields: Fields) -> Infill:
    model: str = fields.take("model", str, service.model_name)
    files = []
    for item in fields.take_objects("input_extra") or ():
        files.append((item.take("filename", str, "tmp"), item.take("text", str, "")))
        item.finish(INPUT_EXTRA)
    prefix = fields.take("input_prefix", str, "") + fields.take("prompt", str, "")
    suffix: str = fields.take("input_suffix", str, "")
    sampling = take_sampling(
        fields,
        _SPELLING,
        unset={"n_predict": (-1,), "seed": (-1,)},
        unlimited="Write -1 for as many as fit.",
        **service.sampling_defaults,
    )
    stream: bool = fields.take("stream", bool, False)
    timings_per_token: bool = fields.take("timings_per_token", bool, False)
    response_fields: list[str] = fields.take("response_fields", list[str], [])
    fields.finish(INFILL.whole)
    rid = service.frontend.new_rid()
    generation = Generate(
        rid=rid,
        prompt=(prefix,),
        fill=Fill(suffix, tuple(files)),
        sampling=sampling,
        lora=lora_of(service, model),
        every_s=0.0 if stream else HELD_S,
        flow=rid,
    )
    spelled = {"prompt": "input_prefix", "suffix": "input_suffix", "max_tokens": "n_predict"}
    chunks = explained(service.generate(generation, INFILL.path), explain_by_field(None), spelled)
    return Infill(chunks, model, stream, timings_per_token, response_fields)


async def _events(parsed: Infill) -> AsyncGenerator[bytes, None]:
    timings, text, ids, usage = Timings(), "", list[int](), Usage()
    async with aclosing(parsed.chunks) as chunks:
        async for chunk in chunks:
            refuse_abort(chunk.finish)
            text, usage = text + chunk.text, chunk.usage or usage
            ids += chunk.ids
            timings.push(chunk)
            if chunk.text or (chunk.ids and chunk.finish is None):
                body: Body = {
                    **_piece(chunk.text, chunk.ids, usage, len(ids)),
                    **({"timings": timings.body()} if parsed.timings_per_token else {}),
                }
                yield event(_chosen(body, parsed.response_fields))
            if chunk.finish is not None:
                yield event(last_body(parsed, chunk.finish, usage, text, ids))


def _piece(text: str, ids: Sequence[int], usage: Usage, predicted: int) -> Body:
    return {
        "index": 0,
        "content": text,
        "tokens": list(ids),
        "stop": False,
        "tokens_predicted": predicted,
        "tokens_evaluated": usage.prompt_tokens,
    }


def last_body(parsed: Infill, finish: Finish, usage: Usage, text: str, ids: Sequence[int]) -> Body:
    """The last event of a stream, or the whole answer. `text` and `ids` are the whole output."""
    word = finish.matched if isinstance(finish.matched, str) else ""
    body = _piece("", () if parsed.stream else ids, usage, usage.completion_tokens) | {
        "stop": True,
        "model": parsed.model,
        "has_new_line": "\n" in text,
        "truncated": False,
        "stop_type": "limit" if finish.reason == "length" else "word" if word else "eos",
        "stopping_word": word,
        "tokens_cached": usage.prompt_tokens + usage.completion_tokens,
        "timings": timings_body(usage),
    }
    return _chosen(body if parsed.stream else body | {"content": text}, parsed.response_fields)


def _chosen(body: Body, paths: Sequence[str]) -> Body:
    """The values at `paths`, such as ``timings/prompt_ms``, by path; the whole `body` if there are none."""
    if not paths:
        return body
    chosen: Body = {}
    for path in paths:
        value: Any = body
        for key in path.split("/"):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            chosen[path] = value
    return chosen

"""The OpenAI surface: /v1/models, /v1/chat/completions and /v1/completions.

Beyond OpenAI's own fields these are taken, spelled as other engines spell them: top_k, min_p,
repetition_penalty, min_tokens, ignore_eos, stop_token_ids, skip_special_tokens; token_healing; constraints as
`output_format` lists them; reasoning as `reasoning` does; `cache_salt` (as vLLM) is the cache scope.
With n > 1, choice i is drawn with seed + i. A field that is not honoured is refused by name.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from ramify.errors import Cancelled, InvalidRequest, NotFound, UnsupportedField
from ramify.messages import Finish, Generate, TextChunk
from ramify.runtime.server.chat import take_chat
from ramify.runtime.server.fanout import Collected, collect, merged
from ramify.runtime.server.fields import Fields, json_response, read_fields
from ramify.runtime.server.output_format import take_output_format
from ramify.runtime.server.params import (
    Explain,
    check_sampling,
    explain_by_field,
    explained,
    fan_out,
    take_prompts,
    take_sampling,
)
from ramify.runtime.server.replies import ModelCard, ModelList, usage_reply
from ramify.runtime.server.service import Service
from ramify.runtime.server.shapes import ChatShape, CompletionShape, Shape
from ramify.runtime.server.sse import DONE, EventStream, event, while_connected
from ramify.sampling import SamplingParams

router = APIRouter()

COMPLETION_MAX_TOKENS = 16
"""What /v1/completions generates when max_tokens is not given (API reference)."""

_SPELLING = {
    name: name
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "stop",
        "stop_token_ids",
        "min_tokens",
        "ignore_eos",
        "skip_special_tokens",
        "token_healing",
        "n",
        "max_tokens",
    )
}
_CHAT_SPELLING = _SPELLING | {"max_completion_tokens": "max_tokens"}

_ELSEWHERE = {
    "store": "",
    "metadata": "",
    "service_tier": "",
    "safety_identifier": "Use user; it is written to the log.",
    "prompt_cache_key": "Use cache_salt to keep caches apart; equal prefixes are always shared.",
    "guided_decoding_backend": "The engine is chosen by what it enforces.",
    "guided_whitespace_pattern": "Use response_format with a json_schema and its whitespace.",
    "lora_path": "",
}
UNSUPPORTED_CHAT = _ELSEWHERE | {
    "functions": "Use tools.",
    "function_call": "Use tool_choice.",
    "audio": "",
    "modalities": "",
    "prediction": "",
    "verbosity": "",
    "web_search_options": "",
    "moderation": "",
    "prompt_cache_options": "",
    "prompt_cache_retention": "",
    "chat_template": "",
    "echo": "",
}
UNSUPPORTED_COMPLETION = _ELSEWHERE | {"suffix": "", "tools": "Use /v1/chat/completions."}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A request that has been understood."""

    requests: list[Generate]
    """One per choice, by index; n successive ones share a prompt."""
    explain: Explain
    n: int
    stream: bool
    include_usage: bool
    user: str | None


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    return json_response(ModelList(data=[_card(Service.of(request))]))


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> Response:
    service = Service.of(request)
    _check_model(service, model)
    return json_response(_card(service))


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    service = Service.of(request)
    fields = await read_fields(request)
    head = _head(service, fields, "chatcmpl")
    chat = take_chat(fields, service.desk.info.chat_format)
    want_logprobs: bool = fields.take("logprobs", bool, False)
    top_logprobs: int | None = fields.take("top_logprobs", int)
    if top_logprobs is not None and not want_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", field="top_logprobs")
    sampling = take_sampling(fields, _CHAT_SPELLING)
    if want_logprobs:
        sampling = check_sampling(
            msgspec.structs.replace(sampling, logprobs=top_logprobs or 0), {"logprobs": "top_logprobs"}
        )
    service.check_count(sampling.n)
    asked = Generate(
        rid=head["id"],
        chat=chat.messages,
        tools=chat.tools,
        template_kwargs=chat.template_kwargs,
        preambles=chat.preambles,
        constraint=chat.constraint,
    )
    job = _take_job(fields, [asked], sampling, UNSUPPORTED_CHAT, chat.explain)
    shape = ChatShape(head, want_logprobs, chat.form)
    return await _respond(request, service, job, shape, "/v1/chat/completions")


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    service = Service.of(request)
    fields = await read_fields(request)
    head = _head(service, fields, "cmpl")
    given = take_prompts(fields, "prompt", service.desk.info.vocab_size)
    if given is None:
        raise InvalidRequest("prompt is missing.", field="prompt")
    prompts, _ = given
    if fields.take("best_of", int, 1) != 1:
        raise UnsupportedField("best_of other than 1 is not supported.", field="best_of", remedy="Use n.")
    echo: bool = fields.take("echo", bool, False)
    logprobs: int | None = fields.take("logprobs", int)
    options: dict[str, Any] = {"max_tokens": COMPLETION_MAX_TOKENS, "logprobs": logprobs}
    if echo:
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise UnsupportedField(
                "echo of a prompt given as token ids is not supported.",
                field="echo",
                remedy="Give the prompt as text, or use /generate with logprob_start_len.",
            )
        options["prompt_logprobs_start"] = None if logprobs is None else 0
    sampling = take_sampling(fields, _SPELLING, **options)
    service.check_count(len(prompts) * sampling.n)
    found = take_output_format(fields)
    asked = [
        Generate(rid=head["id"], prompt=(prompt,), constraint=None if found is None else found[1])
        for prompt in prompts
    ]
    job = _take_job(fields, asked, sampling, UNSUPPORTED_COMPLETION, explain_by_field(found and found[0]))
    texts = [prompt if echo and isinstance(prompt, str) else "" for prompt in prompts for _ in range(job.n)]
    shape = CompletionShape(head, texts, logprobs is not None)
    return await _respond(request, service, job, shape, "/v1/completions")


async def _respond(request: Request, service: Service, job: Job, shape: Shape, endpoint: str) -> Response:
    streams = [
        explained(service.generate(generate, endpoint, job.user), job.explain) for generate in job.requests
    ]
    if job.stream:
        return EventStream(_events(streams, job, shape))
    results = await while_connected(request.receive, collect(streams))
    for result in results:
        _refuse_abort(result.finish)
    return json_response(shape.answer(results, job.n))


async def _events(
    streams: Sequence[AsyncGenerator[TextChunk, None]], job: Job, shape: Shape
) -> AsyncGenerator[bytes, None]:
    encode = msgspec.json.Encoder().encode
    results = [Collected() for _ in streams]
    # Without include_usage the key is left out; with it, it is null but for the last event.
    usage = {"usage": None} if job.include_usage else {}
    async with aclosing(merged(streams)) as chunks:
        async for index, chunk in chunks:
            if chunk.usage is not None:
                results[index].usage = chunk.usage
            _refuse_abort(chunk.finish)
            for choice in shape.parts(index, chunk):
                yield event(encode(shape.chunk([choice], **usage)))
    if job.include_usage:
        yield event(encode(shape.chunk([], usage=usage_reply(results, job.n))))
    yield DONE


def _head(service: Service, fields: Fields, prefix: str) -> dict[str, Any]:
    """What every body of an answer starts with; refuses a model that is not served."""
    model: str | None = fields.take("model", str)
    if model is None:
        raise InvalidRequest("model is missing.", field="model", remedy=f"This is {service.model_name!r}.")
    _check_model(service, model)
    return {"id": f"{prefix}-{service.desk.new_rid()}", "created": int(time.time()), "model": model}


def _take_job(
    fields: Fields,
    asked: Sequence[Generate],
    sampling: SamplingParams,
    unsupported: dict[str, str],
    explain: Explain,
) -> Job:
    """What is left in `fields`, put together with `asked`, one for each prompt; refuses what it does not
    know."""
    scope: str = fields.take("cache_salt", str, "")
    stream: bool = fields.take("stream", bool, False)
    include_usage = False
    stream_options = fields.take_object("stream_options")
    if stream_options is not None:
        if not stream:
            raise InvalidRequest("stream_options needs stream: true.", field="stream_options")
        include_usage = stream_options.take("include_usage", bool, False)
        stream_options.refuse_rest({"include_obfuscation": "", "continuous_usage_stats": ""})
    user: str | None = fields.take("user", str)
    fields.refuse_rest(unsupported)
    choices = [(one, options) for one in asked for options in fan_out(sampling)]
    return Job(
        requests=[
            msgspec.structs.replace(
                one,
                rid=f"{one.rid}-{index}" if len(choices) > 1 else one.rid,
                sampling=options,
                scope=scope,
            )
            for index, (one, options) in enumerate(choices)
        ],
        explain=explain,
        n=sampling.n,
        stream=stream,
        include_usage=include_usage,
        user=user,
    )


def _check_model(service: Service, model: str) -> None:
    # "default" is what SGLang's examples call the one model that a server has.
    if model not in (service.model_name, "default"):
        raise NotFound(
            f"There is no model {model!r} here.", field="model", remedy=f"This is {service.model_name!r}."
        )


def _card(service: Service) -> ModelCard:
    info = service.desk.info
    return ModelCard(
        id=service.model_name, created=service.started_at, root=info.path, max_model_len=info.context_length
    )


def _refuse_abort(finish: Finish | None) -> None:
    # OpenAI's API has no finish reason for a request that somebody else aborted.
    if finish is not None and finish.reason == "abort":
        raise Cancelled("The request was aborted.")

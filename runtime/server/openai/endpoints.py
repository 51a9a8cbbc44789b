"""OpenAI's API: /v1/models, /v1/chat/completions and /v1/completions.

Fields beyond OpenAI's own have the names that other engines give them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ramify.errors import UnsupportedField
from ramify.fill import Fill
from ramify.messages import Generate, Segment, Usage
from ramify.runtime.server.errors import SYSTEM_ONE_ID, SYSTEM_ONE_SDK
from ramify.runtime.server.fields import Fields, json_response
from ramify.runtime.server.models import ServedModel, served_model, served_models, status_body
from ramify.runtime.server.openai.bodies import Body, Timings, timings_body
from ramify.runtime.server.openai.chat import CHAT_COMPLETIONS, take_beginning, take_chat
from ramify.runtime.server.openai.codex_models import codex_model
from ramify.runtime.server.openai.formatters import ChatFormatter, CompletionFormatter, ResponseFormatter
from ramify.runtime.server.openai.output_format import take_output_format
from ramify.runtime.server.openai.request import (
    ParsedRequest,
    lora_of,
    parse_request,
    refuse_abort,
    take_header,
    take_logprobs,
)
from ramify.runtime.server.openai.tokenize import texts_of
from ramify.runtime.server.params import OPENAI_SPELLING, explain_by_field, take_prompts, take_sampling
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.runtime.server.sse import DONE, EventStream, collect, event, merge, while_connected
from ramify.runtime.server.tables.openai import CHAT, COMPLETION

router = Router()

_COMPLETION_SPELLING = OPENAI_SPELLING | {"n": "n", "max_tokens": "max_tokens"}
_CHAT_SPELLING = _COMPLETION_SPELLING | {"max_completion_tokens": "max_tokens"}


@router.get("/v1/models", any_key=True)
async def list_models(request: Request) -> Response:
    service = Service.serving(request)
    served = await served_models(request)
    cards = [_card(one, service.started_at, name, lora) for one in served for name, lora in one.names.items()]
    if "client_version" in request.query_params:  # Codex
        info = service.frontend.info
        models = [codex_model(card["id"], info, index) for index, card in enumerate(cards)]
    else:
        models = [_metadata(card) for card in cards]
    headers = (
        {SYSTEM_ONE_ID: "req_" + service.frontend.new_rid()} if SYSTEM_ONE_SDK in request.headers else {}
    )
    return json_response({"object": "list", "data": cards, "models": models}, headers)


@router.get("/v1/models/{model:path}", any_key=True)
async def get_model(request: Request, model: str) -> Response:
    served, started = await served_model(request, model), Service.serving(request).started_at
    lora = "" if served.service is None else lora_of(served.service, model)
    return json_response(_card(served, started, lora or (model if model in served.names else ""), lora=lora))


@router.post("/v1/chat/completions", any_key=True)
async def chat_completions(request: Request) -> Response:
    (parsed, formatter), headers = await parse_body(request, CHAT, _parse_chat)
    return await _respond(request, parsed, formatter, headers)


def _parse_chat(service: Service, fields: Fields) -> tuple[ParsedRequest, ResponseFormatter]:
    header = take_header(service, fields, "chatcmpl-")
    chat_format = service.frontend.info.chat_format
    chat = take_chat(fields, chat_format, CHAT_COMPLETIONS, header["id"])
    chat = take_beginning(fields, chat)
    sampling = take_sampling(
        fields, _CHAT_SPELLING, least_tokens=1, unlimited=None, **service.sampling_defaults
    )
    sampling = take_logprobs(fields, sampling)
    limit = "max_completion_tokens" if fields.given("max_completion_tokens") else "max_tokens"
    service.check_count(sampling.n)
    timings_per_token: bool = fields.take("timings_per_token", bool, False)
    parsed = parse_request(
        service,
        fields,
        header,
        [chat.request],
        sampling,
        CHAT,
        explain=chat.explain,
        tell=chat.tell,
        spelled={"prompt": "messages", "max_tokens": limit},
    )
    formatter = ChatFormatter(header, sampling.logprobs is not None, chat.turn_format)
    formatter.timings_per_token = timings_per_token
    return parsed, formatter


@router.post("/v1/completions", any_key=True)
async def completions(request: Request) -> Response:
    (parsed, formatter, echoed), headers = await parse_body(request, COMPLETION, _parse_completion)
    if echoed:
        texts = await texts_of(Service.serving(request), echoed)
        formatter.echoes = [text for text in texts for _ in range(parsed.n)]
    return await _respond(request, parsed, formatter, headers)


def _parse_completion(
    service: Service, fields: Fields
) -> tuple[ParsedRequest, CompletionFormatter, list[Segment]]:
    """(the request, the formatter of its answer, the prompts that the answer repeats)."""
    header = take_header(service, fields, "cmpl-")
    suffix: str = fields.take("suffix", str, "")
    prompts: list[Segment]
    if suffix:  # the text before the middle may be empty
        one: str | list[str] = fields.take("prompt", str | list[str], "")
        prompts = [one] if isinstance(one, str) else [*one]
    else:
        prompts, _ = take_prompts(fields, "prompt", service.frontend.info.vocab_size)
    if fields.take("best_of", int, 1) != 1:
        raise UnsupportedField("best_of other than 1 is not supported.", field="best_of", remedy="Use n.")
    echo: bool = fields.take("echo", bool, False)
    logprobs: int | None = fields.take("logprobs", int)
    options = service.sampling_defaults | {
        "max_tokens": COMPLETION.default_tokens,
        "logprobs": logprobs,
    }
    if echo:
        if suffix:
            raise UnsupportedField(
                "echo and suffix cannot be combined.", field="echo", remedy="Leave it out."
            )
        options["prompt_logprobs_start"] = None if logprobs is None else 0
    default = not fields.given("max_tokens")
    sampling = take_sampling(fields, _COMPLETION_SPELLING, unlimited=None, **options)
    service.check_count(len(prompts) * sampling.n)
    found = take_output_format(fields)
    generations = [
        Generate(
            rid=header["id"],
            prompt=(prompt,),
            fill=Fill(suffix) if suffix else None,
            constraint=None if found is None else found[1],
            cut_to_fit=default,
        )
        for prompt in prompts
    ]
    timings_per_token: bool = fields.take("timings_per_token", bool, False)
    parsed = parse_request(
        service,
        fields,
        header,
        generations,
        sampling,
        COMPLETION,
        explain=explain_by_field(found and found[0]),
        spelled={},
    )
    formatter = CompletionFormatter(header, logprobs is not None, [""] * len(parsed.streams))
    formatter.timings_per_token = timings_per_token
    return parsed, formatter, prompts if echo else []


async def _respond(
    request: Request, parsed: ParsedRequest, formatter: ResponseFormatter, headers: Mapping[str, str]
) -> Response:
    if parsed.stream:
        return EventStream(_events(parsed, formatter), headers=headers)
    results = await while_connected(request.receive, collect(parsed.streams))
    for result in results:
        refuse_abort(result.finish)
    body = formatter.body(results, parsed.n)
    if len(results) == 1:
        body["timings"] = timings_body(results[0].usage)
    return json_response(body, headers)


async def _events(parsed: ParsedRequest, formatter: ResponseFormatter) -> AsyncGenerator[bytes, None]:
    usages = [Usage() for _ in parsed.streams]
    # With include_usage every event has the key `usage`, null in all but the last unless the usage is
    # continuous. Otherwise no event has it.
    usage: Body = {"usage": None} if parsed.include_usage else {}
    timings, alone = Timings(), len(parsed.streams) == 1
    async with aclosing(merge(parsed.streams)) as chunks:
        async for index, chunk in chunks:
            if chunk.usage is not None:
                usages[index] = chunk.usage
            elif parsed.continuous_usage:
                written = usages[index].completion_tokens + len(chunk.ids)
                usages[index] = msgspec.structs.replace(usages[index], completion_tokens=written)
            if parsed.continuous_usage:
                usage = {"usage": formatter.usage(usages, parsed.n)}
            refuse_abort(chunk.finish)
            timings.push(chunk)
            choices = formatter.stream_choices(index, chunk)
            for choice in choices:
                last = choice is choices[-1] and chunk.finish is not None and not parsed.include_usage
                timed: Body = {}
                if alone and (last or formatter.timings_per_token):
                    timed = {"timings": timings.body()}
                yield event(formatter.stream_body([choice]) | usage | timed)
    if parsed.include_usage:
        timed = {"timings": timings.body()} if alone else {}
        yield event(formatter.stream_body([]) | {"usage": formatter.usage(usages, parsed.n)} | timed)
    yield DONE


def _metadata(card: Body) -> Body:
    """The entry of a model in TypeSafe's API. The release date is the date of ``created``."""
    what = "Model" if card["parent"] is None else f"LoRA adapter of {card['parent']}"
    return {
        "name": card["id"],
        "description": f"{what} on Ramify, with a context of {card['max_model_len'] or 'unknown'} tokens.",
        "release_date": time.strftime("%Y-%m-%d", time.gmtime(card["created"])),
    }


def _card(served: ServedModel, started: int, name: str, lora: str = "") -> Body:
    """The entry of the model, or with `lora` of this adapter, under `name` ("": its id)."""
    service, own = served.service, served.identity
    card: Body = {
        "id": name or own,
        "object": "model",
        "created": started,
        "owned_by": "ramify",
        "root": service.frontend.loras.loaded[lora].path if service is not None and lora else served.path,
        "parent": own if lora else None,
        "max_model_len": served.context_length,
        "model_impl": None if service is None else service.frontend.info.model_impl,
    }
    return card if served.status is None or lora else card | status_body(served.status)

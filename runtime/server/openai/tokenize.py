"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as vLLM has them, also under ``/v1``.

The ids are those of the prompt of a completion or chat with the same fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence, Sized
from typing import NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ramify.engine_messages import TokenIds
from ramify.errors import InvalidRequest
from ramify.messages import Generate, Segment
from ramify.runtime.server.fields import Fields, json_response
from ramify.runtime.server.openai.chat import CHAT_COMPLETIONS, take_beginning, take_chat
from ramify.runtime.server.openai.request import lora_of
from ramify.runtime.server.params import check_segments
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import Service
from ramify.runtime.server.tables.openai import DETOKENIZE, TOKENIZE

router = Router()

PART_TEXTS, PART_SIZE = 256, 65_536
"""Limits of one part of a request (`in_parts`): texts, and characters or ids. A part takes about 20 ms."""

T = TypeVar("T", bound=Sized)
R = TypeVar("R")

_CHAT = dataclasses.replace(CHAT_COMPLETIONS, take_format=lambda fields: None)


@router.post("/tokenize", any_key=True)
@router.post("/v1/tokenize", any_key=True)
async def tokenize(request: Request) -> Response:
    service = Service.serving(request)
    parsed, headers = await parse_body(request, TOKENIZE, _parse_tokenize)
    given, messages, spelled = parsed.prompt, parsed.messages, parsed.spelled
    many = isinstance(given, list)
    texts: Sequence[str] = given if isinstance(given, list) else (given or "",)

    async def tokenized(part: Sequence[str]) -> tuple[TokenIds, ...]:
        prompts = [Generate(rid=service.frontend.new_rid(), prompt=(text,)) for text in part]
        return await service.tokenize(prompts if messages is None else [messages], special=parsed.special)

    found = await in_parts(texts, tokenized)
    ids = [one.ids for one in found]
    names = [one.tokens for one in found] if spelled else None
    return json_response(
        {
            "count": [len(one) for one in ids] if many else len(ids[0]),
            "max_model_len": service.frontend.info.context_length,
            "tokens": ids if many else ids[0],
            "token_strs": names if many or names is None else names[0],
        },
        headers,
    )


class _Texts(NamedTuple):
    """A parsed request to /tokenize."""

    prompt: str | list[str] | None
    messages: Generate | None
    """The chat to tokenize instead of the prompt."""
    special: bool
    """Whether to add special tokens."""
    spelled: bool
    """Whether to return the entries of the vocabulary."""


def _parse_tokenize(service: Service, fields: Fields) -> _Texts:
    _take_model(fields, service)
    special: bool | None = fields.take("add_special_tokens", bool)
    spelled: bool = fields.take("return_token_strs", bool, False)
    given: str | list[str] | None = fields.take("prompt", str | list[str])
    chat = fields.given("messages")
    if (given is None) is not chat:
        raise InvalidRequest("Give one of prompt and messages.", field="prompt" if chat else "messages")
    messages = _take_chat(fields, service) if chat else None
    fields.finish(TOKENIZE.whole)
    # Chat templates write special tokens themselves.
    return _Texts(given, messages, not chat if special is None else special, spelled)


@router.post("/detokenize", any_key=True)
@router.post("/v1/detokenize", any_key=True)
async def detokenize(request: Request) -> Response:
    service = Service.serving(request)
    (ids, skip, many), headers = await parse_body(request, DETOKENIZE, _parse_detokenize)

    async def detokenized(part: Sequence[tuple[int, ...]]) -> list[tuple[str, str]]:
        texts = await service.frontend.control.detokenize(part, skip_special_tokens=skip)
        return list(zip(*texts, strict=True))

    pairs = await in_parts(ids, detokenized)
    whole, text = [one for one, _ in pairs], [one for _, one in pairs]
    body = {"prompt": whole if many else whole[0], "text": text if many else text[0]}
    return json_response(body, headers)


def _parse_detokenize(service: Service, fields: Fields) -> tuple[list[tuple[int, ...]], bool, bool]:
    """(the lists of token ids, whether to skip special tokens, whether the request has a list of lists)."""
    _take_model(fields, service)
    given: list[int | list[int]] | None = fields.take("tokens", list[int | list[int]])
    skip: bool = fields.take("skip_special_tokens", bool, True)
    fields.finish(DETOKENIZE.whole)
    if given is None:
        raise InvalidRequest("tokens is missing.", field="tokens")
    lists = [one for one in given if isinstance(one, list)]
    if lists and len(lists) < len(given):
        raise InvalidRequest("tokens must be a list of ids, or a list of such lists.", field="tokens")
    ids = [tuple(one) for one in lists] or [tuple(one for one in given if isinstance(one, int))]
    check_segments(((0,), *ids), "tokens", service.frontend.info.vocab_size)  # lists may be empty
    return ids, skip, bool(lists)


async def texts_of(service: Service, prompts: Sequence[Segment]) -> list[str]:
    """The text of each of `prompts`; that of token ids has the special tokens too."""

    async def detokenized(part: Sequence[tuple[int, ...]]) -> Sequence[str]:
        return (await service.frontend.control.detokenize(part, skip_special_tokens=False))[0]

    found = iter(await in_parts([one for one in prompts if not isinstance(one, str)], detokenized))
    return [one if isinstance(one, str) else next(found) for one in prompts]


@router.get("/tokenizer_info", uses_model=True, any_key=True)
@router.get("/v1/tokenizer_info", uses_model=True, any_key=True)
async def tokenizer_info(request: Request) -> Response:
    """The special tokens and the chat template, under the names of a tokenizer_config.json."""
    info = Service.serving(request).frontend.info
    template = None if info.chat_format is None else info.chat_format.source
    known = {"bos_token": None, "eos_token": None, "chat_template": template} | info.special_tokens
    return json_response(known | {"model_max_length": info.context_length})


async def in_parts(items: Sequence[T], ask: Callable[[Sequence[T]], Awaitable[Sequence[R]]]) -> list[R]:
    """The answers of `ask` for all `items`, which are passed to it in parts. A part ends after `PART_TEXTS`
    items, or when it has `PART_SIZE` characters or ids.

    The parts are processed one after the other. Between them, this process and the tokenizer serve other
    requests.
    """
    found: list[R] = []
    start = size = 0
    for index, item in enumerate(items):
        size += len(item)
        if index + 1 == len(items) or index + 1 - start == PART_TEXTS or size >= PART_SIZE:
            found += await ask(items[start : index + 1])
            start, size = index + 1, 0
    return found


def _take_model(fields: Fields, service: Service) -> None:
    model: str | None = fields.take("model", str)
    if model is not None:
        lora_of(service, model)


def _take_chat(fields: Fields, service: Service) -> Generate:
    rid = service.frontend.new_rid()
    chat = take_chat(fields, service.frontend.info.chat_format, _CHAT, rid)
    return take_beginning(fields, chat).request

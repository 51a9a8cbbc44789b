"""The fields that all endpoints of OpenAI's API share, and the generations of a parsed request."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, NamedTuple

import msgspec

from ramify.errors import Cancelled, InvalidRequest, NotFound, UnsupportedField
from ramify.messages import HELD_S, Finish, Generate, TextChunk
from ramify.priority import BATCH
from ramify.runtime.lora_names import unknown
from ramify.runtime.models.names import LATEST
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.leases import take_hint
from ramify.runtime.server.metrics import ChoiceUsages
from ramify.runtime.server.params import (
    Explain,
    Tell,
    check_sampling,
    explained,
    split_choices,
    take_priority,
)
from ramify.runtime.server.service import Service
from ramify.runtime.server.tables.openai import CHAT, COMPLETION, OTHER_SERVERS, STREAM_OPTIONS
from ramify.runtime.server.tables.rows import Endpoint
from ramify.sampling_params import SamplingParams
from ramify.text import quoted

ServiceTier = Literal["auto", "default", "flex", "priority"]
TIERS = {"auto": 0, "default": 0, "flex": BATCH, "priority": 1}
"""Service tier → priority."""


class ParsedRequest(NamedTuple):
    """A parsed and checked request."""

    streams: list[AsyncGenerator[TextChunk, None]]
    """The chunks of each choice, in order. Each prompt has n consecutive choices. A generation starts when
    its iterator is first read."""
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    """Whether each event has the usage so far."""


def take_header(service: Service, fields: Fields, prefix: str) -> dict[str, Any]:
    """Take the model and the service tier from `fields`, and return the fields with which every response body
    starts. The response's id starts with `prefix`. Without a model it is the served one. Raises `NotFound`
    for a model that is not served."""
    tier = fields.take("service_tier", ServiceTier)
    model: str = fields.take("model", str) or service.model_name
    lora_of(service, model)
    header = {"id": prefix + service.frontend.new_rid(), "created": int(time.time()), "model": model}
    return header if tier is None else {**header, "service_tier": "default" if tier == "auto" else tier}


def lora_of(service: Service, model: str) -> str:
    """The LoRA adapter that `model` names, as "name" or "base:name"; "" if it names only the base model.

    A name with Ollama's tag ":latest" means the same as without. Raises `NotFound` for a model that is not
    served, and `NotAllowed` for one that the key may not use.
    """
    try:
        lora = _lora_of(service, model)
    except NotFound:
        if not model.endswith(LATEST):
            raise
        lora = _lora_of(service, model := model.removesuffix(LATEST))
    service.check_model(lora or model)
    return lora


def _lora_of(service: Service, model: str) -> str:
    # SGLang's examples call the only model of a server "default".
    own = (*service.model_names, "default")
    if model in own:
        return ""
    loras = service.frontend.loras.loaded
    if model in loras:
        return model
    base, _, name = model.rpartition(":")
    if base in own:
        if name not in loras:
            raise unknown(name, loras, "model")
        return name
    known = service.all_names  # to the key
    models = [name for name in own if name in known or name == "default"]
    names = ", ".join(map(repr, [*models, *sorted(known.keys() & loras.keys())]))
    raise NotFound(f"There is no model {quoted(model)} here.", field="model", remedy=f"Use one of {names}.")


def parse_request(
    service: Service,
    fields: Fields,
    header: Mapping[str, Any],
    prompts: Sequence[Generate],
    sampling: SamplingParams,
    endpoint: Endpoint,
    *,
    explain: Explain,
    tell: Tell | None = None,
    spelled: Mapping[str, str],
    session: str = "",
    lease_s: float | None = None,
) -> ParsedRequest:
    """Parse the remaining fields of a request. Fields that are unknown or unsupported are refused.

    header : the result of `take_header`
    prompts : a generation for each prompt, without sampling options
    spelled : our name of a field → the client's name, for errors of the engine
    session, lease_s : see `leases.hint_of`
    """
    scope: str = fields.take("cache_salt", str, "")
    hint = take_hint(fields, scope, header["id"], session=session, lease_s=lease_s)
    stream: bool = fields.take("stream", bool, False)
    include_usage = continuous_usage = False
    stream_options = fields.take_object("stream_options")
    if stream_options is not None:
        include_usage = stream_options.take("include_usage", bool, False)
        continuous_usage = stream_options.take("continuous_usage_stats", bool, False)
        if continuous_usage and not (include_usage and endpoint in (CHAT, COMPLETION)):
            path = stream_options.path("continuous_usage_stats")
            raise UnsupportedField(
                f"{path} needs include_usage: true, in chat completions or completions.", field=path
            )
        if include_usage and not stream:
            raise InvalidRequest("stream_options needs stream: true.", field="stream_options")
        stream_options.finish(STREAM_OPTIONS)
    user = _take_user(fields)
    priority = take_priority(fields, TIERS[fields.take("service_tier", ServiceTier, "auto")])
    stop_texts = OTHER_SERVERS in endpoint.shared and _take_others(service, fields, sampling)
    fields.finish(endpoint.whole)
    streams: list[AsyncGenerator[TextChunk, None]] = []
    for prompt in prompts:
        usages = ChoiceUsages(sampling.n)
        for options in split_choices(sampling):
            several = len(prompts) * sampling.n > 1
            request = msgspec.structs.replace(
                prompt,
                rid=f"{prompt.rid}-{len(streams)}" if several else prompt.rid,
                sampling=options,
                scope=scope,
                lora=lora_of(service, header["model"]),
                every_s=0.0 if stream else HELD_S,
                priority=priority,
                hint=hint,
                flow=prompt.rid,
            )
            chunks = service.generate(request, endpoint.path, user, usages)
            chunks = explained(chunks, explain, spelled, tell)
            streams.append(with_stop_texts(chunks) if stop_texts else chunks)
    return ParsedRequest(streams, sampling.n, stream, include_usage, continuous_usage)


def with_top_logprobs(sampling: SamplingParams, top: int | None) -> SamplingParams:
    """`sampling` with log-probabilities of the sampled token and of the `top` likeliest tokens."""
    return check_sampling(msgspec.structs.replace(sampling, logprobs=top or 0), {"logprobs": "top_logprobs"})


def take_logprobs(fields: Fields, sampling: SamplingParams) -> SamplingParams:
    """`sampling` with the log-probabilities that ``logprobs`` and ``top_logprobs`` ask for."""
    top: int | None = fields.take("top_logprobs", int)
    if fields.take("logprobs", bool, False):
        return with_top_logprobs(sampling, top)
    if top:
        raise InvalidRequest("top_logprobs needs logprobs: true.", field="top_logprobs")
    return sampling


def refuse_abort(finish: Finish | None) -> None:
    # OpenAI's API has no finish reason for a request that another request has aborted.
    if finish is not None and finish.reason == "abort":
        raise Cancelled("The request was aborted.")


async def with_stop_texts(stream: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[TextChunk, None]:
    """The chunks of `stream`; the text of the last one ends with the stop string that ended the output."""
    async with aclosing(stream):
        async for chunk in stream:
            matched = chunk.finish and chunk.finish.matched
            if isinstance(matched, str):
                pieces = (*chunk.pieces, (0, len(matched))) if chunk.pieces else ()
                chunk = msgspec.structs.replace(chunk, text=chunk.text + matched, pieces=pieces)
            yield chunk


def check_context(service: Service, fields: Fields) -> None:
    """Take ``num_ctx``, Ollama's context length. More than the server's is refused; less has no effect."""
    wanted: int | None = fields.take("num_ctx", int)
    context = service.frontend.info.context_length
    if wanted is not None and wanted > context:
        path = fields.path("num_ctx")
        raise UnsupportedField(
            f"{path} is {wanted}; this server's context has {context} tokens.",
            field=path,
            remedy="Ask for less, or start the server with another --context-length.",
        )
    fields.ignore({"num_ctx": None})


def _take_others(service: Service, fields: Fields, sampling: SamplingParams) -> bool:
    """Take fields of other servers. Returns ``include_stop_str_in_output``: whether the text ends with the
    stop string that ended it."""
    stop_texts: bool = fields.take("include_stop_str_in_output", bool, False)
    if stop_texts and sampling.stop_token_ids:
        raise UnsupportedField(
            "include_stop_str_in_output is about stop strings; stop_token_ids are left out of the text.",
            field="include_stop_str_in_output",
            remedy="Give the texts in stop.",
        )
    check_context(service, fields)
    return stop_texts


def _take_user(fields: Fields) -> str | None:
    user: str | None = fields.take("user", str)
    identifier: str | None = fields.take("safety_identifier", str)
    if user is not None and identifier is not None and user != identifier:
        raise InvalidRequest("user and safety_identifier mean the same; give one.", field="safety_identifier")
    return user if identifier is None else identifier

"""SGLang's native API, so that its own clients work unchanged.

Field names, defaults and bodies are SGLang's (its HTTP server, 0.5). Differences:

- An unsupported field is refused by name.
- ``logprob_start_len`` p returns the prompt's tokens from position p on, each with its log-probability.
  Position 0 has none (null). With ``max_new_tokens: 0`` the default of p is 0, since such a request can only
  ask for log-probabilities.
- Ramify's own fields: ``prompt_segments`` (text and token ids mixed), ``constraint``, ``preambles``,
  ``program`` {program, name, lease_s, path, next_use, branch, forks, ended, parts, calls_left, limits,
  session, pinned, client, max_pinned_share}, ``cache_scope``; in sampling_params token_healing; the routes
  /end_program and /await_tools.
- ``choices`` {texts, unconditional}, Ramify's own too, scores these texts after the prompt in one request, as
  a `select` does. Nothing is generated: ``max_new_tokens`` is 0, which is its default if choices are given.
  ``meta_info.choices`` has for each text ``token_logprobs`` (SGLang's triples) and ``behind``, which is false
  if the first token contains the end of the prompt. With ``unconditional: true`` it also has
  ``unconditional_token_logprobs``, those of the same tokens without the prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ramify import constraint
from ramify.constraint import Constraint, with_definitions
from ramify.errors import InvalidRequest, RamifyError
from ramify.messages import Choices, Generate, Preamble, ProgramHint, Segment, TextChunk
from ramify.runtime.generation import GenerationResult
from ramify.runtime.processes.choice_tokens import check_choices
from ramify.runtime.server.fields import Fields, json_response
from ramify.runtime.server.leases import hint_of, scoped
from ramify.runtime.server.openai.request import lora_of
from ramify.runtime.server.params import (
    COMMON,
    FieldConstraint,
    Makers,
    check_hint,
    check_sampling,
    check_segments,
    explain_by_field,
    explained,
    make_constraint,
    only_constraint,
    split_choices,
    take_constraints,
    take_definitions,
    take_priority,
    take_prompts,
    take_sampling,
)
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import FrontendProtocol, Service
from ramify.runtime.server.sglang.bodies import generation_body, model_info, server_info
from ramify.runtime.server.sse import DONE, EventStream, collect, event, merge, while_connected
from ramify.runtime.server.tables.sglang import (
    ABORT,
    AWAIT_TOOLS,
    END_PROGRAM,
    GENERATE,
    LOAD_LORA,
    SAMPLING_PARAMS,
    UNLOAD_LORA,
)
from ramify.sampling_options import SPELLINGS
from ramify.sampling_params import SamplingParams
from ramify.schema_bundle import finder


class LoadingNotAllowed(RamifyError):
    """The error 403: adapters can only be chosen when the server starts."""

    code = "loading_not_allowed"
    status = 403


router = Router()

_SPELLING = {name: name for name in ("n", *COMMON) if name not in SPELLINGS.values()} | SPELLINGS
_SCORING_SPELLING = {
    "max_tokens": "sampling_params.max_new_tokens",
    "logprobs": "return_logprob",
    "prompt_logprobs_start": "return_logprob",
}
"""Option that cannot be combined with choices → its name in error messages."""
_CONSTRAINTS: Makers = {
    "json_schema": (str, constraint.json_schema),
    "regex": (str, constraint.regex),
    "ebnf": (str, constraint.ebnf),
    "structural_tag": (str, constraint.structural_tag),
}


class ParsedRequest(NamedTuple):
    """A parsed and checked request to /generate."""

    requests: list[Generate]
    streams: list[AsyncGenerator[TextChunk, None]]
    """The chunks of each request. A generation starts when its iterator is first read."""
    batch: bool
    """Whether the response is a list, and stream events have an index."""
    stream: bool
    texts: bool
    """Whether log-probabilities include the texts of the tokens."""


@router.post("/generate", any_key=True)
@router.put("/generate", any_key=True)
async def generate(request: Request) -> Response:
    service = Service.serving(request)
    parsed, headers = await parse_body(request, GENERATE, _parse_request)
    if parsed.stream:
        events = _events(parsed, service.config.incremental_streaming_output)
        return EventStream(events, headers=headers)
    results = await while_connected(request.receive, collect(parsed.streams))
    pairs = zip(parsed.requests, results, strict=True)
    bodies = [generation_body(one, result, parsed.texts) for one, result in pairs]
    return json_response(bodies if parsed.batch else bodies[0], headers)


@router.get("/get_model_info", uses_model=True, any_key=True)
@router.get("/model_info", uses_model=True, any_key=True)
async def get_model_info(request: Request) -> Response:
    service = Service.serving(request)
    service.check_name(request.query_params.get("model", ""))
    return json_response(model_info(service))


@router.get("/get_server_info", uses_model=True)
@router.get("/server_info", uses_model=True)
async def get_server_info(request: Request) -> Response:
    return json_response(await server_info(Service.serving(request)))


@router.get("/flush_cache")
@router.post("/flush_cache", uses_model=False)
@router.post("/reset_prefix_cache", uses_model=False)  # vLLM's name, which aiperf --reset-kv-cache sends
async def flush_cache(request: Request) -> Response:
    await Service.serving(request).frontend.control.flush_cache()
    return json_response({"flushed": True})


@router.post("/abort_request", uses_model=False, any_key=True)
async def abort_request(request: Request) -> Response:
    rid, headers = await parse_body(request, ABORT, _parse_abort)
    return json_response({"aborted": Service.serving(request).abort(rid)}, headers)


def _parse_abort(service: Service, fields: Fields) -> str | None:
    """The id, or None for all requests."""
    rid: str = fields.take("rid", str, "")
    every: bool = fields.take("abort_all", bool, False)
    fields.finish(ABORT.whole)
    if not rid and not every:
        raise InvalidRequest("rid is missing.", field="rid", remedy="Or set abort_all to true.")
    return None if every else rid


@router.post("/v1/load_lora_adapter")
@router.post("/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    frontend = _loading(request)
    (name, path), headers = await parse_body(request, LOAD_LORA, _parse_lora)
    with _fields_of_body():
        await frontend.loras.load(name, path)
    return _adapters(frontend, headers)


def _parse_lora(service: Service, fields: Fields) -> tuple[str, str]:
    """The name and the path."""
    fields.take("lora_path", str)
    name = _take_lora_name(service, fields)
    fields.finish(LOAD_LORA.whole)
    return name, fields.need("lora_path")


@router.post("/v1/unload_lora_adapter")
@router.post("/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    frontend = _loading(request)
    name, headers = await parse_body(request, UNLOAD_LORA, _parse_unloaded)
    with _fields_of_body():
        await frontend.loras.unload(name)
    return _adapters(frontend, headers)


def _parse_unloaded(service: Service, fields: Fields) -> str:
    """The name."""
    name = _take_lora_name(service, fields)
    fields.finish(UNLOAD_LORA.whole)
    return name


def _take_lora_name(service: Service, fields: Fields) -> str:
    """The adapter's name without the model's, which may stand before it as in "model:adapter"."""
    fields.take("lora_name", str)
    name: str = fields.need("lora_name")
    base, _, adapter = name.rpartition(":")
    return adapter if base in service.model_names else name


@contextmanager
def _fields_of_body() -> Iterator[None]:
    """Replace the fields in errors of the frontend by the names that they have in the request's body."""
    try:
        yield
    except RamifyError as error:
        error.field = {"name": "lora_name", "path": "lora_path"}.get(error.field or "", error.field)
        raise


def _loading(request: Request) -> FrontendProtocol:
    """The frontend, if requests may load adapters. Raises `LoadingNotAllowed` if they may not."""
    service = Service.serving(request)
    if not service.config.lora_loading:
        raise LoadingNotAllowed(
            "This server does not let requests load or unload adapters.",
            remedy="Start it with --lora-loading, or name adapters at the start: --lora name=path.",
        )
    return service.frontend


def _adapters(frontend: FrontendProtocol, headers: Mapping[str, str]) -> Response:
    """The response to loading or unloading, in SGLang's form. Clients of vLLM read only the status."""
    loaded = {name: lora.path for name, lora in frontend.loras.loaded.items()}
    return json_response({"success": True, "loaded_adapters": loaded}, headers)


@router.post("/await_tools", uses_model=False, any_key=True)
async def await_tools(request: Request) -> Response:
    (program, branch, tools), _ = await parse_body(request, AWAIT_TOOLS, _parse_awaited)
    await Service.serving(request).await_tools(program, branch, tools)
    return json_response({"awaited": list(tools)})


def _parse_awaited(service: Service, fields: Fields) -> tuple[str, str, tuple[str, ...]]:
    """The program, the branch, and the names of the tools."""
    program: str = fields.need("program")
    branch: str = fields.take("branch", str, "")
    tools: tuple[str, ...] = fields.need("tools", tuple[str, ...])
    fields.finish(AWAIT_TOOLS.whole)
    return program, branch, tools


@router.post("/end_program", uses_model=False, any_key=True)
async def end_program(request: Request) -> Response:
    (program, scope), _ = await parse_body(request, END_PROGRAM, _parse_ended)
    await Service.serving(request).end_program(scoped(program, scope))
    return json_response({"ended": program})


def _parse_ended(service: Service, fields: Fields) -> tuple[str, str]:
    """(the program, its cache scope)."""
    program: str = fields.need("program")
    scope: str = fields.take("cache_salt", str, "")
    fields.finish(END_PROGRAM.whole)
    return program, scope


def _parse_request(service: Service, fields: Fields) -> ParsedRequest:
    prompts, prompt_field, batch = _take_prompts(fields, service.frontend.info.vocab_size)
    count = len(prompts)
    stream: bool = fields.take("stream", bool, False)
    texts: bool = fields.take("return_text_in_logprobs", bool, False)
    wanted = _each(fields, "return_logprob", bool, False, count)
    starts = _each(fields, "logprob_start_len", int, None, count)
    tops = _each(fields, "top_logprobs_num", int, 0, count)
    choices: Choices | None = fields.take("choices", Choices)
    options = _take_options(fields, count, GENERATE.default_tokens if choices is None else 0)
    own = _take_constraint(fields)
    preambles: tuple[Preamble, ...] = fields.take("preambles", tuple[Preamble, ...], ())
    hint = fields.take_struct("program", ProgramHint)
    if hint is not None:
        check_hint(hint, "program")
    scope: str = fields.take("cache_scope", str, "")
    rids = _take_rids(fields, count, service)
    if hint is None:
        hint = hint_of(fields, scope, rids[0])
    model: str | None = fields.take("model", str)
    loras = _each(fields, "lora_path", str, "" if model is None else lora_of(service, model), count)
    priority = take_priority(fields)
    fields.finish(GENERATE.whole)

    service.check_count(sum(sampling.n for sampling, _, _ in options))
    requests: list[Generate] = []
    streams = []
    # Our name of a field → the client's name, for errors of the engine.
    spelled = {
        "prompt": prompt_field,
        "max_tokens": "sampling_params.max_new_tokens",
        "stop": "sampling_params.stop",
    }
    for index, (prompt, (sampling, default, found)) in enumerate(zip(prompts, options, strict=True)):
        if choices is not None and sampling.n > 1:
            raise InvalidRequest("n has no effect where choices are scored.", field="sampling_params.n")
        sampling = _with_logprobs(sampling, wanted[index], starts[index], tops[index])
        if own is not None and found is not None:
            raise InvalidRequest(f"constraint and {found[0]} are both given; give one.", field="constraint")
        for i, one in enumerate(split_choices(sampling)):
            request = Generate(
                rid=rids[index] if sampling.n == 1 else f"{rids[index]}-{i}",
                prompt=prompt,
                sampling=one,
                cut_to_fit=default,
                constraint=own if found is None else found[1],
                choices=choices,
                preambles=preambles,
                hint=hint,
                scope=scope,
                lora=loras[index],
                priority=priority,
                flow=rids[0],
            )
            check_choices(request, _SCORING_SPELLING)
            requests.append(request)
            explain = explain_by_field("constraint.source" if found is None else found[0])
            streams.append(explained(service.generate(request, "/generate"), explain, spelled))
    return ParsedRequest(requests, streams, batch or len(requests) > 1, stream, texts)


def _take_constraint(fields: Fields) -> Constraint | None:
    """The constraint in the field ``constraint``. The references in its schema are resolved by its
    ``definitions``."""
    inner = fields.take_object("constraint")
    if inner is None:
        return None
    definitions = take_definitions(inner)
    own = inner.as_struct(Constraint)
    if definitions is None:
        return make_constraint("constraint.source", Constraint.check, own)
    if own.kind not in ("json_schema", "structural_tag"):
        raise InvalidRequest(
            f"constraint.definitions is for JSON schemas, not for a constraint of kind {own.kind}.",
            field="constraint.definitions",
        )
    return make_constraint(
        "constraint.source", lambda given: with_definitions(given, finder(definitions)), own
    )


def _take_prompts(fields: Fields, vocab_size: int) -> tuple[list[tuple[Segment, ...]], str, bool]:
    """(prompts, the field that they were in, whether it holds a list of prompts)."""
    names = [name for name in ("text", "input_ids", "prompt_segments") if fields.take(name, msgspec.Raw)]
    if len(names) != 1:
        said = " and ".join(names) + " are both given" if names else "The prompt is missing"
        field = names[-1] if names else "text"
        raise InvalidRequest(f"{said}; give one of text, input_ids and prompt_segments.", field=field)
    name = names[0]
    if name == "prompt_segments":
        segments: tuple[Segment, ...] = fields.take(name, tuple[str | tuple[int, ...], ...])
        check_segments(segments, name, vocab_size)
        return [segments], name, False
    prompts, batch = take_prompts(fields, name, vocab_size)
    for prompt in prompts:
        if isinstance(prompt, str) is (name == "input_ids"):
            kind = "token ids" if name == "input_ids" else "a string or a list of strings"
            raise InvalidRequest(f"{name} must be {kind}.", field=name)
    return [(prompt,) for prompt in prompts], name, batch


def _take_options(
    fields: Fields, count: int, max_tokens: int | None
) -> list[tuple[SamplingParams, bool, FieldConstraint | None]]:
    """(the sampling options, whether max_tokens is the default, the constraint) of each prompt. The request
    gives one object for all prompts, or a list of objects.

    `max_tokens` is the default for ``max_new_tokens``. With an explicit null only the context limits the
    output.
    """
    field = "sampling_params"
    raw: Any = fields.take(field, dict[str, msgspec.Raw] | list[msgspec.Raw])
    if not isinstance(raw, list):
        every = [fields.take_object(field) or Fields({}, field)]
    else:
        every = fields.take_objects(field) or []
        if len(every) != count:
            raise _length_differs(field, len(every), count)
    options = []
    for one in every:
        limit: dict[str, Any] = {} if one.is_null("max_new_tokens") else {"max_tokens": max_tokens}
        default = bool(limit) and not one.given("max_new_tokens")
        unlimited = "Give null for as many as fit into the context."
        sampling = take_sampling(one, _SPELLING, unlimited=unlimited, **limit)
        found = only_constraint(take_constraints(one, _CONSTRAINTS))
        one.finish(SAMPLING_PARAMS)
        options.append((sampling, default, found))
    return options if len(options) == count else options * count


def _with_logprobs(sampling: SamplingParams, wanted: bool, start: int | None, top: int) -> SamplingParams:
    if not wanted:
        if top > 0:
            raise InvalidRequest("top_logprobs_num needs return_logprob: true.", field="top_logprobs_num")
        if start is not None and start >= 0:
            raise InvalidRequest("logprob_start_len needs return_logprob: true.", field="logprob_start_len")
        return sampling
    if start is None and sampling.max_tokens == 0:
        start = 0
    return check_sampling(
        msgspec.structs.replace(
            sampling, logprobs=top, prompt_logprobs_start=None if start in (None, -1) else start
        ),
        {"logprobs": "top_logprobs_num", "prompt_logprobs_start": "logprob_start_len"},
    )


def _take_rids(fields: Fields, count: int, service: Service) -> list[str]:
    given: str | list[str] | None = fields.take("rid", str | list[str])
    if given is None:
        return [service.frontend.new_rid() for _ in range(count)]
    if isinstance(given, str):
        rids = [given] if count == 1 else [f"{given}-{index}" for index in range(count)]
    else:
        rids = given
    if len(rids) != count:
        raise _length_differs("rid", len(rids), count)
    if "" in rids or len(set(rids)) != count:
        raise InvalidRequest("rid must be unique and not empty.", field="rid")
    return rids


def _each(fields: Fields, field: str, kind: Any, default: Any, count: int) -> list[Any]:
    """A value for each of `count` prompts. The request gives one value for all prompts, or a list."""
    value = fields.take(field, kind | list[kind | None])
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise _length_differs(field, len(value), count)
    return [default if one is None else one for one in value]


def _length_differs(field: str, length: int, count: int) -> InvalidRequest:
    return InvalidRequest(f"{field} has {length} entries for {count} prompts.", field=field)


async def _events(parsed: ParsedRequest, incremental: bool) -> AsyncGenerator[bytes, None]:
    """The stream events in SGLang's form: each has the whole output so far, or with `incremental` only the
    new output."""
    results = [GenerationResult() for _ in parsed.streams]
    async with aclosing(merge(parsed.streams)) as chunks:
        async for index, chunk in chunks:
            result = results[index]
            result.add_chunk(chunk)
            part = None
            if incremental:
                part = GenerationResult()
                part.add_chunk(chunk)
            body = generation_body(parsed.requests[index], result, parsed.texts, part)
            if parsed.batch:
                body["index"] = index
            yield event(body)
    yield DONE

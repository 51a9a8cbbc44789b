"""``POST /v1/programs``: runs a program, given as a graph, on the server, without a round trip between calls.

The body:

- ``graph``: `ramify.graph.Graph`, as ``fn.compile().graph()`` gives it.
- ``arguments``: one object of arguments, or ``rows``: a list of such objects. Without either the graph runs
  once.
- ``sampling_params``: fields of `ramify.sampling_params.SamplingParams` (or SGLang's spellings) for every gen
  that does not set its own.
- ``model``: the model of steps that name none, on a server of several models.
- ``cache_scope``, ``priority``: as in ``POST /generate``; ``lora``: the LoRA adapter of steps that set none.
- ``timeout``, ``max_total_tokens``, ``max_calls``: limits of each run of the graph, as for ``run``.
- ``stream``: answer with server-sent events, ended by ``[DONE]``.
- ``events``, with ``stream``: ``nodes`` (the default) sends ``{row, node, branch, name, value, usage,
  finish_reason}`` for each gen, select and scope as it ends. ``requests`` sends ``{row, request, chunks}``
  for each request when it has ended; ``chunks`` sends such events while text is generated. Both are meant for
  Ramify's own client.

The last event of a row is ``{row, text, variables, nodes, usage}``; without ``stream`` the answer is
``{"rows": […]}``, a list of these objects. The event of a node, request or row that failed has ``failed``:
``{code, message, …}``. If there is one row and it fails before its first event was sent, the answer is that
error, with its HTTP status.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ramify.bounds import Bounds
from ramify.errors import InvalidRequest, NotFound, RamifyError, UnsupportedField, from_info
from ramify.graph import CallTools, Graph
from ramify.graph import Request as Step
from ramify.lang.graph.serve import Events, Job, ToolResults, run_row
from ramify.loop import cancel_at_end
from ramify.messages import Generate, TextChunk
from ramify.model_info import ModelInfo
from ramify.runtime.server.fields import Fields, json_response
from ramify.runtime.server.models import Models, several_models
from ramify.runtime.server.openai.request import lora_of
from ramify.runtime.server.params import take_priority
from ramify.runtime.server.parsing import parse_body
from ramify.runtime.server.router import Router
from ramify.runtime.server.service import KEY, Service
from ramify.runtime.server.sse import DONE, EventStream, while_connected
from ramify.runtime.server.sse import event as sse_event
from ramify.runtime.server.tables.programs import PROGRAMS, RESULTS
from ramify.sampling_options import read_options

router = Router()

PATH = "/v1/programs"
MAX_ROWS = 4096
"""Most rows of one HTTP request. The number of rows that run at a time is bounded so that their requests fit
into `max_running`."""


@router.post(PATH, any_key=True)
async def programs(request: Request) -> Response:
    service, models = Service.serving(request), several_models(request)
    backend = _Served(service, models)
    parse = functools.partial(_parse, backend)
    (stream, run, job, rows), _ = await parse_body(request, PROGRAMS, parse)
    if models is not None and backend.has_others:
        # Its requests acquire their models, which may not fit side by side.
        await models.release_model(request)
        backend.acquired = False
    at_once = max(service.max_running // max(job.graph.width, 1), 1)
    if stream:
        return _ProgramStream(service, run, job, rows, at_once)
    answers = await while_connected(request.receive, _whole(job, rows, at_once))
    return json_response({"rows": answers})


def _parse(
    backend: _Served, service: Service, fields: Fields
) -> tuple[bool, str | None, Job, list[dict[str, Any]]]:
    """(whether to stream, the client's id as `Service.programs` has it, the job, the arguments of each
    row)."""
    stream: bool = fields.take("stream", bool, False)
    run: str | None = fields.take("id", str)
    job, rows = _take_job(fields, service, backend, stream)
    service.check_count(job.graph.width)
    calls_tools = any(isinstance(node, CallTools) for node in job.graph.nodes)
    if calls_tools and not (stream and run):
        raise InvalidRequest(
            "A program with call_tools waits for the client's results.",
            field="stream",
            remedy=f"Send stream: true and an id of your own, and post results to {PATH}/ID/results.",
        )
    own = run and KEY.get().own_id(run)
    if own in service.programs:
        raise InvalidRequest(f"A program with the id {run!r} is running.", field="id")
    return stream, own, job, rows


@router.post(PATH + "/{run}/results", uses_model=False, any_key=True)
async def results(request: Request, run: str) -> Response:
    """Take the results of a turn's tool calls from the client. A streamed program waits for them."""
    (place, row, texts), _ = await parse_body(request, RESULTS, _parse_results)
    waiting: list[ToolResults] = Service.serving(request).programs.get(KEY.get().own_id(run), [])
    if not 0 <= row < len(waiting):
        raise NotFound(f"No program {run!r} with row {row} runs here.", field="id")
    waiting[row].put(place, texts)
    return json_response({})


def _parse_results(service: Service, fields: Fields) -> tuple[str, int, list[str]]:
    """(the place of the turn, the row, the results)."""
    place: str = fields.need("tools", str)
    row: int = fields.take("row", int, 0)
    texts: list[str] | None = fields.take("results", list[str])
    fields.finish(RESULTS.whole)
    if texts is None:
        raise InvalidRequest("results is missing.", field="results")
    return place, row, texts


class _ProgramStream(EventStream):
    """The event stream of a program.

    `run` is the client's id of the program. While the program runs, `results` finds the stream under this id.
    """

    def __init__(
        self, service: Service, run: str | None, job: Job, rows: list[dict[str, Any]], at_once: int
    ) -> None:
        self._programs, self._run = service.programs, run
        self._tools = [ToolResults() for _ in rows]
        super().__init__(_events(job, rows, at_once, self._tools, self._end))
        if run:
            self._programs[run] = self._tools

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()  # in case the stream has not begun, or breaks off

    def _end(self) -> None:
        if self._run and self._programs.get(self._run) is self._tools:
            del self._programs[self._run]


def _take_job(
    fields: Fields, service: Service, backend: _Served, stream: bool
) -> tuple[Job, list[dict[str, Any]]]:
    graph: Graph | None = fields.take("graph", Graph)
    if graph is None:
        raise InvalidRequest("graph is missing.", field="graph")
    graph.check()
    for node in graph.nodes:
        if isinstance(node, Step) and node.model is not None:
            backend.model(node.model)
    arguments: dict[str, Any] | None = fields.take("arguments", dict[str, Any])
    rows: list[dict[str, Any]] | None = fields.take("rows", list[dict[str, Any]])
    options: dict[str, Any] = fields.take("sampling_params", dict[str, Any], {})
    options = read_options(options, of="sampling_params")
    priority = take_priority(fields)
    if fields.given("priority"):
        options["priority"] = priority
    model: str | None = fields.take("model", str)
    lora: str | None = fields.take("lora", str, lora_of(service, model) or None if model else None)
    if lora is not None:
        options["lora"] = lora
    scope: str = fields.take("cache_scope", str, "")
    bounds = Bounds(
        timeout=fields.take("timeout", float),
        max_total_tokens=fields.take("max_total_tokens", int),
        max_calls=fields.take("max_calls", int),
    )
    events: Events = fields.take("events", Events, "nodes")
    fields.finish(PROGRAMS.whole)
    if arguments is not None and rows is not None:
        raise InvalidRequest("arguments and rows are both given; give one.", field="rows")
    if rows is None:
        graph.check_row(arguments or {}, "arguments")
        rows = [arguments or {}]
    else:
        if not 0 < len(rows) <= MAX_ROWS:
            raise InvalidRequest(f"{len(rows)} rows; 1 to {MAX_ROWS} are accepted.", field="rows")
        for index, row in enumerate(rows):
            graph.check_row(row, f"rows[{index}]")
    if events != "nodes" and not stream:
        raise InvalidRequest(f"events: {events!r} needs stream: true.", field="events")
    job = Job(
        graph=graph,
        backend=backend,
        info=service.frontend.info,
        options=options,
        scope=scope,
        bounds=bounds,
        events=events,
    )
    return job, rows


async def _whole(job: Job, rows: list[dict[str, Any]], at_once: int) -> list[dict[str, Any]]:
    """Run all rows; returns the last event of each row.

    Raises the error of a failed row if it is the only one.
    """
    answers: list[dict[str, Any]] = [{}] * len(rows)
    async with aclosing(_row_events(job, rows, at_once, [ToolResults() for _ in rows])) as events:
        async for event in events:
            if event.last:
                answers[event.row] = event.data
    if len(rows) == 1:
        _raise_failed(answers[0])
    return answers


async def _events(
    job: Job,
    rows: list[dict[str, Any]],
    at_once: int,
    tools: list[ToolResults],
    end: Callable[[], None],
) -> AsyncGenerator[bytes, None]:
    # Ramify's own client handles the failures of requests itself.
    first = len(rows) == 1 and job.events == "nodes"
    async with aclosing(_row_events(job, rows, at_once, tools)) as events:
        async for event in events:
            if first:
                _raise_failed(event.data)
            first = False
            yield sse_event({"row": event.row, **event.data})
    end()  # before the client learns of the end and may use the id again
    yield DONE


def _raise_failed(answer: dict[str, Any]) -> None:
    if "failed" in answer:
        raise from_info(answer["failed"])


class Event(NamedTuple):
    row: int
    data: dict[str, Any]
    last: bool
    """Whether this is the last event of the row."""


async def _row_events(
    job: Job, rows: list[dict[str, Any]], at_once: int, tools: list[ToolResults]
) -> AsyncGenerator[Event, None]:
    """Run the rows, `at_once` at a time, and yield their events.

    `tools` has, for each row, the object that receives the results of its tool calls.

    Closing the generator cancels the rows that still run.
    """
    queue: asyncio.Queue[Event | Exception] = asyncio.Queue()
    places = asyncio.Semaphore(at_once)

    async def one(number: int, row: dict[str, Any]) -> None:
        async with places:
            try:
                summary = await run_row(
                    job, row, lambda data: queue.put_nowait(Event(number, data, False)), tools[number]
                )
            except RamifyError as error:
                queue.put_nowait(Event(number, {"failed": error.to_info()}, True))
            except Exception as error:
                queue.put_nowait(error)
            else:
                queue.put_nowait(Event(number, summary, True))

    work = [asyncio.create_task(one(number, row)) for number, row in enumerate(rows)]
    left = len(work)
    async with cancel_at_end(work):
        while left:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            left -= event.last
            yield event


class _Served:
    """The backend of programs that run in the server: the model of the request's service, or `name`, another
    one of the server."""

    def __init__(self, service: Service, models: Models | None, name: str | None = None) -> None:
        self._service, self._models = service, models
        self._name = service.model_names[0] if name is None else name
        self._whole = service if models is None else models.server
        self._others: dict[str, _Served] = {}
        self.acquired = name is None
        """Whether the request has acquired this model. Its steps must not acquire it again: a model that is
        to be unloaded takes no new users until those that it has are gone."""

    @property
    def has_others(self) -> bool:
        """Whether steps name other models."""
        return bool(self._others)

    def model(self, name: str) -> _Served:
        if self._models is None:
            if lora_of(self._service, name):
                raise UnsupportedField(
                    f"{name} is an adapter.", field="model", remedy=f"Write lora={name!r}."
                )
            return self
        name = self._models.allowed_model(name)
        if name == self._name:
            return self
        if name not in self._others:
            self._others[name] = _Served(self._service, self._models, name)
        return self._others[name]

    async def info(self) -> ModelInfo:
        async with self._using() as service:
            return msgspec.structs.replace(service.frontend.info, name=self._name)

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        async with self._using() as service, aclosing(service.generate(request, PATH)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _using(self) -> AbstractAsyncContextManager[Service]:
        if self._models is None or self.acquired:
            return nullcontext(self._service)
        return self._models.using(self._name)

    async def abort(self, rid: str) -> None:
        self._whole.abort(rid)

    async def await_tools(self, program: str, branch: str, tools: tuple[str, ...]) -> None:
        await self._whole.await_tools(program, branch, tools)

    async def end_program(self, program: str) -> None:
        await self._whole.end_program(program)

    async def aclose(self) -> None:
        """Do nothing: the server outlives its programs."""

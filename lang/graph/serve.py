"""Running graphs in a server on behalf of a client, with events about their progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import msgspec

from ramify.bounds import Bounds
from ramify.errors import EngineError, InvalidRequest, RamifyError, from_info
from ramify.graph import WITH_RESULT, Either, Graph
from ramify.lang.backends.base import Backend, Wrapper
from ramify.lang.backends.router import model_of
from ramify.lang.backends.submitted import ranks, renamed
from ramify.lang.calls.limits import Limit
from ramify.lang.graph.execute import Execution, Row, Traced
from ramify.lang.program.run import Run
from ramify.lang.program.variables import Skipped, Variable
from ramify.lang.tools.tool import ToolCalls
from ramify.lang.trace.calls import CURRENT
from ramify.lang.typed.decision import Decision, ModelDecision
from ramify.messages import Generate, TextChunk
from ramify.model_info import ModelInfo

logger = logging.getLogger(__name__)

MAX_TURNS = 4096

Events = Literal["nodes", "requests", "chunks"]
"""The kind of events that a run emits. nodes: the result of each node. requests: all chunks of a request,
when the request has ended. chunks: each chunk of a request, when the chunk arrives."""

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A graph and the options of its runs."""

    graph: Graph
    backend: Backend
    info: ModelInfo
    options: Mapping[str, Any]
    """Default sampling options of every gen, as fields of `SamplingParams`."""
    scope: str
    events: Events
    bounds: Bounds = field(default_factory=Bounds)


class ToolResults:
    """The results of tools that the client runs, by the place of the turn of calls (`Call.place`). For each
    place, `wait` and `put` may be called in either order."""

    def __init__(self) -> None:
        self._results: dict[str, asyncio.Future[list[str]]] = {}

    def _at(self, place: str) -> asyncio.Future[list[str]]:
        return self._results.setdefault(place, asyncio.get_running_loop().create_future())

    async def wait(self, place: str, count: int) -> list[str]:
        """Wait for the results of the turn at `place`. Raises `InvalidRequest` if there are not `count`
        results."""
        results = await asyncio.shield(self._at(place))  # `put` may come after this wait was cancelled
        if len(results) != count:
            raise InvalidRequest(f"{len(results)} results for {count} calls at {place}.", field="results")
        return results

    def put(self, place: str, results: list[str]) -> None:
        """Set the results of the turn at `place`. The same results may be set again, because a client that
        has not received the answer repeats its request.

        Raises `InvalidRequest` if other results have been set for `place`.
        """
        if place not in self._results and len(self._results) >= MAX_TURNS:
            raise InvalidRequest(f"Results of more than {MAX_TURNS} turns.", field="tools")
        future = self._at(place)
        if not future.done():
            future.set_result(results)
        elif future.result() != results:
            raise InvalidRequest(f"Other results of {place} were given before.", field="tools")


async def run_row(job: Job, row: Row, emit: Emit, tools: ToolResults | None = None) -> dict[str, Any]:
    """Run the graph of `job` once in this event loop, with the arguments in `row`. Calls `emit` with each
    event.

    The caller puts the client's results of tool calls into `tools`. Returns the last event of the run. If
    ``job.events`` is "nodes", the last event has a summary. Cancelling the coroutine aborts the requests.
    Raises `RamifyError` for arguments with which the graph cannot run.
    """
    nodes = job.events == "nodes"
    backend = _Emitting(job, emit, tools or ToolResults())
    loop = asyncio.get_running_loop()
    stream = job.events == "chunks"
    limits = (Limit(job.bounds, f"the run of {job.graph.name!r}"),) if job.bounds else ()
    run = Run(
        job.graph.name,
        backend,
        job.info,
        job.options,
        scope=job.scope,
        stream=stream,
        loop=loop,
        limits=limits,
    )
    results: dict[int, dict[str, Any]] = {}
    try:
        execution = Execution(Traced(job.graph), run.root, row)
        execution.submit()
        if nodes:
            for place, variable in execution.outcomes.items():

                def done(place: int = place, variable: Variable = variable) -> None:
                    results[place] = _node(job.graph, place, variable)
                    emit(results[place])

                variable.ready.on_set(done)
        # `finish` runs in a new task, which begins after the tasks that `submit` has started.
        await asyncio.create_task(run.finish())
    finally:
        await asyncio.shield(run.cancel())
    event: dict[str, Any] = {}
    if nodes:
        event |= _summary(run, [results[place] for place in sorted(results)])
    if run.root.error is not None:
        event["failed"] = problem_of(run.root.error).to_info()
    return event


def _node(graph: Graph, place: int, variable: Variable) -> dict[str, Any]:
    node = graph.nodes[place]
    assert isinstance(node, WITH_RESULT)
    event: dict[str, Any] = {"node": place, "branch": node.branch, "name": node.name}
    if isinstance(variable.error, Skipped):
        return {**event, "skipped": True}
    if variable.error is not None:
        return {**event, "failed": problem_of(variable.error).to_info()}
    event["value"] = _plain(variable.value)
    if variable.thinking is not None:
        event["thinking"] = variable.thinking
    if variable.call is not None and not isinstance(node, Either):
        event["usage"] = variable.call.usage
        if variable.call.finish is not None:
            event["finish_reason"] = variable.call.finish.reason
    return event


def _summary(run: Run, results: list[dict[str, Any]]) -> dict[str, Any]:
    root = run.root
    return {
        "text": root.text,
        "variables": {
            name: _plain(variable.value)
            for name, variable in root.variables.items()
            if variable.error is None
        },
        "nodes": results,
        "usage": root.call.usage,
    }


def _plain(value: Any) -> Any:
    """`value` as plain data for JSON. Tool calls become their names and results."""
    if isinstance(value, Decision | ModelDecision):
        return value.to_dict()
    if isinstance(value, ToolCalls):
        return [{"name": call.name, "result": call.shown} for call in value]
    return list(map(_plain, value)) if isinstance(value, list) else value


def problem_of(error: RamifyError) -> RamifyError:
    """The `RamifyError` that caused `error`, a step's error, with the message of `error`, which names the
    step. If the cause is no `RamifyError`, an `EngineError` with this message; `error` itself if it has no
    cause."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, RamifyError) and cause.code != error.code):
        cause = cause.__cause__
    if not isinstance(cause, RamifyError):
        return EngineError(error.message) if error.__cause__ is not None else error
    return from_info(msgspec.structs.replace(cause.to_info(), message=error.message))


class _Emitting(Wrapper):
    """The backend that a job's steps run on. Unless ``job.events`` is "nodes", it emits the answers as
    ``{"request": place, "chunks": […]}``. Before it waits for results of tool calls, it emits
    ``{"tools": place, "calls": […]}``."""

    def __init__(self, job: Job, emit: Emit, tools: ToolResults) -> None:
        self._job, self._backend, self._emit, self._tools = job, job.backend, emit, tools
        self._models: dict[Backend, Backend] = {}
        self._nodes, self._each = job.events == "nodes", job.events == "chunks"

    async def tool_results(self, place: str, calls: Sequence[tuple[str, str]]) -> list[str]:
        if not calls:
            return []
        listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
        self._emit({"tools": place, "calls": listed})
        return await self._tools.wait(place, len(calls))

    def model(self, name: str) -> Backend:
        found = model_of(self._backend, name)
        if found is self._backend:
            return self
        if found not in self._models:
            self._models[found] = _Emitting(replace(self._job, backend=found), self._emit, self._tools)
        return self._models[found]

    async def info(self) -> ModelInfo:
        return await self._backend.info()

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        if self._nodes:
            async with aclosing(cast("Any", self._backend.generate(request))) as answer:
                async for chunk in answer:
                    yield chunk
            return
        call = CURRENT.get()
        assert call is not None
        place = call.place
        chunks: list[TextChunk] = []
        answer = cast("AsyncGenerator[TextChunk, None]", self._backend.generate(request))
        try:
            async with aclosing(answer):
                async for chunk in answer:
                    chunks.append(renamed(chunk, ranks(request)))
                    if self._each or chunk.finish is not None:
                        self._emit({"request": place, "chunks": chunks})
                        chunks = []
                    yield chunk
        except Exception as error:
            if not isinstance(error, RamifyError):
                logger.exception("A request of a program failed.")
            event = error if isinstance(error, RamifyError) else EngineError("An internal error ended it.")
            self._emit({"request": place, "chunks": chunks, "failed": event.to_info()})
            raise

    async def end_program(self, program: str) -> None:
        await self._backend.end_program(program)

    async def aclose(self) -> None:
        """Do nothing: the caller who opened the backend closes it."""

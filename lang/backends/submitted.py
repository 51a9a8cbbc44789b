"""A program that a Ramify server runs as a graph, and its replica in this process.

The graph runs both at the server and here. The local run sends no requests. It reads the answers from one
stream of events, in which the server reports the whole program. So the local `ProgramState` is the same as if
the program had run here. If the stream fails transiently, complete answers are kept, and each remaining
request of the local run is sent to the server as a separate request.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec

from ramify.errors import BackendError, Cancelled, ErrorInfo, NotFound, RamifyError, from_info
from ramify.lang.backends.base import Backend, Submission, Wrapper
from ramify.lang.backends.http import Event, HttpClient
from ramify.lang.backends.http_errors import remote
from ramify.lang.backends.model_info import model_info
from ramify.lang.backends.router import model_of
from ramify.lang.trace.calls import CURRENT
from ramify.lang.trace.spans import program_context
from ramify.messages import Generate, TextChunk
from ramify.model_info import ModelInfo


class _ProgramEvent(Event, frozen=True, kw_only=True):
    """An event of a submitted program.

    `request`: the event has chunks of the answer to the request at this place (`Call.place`). `tools`: the
    server waits for the results of the tool calls of the step at this place. An event with neither is the end
    of the program.
    """

    request: str | None = None
    tools: str | None = None
    chunks: tuple[TextChunk, ...] = ()
    failed: ErrorInfo | None = None


class SubmittedProgram:
    """The backend of one local run of a submitted program. `end_program` also ends the run at the server."""

    def __init__(
        self,
        endpoint: Backend,
        model: str,
        http: HttpClient,
        submission: Submission,
        failed: Callable[[], bool],
    ) -> None:
        self._endpoint = endpoint
        self.retry = getattr(endpoint, "retry", None)
        self._http = http
        options = dict(submission.options)
        self._id = uuid.uuid4().hex
        self._body = {
            "id": self._id,
            "graph": msgspec.to_builtins(submission.graph),
            "arguments": dict(submission.arguments),
            **({"model": model} if model else {}),
            "priority": options.pop("priority", None),
            "lora": options.pop("lora", None),
            "sampling_params": msgspec.to_builtins(options),
            "cache_scope": submission.scope,
            **msgspec.to_builtins(submission.bounds),
            "stream": True,
            "events": "chunks" if submission.stream else "requests",
        }
        self._failed = failed
        self._reader: asyncio.Task[None] | None = None
        self._answers: dict[str, asyncio.Queue[list[TextChunk] | RamifyError]] = {}
        self._error: RamifyError | None = None
        """Error that all later requests raise; None until the stream has ended."""
        self._lost: set[str] = set()
        """Places of requests that failed transiently or were lost at the server. They are sent again as
        separate requests."""
        self._alone = False
        """Whether any request was sent as a separate request."""
        self._models: dict[Backend, Backend] = {}

    def model(self, name: str) -> Backend:
        """The backend of the steps that name the model `name`, which the same run answers."""
        found = model_of(self._endpoint, name)
        if found is self._endpoint:
            return self
        return self._models.setdefault(found, _OtherModel(self, found))

    async def info(self) -> ModelInfo:
        raise BackendError("A submitted program does not ask for its model.")

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        return self.answer(request, self._endpoint)

    async def answer(self, request: Generate, endpoint: Backend) -> AsyncIterator[TextChunk]:
        """The answer to `request` by the server's run, or after a transient failure by `endpoint`."""
        call = CURRENT.get()
        assert call is not None
        if self._reader is None:
            with program_context(call):
                self._reader = asyncio.create_task(self._read())
        place = call.place
        answers = self._of(place)
        if place in self._lost or (self._error is not None and self._error.transient and answers.empty()):
            self._alone = True
            async with aclosing(cast("Any", endpoint.generate(request))) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        while True:
            if self._error is not None and answers.empty():
                raise self._error
            answer = await answers.get()
            if isinstance(answer, RamifyError):
                raise answer
            ids = {rank: id for id, rank in ranks(request).items()}
            for chunk in answer:
                yield renamed(chunk, ids)
            if answer and answer[-1].finish is not None:
                return

    async def tools_returned(self, place: str, results: Sequence[str]) -> None:
        if self._error is None:
            body = {"tools": place, "results": list(results)}
            try:
                await self._http.post(f"/v1/programs/{self._id}/results", body)
            except NotFound:  # the server was restarted, or a balancer has chosen another one
                self._lost.add(place)
                if self._reader is not None:
                    self._reader.cancel()  # further requests are sent as requests of their own
                    await asyncio.wait((self._reader,))

    async def abort(self, rid: str) -> None:
        """End a request.

        A separate request is aborted at the server. Any other request fails at once if the local run has
        failed. If the local run has not failed, a time limit of the program has passed; the server then ends
        the request and reports its usage.
        """
        call = CURRENT.get()
        assert call is not None
        place = call.place
        if place in self._lost and hasattr(self._endpoint, "abort"):
            await self._endpoint.abort(rid)
        elif self._failed():
            self._of(place).put_nowait(Cancelled("The run was cancelled."))

    async def end_program(self, program: str) -> None:
        if self._reader is None:
            return
        if self._failed():
            self._reader.cancel()
        await asyncio.wait((self._reader,))
        if self._alone:
            await self._endpoint.end_program(program)

    async def aclose(self) -> None:
        """Do nothing: the connections belong to the endpoint."""

    def _of(self, place: str) -> asyncio.Queue[list[TextChunk] | RamifyError]:
        return self._answers.setdefault(place, asyncio.Queue())

    async def _read(self) -> None:
        error: RamifyError = BackendError("The server ended the program before this request.")
        try:
            sent = self._http.events("/v1/programs", self._body, _ProgramEvent)
            async with aclosing(cast("Any", sent)) as events:
                async for found in events:
                    failed = None if found.failed is None else remote(from_info(found.failed))
                    if found.tools is not None:
                        continue  # this process runs the calls itself, from the chunks
                    if found.request is None:
                        error = failed or error
                        continue
                    answers = self._of(found.request)
                    answers.put_nowait(list(found.chunks))
                    if failed is not None:
                        answers.put_nowait(failed)
                        if failed.transient:
                            self._lost.add(found.request)
        except RamifyError as raised:
            error = raised
        finally:
            error.transient |= bool(self._lost)  # the server has not run requests after a lost one
            self._error = error
            for answers in self._answers.values():
                answers.put_nowait(error)


class _OtherModel(Wrapper):
    """The backend of the steps of a submitted program that name another model than the program's own."""

    def __init__(self, program: SubmittedProgram, endpoint: Backend) -> None:
        self._backend: SubmittedProgram = program
        self._endpoint = endpoint

    async def info(self) -> ModelInfo:
        return await model_info(self._endpoint)

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        return self._backend.answer(request, self._endpoint)

    async def end_program(self, program: str) -> None:
        """Do nothing: the end of the submitted program ends it for all models."""

    async def aclose(self) -> None:
        """Do nothing: the connections belong to the endpoint."""


def ranks(request: Generate) -> dict[str, str]:
    """Id of a limit → position of the limit, counted from the innermost. The position of a limit is the same
    at the server and in the local run."""
    limits = () if request.hint is None else request.hint.limits
    return {limit.id: str(rank) for rank, limit in enumerate(reversed(limits))}


def renamed(chunk: TextChunk, names: Mapping[str, str]) -> TextChunk:
    """`chunk`. If a limit ended the request, the limit's id in `chunk` is replaced by ``names[id]``."""
    if chunk.finish is None or chunk.finish.limit is None:
        return chunk
    id, replace = chunk.finish.limit.id, msgspec.structs.replace
    limit = replace(chunk.finish.limit, id=names.get(id, id))
    return replace(chunk, finish=replace(chunk.finish, limit=limit))

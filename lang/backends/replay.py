"""Backends that record the answers of another backend, and replay them to test programs offline."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import cast

import msgspec

from ramify.errors import BackendError, ErrorInfo, RamifyError, from_info
from ramify.lang.backends import recording
from ramify.lang.backends.base import Backend, Wrapper
from ramify.lang.backends.recording import Exchange, Header
from ramify.lang.backends.router import model_of
from ramify.lang.trace.calls import CURRENT
from ramify.messages import Generate, TextChunk
from ramify.model_info import ModelInfo


class NotRecorded(BackendError):
    """The error for a request without an answer in the recording that is replayed. It ends the run: the
    program cannot recover from it, and `run` raises it."""

    code = "not_recorded"
    fatal = True


class RecordingBackend(Wrapper):
    """A backend that passes requests on to `backend` and records them, with their answers, in the file
    `path`.

    An existing file is replaced. If the process is killed, the file still has every request that had ended.
    The `cache` of `backend` is not used, so that the recording contains all requests.
    """

    PASSED_ON = Wrapper.PASSED_ON | {"flush_cache", "get_model_name", "get_server_info"}
    answers = None

    def __init__(self, backend: Backend, path: str | os.PathLike[str]) -> None:
        self.backend = self._backend = backend
        self.path = Path(path)
        self.takes_messages = bool(getattr(backend, "takes_messages", False))
        self._numbers = itertools.count()
        self.path.write_bytes(b"")
        self._begun = False
        self._name = ""
        self._models: dict[str, RecordingBackend] = {}
        self._lock = threading.Lock()

    @property
    def unused(self) -> list[Generate]:
        """Always an empty list, so that a test that asserts ``not backend.unused`` of its `ReplayBackend`
        also passes while the test is being recorded."""
        return []

    def model(self, name: str) -> Backend:
        """The recorder of the model `name` of the recorded backend, into the same file."""
        found = model_of(self.backend, name)
        if found is self.backend:
            return self
        if name not in self._models:
            other = self._models[name] = copy.copy(self)
            other.backend = other._backend = found
            other._name, other._begun = name, False
            other.takes_messages = bool(getattr(found, "takes_messages", False))
        return self._models[name]

    async def info(self) -> ModelInfo:
        info = await self.backend.info()
        self._begin(info)
        return info

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        if not self._begun:
            await self.info()
        number, path = next(self._numbers), recording.call_path(CURRENT.get())
        chunks: list[TextChunk] = []
        error: ErrorInfo | None = None
        ended = again = False
        try:
            answer = cast("AsyncGenerator[TextChunk, None]", self.backend.generate(request))
            async with aclosing(answer):
                async for chunk in answer:
                    chunks.append(chunk)
                    yield chunk
            ended = True
        except RamifyError as raised:
            error, ended = raised.to_info(), True
            again = raised.transient and getattr(getattr(self, "retry", None), "retries", 0) != 0
            raise
        finally:
            if not again:  # the recording keeps only the attempt that is answered
                self._write(
                    Exchange(
                        number=number,
                        path=path,
                        model=self._name,
                        request=recording.bare(request),
                        chunks=tuple(msgspec.structs.replace(chunk, rid="") for chunk in chunks),
                        error=error,
                        ended=ended,
                    )
                )

    async def end_program(self, program: str) -> None:
        await self.backend.end_program(program)

    async def aclose(self) -> None:
        await self.backend.aclose()

    def _begin(self, info: ModelInfo) -> None:
        with self._lock:
            if not self._begun:
                self._begun = True
                self._append(
                    Header(
                        ramify_recording=recording.VERSION,
                        info=info,
                        takes_messages=self.takes_messages,
                        model=self._name,
                    )
                )

    def _write(self, exchange: Exchange) -> None:
        with self._lock:
            for one in recording.split(exchange):
                self._append(one)

    def _append(self, line: Header | Exchange) -> None:
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


class ReplayBackend:
    """A backend that answers from the recording at `path`, with the same chunks as the recorded backend.

    Each recorded answer is used once. If several are left for a request, an answer recorded for the same step
    of the program is preferred, else the earliest is taken. Raises `NotRecorded` for a request that was not
    recorded, that is sent more often than it was recorded, or whose answer is read beyond the point where the
    recorded program cancelled. For a request that was not recorded at all, the error shows how the request
    differs from the most similar recorded request.
    """

    pins = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        headers, exchanges = recording.read(path)
        self.remedy = "Record the run again."
        self._headers = {header.model: header for header in headers}
        self._models: dict[str, ReplayBackend] = {"": self}
        self._left: dict[str, dict[bytes, list[Exchange]]] = defaultdict(lambda: defaultdict(list))
        """Model → key of a request → exchanges that were not replayed. Shared by the models."""
        for exchange in exchanges:
            self._left[exchange.model][recording.key_of(exchange.request)].append(exchange)
        self._exchanges = exchanges
        self._name = headers[0].model

    @property
    def takes_messages(self) -> bool:
        return self._headers[self._name].takes_messages

    def model(self, name: str) -> ReplayBackend:
        """The replay of the model `name`. Raises `NotRecorded` for a model without a recorded request."""
        known = {header.info.name: model for model, header in reversed(self._headers.items())}
        name = name if name in self._headers else known.get(name, name)
        if name not in self._headers:
            raise NotRecorded(f"{self.path} has no model {name!r}.", field="model", remedy=self.remedy)
        if name not in self._models:
            other = self._models[name] = copy.copy(self)
            other._name = name
        return self._models[name]

    @property
    def unused(self) -> list[Generate]:
        """The recorded requests that have not been replayed. A test may assert that the list is empty."""
        left = [one for model in self._left.values() for exchanges in model.values() for one in exchanges]
        return [exchange.request for exchange in sorted(left, key=lambda exchange: exchange.number)]

    async def info(self) -> ModelInfo:
        return self._headers[self._name].info

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        exchange = recording.joined([self._take(one) for one in recording.by_question(request)])
        for chunk in exchange.chunks:
            await asyncio.sleep(0)  # yields to other requests, as a real backend does
            yield msgspec.structs.replace(chunk, rid=request.rid)
        if exchange.error is not None:
            raise from_info(exchange.error)
        if not exchange.ended:
            raise NotRecorded(
                f"{self.path}: the recorded program cancelled after {len(exchange.chunks)} chunks of request "
                f"{exchange.number}, and this one reads on.",
                remedy=self.remedy,
            )

    async def end_program(self, program: str) -> None:
        """There is nothing to release."""

    async def aclose(self) -> None:
        """There is nothing to release."""

    def _take(self, request: Generate) -> Exchange:
        left = self._left[self._name].get(recording.key_of(request))
        if not left:
            raise self._refusal(request)
        path = recording.call_path(CURRENT.get())
        index = next((index for index, exchange in enumerate(left) if exchange.path == path), 0)
        return left.pop(index)

    def _refusal(self, request: Generate) -> NotRecorded:
        path = recording.call_path(CURRENT.get()) or "A request"
        if recording.key_of(request) in self._left[self._name]:
            often = sum(
                recording.bare(request) == exchange.request
                for exchange in self._exchanges
                if exchange.model == self._name
            )
            return NotRecorded(
                f"{path} repeats a request more often than {self.path} has it: {often} times.",
                remedy=self.remedy,
            )
        if not self._exchanges:
            return NotRecorded(f"{self.path} holds no request.", remedy=self.remedy)
        nearest = max(
            self._exchanges,
            key=lambda exchange: (
                *recording.likeness(request, exchange.request),
                exchange.path == path,
                -exchange.number,
            ),
        )
        return NotRecorded(
            f"{path} is not in {self.path}. The most similar is request {nearest.number} "
            f"({nearest.path or 'unnamed'}): {recording.difference(request, nearest.request)}.",
            remedy=self.remedy,
        )

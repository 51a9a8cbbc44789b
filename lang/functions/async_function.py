"""Programs whose body is a coroutine function, which runs in the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, Literal, ParamSpec, Unpack, overload

from typing_extensions import TypeVar

from ramify.errors import ProgramError
from ramify.lang.backends.base import Backend
from ramify.lang.backends.model_info import cached_model_info, lora_revisions, model_info
from ramify.lang.batch import estimate, results, runs
from ramify.lang.batch.breaker import GIVE_UP_AFTER_S
from ramify.lang.batch.estimate import BatchEstimate
from ramify.lang.batch.summary import BatchSummary
from ramify.lang.functions.arguments import BatchKeywords, FileKeywords, RowKeywords
from ramify.lang.functions.program import Batch, CompiledProgram, Program, Started
from ramify.lang.graph.body import async_body_of
from ramify.lang.program.place import PLACE, placed
from ramify.lang.state.state import ProgramState
from ramify.loop import submit
from ramify.model_info import ModelInfo

P = ParamSpec("P")
R = TypeVar("R", default=Any)
T = TypeVar("T")


class AsyncFunction(Program[P, Coroutine[Any, Any, ProgramState[R]], Coroutine[Any, Any, R]]):
    """A program whose body is a coroutine function, run in the caller's event loop; made by `function`."""

    _graph_body = staticmethod(async_body_of)
    _asynchronous = True

    def compile(self, **given: Any) -> AsyncCompiled[..., R]:
        """Compile the program as `Function.compile` does. The body may await only its own steps."""
        traced, left, bound = self._compile(given)
        return AsyncCompiled(traced, left, self.body, bound)

    def bind(self, **bound: Any) -> AsyncFunction[..., R]:
        """A copy of the program with values bound to some of its parameters or to options of `run`."""
        return self._with(bound)

    async def _run(self, *args: Any, **kwargs: Any) -> ProgramState[R]:
        settings, own = self._sort(kwargs, "run")
        bound = self._signature.bind(*args, **own)
        info = await _info(settings.backend)
        started = self._start(settings, info, lambda: bound, PLACE.get())
        if settings.stream:
            started.state._body = asyncio.create_task(_stream(started))
        else:
            await _execute(started)
        return started.state

    @overload
    async def run_batch(
        self, rows: Iterable[Any], *, dry_run: Literal[True], **options: Unpack[FileKeywords]
    ) -> BatchEstimate: ...
    @overload
    async def run_batch(
        self, rows: Iterable[Any], *, out: str | os.PathLike[str], **options: Unpack[FileKeywords]
    ) -> BatchSummary: ...
    @overload
    async def run_batch(
        self, rows: Iterable[Any], **options: Unpack[BatchKeywords]
    ) -> list[ProgramState[R]]: ...
    @overload
    async def run_batch(
        self,
        rows: Iterable[Any],
        *,
        out: str | os.PathLike[str] | None = None,
        dry_run: bool = False,
        **options: Unpack[FileKeywords],
    ) -> list[ProgramState[R]] | BatchSummary | BatchEstimate: ...
    async def run_batch(
        self,
        rows: Iterable[Any],
        *,
        num_threads: int | Literal["auto"] = "auto",
        concurrency: int | None = None,
        progress_bar: bool = False,
        progress: bool = False,
        out: str | os.PathLike[str] | None = None,
        key: str | None = None,
        look_ahead: int | None = None,
        rerun: str | None = None,
        trace: str | os.PathLike[str] | None = None,
        trace_rows: int | None = None,
        dry_run: bool = False,
        give_up_after: float | None = GIVE_UP_AFTER_S,
        **options: Any,
    ) -> list[ProgramState[R]] | BatchSummary | BatchEstimate:
        """Run the program once for each row in this event loop, as `Function.run_batch` does."""
        writing = {
            "key": key,
            "look_ahead": look_ahead,
            "rerun": rerun,
            "trace": trace,
            "trace_rows": trace_rows,
            "dry_run": dry_run,
        }
        batch = self._batch(
            options, num_threads, concurrency, progress or progress_bar, give_up_after, out, **writing
        )
        if batch.plan is None:
            return [state async for state in self._states(batch, rows)]
        info = await _info(batch.settings.backend)
        loras = await _on_background(lora_revisions(batch.settings.backend))
        work = functools.partial(self._run_row, batch, info)
        run = estimate.estimate_in_tasks if dry_run else results.run_in_tasks
        return await run(work, rows, batch.plan, self._record(batch, info, loras))

    async def iter_batch(
        self,
        rows: Iterable[Any],
        *,
        num_threads: int | Literal["auto"] = "auto",
        concurrency: int | None = None,
        progress_bar: bool = False,
        give_up_after: float | None = GIVE_UP_AFTER_S,
        **options: Unpack[RowKeywords],
    ) -> AsyncIterator[ProgramState[R]]:
        """Run the rows as `run_batch` does, and yield the states in the order of the rows. Each row is read
        only when it is needed."""
        batch = self._batch(options, num_threads, concurrency, progress_bar, give_up_after)
        async for state in self._states(batch, rows):
            yield state

    async def _states(self, batch: Batch, rows: Iterable[Any]) -> AsyncIterator[ProgramState[R]]:
        info = await _info(batch.settings.backend)
        work = functools.partial(self._run_row, batch, info)

        async def refuse(error: ProgramError, row: Any) -> ProgramState[R]:
            return self._refused_row(batch, info, error, row)

        async for state in runs.run_in_tasks(work, refuse, batch.in_order(rows)):
            yield state

    async def _run_row(
        self, batch: Batch, info: ModelInfo, register: runs.Register, row: Any
    ) -> ProgramState[R]:
        started = self._start_row(batch, info, row)
        with register(started.run):
            await _stream(started)
        return started.state


class AsyncCompiled(
    CompiledProgram[P, Coroutine[Any, Any, ProgramState[R]], Coroutine[Any, Any, R]], AsyncFunction[P, R]
):
    """An async program that runs as a graph; made by `AsyncFunction.compile`."""


async def _execute(started: Started) -> None:
    run = started.run
    try:
        with placed(run, run.root.call):
            started.state._returned.append(await started.body())
        run.end_body()
        await _on_background(run.finish())
    except BaseException as error:
        run.end_body(error)
        await asyncio.shield(_on_background(run.cancel()))
        if isinstance(error, Exception):
            run.raise_fatal()
        raise
    run.raise_fatal()


async def _stream(started: Started) -> None:
    """Run as `_execute` does, but raise nothing. An exception is kept in the run, and raised when a state of
    the run is read."""
    with contextlib.suppress(Exception):
        await _execute(started)


async def _info(backend: Backend) -> ModelInfo:
    known = cached_model_info(backend)
    return await _on_background(model_info(backend)) if known is None else known


def _on_background(coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """The future of `coroutine`, which starts on the background loop at once. Cancelling the future cancels
    the coroutine.

    A task of the caller's loop is not used, because at its end `asyncio.run` cancels all tasks, even tasks
    that have not begun.
    """
    return asyncio.wrap_future(submit(coroutine))

"""Programs: functions of a state, run once or over many rows, blocking or in the caller's event loop."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Self, TypeVar, overload

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.lang import batch, batch_out
from ramify.lang.backends.base import Backend
from ramify.lang.batch_out import BatchSummary
from ramify.lang.beginning import begun
from ramify.lang.graph_body import async_body_of, body_of, compile_body
from ramify.lang.options import NAMES, read_options
from ramify.lang.refused import refused
from ramify.lang.run import Run, find_backend, known_info, model_info
from ramify.lang.state import ProgramState
from ramify.lang.tracing import Traced, trace_as_far
from ramify.loop import submit, wait
from ramify.messages import ModelInfo

if TYPE_CHECKING:
    from ramify.lang.compiled import AsyncCompiled, Compiled

P = ParamSpec("P")
T = TypeVar("T")

RESERVED = ("backend", "stream", "cache_scope", "compiled")
"""Arguments of `run` that no program can have as its own."""


NOTHING_LEFT = inspect.Signature()

Arguments = Callable[[], inspect.BoundArguments]
"""Gives a program's own arguments; raises TypeError or InvalidRequest where they do not fit."""


@dataclass(frozen=True)
class Settings:
    """How to run, as given to `run` beside the program's own arguments."""

    options: dict[str, Any]
    backend: Backend
    stream: bool
    scope: str
    compiled: bool


class _Program(Generic[P]):
    """What sync and async programs have in common: their signature and what is bound to it."""

    _graph_body: Callable[[Traced, inspect.Signature, Callable[..., Any]], Callable[..., Any]]
    """Makes a body that runs a graph."""

    def __init__(self, body: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        self.body = body
        self.bound = dict(bound or {})
        parameters = list(inspect.signature(body).parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise TypeError(
                f"{body.__qualname__} takes no state; its first parameter is the state, usually `s`."
            )
        self._signature = inspect.Signature(parameters[1:])
        self.arg_names = [parameter.name for parameter in parameters[1:]]
        for name in RESERVED:
            if name in self.arg_names:
                raise TypeError(f"{body.__qualname__} cannot have a parameter {name!r}: run() has one.")
        functools.update_wrapper(self, body)  # type: ignore[arg-type]

    trace = refused("trace", "Use compile().")
    cache = refused("cache", "The runtime finds shared prefixes by itself.")

    def _sort(self, kwargs: Mapping[str, Any], of: str) -> tuple[Settings, dict[str, Any]]:
        """Tell the run's settings from the program's own arguments, with what is bound filled in."""
        given = {**self.bound, **kwargs}
        backend, stream = given.pop("backend", None), given.pop("stream", False)
        scope, compiled = given.pop("cache_scope", ""), given.pop("compiled", False)
        own = {name: given.pop(name) for name in list(given) if name in self.arg_names or name not in NAMES}
        options = read_options(given, of=of)
        return Settings(options, find_backend(backend), stream, scope, compiled), own

    def _compile(self, given: Mapping[str, Any]) -> tuple[Traced, inspect.Signature, dict[str, Any]]:
        """The program traced, the signature of what is left to be given, and what stays bound."""
        bound = self._bind(given)
        own = {name: bound.pop(name) for name in self.arg_names if name in bound}
        return *compile_body(self.body, self._signature, own), bound

    def _calling(self, bound: inspect.BoundArguments, compiled: bool) -> Callable[[ProgramState], Any]:
        """What runs the program on a state: its body, or its graph where it is to be compiled and has one."""
        if compiled:
            traced = trace_as_far(self.body, copy.copy(bound))
            if isinstance(traced, Traced):
                return self._graph_body(traced, NOTHING_LEFT, self.body)
            return lambda s: self.body(begun(s, traced), *bound.args, **bound.kwargs)
        return lambda s: self.body(s, *bound.args, **bound.kwargs)

    def _start(
        self, settings: Settings, info: ModelInfo, *, asynchronous: bool
    ) -> tuple[Run, ProgramState, ProgramState]:
        """A run, the state that its body works on, and the one for its caller."""
        run = Run(
            self.body.__name__,
            settings.backend,
            info,
            settings.options,
            scope=settings.scope,
            stream=settings.stream,
            asynchronous=asynchronous,
        )
        return run, ProgramState(run.root), ProgramState(run.root, outside=True)

    def _sort_batch(self, kwargs: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
        """`_sort` for all rows of a batch, before any of them runs."""
        settings, common = self._sort(kwargs, "run_batch")
        if "stream" in kwargs:
            raise InvalidRequest("A batch does not stream.", field="stream")
        for name in common:
            if name not in self.arg_names:
                raise UnsupportedField(f"run_batch has no option {name!r}.", field=name)
        return settings, common

    def _plan(
        self,
        settings: Settings,
        common: Mapping[str, Any],
        out: str | os.PathLike[str],
        concurrency: int,
        **how: Any,
    ) -> batch_out.Plan:
        """How a batch is written to `out`; `how` are the fields of a `Plan` that its caller chooses."""
        same = {"arguments": common, "options": settings.options}
        return batch_out.Plan(
            out=out,
            program=self.body.__qualname__,
            columns=self.arg_names,
            same=same,
            concurrency=concurrency,
            **how,
        )

    def _row(self, common: Mapping[str, Any], row: Any) -> inspect.BoundArguments:
        """A row of a batch as arguments: a mapping by name, a list or tuple by position."""
        if isinstance(row, Mapping):
            return self._signature.bind(**{**common, **row})
        if isinstance(row, list | tuple):
            return self._signature.bind(*row, **common)
        raise InvalidRequest(
            f"A row must be a mapping, a list or a tuple, not {type(row).__name__}.", field="rows"
        )

    def _bind(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        for name in bound:
            if name not in self.arg_names and name not in NAMES and name not in RESERVED:
                raise TypeError(f"{self.body.__qualname__} has no parameter {name!r} to bind.")
        return {**self.bound, **bound}

    def _with(self, bound: Mapping[str, Any]) -> Self:
        other = copy.copy(self)
        other.bound = self._bind(bound)
        return other


class Function(_Program[P]):
    """A program whose body is a plain function; made by `function`."""

    _graph_body = staticmethod(body_of)

    def compile(self, **given: Any) -> Compiled[...]:
        """The program as a graph that runs with no Python between its calls; see ``docs/programs.md``.

        The body is called once, with results that are not there yet, and with the arguments in `given`;
        parameters with defaults have these. The others are texts that each run of the graph is given.
        `given` may also hold options of `run`. Raises `CompileError`, with the line, where what the body
        does depends on a result, or on an argument that was not given.
        """
        from ramify.lang.compiled import Compiled

        traced, left, bound = self._compile(given)
        return Compiled(traced, left, self.body, bound)

    def bind(self, **bound: Any) -> Function[...]:
        """The same program with some arguments, or options of `run`, given."""
        return self._with(bound)

    def with_options(self, **options: Any) -> Function[P]:
        """The same program with a backend or sampling options; keeps its parameters' types."""
        return self._with(options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ProgramState:
        return self.run(*args, **kwargs)

    @overload
    def run(self, *args: P.args, **kwargs: P.kwargs) -> ProgramState: ...
    @overload
    def run(self, *args: Any, backend: Backend | None, **kwargs: Any) -> ProgramState: ...
    @overload
    def run(self, *args: Any, stream: bool, **kwargs: Any) -> ProgramState: ...
    @overload
    def run(self, *args: Any, temperature: float, **kwargs: Any) -> ProgramState: ...
    @overload
    def run(self, *args: Any, max_new_tokens: int, **kwargs: Any) -> ProgramState: ...
    @overload
    def run(self, *args: Any, max_tokens: int, **kwargs: Any) -> ProgramState: ...
    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program in this thread and wait for all its steps.

        Besides the program's own arguments: `backend`, `stream` (run the body in a thread of its own and
        return at once), `cache_scope`, `compiled` (run the program as a graph where it has one; the body is
        called to find out, and once more where it has none), and sampling options for every `gen` that does
        not set its own.
        An exception of the body, or Ctrl-C, cancels what is in flight and is raised. A step that fails
        raises where its variable is read.
        """
        settings, own = self._sort(kwargs, "run")
        bound = self._signature.bind(*args, **own)
        run, inside, outside = self._start(settings, _info(settings.backend), asynchronous=False)
        if settings.stream:
            body = functools.partial(self._stream, lambda: bound, settings, run, inside, outside)
            context = contextvars.copy_context()
            threading.Thread(target=context.run, args=(body,), name="ramify-program", daemon=True).start()
        else:
            self._execute(lambda: bound, settings, run, inside, outside)
        return outside

    def _execute(
        self,
        arguments: Arguments,
        settings: Settings,
        run: Run,
        inside: ProgramState,
        outside: ProgramState,
    ) -> None:
        try:
            outside.ret_value = self._calling(arguments(), settings.compiled)(inside)
            run.end_body()
            wait(run.finish())
        except BaseException as error:
            run.end_body(error)
            wait(run.cancel())
            raise

    def _stream(
        self,
        arguments: Arguments,
        settings: Settings,
        run: Run,
        inside: ProgramState,
        outside: ProgramState,
    ) -> None:
        try:
            self._execute(arguments, settings, run, inside, outside)
        except Exception:  # kept in run.error, which every reader of the state raises
            return

    @overload
    def run_batch(
        self, rows: Iterable[Any], *, out: str | os.PathLike[str], **options: Any
    ) -> BatchSummary: ...
    @overload
    def run_batch(
        self, rows: Iterable[Any], *, generator_style: Literal[False] = False, **options: Any
    ) -> list[ProgramState]: ...
    @overload
    def run_batch(
        self, rows: Iterable[Any], *, generator_style: Literal[True], **options: Any
    ) -> Iterator[ProgramState]: ...
    def run_batch(
        self,
        rows: Iterable[Any],
        *,
        num_threads: int | Literal["auto"] = "auto",
        concurrency: int | None = None,
        progress_bar: bool = False,
        progress: bool = False,
        generator_style: bool = False,
        out: str | os.PathLike[str] | None = None,
        key: str | None = None,
        look_ahead: int | None = None,
        retry_failed: bool = False,
        **options: Any,
    ) -> list[ProgramState] | Iterator[ProgramState] | BatchSummary:
        """Run the program once for each row, `concurrency` (or `num_threads`) at a time.

        Returns the states in the order of the rows. A row whose program raises does not end the others:
        its state raises the error where it is read, and has it as `error()`; so does a row that does
        not fit the program's parameters. With `generator_style` the
        states are yielded in order, and no more rows are read than are needed for that.

        With `out`, each finished row becomes a line of that JSONL file, in the order in which they finish,
        nothing else is kept, and a summary is returned. Rows that the file has already are not run again,
        so the same call goes on where a run was stopped, by whatever means (`ramify.lang.checkpoint`).
        `look_ahead` rows are read before they are begun (16 times the concurrency), so that rows which
        share a prefix can be run together. `key` names a column that is copied into each line.
        `retry_failed` runs the rows again that failed before.
        """
        settings, common = self._sort_batch(options)
        limit = batch.limit(num_threads, concurrency)
        work = functools.partial(self._run_row, settings, common, _info(settings.backend))
        shown = progress or progress_bar
        if out is not None:
            if generator_style:
                raise InvalidRequest("With out there are no states to yield.", field="generator_style")
            how = {"key": key, "look_ahead": look_ahead, "retry_failed": retry_failed, "progress": shown}
            return batch_out.run_in_threads(work, rows, self._plan(settings, common, out, limit, **how))
        _refuse_without_out(key, look_ahead, retry_failed)
        states = batch.run_in_threads(work, rows, limit, shown)
        return states if generator_style else list(states)

    def _run_row(
        self,
        settings: Settings,
        common: Mapping[str, Any],
        info: ModelInfo,
        register: batch.Register,
        row: Any,
    ) -> ProgramState:
        run, inside, outside = self._start(settings, info, asynchronous=False)
        with register(run):
            self._stream(functools.partial(self._row, common, row), settings, run, inside, outside)
        return outside


class AsyncFunction(_Program[P]):
    """A program whose body is a coroutine function, run in the caller's event loop; made by `function`."""

    _graph_body = staticmethod(async_body_of)

    def compile(self, **given: Any) -> AsyncCompiled[...]:
        """`Function.compile`. The body may await its own steps alone."""
        from ramify.lang.compiled import AsyncCompiled

        traced, left, bound = self._compile(given)
        return AsyncCompiled(traced, left, self.body, bound)

    def bind(self, **bound: Any) -> AsyncFunction[...]:
        """The same program with some arguments, or options of `run`, given."""
        return self._with(bound)

    def with_options(self, **options: Any) -> AsyncFunction[P]:
        """The same program with a backend or sampling options; keeps its parameters' types."""
        return self._with(options)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ProgramState:
        return await self.run(*args, **kwargs)

    @overload
    async def run(self, *args: P.args, **kwargs: P.kwargs) -> ProgramState: ...
    @overload
    async def run(self, *args: Any, backend: Backend | None, **kwargs: Any) -> ProgramState: ...
    @overload
    async def run(self, *args: Any, stream: bool, **kwargs: Any) -> ProgramState: ...
    @overload
    async def run(self, *args: Any, temperature: float, **kwargs: Any) -> ProgramState: ...
    @overload
    async def run(self, *args: Any, max_new_tokens: int, **kwargs: Any) -> ProgramState: ...
    @overload
    async def run(self, *args: Any, max_tokens: int, **kwargs: Any) -> ProgramState: ...
    async def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """`Function.run` in this event loop. Cancelling it aborts what is in flight.

        With ``stream=True`` the body runs in a task of its own and the state is returned at once.
        """
        settings, own = self._sort(kwargs, "run")
        bound = self._signature.bind(*args, **own)
        run, inside, outside = self._start(settings, await _ainfo(settings.backend), asynchronous=True)
        if settings.stream:
            outside._body = asyncio.create_task(self._stream(lambda: bound, settings, run, inside, outside))
        else:
            await self._execute(lambda: bound, settings, run, inside, outside)
        return outside

    async def _execute(
        self,
        arguments: Arguments,
        settings: Settings,
        run: Run,
        inside: ProgramState,
        outside: ProgramState,
    ) -> None:
        try:
            outside.ret_value = await self._calling(arguments(), settings.compiled)(inside)
            run.end_body()
            await _on_background(run.finish())
        except BaseException as error:
            run.end_body(error)
            await asyncio.shield(_on_background(run.cancel()))
            raise

    async def _stream(
        self,
        arguments: Arguments,
        settings: Settings,
        run: Run,
        inside: ProgramState,
        outside: ProgramState,
    ) -> None:
        try:
            await self._execute(arguments, settings, run, inside, outside)
        except Exception:  # kept in run.error, which every reader of the state raises
            return

    @overload
    async def run_batch(
        self, rows: Iterable[Any], *, out: str | os.PathLike[str], **options: Any
    ) -> BatchSummary: ...
    @overload
    async def run_batch(self, rows: Iterable[Any], **options: Any) -> list[ProgramState]: ...
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
        retry_failed: bool = False,
        **options: Any,
    ) -> list[ProgramState] | BatchSummary:
        """`Function.run_batch` in this event loop."""
        shown = progress or progress_bar
        if out is None:
            _refuse_without_out(key, look_ahead, retry_failed)
            states = self.iter_batch(
                rows, num_threads=num_threads, concurrency=concurrency, progress_bar=shown, **options
            )
            return [state async for state in states]
        settings, common = self._sort_batch(options)
        limit = batch.limit(num_threads, concurrency)
        work = functools.partial(self._run_row, settings, common, await _ainfo(settings.backend))
        how = {"key": key, "look_ahead": look_ahead, "retry_failed": retry_failed, "progress": shown}
        return await batch_out.run_in_tasks(work, rows, self._plan(settings, common, out, limit, **how))

    async def iter_batch(
        self,
        rows: Iterable[Any],
        *,
        num_threads: int | Literal["auto"] = "auto",
        concurrency: int | None = None,
        progress_bar: bool = False,
        **options: Any,
    ) -> AsyncIterator[ProgramState]:
        """The states of `run_batch` as they are ready, in order; reads no more rows than are needed."""
        settings, common = self._sort_batch(options)
        limit = batch.limit(num_threads, concurrency)
        work = functools.partial(self._run_row, settings, common, await _ainfo(settings.backend))
        async for state in batch.run_in_tasks(work, rows, limit, progress_bar):
            yield state

    async def _run_row(
        self, settings: Settings, common: Mapping[str, Any], info: ModelInfo, row: Any
    ) -> ProgramState:
        run, inside, outside = self._start(settings, info, asynchronous=True)
        await self._stream(functools.partial(self._row, common, row), settings, run, inside, outside)
        return outside


def _refuse_without_out(key: str | None, look_ahead: int | None, retry_failed: bool) -> None:
    """Raise `InvalidRequest` for an option that only a results file gives a meaning."""
    given = {"key": key is not None, "look_ahead": look_ahead is not None, "retry_failed": retry_failed}
    for name in given:
        if given[name]:
            raise InvalidRequest(f"{name} needs out.", field=name)


def _info(backend: Backend) -> ModelInfo:
    return known_info(backend) or wait(model_info(backend))


async def _ainfo(backend: Backend) -> ModelInfo:
    known = known_info(backend)
    return await _on_background(model_info(backend)) if known is None else known


async def _on_background(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await `coroutine`, which runs on the background loop; cancelling the caller cancels it."""
    return await asyncio.wrap_future(submit(coroutine))

"""Programs whose body is a plain function: run in the caller's thread, or in one of their own."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, overload

from ramify.errors import InvalidRequest
from ramify.lang.backends.base import Backend
from ramify.lang.batch import results, runs
from ramify.lang.batch.results import BatchSummary
from ramify.lang.graph.body import body_of
from ramify.lang.program.program import Batch, Program, Started
from ramify.lang.program.run import known_info, model_info
from ramify.lang.program.state import ProgramState
from ramify.loop import wait
from ramify.messages import ModelInfo

if TYPE_CHECKING:
    from ramify.lang.graph.compiled import Compiled

P = ParamSpec("P")


class Function(Program[P]):
    """A program whose body is a plain function; made by `function`."""

    _graph_body = staticmethod(body_of)

    def compile(self, **given: Any) -> Compiled[...]:
        """The program as a graph that runs with no Python between its calls; see ``docs/programs.md``.

        The body is called once, with results that are not there yet, and with the arguments in `given`;
        parameters with defaults have these. The others are texts that each run of the graph is given.
        `given` may also hold options of `run`. Raises `CompileError`, with the line, where what the body
        does depends on a result, or on an argument that was not given.
        """
        from ramify.lang.graph.compiled import Compiled

        traced, left, bound = self._compile(given)
        return Compiled(traced, left, self.body, bound)

    def bind(self, **bound: Any) -> Function[...]:
        """The same program with some arguments, or options of `run`, given."""
        return self._with(bound)

    def with_options(self, **options: Any) -> Function[P]:
        """The same program with a backend or sampling options; keeps its parameters' types."""
        return self._with(options)

    @overload
    def __call__(self, state: ProgramState, /, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> ProgramState: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]  # it takes all of both
        """With the state of another program first: append this one's steps to it, and return what its body
        returns. Otherwise `run`."""
        if args and isinstance(args[0], ProgramState):
            return self._on_state(*args, **kwargs)
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
        started = self._start(settings, _info(settings.backend), lambda: bound)
        if settings.stream:
            context = contextvars.copy_context()
            thread = functools.partial(context.run, _stream, started)
            threading.Thread(target=thread, name="ramify-program", daemon=True).start()
        else:
            _execute(started)
        return started.state

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
        so the same call goes on where a run was stopped, by whatever means (`ramify.lang.batch.checkpoint`).
        `look_ahead` rows are read before they are begun (16 times the concurrency), so that rows which
        share a prefix can be run together. `key` names a column that is copied into each line.
        `retry_failed` runs the rows again that failed before.
        """
        writing = {"key": key, "look_ahead": look_ahead, "retry_failed": retry_failed}
        asked = self._batch(options, num_threads, concurrency, progress or progress_bar, out, **writing)
        work = functools.partial(self._run_row, asked, _info(asked.settings.backend))
        if asked.plan is not None:
            if generator_style:
                raise InvalidRequest("With out there are no states to yield.", field="generator_style")
            return results.run_in_threads(work, rows, asked.plan)
        states = runs.run_in_threads(work, rows, asked.limit, asked.progress)
        return states if generator_style else list(states)

    def _run_row(self, of: Batch, info: ModelInfo, register: runs.Register, row: Any) -> ProgramState:
        started = self._start_row(of, info, row)
        with register(started.run):
            _stream(started)
        return started.state


def _execute(started: Started) -> None:
    """Call the body and wait for all steps; an exception ends the run and is raised."""
    run = started.run
    try:
        started.state.ret_value = started.body()
        run.end_body()
        wait(run.finish())
    except BaseException as error:
        run.end_body(error)
        wait(run.cancel())
        raise


def _stream(started: Started) -> None:
    """`_execute`; exceptions are kept in the run, whose states raise them to every reader."""
    with contextlib.suppress(Exception):
        _execute(started)


def _info(backend: Backend) -> ModelInfo:
    return known_info(backend) or wait(model_info(backend))

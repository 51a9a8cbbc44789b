"""Programs whose body is a plain function.

The body runs in the caller's thread, or with ``stream=True`` in a thread of its own.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Literal, ParamSpec, Unpack, overload

from typing_extensions import TypeVar

from ramify.errors import InvalidRequest
from ramify.lang.backends.base import Backend
from ramify.lang.backends.model_info import cached_model_info, lora_revisions, model_info
from ramify.lang.batch import estimate, results, runs
from ramify.lang.batch.breaker import GIVE_UP_AFTER_S
from ramify.lang.batch.estimate import BatchEstimate
from ramify.lang.batch.summary import BatchSummary
from ramify.lang.functions.arguments import BatchKeywords, FileKeywords
from ramify.lang.functions.program import Batch, CompiledProgram, Program, Started
from ramify.lang.graph.body import body_of
from ramify.lang.program.place import PLACE, placed
from ramify.lang.state.state import ProgramState
from ramify.loop import wait
from ramify.model_info import ModelInfo

P = ParamSpec("P")
R = TypeVar("R", default=Any)


class Function(Program[P, ProgramState[R], R]):
    """A program whose body is a plain function; made by `function`."""

    _graph_body = staticmethod(body_of)
    _asynchronous = False

    def compile(self, **given: Any) -> Compiled[..., R]:
        """Compile the program to a graph, which runs without Python code between its calls; see
        ``docs/compiled-programs.md``.

        The body is called once, with placeholders for the results of its steps. Parameters get their values
        from `given`, else their defaults, else placeholders. Each run of the graph takes the arguments for
        these placeholders. `given` may also hold options of `run`. Raises `CompileError`, which names the
        line, if the body branches on a placeholder.
        """
        traced, left, bound = self._compile(given)
        return Compiled(traced, left, self.body, bound)

    def bind(self, **bound: Any) -> Function[..., R]:
        """A copy of the program with values bound to some of its parameters or to options of `run`."""
        return self._with(bound)

    def _run(self, *args: Any, **kwargs: Any) -> ProgramState[R]:
        settings, own = self._sort(kwargs, "run")
        bound = self._signature.bind(*args, **own)
        started = self._start(settings, _info(settings.backend), lambda: bound, PLACE.get())
        if settings.stream:
            context = contextvars.copy_context()
            thread = functools.partial(context.run, _stream, started)
            threading.Thread(target=thread, name="ramify-program", daemon=True).start()
        else:
            _execute(started)
        return started.state

    @overload
    def run_batch(
        self, rows: Iterable[Any], *, dry_run: Literal[True], **options: Unpack[FileKeywords]
    ) -> BatchEstimate: ...
    @overload
    def run_batch(
        self, rows: Iterable[Any], *, out: str | os.PathLike[str], **options: Unpack[FileKeywords]
    ) -> BatchSummary: ...
    @overload
    def run_batch(
        self,
        rows: Iterable[Any],
        *,
        generator_style: Literal[False] = False,
        **options: Unpack[BatchKeywords],
    ) -> list[ProgramState[R]]: ...
    @overload
    def run_batch(
        self, rows: Iterable[Any], *, generator_style: Literal[True], **options: Unpack[BatchKeywords]
    ) -> Iterator[ProgramState[R]]: ...
    @overload
    def run_batch(
        self,
        rows: Iterable[Any],
        *,
        generator_style: bool = False,
        out: str | os.PathLike[str] | None = None,
        dry_run: bool = False,
        **options: Unpack[FileKeywords],
    ) -> list[ProgramState[R]] | Iterator[ProgramState[R]] | BatchSummary | BatchEstimate: ...
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
        rerun: str | None = None,
        trace: str | os.PathLike[str] | None = None,
        trace_rows: int | None = None,
        dry_run: bool = False,
        give_up_after: float | None = GIVE_UP_AFTER_S,
        **options: Any,
    ) -> list[ProgramState[R]] | Iterator[ProgramState[R]] | BatchSummary | BatchEstimate:
        """Run the program once for each row, `concurrency` (or `num_threads`) rows at a time.

        Returns the states in the order of the rows. If one row raises an exception, the other rows still run
        to their end. `error()` of the failed row's state returns the exception, and reading a variable of
        that state raises it. A row that does not fit the program's parameters fails in the same way. With
        `generator_style` the states are yielded in order, and each row is read only when it is needed.

        A row that fails transiently (`ramify.errors.is_transient`) runs again, after a pause in which no row
        starts (`ramify.lang.batch.breaker`). If no request has been answered for `give_up_after` seconds
        (None: no limit), the batch stops. The states of the remaining rows then have an error whose
        `transient` is true; with `out`, the field `stopped` of the summary is set.

        With `out`, each finished row is written as a line of that JSONL file, in the order in which rows
        finish. No states are kept, and a summary is returned. Rows that are in the file already are skipped,
        so a repeated call continues a batch that was stopped or killed (`ramify.lang.batch.checkpoint`); rows
        that failed transiently run again. A file ``NAME.parquet`` is written at the end, from ``NAME.jsonl``.
        ``"-"`` is standard output. A batch whose `out` is standard output, a pipe or a device cannot be
        continued. A value that cannot be written as JSON fails its row, but the row's other values are
        written; NaN and infinities are written as strings. Raises `RamifyError` if the file cannot be
        written, for example on a full disk.

        `key` is the name of the column that identifies a row; the row's line has the value of this column.
        Without `key` a row is identified by its content. The file records the program and its options
        (`ramify.lang.batch.fingerprint`). If the program or an option has changed since the file was written,
        `rerun` must be ``"changed"`` (rows that were run before the change run again) or ``"missing"`` (the
        results of these rows are kept); otherwise `InvalidRequest` is raised, with the difference. With
        ``"failed"`` rows that failed run again. `rerun` may hold several of these words, separated by commas.

        `look_ahead` rows (default: 16 times the concurrency) are read in advance, so that rows with a common
        prefix run together. `trace` is the path at which an HTML report of the first `trace_rows` rows
        (default: 16) is written.

        With `dry_run` at most 8 rows run, nothing is written, and an estimate for all rows that have no
        result is returned (`ramify.lang.batch.estimate`).
        """
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
        info = _info(batch.settings.backend)
        work = functools.partial(self._run_row, batch, info)
        if batch.plan is not None:
            if generator_style:
                raise InvalidRequest("With out there are no states to yield.", field="generator_style")
            run = estimate.estimate_in_threads if dry_run else results.run_in_threads
            loras = wait(lora_revisions(batch.settings.backend))
            return run(work, rows, batch.plan, self._record(batch, info, loras))
        refuse = functools.partial(self._refused_row, batch, info)
        states = runs.run_in_threads(work, refuse, batch.in_order(rows))
        return states if generator_style else list(states)

    def _run_row(self, batch: Batch, info: ModelInfo, register: runs.Register, row: Any) -> ProgramState[R]:
        started = self._start_row(batch, info, row)
        with register(started.run):
            _stream(started)
        return started.state


class Compiled(CompiledProgram[P, ProgramState[R], R], Function[P, R]):
    """A program that runs as a graph; made by `Function.compile`."""


def _execute(started: Started) -> None:
    run = started.run
    try:
        with placed(run, run.root.call):
            started.state._returned.append(started.body())
        run.end_body()
        wait(run.finish())
    except BaseException as error:
        run.end_body(error)
        wait(run.cancel())
        if isinstance(error, Exception):
            run.raise_fatal()
        raise
    run.raise_fatal()


def _stream(started: Started) -> None:
    """Run as `_execute` does, but raise nothing. An exception is kept in the run, and raised when a state of
    the run is read."""
    with contextlib.suppress(Exception):
        _execute(started)


def _info(backend: Backend) -> ModelInfo:
    return cached_model_info(backend) or wait(model_info(backend))

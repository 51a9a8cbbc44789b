"""Batches that write a results file: one line per finished row, and a summary at the end."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.errors import InvalidRequest, ProgramError, is_transient
from ramify.lang.batch import runs
from ramify.lang.batch.breaker import Breaker
from ramify.lang.batch.checkpoint import ResultsFile, read_rerun
from ramify.lang.batch.fingerprint import Record
from ramify.lang.batch.json_text import NotJson, encode, valid
from ramify.lang.batch.keys import check_keys, numbered, split
from ramify.lang.batch.output import check_file, check_out, unwritten
from ramify.lang.batch.summary import BatchSummary
from ramify.lang.batch.table import check_table, write_table
from ramify.lang.batch.window import Row, Window
from ramify.lang.common.caller import users_frames
from ramify.lang.trace.calls import Call
from ramify.lang.trace.outputs import add_usage
from ramify.lang.trace.report import together

if TYPE_CHECKING:
    from ramify.lang.state.state import ProgramState

LOOK_AHEAD = 16
"""Default size of the window of rows, as a multiple of the concurrency."""
TRACE_ROWS = 16
"""Default number of rows in a trace report."""
TRACEBACK_FRAMES, TRACEBACK_CHARS = 8, 4000
"""Most frames and most characters of a traceback in a result line. The innermost frames are kept."""


@dataclass(frozen=True)
class Plan:
    """The arguments of a batch that writes a results file."""

    out: str | os.PathLike[str]
    """Path of the results file ``NAME.jsonl``; or ``NAME.parquet``, the path of a table that is made from
    ``NAME.jsonl`` at the end; or a stream (`ramify.lang.batch.output`), such as "-" for standard output."""
    program: str
    columns: list[str]
    """The names of the program's parameters."""
    concurrency: int
    key: str | None = None
    look_ahead: int | None = None
    """Size of the window in rows; None for `LOOK_AHEAD` times the concurrency."""
    rerun: str | None = None
    """Words of `ramify.lang.batch.checkpoint.RERUN`, separated by commas."""
    trace: str | os.PathLike[str] | None = None
    """Path of an HTML report of the `trace_rows` rows that end first; None for no report."""
    trace_rows: int = TRACE_ROWS
    dry_run: bool = False
    """Estimate the tokens and the time of the batch, and write nothing."""
    progress: bool = False
    give_up_after: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("look_ahead", self.look_ahead), ("trace_rows", self.trace_rows)):
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} is {value}; it must be at least 1.", field=name)
        read_rerun(self.rerun)
        check_out(self.out)
        if self.trace is not None:
            check_file(self.trace, "trace")
        if self.table is not None:
            check_table(self.table)

    @property
    def table(self) -> Path | None:
        return Path(self.out) if Path(self.out).suffix == ".parquet" else None

    @property
    def jsonl(self) -> Path:
        return Path(self.out) if self.table is None else self.table.with_suffix(".jsonl")


class RowReader:
    """A reader of the input. Rows that have to run come out of `window`; rows that need not run are counted.
    With `read_only` the results file is left unchanged."""

    def __init__(self, plan: Plan, rows: Iterable[Any], record: Record, *, read_only: bool = False) -> None:
        if plan.key is not None and isinstance(rows, list | tuple):  # any other may be readable only once
            check_keys(rows, plan.key)
        self._plan = plan
        self._rows = rows
        self.file = ResultsFile(plan.jsonl, record, plan.key, read_rerun(plan.rerun), read_only=read_only)
        self.window = Window(self._read(), plan.look_ahead or LOOK_AHEAD * plan.concurrency, plan.columns)
        self.summary = BatchSummary()
        self.read = 0
        self.skipped: Callable[[], None] = lambda: None
        """A function that is called for each row that need not run."""

    def _read(self) -> Iterator[Row]:
        for index, values in numbered(self._rows):
            key, arguments = split(index, values, self._plan.key, self._plan.columns)
            self.read += 1
            identity, status = self.file.see(index, values, key)
            if status:
                self.summary.skipped += 1
                self.summary.failed_before += status > 1
                self.skipped()
            else:
                yield Row(index, arguments, identity)


def run_in_threads(
    one: Callable[[runs.Register, Any], ProgramState], rows: Iterable[Any], plan: Plan, record: Record
) -> BatchSummary:
    """Run ``one(register, values)`` for each row that has to run, and write the row's line to the results
    file."""
    with _Writer(plan, rows, record) as writer:
        finished = runs.finished_in_threads(one, writer.breaker, plan.concurrency)
        with contextlib.closing(finished):
            for row, state in finished:
                writer.write(row, state)
        writer.end()
    return writer.summary


async def run_in_tasks(
    one: Callable[[runs.Register, Any], Awaitable[ProgramState]],
    rows: Iterable[Any],
    plan: Plan,
    record: Record,
) -> BatchSummary:
    """`run_in_threads` as a coroutine. The event loop is blocked while a line is written."""
    with _Writer(plan, rows, record) as writer:
        finished = runs.finished_in_tasks(one, writer.breaker, plan.concurrency)
        async with contextlib.aclosing(finished):
            async for row, state in finished:
                writer.write(row, state)
        writer.end()
    return writer.summary


class _Writer:
    def __init__(self, plan: Plan, rows: Iterable[Any], record: Record) -> None:
        self._plan = plan
        self._rows = rows
        self.reader = RowReader(plan, rows, record)
        self._file = self.reader.file
        self.window = self.reader.window
        self.breaker = Breaker(self.window, plan.give_up_after)
        self.summary = self.reader.summary
        self._traces: list[tuple[float, Call]] = []
        """(start time, call) of each row in the HTML report."""
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._file.close)
        self._bar = self._stack.enter_context(runs.progress(rows, plan.progress))
        self.reader.skipped = self._bar.skip
        self._began = time.perf_counter()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self.summary.duration_s = time.perf_counter() - self._began
        if error is not None:
            refused = isinstance(error, InvalidRequest)
            if not refused or self.summary.rows + self.summary.skipped:
                error.add_note(self._standing(again=not refused))
        self._stack.close()
        if self._plan.trace is not None and self._traces:
            name = f"{self._plan.program}, {len(self._traces)} rows"
            try:
                together(name, self._traces).save(self._plan.trace)
            except OSError as failure:
                raise unwritten(self._plan.trace, failure, "The results are complete.") from failure

    def _standing(self, *, again: bool) -> str:
        """Sentences about the progress of a batch that broke off, for a note on the error. `again`: whether
        the same call would continue the batch."""
        done = self.summary.rows + self.summary.skipped
        total = len(self._rows) if isinstance(self._rows, Sized) else None
        of, left = ("", "") if total is None else (f" of {total}", f", {total - done} are left")
        if self._file.is_stream:
            return f"{done}{of} rows were written to {self._plan.out}; a further run begins anew."
        table = self._plan.table
        old = ""
        if table is not None and table.exists() and self.summary.rows:
            old = f" {table} is out of date: it is written anew at the end of a run."
        if not again:
            return f"{done}{of} rows have their results in {self._plan.jsonl}, which stay.{old}"
        failed = self.summary.failed + self.summary.failed_before
        return (
            f"{done}{of} rows are done ({failed} failed){left}. Results are in {self._plan.jsonl}; "
            f"the same again goes on with the others.{old}"
        )

    def end(self) -> None:
        summary = self.summary
        if self.breaker.gave_up:
            total = len(self._rows) if isinstance(self._rows, Sized) else self.reader.read
            summary.left = total - summary.rows - summary.skipped
            summary.stopped = self.breaker.reason
        else:
            summary.others = self._file.others
        summary.outdated = self._file.outdated
        if self._plan.table is not None:
            self._file.close()
            try:
                write_table(self._plan.jsonl, self._plan.table)
            except OSError as error:
                kept = f"{self._plan.jsonl} has all results; the same again writes the table."
                raise unwritten(self._plan.table, error, kept) from error

    def write(self, row: Row, state: ProgramState) -> None:
        error, fields = outcome(state)
        self._file.append(row.index, row.identity, fields)
        summary = self.summary
        summary.rows += 1
        summary.usage = add_usage(summary.usage, state.usage)
        if error is None:
            self.window.learn(row, state._branch.text)
        else:
            summary.failed += 1
            summary.first_error = summary.first_error or str(error)
        if self._plan.trace is not None and len(self._traces) < self._plan.trace_rows:
            state.trace.name = f"row {row.index}"
            self._traces.append((state._branch.run.started, state.trace))
        seconds = time.perf_counter() - self._began
        self._bar.advance(
            failed=summary.failed,
            **({"skipped": summary.skipped} if summary.skipped else {}),
            tok_s=round(summary.usage.completion_tokens / seconds),
            cached=f"{summary.cached_share:.0%}",
        )


def outcome(state: ProgramState) -> tuple[ProgramError | None, dict[str, Any]]:
    """A row's error, and the fields of its line: variables, return value, error and usage. If a value has no
    JSON text, the row gets an error; the other values of the row are kept."""
    error, outputs = state.error(), dict[str, Any]()
    for name, variable in state._branch.variables.items():
        if variable.ready.is_set() and variable.error is None:
            error = _add(outputs, name, variable.value, f"The value of {name!r}") or error
    returned = dict[str, Any](returned=None)
    for value in state._returned:
        error = _add(returned, "returned", value, "What the program returned") or error
    failure = None if error is None else _failure(error)
    return error, {"outputs": outputs, **returned, "error": failure, "usage": _usage(state)}


def _add(fields: dict[str, Any], name: str, value: Any, said: str) -> ProgramError | None:
    """Add `value` to `fields` as JSON; returns None, or the error if `value` has no JSON text."""
    try:
        fields[valid(name)] = msgspec.Raw(encode(value))
    except NotJson as problem:
        return ProgramError(f"{said} cannot be written as JSON: {problem}.")
    return None


def _failure(error: ProgramError) -> dict[str, Any]:
    cause = error.__cause__
    line, frames = users_frames(error if cause is None else cause)
    texts = {
        "type": type(error if cause is None else cause).__name__,
        "message": str(error),
        "variable": error.variable,
        "line": error.line or line,
        "traceback": "".join(traceback.format_list(frames[-TRACEBACK_FRAMES:]))[-TRACEBACK_CHARS:] or None,
        "partial": error.partial,
    }
    known = {name: None if text is None else valid(text) for name, text in texts.items()}
    return {**known, "transient": is_transient(error)}


def _usage(state: ProgramState) -> dict[str, Any]:
    usage, trace = state.usage, state.trace
    counts = ("prompt_tokens", "cached_tokens", "completion_tokens", "forced_tokens")
    tokens = {name: getattr(usage, name) for name in counts}
    return {"requests": trace.requests, **tokens, "duration_s": trace.duration_s}

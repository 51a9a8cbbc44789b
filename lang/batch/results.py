"""Batches that write a results file: one line per finished row, and a summary at the end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ramify.errors import InvalidRequest, ProgramError, is_transient
from ramify.lang.batch import runs
from ramify.lang.batch.breaker import Breaker
from ramify.lang.batch.checkpoint import ResultsFile, digest_of
from ramify.lang.batch.window import Row, Window
from ramify.lang.calls.meta_info import add_usage
from ramify.messages import Usage

if TYPE_CHECKING:
    from ramify.lang.program.state import ProgramState

LOOK_AHEAD = 16
"""Default size of the window, in rows per row that runs at once."""


@dataclass(slots=True)
class BatchSummary:
    """The counts, times and tokens of one run of a batch."""

    rows: int = 0
    """Rows that this run finished, including failed rows."""
    failed: int = 0
    skipped: int = 0
    """Rows that an earlier run had finished."""
    duration_s: float = 0.0
    usage: Usage = field(default_factory=Usage)
    """The sum over all requests of this run."""
    first_error: str | None = None
    stopped: str | None = None
    """Why the batch ended before its last row; None where all rows have a line."""
    left: int = 0
    """Rows of a stopped batch that have no line: all of them where the number of rows is known, else those
    that were read."""

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.duration_s if self.duration_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.usage.completion_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens, cached ones included, and output tokens."""
        total = self.usage.prompt_tokens + self.usage.completion_tokens
        return total / self.duration_s if self.duration_s else 0.0

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens that were cached."""
        return self.usage.cached_tokens / self.usage.prompt_tokens if self.usage.prompt_tokens else 0.0

    def _repr_html_(self) -> str:
        from ramify.lang.notebook.pages import batch_page

        return batch_page(self)

    def __str__(self) -> str:
        skipped = f", {self.skipped} were done before" if self.skipped else ""
        lines = [
            f"{self.rows} rows in {self.duration_s:.1f} s ({self.rows_per_s:.1f} rows/s), "
            f"{self.failed} failed{skipped}",
            f"{self.output_tokens_per_s:.0f} output tokens/s, {self.tokens_per_s:.0f} tokens/s in all, "
            f"{self.cached_share:.0%} of {self.usage.prompt_tokens} prompt tokens cached",
        ]
        if self.first_error is not None:
            lines.append(f"first error: {self.first_error}")
        if self.stopped is not None:
            lines.append(
                f"stopped: {self.stopped}\n{self.rows + self.skipped} rows are done, {self.left} are left; "
                "run the same again to go on"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Plan:
    """The arguments of a batch that writes a results file."""

    out: str | os.PathLike[str]
    program: str
    columns: list[str]
    """The program's parameters."""
    same: Any
    """The arguments and sampling options that all rows share. A file with others is refused."""
    concurrency: int
    key: str | None = None
    look_ahead: int | None = None
    """The window's size in rows; None for `LOOK_AHEAD` times the concurrency."""
    retry_failed: bool = False
    progress: bool = False
    give_up_after: float | None = None


def run_in_threads(
    one: Callable[[runs.Register, Any], ProgramState], rows: Iterable[Any], plan: Plan
) -> BatchSummary:
    """Run ``one(register, values)`` for each row that is not in the results file, and write its line."""

    def work(register: runs.Register, row: Row) -> ProgramState:
        return one(register, row.values)

    with _Writer(plan, rows) as writer:
        finished = runs.finished_in_threads(work, writer.breaker, plan.concurrency)
        with contextlib.closing(finished):
            for row, state in finished:
                writer.write(row, state)
        writer.end()
    return writer.summary


async def run_in_tasks(
    one: Callable[[runs.Register, Any], Awaitable[ProgramState]], rows: Iterable[Any], plan: Plan
) -> BatchSummary:
    """`run_in_threads` in this event loop, which is blocked while a line is written."""

    async def work(register: runs.Register, row: Row) -> ProgramState:
        return await one(register, row.values)

    with _Writer(plan, rows) as writer:
        finished = runs.finished_in_tasks(work, writer.breaker, plan.concurrency)
        async with contextlib.aclosing(finished):
            async for row, state in finished:
                writer.write(row, state)
        writer.end()
    return writer.summary


class _Writer:
    """The results file of one run of a batch, with its window of rows and its summary."""

    def __init__(self, plan: Plan, rows: Iterable[Any]) -> None:
        if plan.look_ahead is not None and plan.look_ahead < 1:
            raise InvalidRequest(
                f"look_ahead is {plan.look_ahead}; it must be at least 1.", field="look_ahead"
            )
        self._plan = plan
        self._rows = rows
        self._start = digest_of([plan.program, plan.same])
        self._file = ResultsFile(plan.out, retry_failed=plan.retry_failed)
        self.window = Window(self._read(), plan.look_ahead or LOOK_AHEAD * plan.concurrency, plan.columns)
        self.breaker = Breaker(self.window, plan.give_up_after)
        self._read_rows = 0
        self.summary = BatchSummary()
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._file.close)
        self._advance = self._stack.enter_context(runs.progress(rows, plan.progress))
        self._began = time.perf_counter()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.summary.duration_s = time.perf_counter() - self._began
        self._stack.close()

    def _read(self) -> Iterator[Row]:
        """The rows that are not in the file."""
        for index, values in enumerate(self._rows):
            self._read_rows = index + 1
            digest = digest_of(values, self._start)
            if self._file.is_done(index, digest):
                self.summary.skipped += 1
                self._advance()
            else:
                key, arguments = self._split(index, values)
                yield Row(index, arguments, digest, key)

    def _split(self, index: int, values: Any) -> tuple[Any, Any]:
        """A row's key and the program's arguments. A key column that is not a parameter is removed."""
        name = self._plan.key
        if name is None:
            return None, values
        if not isinstance(values, Mapping) or name not in values:
            raise InvalidRequest(f"Row {index} has no {name!r}, the key column.", field="key")
        if name in self._plan.columns:
            return values[name], values
        return values[name], {column: value for column, value in values.items() if column != name}

    def end(self) -> None:
        """Complete the summary."""
        summary = self.summary
        if self.breaker.gave_up:
            total = len(self._rows) if isinstance(self._rows, Sized) else self._read_rows
            summary.left = total - summary.rows - summary.skipped
            summary.stopped = str(self.breaker.reason())

    def write(self, row: Row, state: ProgramState) -> None:
        """Append the line of a finished row."""
        error = state.error()
        line = {"index": row.index, "digest": f"{row.digest:08x}"}
        if self._plan.key is not None:
            line["key"] = row.key
        try:
            self._file.append({**line, **_outcome(state, error)})
        except (TypeError, ValueError) as problem:  # an output that is not JSON
            error = ProgramError(f"The outputs cannot be written as JSON: {problem}")
            nothing = {"outputs": {}, "returned": None, "error": _failure(error)}
            self._file.append({**line, **nothing, "usage": _usage(state)})
        summary = self.summary
        summary.rows += 1
        summary.usage = add_usage(summary.usage, state.usage)
        if error is None:
            self.window.learn(row, state._branch.text)
        else:
            summary.failed += 1
            summary.first_error = summary.first_error or str(error)
        seconds = time.perf_counter() - self._began
        self._advance(failed=summary.failed, tok_s=round(summary.usage.completion_tokens / seconds))


def _outcome(state: ProgramState, error: ProgramError | None) -> dict[str, Any]:
    """The fields of a line: the variables that were set, the body's return value, the error, the usage."""
    outputs = {
        name: variable.value
        for name, variable in state._branch.variables.items()
        if variable.ready.is_set() and variable.error is None
    }
    return {
        "outputs": outputs,
        "returned": state.ret_value,
        "error": None if error is None else _failure(error),
        "usage": _usage(state),
    }


def _failure(error: ProgramError) -> dict[str, Any]:
    cause = error.__cause__
    return {
        "type": type(error if cause is None else cause).__name__,
        "message": str(error),
        "variable": error.variable,
        "line": error.line,
        "partial": error.partial,
        "transient": is_transient(error),
    }


def _usage(state: ProgramState) -> dict[str, Any]:
    usage, trace = state.usage, state.trace
    counts = ("prompt_tokens", "cached_tokens", "completion_tokens", "forced_tokens")
    tokens = {name: getattr(usage, name) for name in counts}
    return {"requests": trace.requests, **tokens, "duration_s": trace.duration_s}

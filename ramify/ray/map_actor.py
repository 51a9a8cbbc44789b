"""The actor of `map_program`.

It has one engine, which runs the rows of all batches that Ray gives the actor.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ramify.errors import EngineClosed, InvalidRequest, ProgramError, WorkerDied
from ramify.lang.backends.base import Backend
from ramify.lang.batch.results import outcome
from ramify.lang.batch.window import Row
from ramify.lang.functions.program import Program
from ramify.lang.state.state import ProgramState
from ramify.ray.columns import Columns
from ramify.ray.parts import Parts, row_id
from ramify.ray.row_feed import RowFeed

log = logging.getLogger(__name__)

Engine = Mapping[str, Any] | Callable[[], Backend]
"""Options of `ramify.Engine`; or a function that is called in the actor and returns a backend."""


@dataclass(frozen=True)
class Work:
    """The work of an actor: program, engine and options. Ray sends it to the actors."""

    program: Program[..., Any, Any]
    engine: Engine
    options: Mapping[str, Any]
    """Options of `run_batch`: sampling options, and arguments that all rows share."""
    window: int
    """Most rows that an actor has at once."""
    rows_in_flight: int
    give_up_after: float | None
    raises: bool
    """Whether the first failed row fails the job."""
    key: str | None
    columns: Mapping[str, Any]
    parts: Parts | None


class ProgramActor:
    """The actor's callable: Ray calls it with an Arrow table of rows, and it returns the table with the
    columns of the results added."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._owns_engine = isinstance(work.engine, Mapping)
        backend = make_backend(work.engine)
        batch = work.program._batch(
            {**work.options, "backend": backend}, "auto", work.rows_in_flight, False, work.give_up_after
        )
        self._common = batch.common
        self._columns = Columns(work.columns)
        self._finished = None if work.parts is None else work.parts.open()
        self._feed = RowFeed(work.program, batch, work.window, self._line, self._lost)

    async def __call__(self, rows: Any) -> Any:
        """Run the rows; returns the table with the columns of the results, in the order of the rows.

        If an actor dies, Ray runs its task again, and takes from the second run the blocks that it lacks. So
        the order must be the same in both runs, and rows are not returned in the order in which they finish.
        """
        names = self._arguments(rows.column_names)
        ids, lines = [], []
        for values in rows.to_pylist():
            arguments = {name: values[name] for name in names}
            key = None if self._work.key is None else values[self._work.key]
            # Without a key, a row is identified by all columns, not only by those that the program takes.
            ids.append(self._id(values if self._work.key is None else arguments, key))
            found = None if self._finished is None else self._finished.find(ids[-1])
            lines.append(found or asyncio.wrap_future(self._feed.run(arguments, (ids[-1], key))))
        done = [line if isinstance(line, dict) else await line for line in lines]
        for identity, line in zip(ids, done, strict=True):
            if line["error"] is not None and self._work.raises:
                raise ProgramError(f"Row {identity} failed: {line['error']['message']}")
        return self._columns.table(rows, ids, done)

    def _arguments(self, columns: list[str]) -> list[str]:
        """The columns whose values the program takes as arguments.

        Raises `InvalidRequest` if a required column is missing.
        """
        parameters = self._work.program._signature.parameters.values()
        for parameter in parameters:
            named = parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
            needed = named and parameter.default is inspect.Parameter.empty
            if needed and parameter.name not in {*columns, *self._common, *self._work.program.bound}:
                raise InvalidRequest(
                    f"The program takes {parameter.name!r}, and the dataset has no such column; it has "
                    f"{', '.join(columns)}.",
                    field="dataset",
                    remedy=f'Rename a column: dataset.rename_columns({{"…": "{parameter.name}"}}).',
                )
        if self._work.key is not None and self._work.key not in columns:
            raise InvalidRequest(f"The dataset has no column {self._work.key!r}.", field="key")
        return [name for name in columns if name in self._work.program.arg_names]

    def _id(self, values: Mapping[str, Any], key: Any) -> str:
        try:
            return row_id(values, key)
        except TypeError as error:
            remedy = "Name a column that tells rows apart: key=…" if key is None else None
            raise InvalidRequest(f"{error}", field="dataset", remedy=remedy) from None

    def _line(self, row: Row, state: ProgramState) -> dict[str, Any]:
        """The result line of a row that has ended.

        If there is a checkpoint, the line is written there first.
        """
        error, fields = outcome(state)
        if self._owns_engine and any(map(is_gone, _causes(error))):
            self._lost(error)
        line: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(fields))
        if self._finished is not None:
            identity, key = row.identity
            self._finished.append(identity, key, line)
        return line

    def _lost(self, error: BaseException | None) -> None:
        """If the actor started its engine itself, end the actor's process, so that Ray starts a new actor
        with a new engine. Raising would not do: the actor would stay, and Ray would send the same task to it
        again."""
        if self._owns_engine:
            log.error("The engine is gone, so this actor ends: %s", error)
            if self._finished is not None:
                self._finished.close()
            os._exit(1)


def make_backend(engine: Engine) -> Backend:
    if not isinstance(engine, Mapping):
        return engine()
    from ramify.runtime.engine.engine import Engine as OwnEngine

    return OwnEngine(**engine)


def is_gone(error: BaseException) -> bool:
    """Whether `error` means that the engine will never answer again."""
    return isinstance(error, EngineClosed) or (isinstance(error, WorkerDied) and not error.transient)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__

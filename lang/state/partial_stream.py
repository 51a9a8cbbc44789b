"""Partial values while they are generated, for threads and for event loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ramify.errors import InvalidRequest, ProgramError
from ramify.lang.program.branch import Branch
from ramify.lang.program.variables import Variable
from ramify.lang.state.streaming import async_follow, follow
from ramify.lang.typed.partial import Partial, PartialReader
from ramify.lang.typed.partial_types import checker_of
from ramify.lang.typed.schema import schema_of

if TYPE_CHECKING:
    from ramify.lang.state.state import ProgramState

T = TypeVar("T")


class ObjectStream(Generic[T]):
    """The result of `ProgramState.stream_objects`. It may be iterated several times."""

    def __init__(self, state: ProgramState, branch: Branch, name: str, kind: Any) -> None:
        self._state, self._branch, self._name, self._kind = state, branch, name, kind

    def __iter__(self) -> Iterator[Partial[T]]:
        run = self._branch.run
        if run.stream:
            yield from follow(run, _PartialValue(self._branch, self._name, self._kind))
        yield _complete(self._state._read(self._name), self._kind)

    async def __aiter__(self) -> AsyncIterator[Partial[T]]:
        run = self._branch.run
        if run.stream:
            source = _PartialValue(self._branch, self._name, self._kind)
            async with aclosing(async_follow(run, source)) as partials:
                async for partial in partials:
                    yield partial
        await self._state.aget(self._name)
        yield _complete(self._branch.variable(self._name), self._kind)


def snapshot(branch: Branch, name: str, kind: Any) -> Partial[Any]:
    """The implementation of `ProgramState.partial`."""
    variable = branch.variables.get(name)
    if variable is not None and variable.ready.is_set():
        return _complete(variable, kind)
    return next(_PartialValue(branch, name, kind).new(), Partial(None))


class _PartialValue:
    """The value of one variable while the variable's chunks arrive."""

    def __init__(self, branch: Branch, name: str, kind: Any) -> None:
        self._branch, self._name, self._kind = branch, name, kind
        self._reader: PartialReader | None = None
        self._read = 0

    @property
    def ended(self) -> bool:
        return self._branch.is_final(self._name)

    def new(self) -> Iterator[Partial[Any]]:
        """The partial value, if it has changed since the last call."""
        variable = self._branch.variables.get(self._name)
        if variable is None or not variable.chunks:
            return
        kind = _kind_of(variable, self._kind)
        if not _is_json(kind):
            return
        if self._reader is None:
            self._reader = PartialReader(checker_of(kind))
        chunks = variable.chunks[self._read :]
        self._read += len(chunks)
        try:
            changed = self._reader.push("".join([chunk.text for chunk in chunks]))
        except ValueError as error:
            raise _located(error, variable) from error
        if changed and not self._reader.ended:  # the step sets and validates the complete value
            yield self._reader.partial


def _kind_of(variable: Variable, kind: Any) -> Any:
    found = variable.kind if kind is None else kind
    if found is None:
        raise InvalidRequest(
            f"{variable.name!r} was generated without a schema, so its parts have no types.",
            field="kind",
            remedy="Pass one: stream_objects(name, T).",
        )
    return found


def _is_json(kind: Any) -> bool:
    constraint = schema_of(kind).constraint
    return constraint is not None and constraint.kind == "json_schema"


def _complete(variable: Variable, kind: Any) -> Partial[Any]:
    value = variable.read()
    if kind is not None and variable.text is not None and kind != variable.kind:
        value = schema_of(kind).parse(variable.text)
    return Partial(value, complete=True)


def _located(error: Exception, variable: Variable) -> ProgramError:
    call = variable.call
    where = f" at {call.line}" if call is not None and call.line else ""
    return ProgramError(
        f"gen {variable.name!r}{where} is going wrong: {error}",
        variable=variable.name,
        line=call.line if call is not None else None,
        prompt=call.prompt if call is not None else None,
        partial="".join([chunk.text for chunk in variable.chunks]),
    )

"""Values while they are generated, for threads and for event loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ramify.errors import InvalidRequest, ProgramError
from ramify.lang.program.branch import Branch
from ramify.lang.program.variables import Variable
from ramify.lang.typed.partial import Partial, PartialReader
from ramify.lang.typed.partial_types import checker_of
from ramify.lang.typed.schema import schema_of

if TYPE_CHECKING:
    from ramify.lang.program.state import ProgramState

T = TypeVar("T")


class ObjectStream(Generic[T]):
    """What `ProgramState.stream_objects` returns; may be iterated several times."""

    def __init__(self, state: ProgramState, branch: Branch, name: str, kind: Any) -> None:
        self._state, self._branch, self._name, self._kind = state, branch, name, kind

    def __iter__(self) -> Iterator[Partial[T]]:
        run = self._branch.run
        if run.stream:
            growing = _Growing(self._branch, self._name, self._kind)
            for _ in run.changes():
                ended = growing.ended
                if (partial := growing.new()) is not None:
                    yield partial
                if ended:
                    break
        yield _whole(self._state._read(self._name), self._kind)

    async def __aiter__(self) -> AsyncIterator[Partial[T]]:
        run = self._branch.run
        if run.stream:
            growing = _Growing(self._branch, self._name, self._kind)
            async with aclosing(run.async_changes()) as changes:
                async for _ in changes:
                    ended = growing.ended
                    if (partial := growing.new()) is not None:
                        yield partial
                    if ended:
                        break
        await self._state.aget(self._name)
        yield _whole(self._branch.variable(self._name), self._kind)


def snapshot(branch: Branch, name: str, kind: Any) -> Partial[Any]:
    """What `ProgramState.partial` returns."""
    variable = branch.variables.get(name)
    if variable is not None and variable.ready.is_set():
        return _whole(variable, kind)
    growing = _Growing(branch, name, kind)
    return growing.new() or Partial(None)


class _Growing:
    """One variable's value as its chunks arrive."""

    def __init__(self, branch: Branch, name: str, kind: Any) -> None:
        self._branch, self._name, self._kind = branch, name, kind
        self._reader: PartialReader | None = None
        self._read = 0

    @property
    def ended(self) -> bool:
        variable = self._branch.variables.get(self._name)
        return self._branch.run.body_done.is_set() if variable is None else variable.ready.is_set()

    def new(self) -> Partial[Any] | None:
        """What there is now, if it has grown since the last call."""
        variable = self._branch.variables.get(self._name)
        if variable is None or not variable.chunks:
            return None
        kind = _kind_of(variable, self._kind)
        if not _is_json(kind):
            return None
        if self._reader is None:
            self._reader = PartialReader(checker_of(kind))
        chunks = variable.chunks[self._read :]
        self._read += len(chunks)
        try:
            grown = self._reader.push("".join([chunk.text for chunk in chunks]))
        except ValueError as error:
            raise _located(error, variable) from error
        # The whole value comes from the step itself, which has validated it once more.
        return self._reader.partial if grown and not self._reader.ended else None


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


def _whole(variable: Variable, kind: Any) -> Partial[Any]:
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

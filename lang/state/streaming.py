"""Text and values while they are generated, for threads and for event loops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ramify.errors import InvalidRequest, ProgramError
from ramify.lang.program.events import Event
from ramify.lang.program.variables import Variable
from ramify.lang.trace.outputs import meta_info, token_logprobs
from ramify.lang.typed.partial import Partial, PartialReader
from ramify.lang.typed.partial_types import checker_of
from ramify.lang.typed.schema import schema_of
from ramify.messages import TextChunk, TokenLogprobs, Usage, concatenated

if TYPE_CHECKING:
    from ramify.lang.state.state import ProgramState

T = TypeVar("T")


def follow(state: ProgramState, source: Source) -> Iterator[Any]:
    """Yield the additions to `source` until it has ended. Blocks until the run changes."""
    run = state._branch.run
    for _ in run.changes(state._reader):
        ended = source.ended  # read before the additions, so that none is missed
        yield from source.new()
        if ended:
            break
    run.raise_fatal()


async def async_follow(state: ProgramState, source: Source) -> AsyncGenerator[Any, None]:
    """Yield the additions to `source` until it has ended, in any event loop."""
    run = state._branch.run
    async with aclosing(run.async_changes(state._reader)) as changes:
        async for _ in changes:
            ended = source.ended
            for item in source.new():
                yield item
            if ended:
                break
    run.raise_fatal()


def text_iter(state: ProgramState, name: str | None, thinking: bool = False) -> Iterator[str]:
    """The implementation of `ProgramState.text_iter`."""
    _check(name, thinking)
    if not state._branch.run.stream:
        if name is None:
            yield state.text()
        else:
            yield str(state.thinking(name) if thinking else state._read(name).text or state[name])
        return
    source = _source(state, name, thinking)
    for text, _meta in follow(state, source):
        yield text
    source.check()


async def text_async_iter(
    state: ProgramState, name: str | None, with_meta: bool, thinking: bool = False
) -> AsyncIterator[Any]:
    """The implementation of `ProgramState.text_async_iter`."""
    _check(name, thinking)
    if with_meta and name is None:
        raise ValueError("return_meta_data needs the name of a variable.")
    if not state._branch.run.stream:
        if name is None:
            await state.wait()
            yield state.text()
        else:
            value = await state.aget(name)
            variable = state._branch.variables[name]
            text = str(variable.read_thinking() if thinking else variable.text or value)
            yield (text, state.get_meta_info(name)) if with_meta else text
        return
    source = _source(state, name, thinking)
    async with aclosing(async_follow(state, source)) as additions:
        async for text, meta in additions:
            yield (text, meta) if with_meta else text
    source.check()


def _check(name: str | None, thinking: bool) -> None:
    if thinking and name is None:
        raise InvalidRequest("thinking=True needs the name of a variable.", field="thinking")


def _source(state: ProgramState, name: str | None, thinking: bool) -> BranchText | _VariableText:
    if name is None:
        return BranchText(state)
    return _VariableThoughts(state, name) if thinking else _VariableText(state, name)


class BranchText:
    """All text of a branch, up to its forks and its own, until its steps so far are done."""

    def __init__(self, state: ProgramState) -> None:
        self._state, self._branch, self._done = state, state._branch, state._all_done()
        self._read = self._read_before = 0

    @property
    def ended(self) -> bool:
        return self._done.is_set()

    def new(self) -> Iterator[tuple[str, None]]:
        added = self._branch.texts[self._read :]  # read first: `texts_before` is complete when there are any
        before = self._branch.texts_before[self._read_before :]
        self._read += len(added)
        self._read_before += len(before)
        if text := "".join([*chain.from_iterable(texts[:count] for texts, count in before), *added]):
            yield text, None

    def check(self) -> None:
        self._state._raise()


class _OfVariable:
    """Base of the sources that read one variable: the first of this name. A step after `recover` may make
    another variable of the same name."""

    def __init__(self, state: ProgramState, name: str) -> None:
        self._state, self._name = state, name
        self._first: Variable | None = None
        self._read = 0

    @property
    def _variable(self) -> Variable | None:
        if self._first is None:
            self._first = self._state._branch.variables.get(self._name)
        return self._first

    @property
    def ended(self) -> bool:
        variable = self._variable
        return self._state._declared(self._name) if variable is None else variable.ready.is_set()

    def variable(self) -> Variable:
        """The variable. Raises the errors of `Branch.variable` if there is none."""
        return self._variable or self._state._branch.variable(self._name)


class _VariableText(_OfVariable):
    """The text of one variable, chunk by chunk. If the variable has no chunks, its whole text is added when
    the variable is set."""

    def __init__(self, state: ProgramState, name: str) -> None:
        super().__init__(state, name)
        self._tokens = 0
        self._logprobs: TokenLogprobs | None = None
        """Log-probabilities of the tokens since the last addition of text; None without log-probabilities."""

    def new(self) -> Iterator[tuple[str, Any]]:
        variable = self._variable
        if variable is None:
            return
        ended = variable.ready.is_set()
        chunks = variable.chunks[self._read :]
        self._read += len(chunks)
        for chunk in chunks:
            self._tokens += len(chunk.ids)
            self._logprobs = concatenated([self._logprobs, chunk.logprobs])
            if text := self._text(chunk):
                yield text, self._meta(chunk)
                self._logprobs = None
        if ended and not self._read and variable.error is None:
            self._read = 1
            yield self._whole(variable), variable.meta

    def _text(self, chunk: TextChunk) -> str:
        return chunk.text

    def _whole(self, variable: Variable) -> str:
        return str(variable.text if variable.text is not None else variable.value)

    def _meta(self, chunk: TextChunk) -> dict[str, Any]:
        """The ``meta_info`` up to this chunk. As in SGLang, log-probabilities are given only for the tokens
        since the last addition."""
        usage = chunk.usage or Usage(completion_tokens=self._tokens)
        meta = meta_info(chunk.rid, usage, chunk.finish)
        if self._logprobs is not None:
            meta["output_token_logprobs"] = token_logprobs(self._logprobs)
            meta["output_token_logprobs_length"] = self._tokens
        return meta

    def check(self) -> None:
        self.variable().read()


class _VariableThoughts(_VariableText):
    """The thoughts before a variable's value. The source has ended when the first text of the value has
    arrived."""

    @property
    def ended(self) -> bool:
        variable = self._variable
        return super().ended or (variable is not None and any(chunk.text for chunk in variable.chunks))

    def _text(self, chunk: TextChunk) -> str:
        return chunk.reasoning

    def _whole(self, variable: Variable) -> str:
        return str(variable.read_thinking())

    def check(self) -> None:
        variable = self.variable()
        if variable.ready.is_set() or variable.thinking is None:
            variable.read_thinking()


class EventSource:
    """The events of a state and of all branches forked from it, until their steps so far are done."""

    def __init__(self, state: ProgramState) -> None:
        self._events, self._read = state._branch.events, 0
        inside = () if state._outside else (branch.idle() for branch in state._branch.subtree())
        self._done = [*inside] or [state._all_done()]

    @property
    def ended(self) -> bool:
        return all(done.is_set() for done in self._done)

    def new(self) -> Iterator[Event]:
        added = self._events[self._read :]
        self._read += len(added)
        yield from added


class EventStream:
    """The result of `ProgramState.events`. It may be iterated several times, each time from the beginning."""

    def __init__(self, state: ProgramState) -> None:
        self._state = state

    def __iter__(self) -> Iterator[Event]:
        yield from follow(self._state, EventSource(self._state))
        self._state._raise()

    async def __aiter__(self) -> AsyncIterator[Event]:
        async with aclosing(async_follow(self._state, EventSource(self._state))) as events:
            async for event in events:
                yield event
        self._state._raise()


class ObjectStream(Generic[T]):
    """The result of `ProgramState.stream_objects`. It may be iterated several times."""

    def __init__(self, state: ProgramState, name: str, kind: Any) -> None:
        self._state, self._name, self._kind = state, name, kind

    def __iter__(self) -> Iterator[Partial[T]]:
        source = _PartialValue(self._state, self._name, self._kind)
        if self._state._branch.run.stream:
            yield from follow(self._state, source)
        else:
            self._state._read(self._name)
        yield _complete(source.variable(), self._kind)

    async def __aiter__(self) -> AsyncIterator[Partial[T]]:
        source = _PartialValue(self._state, self._name, self._kind)
        if self._state._branch.run.stream:
            async with aclosing(async_follow(self._state, source)) as partials:
                async for partial in partials:
                    yield partial
        else:
            await self._state.aget(self._name)
        yield _complete(source.variable(), self._kind)


def snapshot(state: ProgramState, name: str, kind: Any) -> Partial[Any]:
    """The implementation of `ProgramState.partial`."""
    source = _PartialValue(state, name, kind)
    variable = source._variable
    if variable is not None and variable.ready.is_set():
        return _complete(variable, kind)
    return next(source.new(), Partial(None))


class _PartialValue(_OfVariable):
    def __init__(self, state: ProgramState, name: str, kind: Any) -> None:
        super().__init__(state, name)
        self._kind = kind
        self._reader: PartialReader | None = None

    def new(self) -> Iterator[Partial[Any]]:
        """The partial value, if it has changed since the last call."""
        variable = self._variable
        if variable is None or not variable.chunks:
            return
        kind = _kind_of(variable, self._kind)
        if variable.n > 1 or not _is_json(kind):
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


Source = BranchText | EventSource | _VariableText | _PartialValue
"""A source that is read while it grows: `new` yields the additions since the last call, and `ended` says
whether nothing will be added any more."""

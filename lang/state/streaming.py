"""Text and values while they are generated, for threads and for event loops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ramify.errors import InvalidRequest
from ramify.lang.program.branch import Branch
from ramify.lang.program.variables import Variable
from ramify.lang.trace.meta_info import meta_info, token_logprobs
from ramify.messages import TextChunk, TokenLogprobs, Usage, concatenated

if TYPE_CHECKING:
    from ramify.lang.program.run import Run
    from ramify.lang.state.state import ProgramState

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Source(Protocol[T_co]):
    """Something that is read while it grows during a run."""

    @property
    def ended(self) -> bool:
        """Whether nothing will be added any more. Read it before `new`, so that no addition is missed."""
        ...

    def new(self) -> Iterator[T_co]:
        """The additions since the last call."""
        ...


def follow(run: Run, source: Source[T]) -> Iterator[T]:
    """Yield the additions to `source` until it has ended. Blocks until the run changes."""
    for _ in run.changes():
        ended = source.ended  # read before the additions, so that none is missed
        yield from source.new()
        if ended:
            break


async def async_follow(run: Run, source: Source[T]) -> AsyncGenerator[T, None]:
    """Yield the additions to `source` until it has ended, in any event loop."""
    async with aclosing(run.async_changes()) as changes:
        async for _ in changes:
            ended = source.ended
            for item in source.new():
                yield item
            if ended:
                break


def text_iter(state: ProgramState, branch: Branch, name: str | None, thinking: bool = False) -> Iterator[str]:
    """The implementation of `ProgramState.text_iter`."""
    _check(name, thinking)
    if not branch.run.stream:
        if name is None:
            yield state.text()
        else:
            yield str(state.thinking(name) if thinking else state._read(name).text or state[name])
        return
    source = _source(state, branch, name, thinking)
    for text, _meta in follow(branch.run, source):
        yield text
    source.check()


async def text_async_iter(
    state: ProgramState, branch: Branch, name: str | None, with_meta: bool, thinking: bool = False
) -> AsyncIterator[Any]:
    """The implementation of `ProgramState.text_async_iter`."""
    _check(name, thinking)
    if with_meta and name is None:
        raise ValueError("return_meta_data needs the name of a variable.")
    if not branch.run.stream:
        if name is None:
            await state.wait()
            yield state.text()
        else:
            value = await state.aget(name)
            variable = branch.variables[name]
            text = str(variable.read_thinking() if thinking else variable.text or value)
            yield (text, state.get_meta_info(name)) if with_meta else text
        return
    source = _source(state, branch, name, thinking)
    async with aclosing(async_follow(branch.run, source)) as additions:
        async for text, meta in additions:
            yield (text, meta) if with_meta else text
    source.check()


def _check(name: str | None, thinking: bool) -> None:
    if thinking and name is None:
        raise InvalidRequest("thinking=True needs the name of a variable.", field="thinking")


def _source(
    state: ProgramState, branch: Branch, name: str | None, thinking: bool
) -> _BranchText | _VariableText:
    if name is None:
        return _BranchText(state, branch)
    return _VariableThoughts(branch, name) if thinking else _VariableText(branch, name)


class _BranchText:
    """All text of a branch."""

    def __init__(self, state: ProgramState, branch: Branch) -> None:
        self._state, self._branch, self._read = state, branch, 0

    @property
    def ended(self) -> bool:
        return self._branch.ended

    def new(self) -> Iterator[tuple[str, None]]:
        texts = self._branch.feed[self._read :]
        self._read += len(texts)
        if text := "".join(texts):
            yield text, None

    def check(self) -> None:
        self._state._raise()


class _VariableText:
    """The text of one variable, chunk by chunk. If a variable has no chunks, its whole text is one addition
    when the variable is set.

    Only the first variable of this name is read. A step after `recover` may make another variable of the same
    name.
    """

    def __init__(self, branch: Branch, name: str) -> None:
        self._branch, self._name = branch, name
        self._first: Variable | None = None
        self._read = self._tokens = 0
        self._logprobs: TokenLogprobs | None = None
        """Log-probabilities of the tokens since the last addition of text; None without log-probabilities."""

    @property
    def _variable(self) -> Variable | None:
        if self._first is None:
            self._first = self._branch.variables.get(self._name)
        return self._first

    @property
    def ended(self) -> bool:
        variable = self._variable
        return self._branch.run.body_done.is_set() if variable is None else variable.ready.is_set()

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
        """The ``meta_info`` up to this chunk. As in SGLang, it has only the log-probabilities of the tokens
        since the last addition."""
        usage = chunk.usage or Usage(completion_tokens=self._tokens)
        meta = meta_info(chunk.rid, usage, chunk.finish)
        if self._logprobs is not None:
            meta["output_token_logprobs"] = token_logprobs(self._logprobs)
            meta["output_token_logprobs_length"] = self._tokens
        return meta

    def check(self) -> None:
        (self._variable or self._branch.variable(self._name)).read()


class _VariableThoughts(_VariableText):
    """The thoughts before a variable's value. They end at the first text of that value."""

    @property
    def ended(self) -> bool:
        variable = self._branch.variables.get(self._name)
        return super().ended or (variable is not None and any(chunk.text for chunk in variable.chunks))

    def _text(self, chunk: TextChunk) -> str:
        return chunk.reasoning

    def _whole(self, variable: Variable) -> str:
        return str(variable.read_thinking())

    def check(self) -> None:
        variable = self._branch.variable(self._name)
        if variable.ready.is_set() or variable.thinking is None:
            variable.read_thinking()

"""Text while it is generated, for threads and for event loops."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ramify.lang.calls.meta_info import add_logprobs, meta_info, token_logprobs
from ramify.lang.program.branch import Branch
from ramify.messages import TextChunk, TokenLogprobs, Usage

if TYPE_CHECKING:
    from ramify.lang.program.state import ProgramState


def text_iter(state: ProgramState, branch: Branch, name: str | None) -> Iterator[str]:
    """What `ProgramState.text_iter` returns."""
    if not branch.run.stream:
        yield state.text() if name is None else str(state._read(name).text or state[name])
        return
    source = _Everything(state, branch) if name is None else _OneVariable(state, branch, name)
    for _ in branch.run.changes():
        ended = source.ended  # asked before the text is read, so that nothing is missed
        for text, _meta in source.new():
            yield text
        if ended:
            break
    source.check()


async def text_async_iter(
    state: ProgramState, branch: Branch, name: str | None, with_meta: bool
) -> AsyncIterator[Any]:
    """What `ProgramState.text_async_iter` returns."""
    if with_meta and name is None:
        raise ValueError("return_meta_data needs the name of a variable.")
    if not branch.run.stream:
        if name is None:
            await state.wait()
            yield state.text()
        else:
            value = await state.aget(name)
            text = str(branch.variables[name].text or value)
            yield (text, state.get_meta_info(name)) if with_meta else text
        return
    source = _Everything(state, branch) if name is None else _OneVariable(state, branch, name)
    async with aclosing(branch.run.async_changes()) as changes:
        async for _ in changes:
            ended = source.ended
            for text, meta in source.new():
                yield (text, meta) if with_meta else text
            if ended:
                break
    source.check()


class _Everything:
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


class _OneVariable:
    """The chunks of one variable; of one that was not generated in chunks, its text at the end."""

    def __init__(self, state: ProgramState, branch: Branch, name: str) -> None:
        self._state, self._branch, self._name = state, branch, name
        self._read = self._tokens = 0
        self._logprobs: TokenLogprobs | None = None
        """Of the tokens since text was last handed out."""

    @property
    def ended(self) -> bool:
        variable = self._branch.variables.get(self._name)
        return self._branch.run.body_done.is_set() if variable is None else variable.ready.is_set()

    def new(self) -> Iterator[tuple[str, Any]]:
        variable = self._branch.variables.get(self._name)
        if variable is None:
            return
        ended = variable.ready.is_set()
        chunks = variable.chunks[self._read :]
        self._read += len(chunks)
        for chunk in chunks:
            self._tokens += len(chunk.ids)
            self._logprobs = add_logprobs(self._logprobs, chunk.logprobs)
            if chunk.text:
                yield chunk.text, self._meta(chunk)
                self._logprobs = None
        if ended and not self._read and variable.error is None:
            self._read = 1
            yield str(variable.text if variable.text is not None else variable.value), variable.meta

    def _meta(self, chunk: TextChunk) -> dict[str, Any]:
        """``meta_info`` so far; log-probabilities are those of this text alone, as in SGLang."""
        usage = chunk.usage or Usage(completion_tokens=self._tokens)
        meta = meta_info(chunk.rid, usage, chunk.finish)
        if self._logprobs is not None:
            meta["output_token_logprobs"] = token_logprobs(self._logprobs)
            meta["output_token_logprobs_length"] = self._tokens
        return meta

    def check(self) -> None:
        self._branch.variable(self._name).read()

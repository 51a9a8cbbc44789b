"""Several generations in one response: their streams merged, and the result of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from ramify.loop import cancel_at_end
from ramify.messages import ChoiceScore, Enforcement, Finish, TextChunk, TokenLogprobs, Usage, Violation

T = TypeVar("T")


class GenerationResult:
    """The output of one generation so far, put together from its chunks."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.pieces: list[tuple[int, int]] = []
        """The field of the same name in `TextChunk`, over all of the text."""
        self.controls: list[int] = []
        """The field of the same name in `TextChunk`, over all of the text."""
        self.forced: list[int] = []
        """Indices in `ids` of forced tokens."""
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.choices: tuple[ChoiceScore, ...] = ()
        self.embedding = b""
        self.usage = Usage()
        self.finish: Finish | None = None
        self.kept_ids = 0
        self.tail = ""
        self.enforcement: Enforcement | None = None
        self.violations: tuple[Violation, ...] | None = None

    def add_chunk(self, chunk: TextChunk) -> None:
        self.controls.extend(len(self.text) + place for place in chunk.controls)
        self.text += chunk.text
        self.forced.extend(len(self.ids) + index for index in chunk.forced)
        self.ids.extend(chunk.ids)
        self.pieces += pieces_of(chunk)
        if chunk.logprobs is not None:
            self.logprobs.append(chunk.logprobs)
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs.append(chunk.prompt_logprobs)
        if chunk.usage is not None:
            self.usage = chunk.usage
        self.enforcement = chunk.enforcement or self.enforcement
        if chunk.finish is not None:
            self.finish, self.kept_ids, self.tail = chunk.finish, chunk.kept_ids, chunk.tail
            self.violations, self.choices = chunk.violations, chunk.choices
            self.embedding = chunk.embedding


def pieces_of(chunk: TextChunk) -> Sequence[tuple[int, int]]:
    return chunk.pieces or ((len(chunk.ids), len(chunk.text)),)


def ids_in(pieces: Sequence[tuple[int, int]], characters: int) -> int:
    """The number of ids that the first `characters` characters of a text of `pieces` have."""
    count = 0
    for ids, length in pieces:
        if length > characters:
            # The borders of tokens within a piece are unknown.
            return count + round(ids * characters / length)
        count += ids
        characters -= length
    return count


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as (index of the stream, item), in order of arrival. The first error closes
    all streams and is raised."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return

    queue: asyncio.Queue[tuple[int, T | None, Exception | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        error = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((index, item, None))
        except Exception as caught:
            error = caught
        queue.put_nowait((index, None, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    async with cancel_at_end(tasks):
        running = len(tasks)
        while running:
            index, new, error = await queue.get()
            if error is not None:
                raise error
            if new is None:
                running -= 1
            else:
                yield index, new


async def collect(streams: Sequence[AsyncGenerator[TextChunk, None]]) -> list[GenerationResult]:
    """The result of each stream, read to its end."""
    results = [GenerationResult() for _ in streams]
    async with aclosing(merge(streams)) as chunks:
        async for index, chunk in chunks:
            results[index].add_chunk(chunk)
    return results

"""Several generations in one response: their streams merged, and the result of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

from ramify.loop import cancel_at_end
from ramify.messages import TextChunk
from ramify.runtime.generation import GenerationResult

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as (index of the stream, item), in order of arrival. After the first error all
    streams are closed and the error is raised."""
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
    """Read each stream to its end. Returns the result of each."""
    results = [GenerationResult() for _ in streams]
    async with aclosing(merge(streams)) as chunks:
        async for index, chunk in chunks:
            results[index].add_chunk(chunk)
    return results

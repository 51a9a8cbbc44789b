"""The chunks of one request, from the ring to the iterator that a caller reads."""

from __future__ import annotations

import asyncio
import collections
import copy

from ramify.errors import RamifyError
from ramify.messages import Generate, TextChunk


class OutputQueue:
    """Chunks of one request that have arrived and have not been read. One reader; used on one event loop."""

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.started = False
        """A chunk has arrived: the request cannot be run again from the start."""
        self.ended = False
        """The last chunk or an error has arrived."""
        self._chunks: collections.deque[TextChunk] = collections.deque()
        self._error: RamifyError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, chunk: TextChunk) -> None:
        if self.ended:
            return
        self.started = True
        self.ended = chunk.finish is not None
        self._chunks.append(chunk)
        self._wake()

    def fail(self, error: RamifyError) -> None:
        if not self.ended:
            self.ended = True
            self._error = error
            self._wake()

    async def next(self) -> TextChunk:
        """The next chunk, waiting for it if there is none. Raises the error that ended the request."""
        while not self._chunks:
            if self._error is not None:
                raise copy.copy(self._error)  # without the traceback that a raised instance keeps
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._chunks.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

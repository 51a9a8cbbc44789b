"""The chunks of one request, from the engine core to the iterator that a caller reads.

When the engine core dies, the next one gets the request with the ids that have arrived (`Continuation`).
Its chunks repeat that output, which is cut off here, so that the reader sees one output without a gap.
"""

from __future__ import annotations

import asyncio
import collections
import copy

import msgspec

from ramify.errors import RamifyError, WorkerDied
from ramify.messages import Continuation, Finish, Generate, TextChunk, TokenLogprobs, Usage

SUSPECT_AT = 2
"""A request in flight at this many deaths, without going on in between, may be what kills the engine core."""
MOST_ALONE = 2
"""A request over which the engine core has died this often while it ran alone fails."""
PROGRESS = 32
"""Output tokens by which a request must have gone on behind a death, so that it was not what killed. What
kills at some token kills there again; fewer tokens are on their way to the frontend at a death."""


class OutputQueue:
    """Chunks of one request that have arrived and have not been read. One reader; used on one event loop.

    request : as the engine core has it
    rid : the id that the chunks carry for the reader; None for the request's
    """

    def __init__(self, request: Generate, rid: str | None = None) -> None:
        self.request = request
        self._rid = request.rid if rid is None else rid
        self.deaths = 0
        """Engine cores that died while they ran the request, since it last went on."""
        self.aborted = False
        """Whether its end has been asked for."""
        self._deaths_alone = 0
        self._size_at_death = 0
        self.ended = False
        """Whether the last chunk or an error has arrived."""
        self._chunks: collections.deque[TextChunk] = collections.deque()
        self._error: RamifyError | None = None
        self._begun = False
        self._ids: list[int] = []
        self._forced: list[int] = []
        self._replaced = 0
        self._text: list[str] = []
        self._repeated_ids = 0
        self._repeated_text = ""
        """Text that the next chunks repeat, with `_repeated_ids` tokens."""
        self._waiter: asyncio.Future[None] | None = None

    def put(self, chunk: TextChunk) -> None:
        if self.ended:
            return
        if self._repeated_ids or self._repeated_text:
            if not self._repeats(chunk):
                self.fail(WorkerDied("The request cannot go on: its text differs.", remedy="Send it again."))
                return
            chunk = self._new_part(chunk)
        if chunk.rid != self._rid:
            chunk = msgspec.structs.replace(chunk, rid=self._rid)
        if not self._begun:
            self._begun, self._replaced = True, chunk.replaced
        self._forced += [len(self._ids) + index for index in chunk.forced]
        self._ids += chunk.ids
        self._text.append(chunk.text)
        self.ended = chunk.finish is not None
        self._chunks.append(chunk)
        self._wake()

    def end_aborted(self) -> None:
        """End an aborted request that no engine core has, behind the output that has arrived."""
        if not self.ended:
            self.ended = True
            usage = Usage(completion_tokens=self.size)
            finish = Finish(reason="abort")
            self._chunks.append(TextChunk(rid=self._rid, usage=usage, finish=finish))
            self._wake()

    def rest(self) -> Generate:
        """The request, from the end of the output that has arrived on; its engine core has died."""
        self._repeated_ids, self._repeated_text = len(self._ids), "".join(self._text)
        self._text = [self._repeated_text]
        # Chunks that are held back would hide where a request is that may be what kills.
        request = msgspec.structs.replace(self.request, every_s=0.0) if self.deaths else self.request
        if not self._ids:
            return request
        output = Continuation(ids=tuple(self._ids), replaced=self._replaced, forced=tuple(self._forced))
        return msgspec.structs.replace(request, continues=output)

    def _repeats(self, chunk: TextChunk) -> bool:
        """Whether `chunk` repeats the output that has arrived, and does not end before its end."""
        expected = self._repeated_text
        return chunk.text.startswith(expected) or (expected.startswith(chunk.text) and chunk.finish is None)

    def _new_part(self, chunk: TextChunk) -> TextChunk:
        """`chunk` without its repeated part."""
        ids, text = min(self._repeated_ids, len(chunk.ids)), min(len(self._repeated_text), len(chunk.text))
        self._repeated_ids -= ids
        self._repeated_text = self._repeated_text[text:]
        return msgspec.structs.replace(
            chunk,
            text=chunk.text[text:],
            ids=chunk.ids[ids:],
            forced=tuple([index - ids for index in chunk.forced if index >= ids]),
            pieces=(),
            controls=tuple([place - text for place in chunk.controls if place >= text]),
            logprobs=_without(chunk.logprobs, ids),
            prompt_logprobs=None,
            enforcement=None,
            replaced=0,
        )

    def count_death(self, error: WorkerDied, *, alone: bool = False) -> None:
        """The engine core that ran the request has died; `error` ends it where that happened too often when
        it ran alone."""
        if self.size >= self._size_at_death + PROGRESS:
            self.deaths = self._deaths_alone = 0
        self._size_at_death = self.size
        self.deaths += 1
        self._deaths_alone += alone
        if self._deaths_alone >= MOST_ALONE:
            self.fail(error)

    @property
    def suspect(self) -> bool:
        """Whether it may be what kills engine cores."""
        return self.deaths >= SUSPECT_AT

    @property
    def size(self) -> int:
        """Output tokens that have arrived."""
        return len(self._ids)

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


def _without(logprobs: TokenLogprobs | None, first: int) -> TokenLogprobs | None:
    """The entries behind the first `first`."""
    if logprobs is None or first == 0:
        return logprobs
    kept = {name: getattr(logprobs, name)[first:] for name in TokenLogprobs.__struct_fields__}
    return TokenLogprobs(**kept)

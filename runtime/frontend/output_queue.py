"""The chunks of one request, from the engine core to the iterator that a caller reads.

If the engine core dies, the next engine core gets the request with the output ids that have arrived
(`Continuation`), and sends that output again. The repetition is cut off here, so the reader sees one output
without a gap.
"""

from __future__ import annotations

import asyncio
import collections
import copy

import msgspec

from ramify.errors import RamifyError, WorkerDied
from ramify.messages import Continuation, Finish, Generate, TextChunk, TokenLogprobs, Usage

SUSPECT_AT = 2
"""Number of deaths after which a request is a suspect. A request that was in flight at all of these deaths,
and made no progress in between, may be their cause."""
MOST_ALONE = 2
"""Number of deaths after which a request fails that ran alone in the engine core at each of them."""
PROGRESS = 32
"""Number of output tokens since the last death that clear a request of suspicion. A request that kills an
engine core at some token kills the next one at the same token. Fewer tokens than this are in transit to the
frontend when an engine core dies."""


class OutputQueue:
    """The chunks of one request that have arrived and have not been read. It has one reader, and is used on
    one event loop.

    request : the request as sent to the engine core
    rid : the id in the chunks that the reader gets; None: the id of `request`
    """

    def __init__(self, request: Generate, rid: str | None = None) -> None:
        self.request = request
        self._rid = request.rid if rid is None else rid
        self.deaths = 0
        """Number of engine cores that died while running the request, since it last made progress."""
        self.aborted = False
        """Whether the request has been aborted."""
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
        """Text that the next chunks will repeat. `_repeated_ids` is the number of tokens of this text."""
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
        """End an aborted request that no engine core has, after the output that has arrived."""
        if not self.ended:
            self.ended = True
            usage = Usage(completion_tokens=self.size)
            finish = Finish(reason="abort")
            self._chunks.append(TextChunk(rid=self._rid, usage=usage, finish=finish))
            self._wake()

    def rest(self) -> Generate:
        """The request to send to another engine core, which continues after the output that has arrived."""
        self._repeated_ids, self._repeated_text = len(self._ids), "".join(self._text)
        self._text = [self._repeated_text]
        # Chunks that are held back would hide the progress of a request that may be the cause of deaths.
        request = msgspec.structs.replace(self.request, every_s=0.0) if self.deaths else self.request
        if not self._ids:
            return request
        output = Continuation(ids=tuple(self._ids), replaced=self._replaced, forced=tuple(self._forced))
        return msgspec.structs.replace(request, continues=output)

    def _repeats(self, chunk: TextChunk) -> bool:
        """Whether `chunk` begins with the text to be repeated, or is a beginning of that text and not the
        last chunk."""
        expected = self._repeated_text
        return chunk.text.startswith(expected) or (expected.startswith(chunk.text) and chunk.finish is None)

    def _new_part(self, chunk: TextChunk) -> TextChunk:
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
        """Count the death of the engine core that ran the request. `alone`: the request ran there alone.
        After `MOST_ALONE` such deaths the request fails with `error`."""
        if self.size >= self._size_at_death + PROGRESS:
            self.deaths = self._deaths_alone = 0
        self._size_at_death = self.size
        self.deaths += 1
        self._deaths_alone += alone
        if self._deaths_alone >= MOST_ALONE:
            self.fail(error)

    @property
    def suspect(self) -> bool:
        """Whether the request may be the cause of deaths."""
        return self.deaths >= SUSPECT_AT

    @property
    def size(self) -> int:
        """Number of output tokens that have arrived."""
        return len(self._ids)

    def fail(self, error: RamifyError) -> None:
        if not self.ended:
            self.ended = True
            self._error = error
            self._wake()

    async def next(self) -> TextChunk:
        """The next chunk. Waits if there is none. Raises the error that ended the request."""
        while not self._chunks:
            if self._error is not None:
                raise copy.copy(self._error)  # a copy, since a raised instance keeps its traceback
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
    if logprobs is None or first == 0:
        return logprobs
    kept = {name: getattr(logprobs, name)[first:] for name in TokenLogprobs.__struct_fields__}
    return TokenLogprobs(**kept)

"""The delivery of one request's chunks, in one or several attempts.

If an attempt breaks off by a transient failure, another attempt follows. If no text of the broken attempt has
been streamed to a reader, the next attempt may give any output. If text has been streamed, the next output
must begin with that text. Another attempt is then made only if the request is greedy or seeded:

    attempt 1   "Once upon a"         shown, then the connection is lost
    attempt 2   "Once upon a time."   begins with what was shown; the reader gets " time."
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import cast

import msgspec

from ramify.answers import AnswerStore
from ramify.errors import BackendError, InvalidRequest, RamifyError, UnsupportedField
from ramify.lang.backends import recording
from ramify.lang.backends.base import Backend
from ramify.lang.calls.session import Session, Target
from ramify.lang.prompt.thinking import ThoughtSplitter
from ramify.lang.trace.calls import Call, Failure
from ramify.lang.trace.outputs import add_usage
from ramify.loop import cancel_at_end
from ramify.messages import (
    Generate,
    TextChunk,
    TokenLogprobs,
    Usage,
)
from ramify.model_info import ModelInfo, ThinkingFormat
from ramify.retry import IN_BATCH_S, Retry

ABORT_S = 2.0
"""Longest time, in seconds, that a cancelled step waits for the last chunk of its request, which has the
usage."""


class Delivery:
    """One request of a run to `target`.

    Args:
        show: Called with each new chunk, without the part that an earlier attempt has shown. None if the text
            is not streamed to a reader.
        marks: The marks around the thoughts at the beginning of the output; None for an output without
            thoughts.
    """

    def __init__(
        self,
        session: Session,
        target: Target,
        call: Call,
        show: Callable[[TextChunk], None] | None = None,
        marks: ThinkingFormat | None = None,
    ) -> None:
        self._session, self._call, self._show = session, call, show
        self._backend, self._info = target.backend, target.info
        self._marks = marks
        self.generated: list[TextChunk] = []
        """The chunks of the latest attempt that has received a chunk."""
        self.received: list[TextChunk] = []
        """The chunks of `generated`, with the thoughts separated from the answer."""
        self.split = self._splitter()
        self._reader_split = self._splitter()
        self._shown = ""
        """The text that the reader has been shown by broken attempts: the longest of their texts."""
        self._shown_ids = 0

    async def receive(self, request: Generate) -> str:
        """Receive all chunks, and return the request id of the attempt that delivered the chunks.

        If the backend has a store of answers, the answer is looked up there first, and a new answer is added
        to the store. Raises the last attempt's error if all attempts fail. Raises `BackendError` if an
        attempt's output does not begin with the text that the reader has been shown.
        """
        store: AnswerStore | None = getattr(self._backend, "answers", None)
        key = None if store is None else key_of(request, self._info, await self._revision(request))
        if store is None or key is None:
            return await self._attempts(request)
        found = await asyncio.to_thread(store.get, key)
        if found is not None:
            self._call.stored = True
            take = self._taker()
            for chunk in found:
                take(msgspec.structs.replace(chunk, rid=request.rid))
            return request.rid
        rid = await self._attempts(request)
        finish = self.generated[-1].finish if self.generated else None
        ended = finish is not None and finish.reason != "abort" and finish.limit is None
        # Another adapter may have been loaded under the same name during the request.
        if ended and key == key_of(request, self._info, await self._revision(request)):
            await asyncio.to_thread(store.put, key, self.generated, self._info.name)
        return rid

    async def _revision(self, request: Generate) -> str:
        if not request.lora:
            return ""
        find = getattr(self._backend, "lora_revisions", None)
        if find is None:
            raise UnsupportedField(
                f"{type(self._backend).__name__} does not tell its LoRA adapters apart: their answers cannot "
                "be stored.",
                field="lora",
                remedy="Use no cache.",
            )
        return str((await find()).get(request.lora, ""))

    async def _attempts(self, request: Generate) -> str:
        session, call = self._session, self._call
        retry = getattr(self._backend, "retry", None) or Retry(0)
        repeatable = is_repeatable(request)
        with retry.attempts(IN_BATCH_S if session.in_batch else None) as attempts:
            while True:
                sent_s = session.clock()
                try:
                    await _receive(self._backend, request, self._taker())
                    return request.rid
                except RamifyError as error:
                    failed_s = session.clock()
                    if self._show is not None:
                        self._note_shown()
                    if (self._shown and not repeatable) or not await attempts.again(error):
                        raise
                    call.failures.append(Failure(str(error), sent_s, failed_s, session.clock()))
                request = msgspec.structs.replace(request, rid=session.next_rid())

    def _taker(self) -> Callable[[TextChunk], None]:
        session, call = self._session, self._call
        generated: list[TextChunk] = []
        received: list[TextChunk] = []
        split = self._splitter()
        chars = ids = 0

        def take(chunk: TextChunk) -> None:
            nonlocal chars, ids
            generated.append(chunk)
            if self.received and not received:  # an earlier attempt has broken off
                broken = least_usage(call.own_usage, self.received)
                call.broken_usage, call.own_usage = add_usage(call.broken_usage, broken), Usage()
            received.append(chunk if split is None else split.push(chunk))
            self.generated, self.received, self.split = generated, received, split
            session.heard_s = time.perf_counter()
            call.own_usage = received[-1].usage or call.own_usage
            if call.first_text_s is None and _text(chunk):
                call.first_text_s = session.clock()
            if self._show is not None:
                self._show_rest(chunk, chars, ids)
                chars, ids = chars + len(_text(chunk)), ids + len(chunk.ids)

        return take

    def _show_rest(self, chunk: TextChunk, chars: int, ids: int) -> None:
        """Show the part of `chunk` that the reader lacks. `chars` and `ids` are the characters and tokens of
        the attempt before this chunk."""
        assert self._show is not None
        text = _text(chunk)
        known = self._shown[chars : chars + len(text)]
        ended_early = chunk.finish is not None and chars + len(text) < len(self._shown)
        if ended_early or not text.startswith(known):
            raise BackendError(
                "The answer broke off, and sent again it does not begin with the text that was streamed.",
                remedy="Run it again, or without stream=True.",
            )
        rest = _without(chunk, len(known), max(self._shown_ids - ids, 0))
        if self._reader_split is not None:
            rest = self._reader_split.push(rest)
        self._show(rest)

    def _note_shown(self) -> None:
        self._shown = max(self._shown, "".join(map(_text, self.generated)), key=len)
        self._shown_ids = max(self._shown_ids, sum(len(chunk.ids) for chunk in self.generated))

    def _splitter(self) -> ThoughtSplitter | None:
        return None if self._marks is None else ThoughtSplitter(self._marks)


def _text(chunk: TextChunk) -> str:
    return chunk.reasoning + chunk.text


def least_usage(known: Usage, received: Sequence[TextChunk]) -> Usage:
    """The usage of a request whose last chunk did not come: `known` with its completion_tokens raised, if
    necessary, to the number of tokens in `received`, and without the times of the first token and of the end.
    A chunk of text without token ids counts as one token."""
    tokens = sum([max(len(chunk.ids), bool(chunk.text or chunk.reasoning)) for chunk in received])
    completion_tokens = max(known.completion_tokens, tokens)
    return msgspec.structs.replace(known, completion_tokens=completion_tokens, first_token_s=0.0, total_s=0.0)


def is_repeatable(request: Generate) -> bool:
    """Whether `request` gives the same answer each time, because it is greedy, has a seed, or generates
    nothing."""
    sampling = request.sampling
    return sampling.temperature == 0.0 or sampling.seed is not None or request.decide is not None


def key_of(request: Generate, info: ModelInfo, lora: str = "") -> bytes | None:
    """The key of the answer to `request` in a store of answers; None if the request is sampled without a
    seed.

    The key covers the model, the revision of the request's LoRA adapter (`lora`), the fields of the request
    that change its answer, and the cache scope, so that no tenant gets another tenant's answers. Raises
    `InvalidRequest` if `info` has no fingerprint of the model.
    """
    if not is_repeatable(request):
        return None
    if not info.fingerprint:
        raise InvalidRequest(
            f"The backend gives no fingerprint of {info.name}, so its answers cannot be stored.",
            field="cache",
            remedy="Use a newer server, or no cache.",
        )
    model = f"{info.fingerprint} {lora}" if lora else info.fingerprint
    return hashlib.sha256(model.encode() + b"\n" + recording.key_of(request)).digest()


def _without(chunk: TextChunk, chars: int, ids: int) -> TextChunk:
    if not chars and not ids:
        return chunk
    logprobs = chunk.logprobs
    if logprobs is not None:
        fields = TokenLogprobs.__struct_fields__
        logprobs = TokenLogprobs(**{field: getattr(logprobs, field)[ids:] for field in fields})
    return msgspec.structs.replace(
        chunk,
        reasoning=chunk.reasoning[chars:],
        text=chunk.text[max(0, chars - len(chunk.reasoning)) :],
        ids=chunk.ids[ids:],
        logprobs=logprobs,
        forced=(),
        pieces=(),
        controls=(),
    )


async def _receive(backend: Backend, request: Generate, take: Callable[[TextChunk], None]) -> None:
    """Call `take` with each chunk of the answer to `request`.

    If this coroutine is cancelled, the backend's `abort` is called. `take` still gets the chunks up to the
    last one, whose usage counts all computed tokens. If the backend does not know the request, the
    cancellation does not wait for chunks.
    """

    async def read() -> None:
        chunks = cast("AsyncGenerator[TextChunk, None]", backend.generate(request))
        async with aclosing(chunks):
            async for chunk in chunks:
                take(chunk)

    abort = getattr(backend, "abort", None)
    if abort is None:
        await read()
        return
    reader = asyncio.create_task(read())
    async with cancel_at_end((reader,)):
        try:
            await asyncio.wait((reader,))
        except asyncio.CancelledError:
            if await abort(request.rid) is not False:
                await asyncio.wait((reader,), timeout=ABORT_S)
            raise
    reader.result()

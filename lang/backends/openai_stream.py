"""Answers of OpenAI-compatible endpoints as `TextChunk`s: streams, whole bodies, and broken-off answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec

from ramify.errors import BackendError
from ramify.lang.backends.http import Event, HttpClient
from ramify.lang.backends.http_errors import SHOWN_CHARS
from ramify.messages import Finish, TextChunk, TokenLogprobs, Usage, concatenated
from ramify.text import sentence, shortened

END_S = 5.0
"""Longest wait, in seconds, for the rest of a stream after its finish reason: the usage and the end."""
UNKNOWN_ID = -1
"""Placeholder for the id of a token of which the endpoint reports only the text."""


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Message | None = None
    message: _Message | None = None
    """The whole message, in place of `delta`, if the endpoint does not stream."""
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Any = None


class _Chunk(Event, frozen=True, kw_only=True):
    choices: list[_Choice] | None = None
    usage: Any = None


NOTHING = _Message()


async def text_chunks(
    http: HttpClient, path: str, body: dict[str, Any], rid: str
) -> AsyncIterator[TextChunk]:
    """Post `body` and yield the chunks of the answer.

    The last chunk has the finish and the usage: an endpoint may send the usage after the finish reason.

    An answer is complete if it has a finish reason or its end was announced. If a complete answer has no
    finish reason, the reason is "length" if the usage shows that max_tokens was reached, else "stop".
    """
    reason, refusal, wrote = "", "", False
    usage = Usage()
    async with aclosing(cast("Any", http.events(path, body, _Chunk, whole=True))) as events:
        while True:
            try:
                async with asyncio.timeout(END_S if reason else None):
                    event = await anext(events, None)
            except (TimeoutError, BackendError) as error:
                if not reason or (isinstance(error, BackendError) and not error.begun):
                    raise
                event = None
            if event is None:
                break
            usage = _usage(event.usage) if event.usage else usage
            for choice in event.choices or ():
                reason = choice.finish_reason or reason
                said = choice.delta or choice.message or NOTHING
                text = choice.text or said.content or ""
                reasoning = said.reasoning_content or said.reasoning or ""
                refusal += said.refusal or ""
                logprobs = _logprobs(choice.logprobs) if "logprobs" in body else None
                if text or reasoning or logprobs:
                    wrote = True
                    yield TextChunk(rid=rid, text=text, reasoning=reasoning, logprobs=logprobs)
    if refusal:
        raise BackendError(sentence(f"The model refused: {shortened(refusal, SHOWN_CHARS)}"))
    if not reason and not wrote:
        raise BackendError(f"{http.base_url + path} ended its answer without any output.")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if not reason:
        reason = "length" if limit is not None and usage.completion_tokens >= limit else "stop"
    yield TextChunk(rid=rid, usage=usage, finish=_finish(reason))


async def unwrapped(chunks: AsyncIterator[TextChunk]) -> TextChunk:
    """Read ``{"choice": …}`` from `chunks`; returns one chunk whose text is the choice. Raises `BackendError`
    for any other text."""
    received = [chunk async for chunk in chunks]
    last, text = received[-1], "".join([chunk.text for chunk in received])
    try:
        choice = json.loads(text)["choice"]
    except (ValueError, KeyError, TypeError):
        raise BackendError(f"The endpoint did not keep to the choices; it answered {text!r}.") from None
    logprobs = concatenated([chunk.logprobs for chunk in received])
    thoughts = "".join([chunk.reasoning for chunk in received])
    return TextChunk(
        rid=last.rid, text=choice, reasoning=thoughts, usage=last.usage, finish=last.finish, logprobs=logprobs
    )


def _usage(found: Any) -> Usage:
    def count(*names: str) -> int:
        value = found
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return value if type(value) is int else 0

    return Usage(
        reasoning_tokens=count("completion_tokens_details", "reasoning_tokens"),
        prompt_tokens=count("prompt_tokens"),
        cached_tokens=count("prompt_tokens_details", "cached_tokens"),
        completion_tokens=count("completion_tokens"),
    )


def _finish(reason: str) -> Finish:
    if reason not in ("stop", "length"):
        raise BackendError(f"The endpoint ended the output with {reason!r}.")
    return Finish(reason=cast("Any", reason))


def _logprobs(found: Any) -> TokenLogprobs | None:
    """Convert the log-probabilities of OpenAI's chat API or completions API, which identify tokens by their
    text; None if `found` has none."""
    found = found or {}
    rows = found.get("content")
    if not rows and found.get("tokens"):  # the completions API
        tops = found.get("top_logprobs") or ()
        return _of_texts(
            found["tokens"], found["token_logprobs"], [list((top or {}).items()) for top in tops]
        )
    if not rows:
        return None
    tops = [[(one["token"], one["logprob"]) for one in row.get("top_logprobs") or ()] for row in rows]
    return _of_texts([row["token"] for row in rows], [row["logprob"] for row in rows], tops)


def _of_texts(
    texts: Sequence[str], logprobs: Sequence[float | None], tops: Sequence[Sequence[tuple[str, float]]]
) -> TokenLogprobs:
    """`tops`: (text, log-probability) of the most likely tokens in each place, best first; may be empty."""
    return TokenLogprobs(
        ids=(UNKNOWN_ID,) * len(texts),
        logprobs=tuple(logprobs),
        texts=tuple(texts),
        top=tuple([tuple([(UNKNOWN_ID, logprob) for _, logprob in top]) for top in tops]),
        top_texts=tuple([tuple([text for text, _ in top]) for top in tops]),
    )

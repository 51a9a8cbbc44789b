"""What a replica and a frontend on another machine say to each other, as msgpack.

    frontend ──▶ replica    one call for each message, numbered from 1 within a session
    replica ──▶ frontend    one stream for each session; an item is a list of messages
    both ways               a call for each KV snapshot of cached pages, with its answer
    (`ramify.ray.snapshots`)

A session is one life of an engine core as one frontend sees it: it begins with `Hello`, and its stream ends
when the engine core dies, or with the frontend's next session. The calls carry texts, numbers, bytes, and
references to objects of Ray's store, which Ray pickles.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

import msgspec

from ramify.engine_messages import Failed, Reply, ToFrontend, ToTokenizer
from ramify.messages import Message, ModelInfo


class Hello(Message, frozen=True, kw_only=True):
    """The engine core is up, and the session has begun."""

    info: ModelInfo
    max_prompt_tokens: int
    page_bytes: int
    """Of a KV page; 0 where pages are not transferred."""


class Goodbye(Message, frozen=True, kw_only=True):
    """The last message of a session: the engine core is gone, for this `reason`."""

    reason: str


ToSession = ToFrontend | Hello | Goodbye


def session_id(frontend: str, number: int) -> str:
    """Id of a frontend's session with a replica. Of one frontend's sessions only the one with the highest
    number lives."""
    return f"{frontend}.{number}"


def session_parts(session: str) -> tuple[str, int]:
    """The frontend and the number in a session id."""
    frontend, _, number = session.rpartition(".")
    return frontend, int(number)


_encoder = msgspec.msgpack.Encoder()
_items: msgspec.msgpack.Decoder[list[ToSession]] = msgspec.msgpack.Decoder(list[ToSession])
_answers: msgspec.msgpack.Decoder[Reply | Failed] = msgspec.msgpack.Decoder(Reply | Failed)
_messages: msgspec.msgpack.Decoder[ToTokenizer] = msgspec.msgpack.Decoder(ToTokenizer)


def encode_item(messages: Sequence[ToSession]) -> bytes:
    return _encoder.encode(messages)


def decode_item(item: bytes) -> list[ToSession]:
    return _items.decode(item)


def encode_message(message: ToTokenizer) -> bytes:
    """Raises UnicodeEncodeError for text that is not valid Unicode, and OverflowError for a number of more
    than 64 bits."""
    return _encoder.encode(message)


def decode_message(message: bytes) -> ToTokenizer:
    """Raises `msgspec.ValidationError`."""
    return _messages.decode(message)


def encode_answer(answer: Reply | Failed) -> bytes:
    return _encoder.encode(answer)


def decode_answer(answer: bytes) -> Reply | Failed:
    return _answers.decode(answer)


class NoSession(Exception):
    """The replica does not have this session (any more)."""


class Transport(Protocol):
    """How a frontend reaches replicas: Ray Serve's handle, and another one in tests."""

    def open(self, replica: str, session: str) -> AsyncGenerator[bytes, None]:
        """The items of a new session. Raises what became of the replica; closing it ends the session."""

    async def send(self, replica: str, session: str, number: int, message: bytes) -> None:
        """Returns when the replica has the message; for a `Generate` when the request has ended.

        Raises `NoSession`, and what became of the replica."""

    async def export(self, replica: str, session: str, message: bytes) -> tuple[bytes, Any]:
        """The answer to an `ExportPrefix`, and what `import_` takes as its KV snapshot: None where there is
        none.

        Raises `NoSession`, and what became of the replica."""

    async def import_(self, replica: str, session: str, message: bytes, snapshot: Any) -> bytes:
        """The answer to an `ImportPrefix`. Raises `NoSession`, and what became of the replica or KV
        snapshot."""

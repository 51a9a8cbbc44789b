"""The messages between a replica and a frontend on another machine, as msgpack.

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
    """Bytes of a KV page; 0 if pages are not transferred."""


class Goodbye(Message, frozen=True, kw_only=True):
    """The last message of a session, with the reason of its end."""

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
    """Encode a message. Raises UnicodeEncodeError for text that is not valid Unicode, and OverflowError
    for a number of more than 64 bits."""
    return _encoder.encode(message)


def decode_message(message: bytes) -> ToTokenizer:
    """Raises `msgspec.ValidationError`."""
    return _messages.decode(message)


def encode_answer(answer: Reply | Failed) -> bytes:
    return _encoder.encode(answer)


def decode_answer(answer: bytes) -> Reply | Failed:
    return _answers.decode(answer)


class NoSession(Exception):
    """The replica does not have this session, or has it no longer."""


class Transport(Protocol):
    """A frontend's connection to replicas: over Ray Serve's handle, or within a process in tests."""

    def open(self, replica: str, session: str) -> AsyncGenerator[bytes, None]:
        """Yield the items of a new session. Closing the iterator ends the session. Raises the replica's
        failure."""

    async def send(self, replica: str, session: str, number: int, message: bytes) -> None:
        """Send a message. Returns when the replica has it; for a `Generate` when the request has ended.

        Raises `NoSession`, and the replica's failure."""

    async def export(self, replica: str, session: str, message: bytes) -> tuple[bytes, Any]:
        """The answer to an `ExportPrefix`, and the KV snapshot for `import_`, or None.

        Raises `NoSession`, and the replica's failure."""

    async def import_(self, replica: str, session: str, message: bytes, snapshot: Any) -> bytes:
        """The answer to an `ImportPrefix`. Raises `NoSession`, and the failure of the replica or the
        snapshot."""

"""The messages between a replica and a frontend on another machine, as msgpack.

    frontend ──▶ replica    one call for each message, numbered from 1 within a session
    replica ──▶ frontend    one stream for each session; an item is a list of messages
    both ways               a call for each KV snapshot of cached pages, with its answer
    (`ramify.ray.snapshots`)

A session connects one frontend with one engine core; a restarted engine core needs a new session. The stream
of a session begins with `Hello`. It ends when the engine core dies, or when the frontend begins its next
session. The arguments of calls, which Ray pickles, are texts, numbers, bytes, and references to objects in
Ray's store.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

import msgspec

from ramify.engine_messages import Failed, Reply, ToFrontend, ToTokenizer
from ramify.messages import Message
from ramify.model_info import ModelInfo


class Hello(Message, frozen=True, kw_only=True):
    """The engine core is up, and the session has begun."""

    info: ModelInfo
    max_prompt_tokens: int
    page_bytes: int
    """Size of a KV page in bytes; 0 if pages are not transferred."""


class Goodbye(Message, frozen=True, kw_only=True):
    """The last message of a session, with the reason of its end."""

    reason: str


ToSession = ToFrontend | Hello | Goodbye


def session_id(frontend: str, number: int) -> str:
    """Id of a frontend's session with a replica.

    Of the sessions of one frontend, only that with the highest number is live.
    """
    return f"{frontend}.{number}"


def session_parts(session: str) -> tuple[str, int]:
    """(frontend, number) of a session id."""
    frontend, _, number = session.rpartition(".")
    return frontend, int(number)


encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
"""Encode a message, or the list of messages of an item.

Raises UnicodeEncodeError for text that is not valid Unicode, and OverflowError for a number of more than 64
bits.
"""
decode_item: Callable[[bytes], list[ToSession]] = msgspec.msgpack.Decoder(list[ToSession]).decode
decode_message: Callable[[bytes], ToTokenizer] = msgspec.msgpack.Decoder(ToTokenizer).decode
"""Decode a message. Raises `msgspec.ValidationError` if it is malformed."""
decode_answer: Callable[[bytes], Reply | Failed] = msgspec.msgpack.Decoder(Reply | Failed).decode


class NoSession(Exception):
    """The replica does not have this session, or does not have it any more."""


class Transport(Protocol):
    """A frontend's connection to replicas: over a handle of Ray Serve, or in tests within a process."""

    def open(self, replica: str, session: str) -> AsyncGenerator[bytes, None]:
        """Begin a session and yield its items.

        Closing the iterator ends the session. Raises the replica's error.
        """

    async def send(self, replica: str, session: str, number: int, message: bytes) -> None:
        """Send message `number`.

        Returns when the replica has received it; for a `Generate`, when the request has ended. Raises
        `NoSession`, and the replica's error.
        """

    async def export(self, replica: str, session: str, message: bytes) -> tuple[bytes, Any]:
        """Send an `ExportPrefix`.

        Returns the answer, and the KV snapshot for `import_`, None if there is none. Raises `NoSession`, and
        the replica's error.
        """

    async def import_(self, replica: str, session: str, message: bytes, snapshot: Any) -> bytes:
        """Send an `ImportPrefix` with its KV snapshot; returns the answer.

        Raises `NoSession`, and the error of the replica or of fetching the snapshot.
        """

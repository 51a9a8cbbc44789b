"""The sockets between the processes: msgpack over ZeroMQ PUSH/PULL on ``ipc://`` paths; and `Publisher`.

This is the only file that imports zmq. A process binds one `Inbox` and connects an `Outbox` to each
peer it sends to. Sends never block: the frontend limits the number of requests in flight.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from ramify.runtime.faults import errors_logged

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class Inbox(Generic[T]):
    """The receiving end at `path`, for messages of type `kind` (a union of tagged structs).

    refuse : called for a message of another type, with the request id and the reason; None: `recv` raises
    """

    def __init__(self, path: Path, kind: Any, refuse: Callable[[str, str], None] | None = None) -> None:
        self._refuse = refuse
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{path}")
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._loop: asyncio.AbstractEventLoop | None = None

    def recv(self, timeout_s: float | None = None) -> T | None:
        """The next message. Waits for at most `timeout_s` seconds, or without limit if that is None.

        Returns None if no message has arrived in time, or if the message was refused.
        """
        timeout_ms = None if timeout_s is None else max(0, int(timeout_s * 1000) + 1)
        if self._socket.poll(timeout_ms) == 0:
            return None
        return self.decode(self._socket.recv())

    def recv_encoded(self, *, wait: bool) -> bytes | None:
        """The next message, encoded; `decode` decodes it. Without `wait`, None if no message has arrived."""
        try:
            return self._socket.recv(0 if wait else zmq.NOBLOCK)
        except zmq.Again:
            return None

    def decode(self, message: bytes) -> T | None:
        """The decoded message; None if it was refused."""
        try:
            return self._decoder.decode(message)
        except msgspec.ValidationError as error:
            if self._refuse is None:
                raise
            self._refuse(msgspec.msgpack.decode(message).get("rid", ""), str(error))
            return None

    def drain(self) -> list[T]:
        """All messages that have arrived, without waiting. Messages that cannot be decoded are only
        logged."""
        messages: list[T] = []
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            with errors_logged("decoding a message"):
                messages.append(self._decoder.decode(message))

    def attach(self, loop: asyncio.AbstractEventLoop, handle: Callable[[T], None]) -> None:
        """Call `handle` on `loop` for every message from now on. Exceptions of `handle` are logged."""

        def readable() -> None:
            # ZeroMQ's descriptor is edge-triggered: it signals again only after all messages were read.
            for message in self.drain():
                with errors_logged(f"handling a {type(message).__name__}"):
                    handle(message)

        self._loop = loop
        loop.add_reader(int(self._socket.getsockopt(zmq.FD)), readable)
        loop.call_soon(readable)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(int(self._socket.getsockopt(zmq.FD)))
            self._loop = None
        self._socket.close()


class Outbox:
    """The sending end for the `Inbox` at `path`, which may be bound later."""

    def __init__(self, path: Path) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{path}")

    def send(self, message: msgspec.Struct) -> None:
        """Queue `message`. Raises UnicodeEncodeError for text that is not valid Unicode."""
        self._socket.send(_encoder.encode(message))

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket. Queued messages are still sent, for up to `linger_s` seconds."""
        self._socket.close(linger=int(linger_s * 1000))


class Publisher:
    """Publishes numbered messages to any number of subscribers by a PUB socket at `address`. A ROUTER socket
    at the address `replay`, if given, sends missed messages again.

    The frames are those of vLLM's KV events. Numbers have 8 bytes and are big-endian:

        to subscribers    topic, number (from 0 on), payload
        a request         [delimiter], first number that is wanted
        each answer       [delimiter], topic, number, payload
        after the last    [delimiter], an empty frame, -1, an empty frame

    A delimiter is an empty frame, which REQ sockets add. Answers have one if the request has one.

    A subscriber that reads too slowly misses messages, and notices the gap by the numbers. For replays the
    last messages are kept: at most `KEPT` messages, of `KEPT_BYTES` bytes in all. Raises `OSError` if an
    address cannot be bound. Port 0 means any free port.
    """

    KEPT = 10_000
    KEPT_BYTES = 256 << 20
    UNREAD = 100_000
    """Maximum number of messages that are queued for one subscriber."""
    END = (-1).to_bytes(8, "big", signed=True)

    def __init__(self, address: str, replay: str | None = None) -> None:
        self.topic = ""
        self._number = 0
        self._kept: collections.deque[tuple[bytes, bytes]] = collections.deque()
        self._kept_bytes = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        try:
            self.address = self._bind(zmq.PUB, address, self.UNREAD)
            self.replay_address = None if replay is None else self._bind(zmq.ROUTER, replay, 2 * self.KEPT)
        except OSError:
            self.close()
            raise

    def _bind(self, kind: int, address: str, unread: int) -> str:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(unread)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, "[" in address or "*" in address)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"Cannot listen on {address}: {error.strerror}.") from None
        return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def publish(self, payload: bytes) -> None:
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self.KEPT or self._kept_bytes > self.KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._sockets[0].send_multipart((self.topic.encode(), number, payload), zmq.NOBLOCK)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on, answer requests for replays on `loop`."""
        if self.replay_address is not None:
            self._loop = loop
            loop.add_reader(int(self._sockets[1].getsockopt(zmq.FD)), self.answer)
            loop.call_soon(self.answer)

    def answer(self) -> None:
        """Answer one request for a replay, if one has come.

        One call answers only one request: otherwise a subscriber that asks again and again would block the
        loop.
        """
        if len(self._sockets) < 2:
            return  # closed
        try:
            request = self._sockets[1].recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if self._loop is not None:  # the descriptor is edge-triggered, and another request may have come
            self._loop.call_soon(self.answer)
        if len(request) != 3 or len(request[2]) != 8:
            return
        for number, payload in self._kept:
            if number >= request[2]:
                self._replay(request[0], self.topic.encode(), number, payload)
        self._replay(request[0], b"", self.END, b"")

    def _replay(self, asker: bytes, *frames: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # the subscriber's queue is full
            self._sockets[1].send_multipart((asker, b"", *frames), zmq.NOBLOCK)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(int(self._sockets[1].getsockopt(zmq.FD)))
            self._loop = None
        for socket in self._sockets:
            socket.close()
        self._sockets = []


LONGEST_PATH = 103
"""Longest path of a socket, in bytes, that every system accepts: sun_path of unix(7) has 104 to 108 bytes
with the terminating zero."""
LONGEST_NAME = len("/ramify-xxxxxxxx/compiler-99999")


def socket_folder() -> Path:
    """Create a private folder (mode 0700) for an engine core's sockets: in TMPDIR, or in /tmp if the path of
    TMPDIR is too long."""
    usual = tempfile.gettempdir()
    fits = len(os.fsencode(usual)) + LONGEST_NAME <= LONGEST_PATH
    return Path(tempfile.mkdtemp(prefix="ramify-", dir=usual if fits else "/tmp"))


class Sockets:
    """The socket paths of one engine core, in its private directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = directory / "tokenizer"
        self.scheduler = directory / "scheduler"
        self.detokenizer = directory / "detokenizer"
        self.frontend = directory / "frontend"

    def rank(self, index: int) -> Path:
        """The socket of rank `index`, at least 1. Rank 0 is the scheduler."""
        return self.directory / f"rank-{index}"

    def compiler(self, generation: int) -> Path:
        """The socket of grammar compiler number `generation`; a restarted compiler has the next number."""
        return self.directory / f"compiler-{generation}"

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
    """Receives messages of type `kind` (a union of tagged structs) at `path`.

    With `refuse`, `recv` calls it with the request id and the reason where a message is of another type.
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
        """The next message, or None after `timeout_s` seconds without one. With None it waits for ever.

        None as well for a message that was refused.
        """
        timeout_ms = None if timeout_s is None else max(0, int(timeout_s * 1000) + 1)
        if self._socket.poll(timeout_ms) == 0:
            return None
        return self.decode(self._socket.recv())

    def recv_encoded(self, *, wait: bool) -> bytes | None:
        """The next message for `decode`. Without `wait`, None where none has arrived."""
        try:
            return self._socket.recv(0 if wait else zmq.NOBLOCK)
        except zmq.Again:
            return None

    def decode(self, message: bytes) -> T | None:
        """The message; None where it was refused, as `recv` says."""
        try:
            return self._decoder.decode(message)
        except msgspec.ValidationError as error:
            if self._refuse is None:
                raise
            self._refuse(msgspec.msgpack.decode(message).get("rid", ""), str(error))
            return None

    def drain(self) -> list[T]:
        """All messages that have arrived, without waiting. What cannot be decoded is logged."""
        messages: list[T] = []
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            with errors_logged("decoding a message"):
                messages.append(self._decoder.decode(message))

    def attach(self, loop: asyncio.AbstractEventLoop, handle: Callable[[T], None]) -> None:
        """Call `handle` on `loop` for every message from now on. Its exceptions are logged."""

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
    """Sends messages to the `Inbox` at `path`, which may be bound later."""

    def __init__(self, path: Path) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{path}")

    def send(self, message: msgspec.Struct) -> None:
        """Queue `message`. Raises UnicodeEncodeError for text that is not valid Unicode."""
        self._socket.send(_encoder.encode(message))

    def close(self, linger_s: float = 0.0) -> None:
        """Close. Queued messages are still sent for up to `linger_s` seconds."""
        self._socket.close(linger=int(linger_s * 1000))


class Publisher:
    """Numbered messages for any number of subscribers: a PUB socket at `address`, and with `replay` a ROUTER
    socket at which they get again what they have missed.

    The frames are those of vLLM's KV events, numbers being 8 bytes, big-endian:

        to subscribers    topic, number from 0 on, payload
        a request         (empty,) first number
        its answers       (empty,) topic, number, payload; after the last (empty,) empty, -1, empty

    A subscriber that reads too slowly misses messages, and sees by the numbers that it has. `KEPT` messages
    of at most `KEPT_BYTES` are kept for replays. Raises `OSError` where an address cannot be bound; a port of
    0 is any free one.
    """

    KEPT = 10_000
    KEPT_BYTES = 256 << 20
    UNREAD = 100_000
    """Messages that may wait for a subscriber."""
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
        """Answer requests for replays on `loop` from now on."""
        if self.replay_address is not None:
            self._loop = loop
            loop.add_reader(int(self._sockets[1].getsockopt(zmq.FD)), self.answer)
            loop.call_soon(self.answer)

    def answer(self) -> None:
        """Answer a request for a replay, if one has come.

        One a call: a subscriber that asks again at once would keep the loop from all else.
        """
        if len(self._sockets) < 2:
            return  # closed
        try:
            request = self._sockets[1].recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if self._loop is not None:  # the descriptor is edge-triggered, and another one may have come
            self._loop.call_soon(self.answer)
        if len(request) != 3 or len(request[2]) != 8:
            return
        for number, payload in self._kept:
            if number >= request[2]:
                self._replay(request[0], self.topic.encode(), number, payload)
        self._replay(request[0], b"", self.END, b"")

    def _replay(self, asker: bytes, *frames: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # too much waits for it
            self._sockets[1].send_multipart((asker, b"", *frames), zmq.NOBLOCK)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(int(self._sockets[1].getsockopt(zmq.FD)))
            self._loop = None
        for socket in self._sockets:
            socket.close()
        self._sockets = []


LONGEST_PATH = 103
"""Bytes of a socket's path that every system accepts: sun_path of unix(7) has 104 to 108 with the zero."""
LONGEST_NAME = len("/ramify-xxxxxxxx/compiler-99999")


def socket_folder() -> Path:
    """A new private folder (mode 0700) for an engine core's sockets: in TMPDIR, or in /tmp if TMPDIR is too
    long."""
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
        """The socket of rank `index`, from 1 on: the first rank is the scheduler."""
        return self.directory / f"rank-{index}"

    def compiler(self, generation: int) -> Path:
        """The socket of grammar compiler number `generation`; a restarted compiler has the next number."""
        return self.directory / f"compiler-{generation}"

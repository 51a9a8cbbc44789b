"""Reads the body of a request. Its size, before and after inflating, and the time to read it are limited."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import zstandard
from starlette.requests import Request

from ramify.errors import InvalidRequest
from ramify.runtime.server.errors import ClientGone

MAX_BODY_BYTES = 32 << 20
"""Maximum size of a body in bytes, both as sent and inflated. A batch of 700 prompts of 8,000 token ids each
is about 32 MB of JSON."""
READ = "ramify.body"
"""Key of a request's scope: the body, if `peek_body` has read it."""
MAX_MEMBERS = 16
"""Maximum number of members of a gzip body, and of frames of a zstd body."""
PIECE_BYTES = 1024
"""Number of bytes that are inflated at a time. Of zstd they may become 32 MiB."""
BODY_IDLE_S = 60.0
"""Longest time without a byte of the body, in seconds."""


class BodyTooLarge(InvalidRequest):
    """The error 413 (RFC 9110, section 15.5.14)."""

    code = "body_too_large"
    status = 413


class BodyTimeout(InvalidRequest):
    """The error 408 (RFC 9110, section 15.5.9)."""

    code = "body_timeout"
    status = 408


class UnsupportedEncoding(InvalidRequest):
    """The error 415 (RFC 9110, section 15.5.16)."""

    code = "unsupported_content_encoding"
    status = 415


async def peek_body(request: Request) -> bytes:
    """The request's body as `read_body` returns it, which a later call of either returns again."""
    body = request.scope[READ] = await read_body(request)
    return body


async def read_body(request: Request) -> bytes:
    """The request's body, inflated. Raises `BodyTooLarge`, `BodyTimeout`, `UnsupportedEncoding`, and
    `InvalidRequest` for a body that cannot be inflated."""
    read: bytes | None = request.scope.pop(READ, None)  # not kept for as long as the response takes
    return await _read(request) if read is None else read


async def _read(request: Request) -> bytes:
    encoding = ",".join(request.headers.getlist("content-encoding")).strip().lower() or "identity"
    if encoding != "identity" and encoding not in _DECODERS:
        raise UnsupportedEncoding(
            f"The content encoding {encoding[:100]!r} is not supported.",
            remedy="Send the body as it is, or with content-encoding: gzip, deflate or zstd.",
        )
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    size = 0
    parts: list[bytes] = []
    more = True
    try:
        while more:
            async with asyncio.timeout(BODY_IDLE_S):
                message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("The client went away in the middle of the body.")
            part, more = message.get("body", b""), message.get("more_body", False)
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise _too_large()
            parts.append(part)
    except TimeoutError:
        raise BodyTimeout(
            f"The body brought no byte for {BODY_IDLE_S:g} seconds, and it has not ended after {size} bytes.",
            remedy="Send as many bytes as content-length says.",
        ) from None
    body = b"".join(parts)
    return body if encoding == "identity" or not body else await asyncio.to_thread(_inflated, body, encoding)


_DECODERS: dict[str, Callable[[], Any]] = {
    "gzip": partial(zlib.decompressobj, 31),
    "x-gzip": partial(zlib.decompressobj, 31),
    "deflate": partial(zlib.decompressobj, 15),
    "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=MAX_BODY_BYTES).decompressobj(),
}
"""Content encoding → function that makes an object with `decompress`, `eof` and `unused_data`."""


def _inflated(body: bytes, encoding: str) -> bytes:
    """`body` without its content encoding, at most `MAX_BODY_BYTES`. It may have at most `MAX_MEMBERS`
    members or frames."""
    make = _DECODERS[encoding]
    if encoding == "deflate" and (body[0] & 15 != 8 or int.from_bytes(body[:2]) % 31):
        make = partial(zlib.decompressobj, -15)  # without zlib's header, as some clients send it
    parts: list[bytes] = []
    room = MAX_BODY_BYTES
    members, member = 1, make()
    for start in range(0, len(body), PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        while piece:
            if member.eof:
                if encoding == "deflate":
                    return b"".join(parts)
                members, member = members + 1, make()
                if members > MAX_MEMBERS:
                    raise InvalidRequest(
                        f"The body has more than {MAX_MEMBERS} {encoding} members.",
                        remedy="Compress it as a whole, in one member.",
                    )
            try:
                parts.append(member.decompress(piece))
            except (zlib.error, zstandard.ZstdError) as error:
                problem = str(error).rpartition(": ")[2]
                raise InvalidRequest(
                    f"The body is not {encoding}, its content encoding: {problem}."
                ) from None
            room -= len(parts[-1])
            if room < 0:
                raise _too_large()
            piece = member.unused_data if member.eof else b""
    if not member.eof:
        raise InvalidRequest(f"The body ends in the middle of its content encoding, {encoding}.")
    return b"".join(parts)


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(
        f"The body has more than {MAX_BODY_BYTES} bytes.", remedy="Split it over several requests."
    )

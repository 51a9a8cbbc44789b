"""The format of a KV snapshot: a prefix's KV pages as bytes, in a file, shared memory or an object store.

    offset                   bytes
    0                        24      magic, version, length and CRC-32 of the header, CRC-32 of the tables
    24                       h       `Header` as msgpack
    24 + h                   4 n     tables: token ids [0, n), int32
    24 + h + 4 n             4 p             the CRC-32 of each page that follows
    24 + h + 4 n + 4 p       B p     pages, each (2, layers, kv_heads, page_size, head_dim): keys, then values

Numbers are little-endian. The token ids are those of all whole pages of the prefix. The pages begin with
number `first_page`, for a reader that already holds the earlier ones. Nothing follows the last page.

The writer writes the first 24 bytes last, so that an unfinished KV snapshot has no magic. The checksum is
CRC-32 as zlib computes it (3 GB/s): it finds every flipped bit and every burst of up to 32 bits, is in the
standard library, and lets other threads run. It is no signature: anyone who can write to the folder can make
a KV snapshot that passes. A reader takes numbers and two strings from a KV snapshot; nothing is executed.
"""

from __future__ import annotations

import struct
import sys
import zlib
from typing import Annotated, Protocol

import msgspec
import numpy as np

MAGIC = b"RMFYKVIM"
VERSION = 1
_PREFIX = struct.Struct("<8sIIII")
MOST_HEADER = 1 << 20
"""Maximum size of the header in bytes. The header contains the cache scope."""

Bytes = bytes | bytearray | memoryview
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class BadSnapshot(Exception):
    """Raised when a KV snapshot cannot be used, with a message for the log."""


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    identity: str
    """The KV identity of the engine that wrote the pages (`ramify.runtime.kv_transfer.identity`)."""
    scope: str
    """The prefix tree's scope: the request's cache scope and the revision of its LoRA adapter."""
    tokens: Count
    """Number of tokens of the prefix, a multiple of `page_size`."""
    page_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 20)]
    page_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    first_page: Count

    @property
    def pages(self) -> int:
        """Number of pages in the KV snapshot."""
        return self.tokens // self.page_size - self.first_page


class Source(Protocol):
    """Bytes from which a KV snapshot is read."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, size: int) -> Bytes:
        """Exactly `size` bytes from `offset` on, or fewer at the end of the snapshot. The bytes are a copy
        that nobody else writes to."""
        ...


class Sink(Protocol):
    def write(self, offset: int, data: Bytes) -> None: ...


class SnapshotWriter:
    """Writes a KV snapshot. The pages are written in order, any number of them at a time.

    ids : token ids of the prefix, (n,) int32, n a multiple of `page_size`
    """

    def __init__(
        self,
        sink: Sink,
        *,
        identity: str,
        scope: str,
        ids: np.ndarray,
        page_size: int,
        page_bytes: int,
        first_page: int,
    ) -> None:
        self._sink = sink
        self._ids = ids.astype("<i4").tobytes()
        self._header = Header(
            identity=identity,
            scope=scope,
            tokens=len(ids),
            page_size=page_size,
            page_bytes=page_bytes,
            first_page=first_page,
        )
        self._encoded = msgspec.msgpack.encode(self._header)
        self._tables_at = _PREFIX.size + len(self._encoded)
        self._pages_at = self._tables_at + len(self._ids) + 4 * self._header.pages
        self._sums: list[int] = []

    def write_pages(self, data: Bytes) -> None:
        """Write the next pages, `page_bytes` each."""
        view, size = memoryview(data).cast("B"), self._header.page_bytes
        self._sink.write(self._pages_at + len(self._sums) * size, view)
        self._sums += [zlib.crc32(view[at : at + size]) for at in range(0, len(view), size)]

    def finish(self) -> None:
        assert len(self._sums) == self._header.pages
        tables = self._ids + np.array(self._sums, "<u4").tobytes()
        header = self._encoded
        self._sink.write(_PREFIX.size, header)
        self._sink.write(self._tables_at, tables)
        sums = zlib.crc32(header), zlib.crc32(tables)
        self._sink.write(0, _PREFIX.pack(MAGIC, VERSION, len(header), *sums))


class SnapshotReader:
    """Reads a KV snapshot. Every method raises `BadSnapshot` if the snapshot is damaged or unfinished, or has
    another version."""

    def __init__(self, source: Source) -> None:
        if sys.byteorder != "little":
            raise BadSnapshot("this machine's numbers are big-endian")
        self._source = source
        start = bytes(source.read(0, _PREFIX.size))
        if len(start) < _PREFIX.size:
            raise BadSnapshot(f"it has {len(start)} bytes")
        magic, version, length, header_sum, tables_sum = _PREFIX.unpack(start)
        if magic != MAGIC:
            raise BadSnapshot("it does not begin as a KV snapshot, or was never finished")
        if version != VERSION:
            raise BadSnapshot(f"it is of version {version}; this is version {VERSION}")
        if length > MOST_HEADER:
            raise BadSnapshot(f"its header has {length} bytes")
        encoded = bytes(source.read(_PREFIX.size, length))
        if len(encoded) != length or zlib.crc32(encoded) != header_sum:
            raise BadSnapshot("the checksum of its header is wrong")
        try:
            self.header = header = msgspec.msgpack.decode(encoded, type=Header)
        except msgspec.DecodeError as error:
            raise BadSnapshot(f"its header cannot be read: {error}") from None
        if header.tokens % header.page_size or header.pages < 0:
            raise BadSnapshot(f"{header.tokens} tokens are not its pages")
        ids_at = _PREFIX.size + length
        sums_at = ids_at + 4 * header.tokens
        self._pages_at = sums_at + 4 * header.pages
        expected = self._pages_at + header.pages * header.page_bytes
        if source.size != expected:
            raise BadSnapshot(f"it has {source.size} bytes; its header says {expected}")
        tables = bytes(source.read(ids_at, self._pages_at - ids_at))
        if zlib.crc32(tables) != tables_sum:
            raise BadSnapshot("the checksum of its token ids is wrong")
        self.ids = np.frombuffer(tables, "<i4", header.tokens).astype(np.int32)
        """Token ids of the prefix, (tokens,) int32."""
        self._sums = np.frombuffer(tables, "<u4", header.pages, 4 * header.tokens)

    def pages(self, start: int, count: int) -> Bytes:
        """Read the pages ``[start, start + count)`` of the prefix, and check their checksums."""
        size, at = self.header.page_bytes, start - self.header.first_page
        data = self._source.read(self._pages_at + at * size, count * size)
        view = memoryview(data)
        for index in range(count):
            if zlib.crc32(view[index * size : (index + 1) * size]) != self._sums[at + index]:
                raise BadSnapshot(f"the checksum of page {start + index} is wrong")
        return data

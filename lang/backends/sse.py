"""A parser of server-sent events (WHATWG HTML, 9.2.6) that accepts common deviations.

b'\\xef\\xbb\\xbf: ping\\r\\n'                a byte order mark and a comment: nothing
b'event: error\\ndata: {"a":\\ndata: 1}\\n\\n'  one event, "error", of two lines
b'data: {"a": 1}\\ndata: [DONE]\\n'         two events: complete JSON ends an event without a blank line
b'<html>…'                               no event; the line is kept in `stray`
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

DONE = b"[DONE]"
"""Data of the event that ends OpenAI's streams."""


class SentEvent(NamedTuple):
    name: bytes
    """Name of the event; empty if it has none."""
    data: bytes


class EventParser:
    """A parser to which the parts of a body are pushed, and which yields events. A line may have any
    length."""

    def __init__(self) -> None:
        self.stray: list[bytes] = []
        """Lines that are neither a field nor a comment. If there are any, the answer is not an event
        stream."""
        self._rest = b""
        self._after_cr = False
        self._began = False
        self._name = b""
        self._data: list[bytes] = []

    def push(self, part: bytes) -> Iterator[SentEvent]:
        """Parse the next part of the body, which is not empty; yields the events that end in it."""
        if self._after_cr and part.startswith(b"\n"):
            part = part[1:]
        self._after_cr = part.endswith(b"\r")
        lines = (self._rest + part).splitlines(keepends=True)
        self._rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        for line in lines:
            yield from self._line(line.rstrip(b"\r\n"))

    def end(self) -> Iterator[SentEvent]:
        """End the body. Yields the last event if its data is complete and only the blank line after it is
        missing."""
        yield from self._line(self._rest)
        if _is_whole(self._data):
            yield from self._ended()

    def _line(self, line: bytes) -> Iterator[SentEvent]:
        if not self._began:
            self._began, line = True, line.removeprefix(codecs.BOM_UTF8)
        if not line:
            yield from self._ended()
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            if _is_whole(self._data):
                yield from self._ended()
            self._data.append(value.removeprefix(b" "))
        elif field == b"event":
            self._name = value.strip()
        elif field not in (b"", b"id", b"retry"):
            self.stray.append(line)

    def _ended(self) -> Iterator[SentEvent]:
        name, data = self._name, b"\n".join(self._data).strip()
        self._name, self._data = b"", []
        if data:
            yield SentEvent(name, data)


def _is_whole(lines: list[bytes]) -> bool:
    """Whether the data of an event is complete, so that no further line belongs to it."""
    if not lines:
        return False
    data = b"\n".join(lines)
    if data.strip() == DONE:
        return True
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True

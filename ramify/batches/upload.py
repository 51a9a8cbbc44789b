"""A form with one file (multipart/form-data, RFC 7578), read to the disk as it comes."""

from __future__ import annotations

import asyncio
import os
from typing import IO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.runtime.server.body import BODY_IDLE_S, BodyTimeout, BodyTooLarge, UnsupportedEncoding
from ramify.runtime.server.errors import ClientGone

MAX_FILE_BYTES = 200 << 20
"""Maximum size of an uploaded form in bytes. OpenAI's limit for the file is 200 MB."""
MAX_FIELD_BYTES = 1024
"""Maximum size of a field other than the file, in bytes."""
MAX_HEADER_BYTES = 4096
"""Maximum size of the name or the value of a part's header, in bytes."""
FIELDS = ("purpose", "file")


class Form:
    """The parts of a form. The bytes of the part ``file`` go to `file`, other fields to `fields`."""

    def __init__(self, content_type: str, file: IO[bytes]) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= 70:  # RFC 2046, section 5.1.1
            raise InvalidRequest(
                "A file is uploaded as a form.",
                field="file",
                remedy="Send content-type: multipart/form-data with a boundary, as curl -F does.",
            )
        self.fields: dict[str, bytes] = {}
        self.filename: str | None = None
        self._file = file
        self._ended = False
        self._name = ""
        self._header = [b"", b""]
        self._disposition = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._add_data,
                "on_end": self._end,
            },
        )

    def write(self, data: bytes) -> None:
        """Parse the next bytes of the form. Raises `InvalidRequest` for a wrong form, and OSError for a file
        that cannot be written."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"The body is no multipart form: {error}.") from None

    def close(self) -> None:
        """Raise `InvalidRequest` unless the form is complete."""
        if not self._ended:
            raise InvalidRequest("The form ends before its last boundary.")
        for name in FIELDS:
            if name not in self.fields:
                raise InvalidRequest(f"{name} is missing.", field=name)

    def _begin_part(self) -> None:
        self._header, self._disposition = [b"", b""], b""

    def _add_header(self, at: int, data: bytes) -> None:
        if len(self._header[at]) + len(data) > MAX_HEADER_BYTES:
            raise InvalidRequest(f"A header of the form has more than {MAX_HEADER_BYTES} bytes.")
        self._header[at] += data

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = [b"", b""]

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = name = options.get(b"name", b"").decode(errors="replace")[:100]
        if name not in FIELDS:
            remedy = f"The fields are {' and '.join(FIELDS)}."
            raise UnsupportedField(f"{name!r} is not a field of this form.", field=name, remedy=remedy)
        if name in self.fields:
            raise InvalidRequest(f"{name} is given twice.", field=name)
        self.fields[name] = b""
        if name == "file":
            self.filename = options.get(b"filename", b"").decode(errors="replace")[:255]

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._file.write(data[start:end])
            return
        self.fields[self._name] += data[start:end]
        if len(self.fields[self._name]) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{self._name} is longer than {MAX_FIELD_BYTES} bytes.", field=self._name)

    def _end(self) -> None:
        self._ended = True


def form_bytes(request: Request) -> int:
    """The most bytes that the form of a request may have."""
    length = request.headers.get("content-length", "")
    return min(int(length), MAX_FILE_BYTES) if length.isascii() and length.isdigit() else MAX_FILE_BYTES


async def read_form(request: Request, file: IO[bytes]) -> Form:
    """Read the form of a request, and write its file to `file`, which is flushed to the disk at the end. The
    bytes are parsed and written in threads."""
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise UnsupportedEncoding(
            f"An upload with the content encoding {encoding[:100]!r} is not supported.",
            remedy="Send it as it is.",
        )
    form = Form(request.headers.get("content-type", ""), file)
    size, stream = 0, request.stream()
    try:
        while True:
            async with asyncio.timeout(BODY_IDLE_S):
                part = await anext(stream, None)
            if part is None:
                break
            size += len(part)
            if size > MAX_FILE_BYTES:
                raise BodyTooLarge(
                    f"The upload has more than {MAX_FILE_BYTES} bytes.",
                    field="file",
                    remedy="Split it into several files.",
                )
            await asyncio.to_thread(form.write, part)
    except ClientDisconnect:
        raise ClientGone("The client went away in the middle of the upload.") from None
    except TimeoutError:
        raise BodyTimeout(f"The upload brought no byte for {BODY_IDLE_S:g} seconds.") from None
    form.close()
    file.flush()
    await asyncio.to_thread(os.fsync, file.fileno())
    return form

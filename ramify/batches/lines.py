"""The lines of a batch's input file: checked, grouped by prefix, and each with its result.

{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ramify.batches.store import LineError
from ramify.errors import InvalidRequest
from ramify.lang.batch.checkpoint import LINE, Identity, ResultsFile
from ramify.lang.batch.keys import key_identity
from ramify.lang.batch.window import Row, Window
from ramify.runtime.server.body import MAX_BODY_BYTES
from ramify.runtime.server.fields import Fields

MAX_LINES = 50_000
"""Maximum number of lines of an input file (OpenAI's limit)."""
MAX_ERRORS = 100
"""Maximum number of errors that are told of one input file."""
MAX_ID = 512
"""Maximum length of a ``custom_id``, in characters."""
LOOK_AHEAD = 1024
"""Number of lines among which those with a common prefix are grouped."""
PREFIX = 4096
"""Number of bytes of each field of `PROMPT` by which lines are grouped."""
PROMPT = ("model", "tools", "system", "instructions", "messages", "input", "state", "query", "prompt")
"""Fields of a body in the order in which they make the prompt."""


class Line(msgspec.Struct):
    """A line of an input file."""

    custom_id: str
    method: str
    url: str
    body: dict[str, msgspec.Raw]


class InputCheck(NamedTuple):
    """The result of checking an input file."""

    lines: int
    model: str | None
    """The model that the first line names."""
    errors: list[LineError]


def input_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, place in bytes, text) of each line that is not blank. A line that is longer than a
    body may be ends the iteration, cut."""
    with path.open("rb") as file:
        number = place = 0
        while text := file.readline(MAX_BODY_BYTES + 1):
            number += 1
            if text.strip():
                yield number, place, text
            if len(text) > MAX_BODY_BYTES:
                return
            place += len(text)


def check_lines(path: Path, endpoint: str) -> InputCheck:
    """Check each line of an input file. At most `MAX_ERRORS` errors are found."""
    errors: list[LineError] = []
    seen: set[int] = set()
    lines, model = 0, None
    for number, _, text in input_lines(path):
        lines += 1
        if lines > MAX_LINES:
            message = f"The file has more than {MAX_LINES} requests. Split it into several files."
            errors.append(LineError("too_many_requests", message, number))
        try:
            line = _checked(text, endpoint)
            identity = key_identity(line.custom_id)
            if identity in seen:
                raise InvalidRequest(
                    f"custom_id {line.custom_id!r} is that of an earlier line.", field="custom_id"
                )
            seen.add(identity)
            model = model or (_text(line.body, "model") if lines == 1 else None)
        except InvalidRequest as error:
            code = "invalid_json_line" if error.field is None else "invalid_request"
            errors.append(LineError(code, str(error), number, error.field))
        if len(errors) >= MAX_ERRORS or lines > MAX_LINES:
            break
    if not lines:
        errors.append(LineError("empty_file", "The input file has no request.", None, "input_file_id"))
    return InputCheck(lines, model, errors)


def _checked(text: bytes, endpoint: str) -> Line:
    if len(text) > MAX_BODY_BYTES:
        raise InvalidRequest(f"The line has more than {MAX_BODY_BYTES} bytes.")
    try:
        fields = Fields.parse(text)
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace("The body", "The line", 1)) from None
    taken = {name: fields.need(name) for name in ("custom_id", "method", "url")}
    line = Line(**taken, body=fields.need("body", dict[str, msgspec.Raw]))
    fields.refuse_rest()
    if len(line.custom_id) > MAX_ID:
        raise InvalidRequest(f"custom_id has more than {MAX_ID} characters.", field="custom_id")
    if line.method != "POST":
        raise InvalidRequest(f"method is {line.method[:100]!r}; it must be POST.", field="method")
    if line.url != endpoint:
        raise InvalidRequest(
            f"url is {line.url[:100]!r}, and the batch's endpoint is {endpoint!r}.", field="url"
        )
    if bytes(line.body.get("stream", b"false")) not in (b"false", b"null"):
        raise InvalidRequest("body.stream must be false: a line has one answer.", field="body.stream")
    return line


def _text(body: dict[str, msgspec.Raw], field: str) -> str | None:
    with suppress(msgspec.DecodeError, RecursionError):
        value = msgspec.json.decode(body.get(field, b"null"))
        return value if isinstance(value, str) else None
    return None


class PendingLine(NamedTuple):
    """A line that has no result yet."""

    number: int
    """Number of the line in the file, from 1."""
    custom_id: str
    identity: Identity
    start: int
    """Place of the line in the file, in bytes."""


class Lines:
    """The lines of an input file at `path` that have no result in `results`. Lines with a common prefix
    follow each other.

    Its methods block, and are called by one thread at a time. Raises `RamifyError` or OSError if `results`
    cannot be read or written.
    """

    def __init__(self, path: Path, results: Path, endpoint: str) -> None:
        self._path = path
        self._file = ResultsFile(results, {"program": {"name": endpoint}}, key="custom_id")
        self._window = Window(self._left(), LOOK_AHEAD, ["prefix"])

    def close(self) -> None:
        self._file.close()

    def _left(self) -> Iterator[Row]:
        for number, start, text in input_lines(self._path):
            line = msgspec.json.decode(text, type=Line)
            identity, done = self._file.see(number, None, line.custom_id)
            if not done:
                prefix = b"".join(bytes(line.body.get(field, b""))[:PREFIX] for field in PROMPT)
                pending = PendingLine(number, line.custom_id, identity, start)
                yield Row(number, {"prefix": prefix.decode(errors="replace")}, pending)

    def take(self) -> PendingLine | None:
        """The next line to compute; None if none is left."""
        row = next(self._window, None)
        return None if row is None else row.identity

    def body(self, line: PendingLine) -> bytes:
        """The body of a line, as the client wrote it."""
        with self._path.open("rb") as file:
            file.seek(line.start)
            found: dict[str, msgspec.Raw] = msgspec.json.decode(file.readline(), type=dict[str, msgspec.Raw])
            return bytes(found["body"])

    def write(self, line: PendingLine, answer: dict[str, Any]) -> None:
        """Append the answer of a line to the results."""
        self._file.append(line.number, line.identity, answer)


class Result(msgspec.Struct):
    """The answer of a line, as it is in the results and, with its ``custom_id``, in an output file."""

    key: str
    id: str
    status_code: int
    request_id: str
    body: msgspec.Raw

    def output(self) -> bytes:
        response = {"status_code": self.status_code, "request_id": self.request_id, "body": self.body}
        line = {"id": self.id, "custom_id": self.key, "response": response, "error": None}
        return msgspec.json.encode(line) + b"\n"


def results_of(path: Path) -> Iterator[Result]:
    """The results in the file at `path`, which has one for each line that was computed."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for text in file:
            if text.startswith(LINE) and text.endswith(b"\n"):
                yield msgspec.json.decode(text, type=Result)

"""The results file of a batch: headers that say what was run, and a line for each finished row.

    {"ramify_results": 1, "header": "5f3a09c1", "program": {"name": "classify"}, "model": …, "code": …}
    {"index": 1, "header": "5f3a09c1", "digest": "283e8c37d51b22f0", "key": "8", "outputs": …}

A row is identified by its key, or if the batch has no key column, by its content; equal rows are numbered
(`copy`). If a row has several lines, the last one counts, and the others are removed when the file is closed.
A run whose program or options differ from the file's headers writes a new header before its first line.

The line of a row is written with one system call when the row has ended. So a killed process leaves complete
lines and at most one torn line, which the next run cuts off. The file is flushed to the disk at most once in
`SYNC_S` seconds and at the end, so a crash of the machine may lose the rows of the last second, which then
run again. A lock keeps two processes from writing one file at a time.

The same lines may be written to a stream (`ramify.lang.batch.output`), which no later run can continue.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from ramify.errors import InvalidRequest
from ramify.lang.batch.fingerprint import Record, difference
from ramify.lang.batch.json_text import canonical, encode
from ramify.lang.batch.keys import claim, hashed, key_identity
from ramify.lang.batch.output import is_stream, open_stream, unwritten
from ramify.spelling import check_word

VERSION = 1
SYNC_S = 1.0
HEADER = b'{"ramify_results":'
LINE = b'{"index":'
CHANGED = 'rerun="changed" (--rerun changed)'
AGAIN = "Then run the same again: the rows that are in it are not run again."
RERUN = ("changed", "failed", "missing")
"""The words that `rerun` may contain. changed: rows whose results are of another program or other options run
again. missing: these rows do not run again, and their results are kept. failed: rows that failed run
again."""


class _Line(msgspec.Struct):
    """The fields of a result line that the next run needs."""

    index: int
    header: str
    digest: str
    copy: int = 0
    key: Any = None
    error: dict[str, Any] | None = None


class Origin(NamedTuple):
    """A store of results, described in the words of error messages about the store."""

    path: object
    kind: str
    """Either "file" or "folder"."""
    field: str
    """Name of the option that gives the store's path."""
    content: str
    """The part of a row that identifies the row if the batch has no key column, such as "their content"."""
    changed: str = 'rerun="changed"'
    """Spelling of the option that runs rows with results of another batch again."""

    def difference(self, header: Record, record: Record, place: object) -> str | None:
        """The first difference between `header` and `record`; None if there is none.

        `place` names the header's file and line in error messages. Raises `InvalidRequest` for a header of
        another version or with another key.
        """
        if header.get("ramify_results") != VERSION or not isinstance(header.get("header"), str):
            raise InvalidRequest(
                f"{place} is a header of another version of Ramify.",
                field=self.field,
                remedy=f"Give another {self.kind}.",
            )
        was, now = header.get("key", {}).get("name"), record["key"].get("name")
        if was != now:
            known = [self.content if one is None else one for one in (was, now)]
            raise InvalidRequest(
                f"{self.path} has rows that are known by {known[0]}, not by {known[1]}.",
                field="key",
                remedy=f"Give {'no key' if was is None else f'key {was!r}'}, or another {self.kind}.",
            )
        return difference(header, record)

    def refusal(self, found: str | None) -> InvalidRequest:
        """Error for a store with results of another batch. `found` is the difference between the batches."""
        return InvalidRequest(
            f"{self.path} has results of another batch: {found}.",
            field=self.field,
            remedy=f"Give another {self.kind}, or {self.changed} to run these rows again, or "
            'rerun="missing" to keep their results and run the others.',
        )


class Identity(NamedTuple):
    """Identity of a row: a number, and the fields of the row's line from which the number is computed."""

    identity: int
    fields: dict[str, Any]


def read_rerun(text: str | None) -> frozenset[str]:
    """Parse `rerun`: words of `RERUN`, separated by commas. Raises `InvalidRequest` for any other word."""
    words = frozenset(word.strip() for word in (text or "").split(",") if word.strip())
    for word in sorted(words):
        check_word("rerun", word, RERUN)
    return words


def keyed(record: Record, key: str | None) -> Record:
    """`record` with the name of the key column added."""
    return {**record, "key": {} if key is None else {"name": key}}


def refuse_changed(path: Path, record: Record, key: str | None, rerun: str | None) -> None:
    """Raise the `InvalidRequest` of `ResultsFile` for a changed program, before the model is known. `record`
    has no parts of the model; those of the file's last header are taken."""
    if is_stream(path) or not path.is_file() or read_rerun(rerun) & {"changed", "missing"}:
        return
    place, last = "", Record()
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.startswith(HEADER):
                place, last = f"{path}, line {number},", read_header(text)
    if not last:
        return
    origin = Origin(path, "file", "out", "their content", CHANGED)
    model: Record = {part: last[part] for part in ("model", "loras") if part in last}
    if found := origin.difference(last, keyed({**record, **model}, key), place):
        raise origin.refusal(found)


class ResultsFile:
    """The results file at `path`, opened and locked for appending; with `read_only`, only read.

    Args:
        record: The program and options of this run (`ramify.lang.batch.fingerprint`).
        key: The name of the key column; None if rows are identified by content.
        rerun: Words of `RERUN`, which say what rows run again.

    Rows take 16 bytes of memory each. Raises `InvalidRequest` if another process writes the file, if a line
    is not a result, and if the program or options have changed and `rerun` has neither "changed" nor
    "missing". Raises `RamifyError` if the file cannot be written, such as on a full disk.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        record: Record,
        key: str | None = None,
        rerun: frozenset[str] = frozenset(),
        *,
        read_only: bool = False,
    ) -> None:
        from ramify.lang.batch.finished import FinishedRows

        self.path = Path(path)
        self._record = keyed(record, key)
        self._origin = Origin(path, "file", "out", "their content", CHANGED)
        self._key, self._rerun = key, rerun
        self._difference: str | None = None
        """First difference between this run's record and the last header that differs from it; None if no
        header differs."""
        self._ids: dict[str, bool] = {}
        """Id of a header in the file → whether that header equals this run's record."""
        self._header: str | None = None
        """Id of the header that new lines refer to; None while that header has not been written."""
        self._changed = False
        self._length = self._lines = 0
        self.is_stream = is_stream(path)
        if self.is_stream and rerun and not read_only:
            raise InvalidRequest(f"{path} is no file that has results.", field="rerun", remedy="Name a file.")
        self._broken = False
        """True after a line could not be written; from then on nothing is written."""
        self._file: Any = None
        if not read_only:
            try:
                self._file = open_stream(path) if self.is_stream else self._open()
            except OSError as error:
                raise unwritten(path, error, "Name another file.") from error
        try:
            if self.path.exists() and not self.is_stream:
                with self.path.open("rb") as file:
                    self._done = FinishedRows(self._scan(file))
            else:
                self._done = FinishedRows(())
            self._replaced = self._lines - len(self._done)
            self.outdated = self._done.outdated
            """Number of results in the file that are of another program, or of other options."""
            if self._changed and not rerun & {"changed", "missing"}:
                raise self._origin.refusal(self._difference)
        except BaseException:
            if self._file is not None:
                self._file.close()
            raise
        keeps = self._file is not None and not self.is_stream
        if keeps and self._length < os.fstat(self._file.fileno()).st_size:
            self._file.truncate(self._length)
        self._synced = time.monotonic()

    # --- rows ---

    def see(self, index: int, values: Any, key: Any = None) -> tuple[Identity, int]:
        """Return the identity of row `index` of the input, and the status of its result: 0 if the row has to
        run.

        A row without a `key` is identified by its content, and so is a malformed row with the key of an
        earlier row.

        Raises `InvalidRequest` if a well-formed row has the key of an earlier row. Also raises
        `InvalidRequest` if the row's result is of another program or other options, and `rerun` has neither
        "changed" nor "missing".
        """
        from ramify.lang.batch.finished import OUTDATED, STATUS, TRANSIENT

        digest = hashed(canonical(values))
        fields: dict[str, Any] = {"digest": f"{digest:016x}"}
        claimed = None
        if self._key is not None and key is not None:
            claimed = claim(self._done, index, self._key, key, values)
        if claimed is not None:
            identity = claimed
        else:
            copy = self._done.place(digest)
            self._done.set_place(digest, copy + 1)
            identity = _copy(digest, copy)
            if copy:
                fields["copy"] = copy
                self._done.set_place(identity, index + 1)
        if self._key is not None:
            fields["key"] = None if claimed is None else msgspec.Raw(encode(key))
        found = Identity(identity, fields)
        word = self._done.word(identity)
        if not word or word & ~STATUS != digest & (0xFFFFFFFF & ~STATUS):
            return found, 0
        if word & OUTDATED and not self._rerun & {"changed", "missing"}:
            raise self._origin.refusal(self._difference)
        status = word & STATUS & ~OUTDATED
        again = (
            (word & OUTDATED and "changed" in self._rerun)
            or status == TRANSIENT
            or (status > 1 and "failed" in self._rerun)
        )
        return found, 0 if again else status

    def append(self, index: int, row: Identity, line: Mapping[str, Any]) -> None:
        """Append the line of a finished row. The values in `line` are JSON."""
        from ramify.lang.batch.finished import OUTDATED

        if self._header is None:
            self._header = self._new_id()
            header = {"ramify_results": VERSION, "header": self._header, **self._record}
            self._write(encode(header))
            self._ids[self._header] = True
        known = {"index": index, "header": self._header, **row.fields}
        self._write(msgspec.json.encode({**known, **line}))
        word = self._done.word(row.identity)
        self._replaced += word != 0
        self.outdated -= word & OUTDATED != 0

    @property
    def others(self) -> int:
        """Number of results whose rows are not in the input. Valid only after the input was read to its
        end."""
        return self._done.count(seen=False)

    def close(self) -> None:
        """Remove lines that a later line of the same row replaces, flush the file, and close it. May be
        called twice."""
        if self._file is None or self._file.closed:
            return
        try:
            if not self.is_stream and not self._broken:
                self._sync()
                if self._replaced:
                    self._drop_replaced()
        except OSError as error:
            raise unwritten(self.path, error, AGAIN) from error
        finally:
            self._file.close()

    # --- writing ---

    def _write(self, data: bytes) -> None:
        rest = memoryview(data + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            self._length += len(data) + 1
            if not self.is_stream and time.monotonic() - self._synced > SYNC_S:
                self._sync()
        except BrokenPipeError:  # the reader has closed the pipe
            raise
        except OSError as error:
            self._broken = True
            if not self.is_stream:
                with contextlib.suppress(OSError):
                    self._file.truncate(self._length)  # drop the incomplete line
            raise unwritten(self.path, error, "" if self.is_stream else AGAIN) from error

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _open(self) -> Any:
        import fcntl  # missing on Windows, where the rest of the package can be imported

        while True:
            file = self.path.open("ab+", buffering=0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                raise InvalidRequest(f"Another process writes {self.path}.", field="out") from None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                    break
            file.close()  # another process has replaced the file since it was opened here
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # so that the file's name survives a crash as its lines do
        finally:
            os.close(folder)
        return file

    def _new_id(self) -> str:
        text = encode([self._record, sorted(self._ids)])
        return hashlib.blake2b(text, digest_size=4).hexdigest()

    def _drop_replaced(self) -> None:
        """Replace the file atomically by one with the last line of each row."""
        from ramify.lang.batch.finished import last_of_each

        ids, headers = array("Q"), []
        with self.path.open("rb") as old:
            for text in old:
                line = _parse(text)
                if line is not None:
                    ids.append(self._identity(line))
                    headers.append(line.header)
        last = last_of_each(ids)
        kept = {header for header, stays in zip(headers, last, strict=True) if stays}
        lines = iter(last)
        new_path = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        try:
            with self.path.open("rb") as old, new_path.open("wb") as new:
                for text in old:
                    if next(lines) if text.startswith(LINE) else read_header(text).get("header") in kept:
                        new.write(text)
                new.flush()
                os.fsync(new.fileno())
            os.replace(new_path, self.path)
        finally:
            new_path.unlink(missing_ok=True)

    # --- reading ---

    def _scan(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        """Yield the identity and the word (digest bits and status) of each result line. Also reads the
        headers, and counts the bytes of complete lines."""
        from ramify.lang.batch.finished import FAILED, OK, OUTDATED, STATUS, TRANSIENT

        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n") and _is_torn(text):
                break
            if text.startswith(HEADER):
                self._read_header(text, number)
            else:
                line = _parse(text)
                if line is None or line.header not in self._ids:
                    raise self._wrong_line(number, text)
                status = OK
                if line.error is not None:
                    status = TRANSIENT if line.error.get("transient") else FAILED
                if not self._ids[line.header]:
                    status |= OUTDATED
                self._lines += 1
                yield self._identity(line), int(line.digest, 16) & (0xFFFFFFFF & ~STATUS) | status
            self._length += len(text)

    def _read_header(self, text: bytes, number: int) -> None:
        record = read_header(text)
        found = self._origin.difference(record, self._record, f"{self.path}, line {number},")
        self._ids[record["header"]] = found is None
        self._changed = found is not None
        if found is None:
            self._header = record["header"]
        else:
            self._difference = found

    def _identity(self, line: _Line) -> int:
        if self._key is not None and line.key is not None:
            return key_identity(line.key)
        return _copy(int(line.digest, 16), line.copy)

    def _wrong_line(self, number: int, text: bytes) -> InvalidRequest:
        if text.startswith(LINE) and b'"digest":' in text and not self._ids:
            return InvalidRequest(
                f"{self.path} was written by an earlier version of Ramify, which did not note what was run.",
                field="out",
                remedy="Give another file, or delete this one; the results in it stay readable.",
            )
        return InvalidRequest(f"{self.path}, line {number}, is not a result of a batch.", field="out")


def rows_of(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The decoded result lines of a results file."""
    with open(path, "rb") as file:
        for text in file:
            if text.startswith(LINE) and text.endswith(b"\n"):
                yield msgspec.json.decode(text)


def _parse(text: bytes) -> _Line | None:
    """The fields of a line; None if the line is torn or not a result."""
    if not text.endswith(b"\n") or not text.startswith(LINE):
        return None
    try:
        line = msgspec.json.decode(text, type=_Line)
        if line.index < 0 or line.copy < 0 or not 0 <= int(line.digest, 16) < 1 << 64:
            return None
    except (msgspec.DecodeError, ValueError):
        return None
    return line


def read_header(text: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_torn(text: bytes) -> bool:
    whole = any(prefix.startswith(text[: len(prefix)]) for prefix in (HEADER, LINE))
    return whole or not text.strip(b"\0")


# --- rows as bytes ------------------------------------------------------------------------------


def _copy(digest: int, copy: int) -> int:
    """Identity of a row without a key. `copy` is the number of equal rows before this row."""
    return hashed(f"{digest} {copy}".encode()) if copy else digest

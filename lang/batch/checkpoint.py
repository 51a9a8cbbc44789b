"""The results file of a batch: one line per finished row, and the rows that a second run can skip.

A line is written with one system call when its row has ended, so a killed process leaves complete lines and
at most one torn line, which the next run cuts off. The file is flushed to the disk at most once in `SYNC_S`
seconds and at the end, so a crash of the machine may lose the rows of the last second, which then run again.
A lock keeps two processes from writing one file at a time.
"""

from __future__ import annotations

import os
import time
import zlib
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ramify.errors import InvalidRequest

SYNC_S = 1.0
NOT_DONE = 0
PREFIX = b'{"index":'


class _Line(msgspec.Struct):
    """The fields of a line that the next run reads."""

    index: int
    digest: str
    error: dict[str, Any] | None


class ResultsFile:
    """`path`, opened for appending by this process alone.

    Finished rows take four bytes of memory each. The lines of rows that failed transiently are removed first,
    with `retry_failed` those of all failed rows. Raises `InvalidRequest` where another process writes the
    file, and where a line is not a result.
    """

    def __init__(self, path: str | os.PathLike[str], *, retry_failed: bool = False) -> None:
        self.path = Path(path)
        self.lines = 0
        """Number of rows in the file when it was opened."""
        self._done = array("I")
        """Row index → digest of the row; `NOT_DONE` for a row that is not in the file."""
        self._file = self._open()
        try:
            self._read(retry_failed)
        except BaseException:
            self._file.close()
            raise
        self._synced = time.monotonic()

    def is_done(self, index: int, digest: int) -> bool:
        """Whether row `index` is in the file; raises `InvalidRequest` where its digest differs."""
        found = self._done[index] if index < len(self._done) else NOT_DONE
        if found not in (NOT_DONE, digest):
            raise InvalidRequest(
                f"{self.path} has results of other rows: its row {index} was run on another input, "
                "by another program, or with other options.",
                field="out",
                remedy="Give another file, or delete this one.",
            )
        return found != NOT_DONE

    def append(self, line: Mapping[str, Any]) -> None:
        """Add the line of a finished row."""
        rest = memoryview(encode(line) + b"\n")
        while rest:
            rest = rest[self._file.write(rest) :]
        if time.monotonic() - self._synced > SYNC_S:
            self._sync()

    def close(self) -> None:
        self._sync()
        self._file.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _open(self) -> Any:
        import fcntl  # missing on Windows, where the rest of the package can be imported

        file = self.path.open("ab+", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise InvalidRequest(f"Another process writes {self.path}.", field="out") from None
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # so that the file's name survives a crash as its lines do
        finally:
            os.close(folder)
        return file

    def _read(self, retry_failed: bool) -> None:
        """Read which rows are done, and cut off a torn line."""
        with self.path.open("rb") as file:
            length, failed = self._scan(file, retry_failed)
        if failed:
            self._drop(retry_failed)
        elif length < os.fstat(self._file.fileno()).st_size:
            self._file.truncate(length)

    def _scan(self, file: BinaryIO, retry_failed: bool) -> tuple[int, int]:
        """The length of the file's complete lines in bytes, and the number of failed rows that run again."""
        length = failed = 0
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n") and (PREFIX.startswith(text[: len(PREFIX)]) or not text.strip(b"\0")):
                break  # torn
            line = _parse(text)
            if line is None:
                raise InvalidRequest(f"{self.path}, line {number}, is not a result of a batch.", field="out")
            self._enter(line, number)
            failed += _runs_again(line, retry_failed)
            length += len(text)
        return length, failed

    def _enter(self, line: _Line, number: int) -> None:
        index, digest = line.index, int(line.digest, 16)
        if index >= len(self._done):
            self._done.extend([NOT_DONE] * (index + 1 - len(self._done)))
        if self._done[index] != NOT_DONE:
            raise InvalidRequest(f"{self.path}, line {number}: row {index} is in it twice.", field="out")
        self._done[index] = digest
        self.lines += 1

    def _drop(self, retry_failed: bool) -> None:
        """Replace the file atomically by one without the failed rows that run again."""
        kept = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        try:
            with self.path.open("rb") as old, kept.open("wb") as new:
                for text in old:
                    line = _parse(text)
                    if line is None:
                        break  # torn
                    if not _runs_again(line, retry_failed):
                        new.write(text)
                    else:
                        self._done[line.index] = NOT_DONE
                        self.lines -= 1
                new.flush()
                os.fsync(new.fileno())
            os.replace(kept, self.path)
        finally:
            kept.unlink(missing_ok=True)
        self._file.close()
        self._file = self._open()


def _runs_again(line: _Line, retry_failed: bool) -> bool:
    return line.error is not None and (retry_failed or bool(line.error.get("transient")))


def _parse(text: bytes) -> _Line | None:
    """The fields of a line; None where it is torn or not a result."""
    if not text.endswith(b"\n"):
        return None
    try:
        line = msgspec.json.decode(text, type=_Line)
        if line.index < 0 or not 0 < int(line.digest, 16) < 1 << 32:
            return None
    except (msgspec.DecodeError, ValueError):
        return None
    return line


# --- rows as bytes ------------------------------------------------------------------------------


def digest_of(value: Any, start: int = 0) -> int:
    """CRC-32 of `value` as JSON, after a digest `start`; never `NOT_DONE`.

    It detects a row that was changed by mistake, not one that was forged.
    """
    return zlib.crc32(msgspec.json.encode(value, enc_hook=_stable, order="deterministic"), start) or 1


def encode(value: Any) -> bytes:
    """`value` as JSON text. Types that neither msgspec nor pydantic can encode are written as their str()."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if callable(dump) else str(value)


def _stable(value: Any) -> Any:
    """The same text in every process. Not str(), which may contain a memory address."""
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if callable(dump) else type(value).__qualname__

"""Answers of models in a file, for requests that come again.

A SQLite database in WAL mode, which any number of processes read and write at the same time. A killed process
leaves the answers that it had written.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ramify.errors import InvalidRequest
from ramify.messages import TextChunk, Usage

logger = logging.getLogger("ramify")

APPLICATION_ID = 0x52414D59
""""RAMY": the header of a SQLite file says which program it belongs to (SQLite, pragma application_id)."""
VERSION = 1
BUSY_S = 30.0
"""Longest wait for another process's write."""


class AnswerStore:
    """The answers in the file at `path`, which is made where there is none.

    Raises `InvalidRequest` for a file that is no store of answers, is of another version, or is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._owner: int | None = None
        self._lock = threading.Lock()
        self._run(lambda database: None)

    def get(self, key: bytes) -> tuple[TextChunk, ...] | None:
        """The chunks of the answer under `key`, or None. Their usage counts `stored_tokens` alone."""

        def read(database: sqlite3.Connection) -> bytes | None:
            row = database.execute("SELECT chunks FROM answers WHERE key = ?", (key,)).fetchone()
            return None if row is None else row[0]

        found = self._run(read)
        if found is None:
            return None
        chunks = msgspec.msgpack.decode(found, type=tuple[TextChunk, ...])
        return tuple([_stored(chunk) for chunk in chunks])

    def put(self, key: bytes, chunks: Sequence[TextChunk], model: str) -> None:
        """Keep an answer; warns in the log where the file cannot be written."""
        data = msgspec.msgpack.encode([msgspec.structs.replace(chunk, rid="") for chunk in chunks])

        def write(database: sqlite3.Connection) -> None:
            database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", (key, model, data))

        try:
            self._run(write)
        except sqlite3.OperationalError as error:
            logger.warning("An answer was not stored in %s: %s.", self.path, error)

    def _run(self, work: Callable[[sqlite3.Connection], bytes | None]) -> bytes | None:
        with self._lock:
            try:
                if self._owner != os.getpid():  # the first use, or that of a forked child
                    self._database = self._open()
                    self._owner = os.getpid()
                return work(self._database)
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError as error:
                raise InvalidRequest(
                    f"{self.path} is no store of answers, or is damaged: {error}.",
                    field="cache",
                    remedy="Remove it, or name another file.",
                ) from None

    def _open(self) -> sqlite3.Connection:
        try:
            database = sqlite3.connect(
                self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.OperationalError as error:
            raise InvalidRequest(f"{self.path} cannot be opened: {error}.", field="cache") from None
        try:
            self._prepare(database)
        except BaseException:
            database.close()
            raise
        return database

    def _prepare(self, database: sqlite3.Connection) -> None:
        database.execute("BEGIN IMMEDIATE")
        if database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {VERSION}")
            database.execute(
                "CREATE TABLE answers (key BLOB PRIMARY KEY, model TEXT, chunks BLOB) WITHOUT ROWID"
            )
        database.execute("COMMIT")
        (identity,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if identity != APPLICATION_ID or version != VERSION:
            what = f"is of version {version}, not {VERSION}" if identity == APPLICATION_ID else "is not one"
            raise InvalidRequest(
                f"{self.path} should be a store of answers, and {what}.",
                field="cache",
                remedy="Name another file.",
            )
        with suppress(sqlite3.OperationalError):  # another process is just changing the mode
            database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")


def _stored(chunk: TextChunk) -> TextChunk:
    if chunk.usage is None:
        return chunk
    usage = chunk.usage
    return msgspec.structs.replace(
        chunk, usage=Usage(stored_tokens=usage.prompt_tokens + usage.completion_tokens)
    )

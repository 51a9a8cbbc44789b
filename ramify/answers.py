"""A file of model answers, from which equal later requests are answered.

The file is a SQLite database in WAL mode. Any number of processes may read and write it at the same time. The
answers that a process has written remain if the process is killed.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ramify.errors import InvalidRequest
from ramify.messages import TextChunk, Usage

logger = logging.getLogger("ramify")

APPLICATION_ID = 0x52414D59
"""The text RAMY. SQLite stores this number in the file's header, to tell whose file it is (pragma
application_id)."""
VERSION = 1
BUSY_S = 30.0
"""Longest wait, in seconds, for another process that writes."""


class AnswerStore:
    """A store of answers in the file at `path`. The file is made if it does not exist.

    Raises `InvalidRequest` if the file is not a store of answers, is of another version, is damaged, or
    cannot be opened and written. If a later read fails, `get` returns None. If a later write fails, `put`
    stores nothing. The first such failure is logged as a warning.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._database: sqlite3.Connection | None = None
        self._lock = threading.Lock()
        self._warned = False
        with _forking:
            _stores.add(self)
        try:
            self._run(lambda database: None)
        except sqlite3.OperationalError as error:
            raise InvalidRequest(f"{self.path} cannot be opened: {error}.", field="cache") from None

    def get(self, key: bytes) -> tuple[TextChunk, ...] | None:
        """The chunks of the answer stored under `key`; None if there is no such answer.

        In the chunks' usage only `stored_tokens` is set.
        """

        def read(database: sqlite3.Connection) -> bytes | None:
            row = database.execute("SELECT chunks FROM answers WHERE key = ?", (key,)).fetchone()
            return None if row is None else row[0]

        try:
            found = self._run(read)
        except sqlite3.OperationalError as error:
            self._warn("read from", error)
            return None
        if found is None:
            return None
        chunks = msgspec.msgpack.decode(found, type=tuple[TextChunk, ...])
        return tuple([_stored(chunk) for chunk in chunks])

    def put(self, key: bytes, chunks: Sequence[TextChunk], model: str) -> None:
        """Store an answer under `key`, unless `key` already has one. `model` is the model's name."""
        data = msgspec.msgpack.encode([msgspec.structs.replace(chunk, rid="") for chunk in chunks])

        def write(database: sqlite3.Connection) -> None:
            database.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", (key, model, data))

        try:
            self._run(write)
        except sqlite3.OperationalError as error:
            self._warn("stored in", error)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _warn(self, what: str, error: sqlite3.OperationalError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("An answer was not %s %s: %s. Others may not be either.", what, self.path, error)

    def _run(self, work: Callable[[sqlite3.Connection], bytes | None]) -> bytes | None:
        with self._lock:
            try:
                if self._database is None:
                    self._database = self._open()
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
        database = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
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
        with suppress(sqlite3.OperationalError):  # another process is changing the mode now
            database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")


def _stored(chunk: TextChunk) -> TextChunk:
    if chunk.usage is None:
        return chunk
    usage = chunk.usage
    return msgspec.structs.replace(
        chunk, usage=Usage(stored_tokens=usage.prompt_tokens + usage.completion_tokens)
    )


# --- fork ---

# A child process may not use a connection of its parent, nor close it: closing releases the file locks that
# the child holds by other connections (SQLite, "How To Corrupt An SQLite Database File", 2.2 and 2.6). So all
# files are closed before a fork. The fork happens while the stores' thread locks are held, so that no other
# thread holds one in the child.
_stores: weakref.WeakSet[AnswerStore] = weakref.WeakSet()
_forking = threading.Lock()
_held: list[AnswerStore] = []


def _before_fork() -> None:
    _forking.acquire()
    for store in _stores:
        store._lock.acquire()
        _held.append(store)
        store._close()


def _after_fork() -> None:
    while _held:
        _held.pop()._lock.release()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)

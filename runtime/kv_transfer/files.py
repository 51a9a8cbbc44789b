"""KV snapshots as files: in a private folder that is removed when its process ends.

The folder is in shared memory if possible.

This module makes the names of the files. A file is always a new one (O_EXCL), is never opened through a link,
and is readable only by its user. Files are read and written, not mapped, so that a full disk or a truncated
file is an error and not a signal that ends the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Protocol

from ramify.runtime.kv_transfer.snapshot import BadSnapshot, Bytes

log = logging.getLogger("ramify")

SHARED_MEMORY = Path("/dev/shm")
_NAME = "ramify-kv-"


class SnapshotStore(Protocol):
    """A store for KV snapshots: files in a `SnapshotFolder` on one machine, Ray objects
    (`ramify.ray.snapshots.RemoteSnapshots`) on a cluster."""

    def new(self) -> str:
        """A name for a KV snapshot: the `path` for `ExportPrefix` and `ImportPrefix`. Raises `OSError`."""

    def has_room(self, size: int) -> bool:
        """Whether there is room for a KV snapshot of `size` bytes. Raises `OSError`."""

    def remove(self, snapshot: str) -> None:
        """Remove a KV snapshot, if there is one of this name."""

    def close(self) -> None:
        """Remove all KV snapshots."""


class SnapshotFolder:
    """A new folder for KV snapshots (mode 0700), locked while this process lives. Abandoned folders of
    processes that have died are removed first."""

    def __init__(self, below: Path | None = None) -> None:
        if below is None:
            usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
            below = SHARED_MEMORY if usable else Path(tempfile.gettempdir())
        remove_abandoned(below)
        made = Path(tempfile.mkdtemp(prefix=f".{_NAME}", dir=below))
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # The folder gets its name after the lock, so a folder of this name without a lock is abandoned.
        self.path = made.with_name(made.name[1:])
        made.rename(self.path)

    def new(self) -> str:
        """A path for one KV snapshot."""
        return str(self.path / secrets.token_hex(8))

    def room(self) -> int:
        """Free bytes on the folder's file system."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def has_room(self, size: int) -> bool:
        """Whether at least twice `size` bytes are free."""
        return self.room() >= 2 * size

    def remove(self, snapshot: str) -> None:
        remove(snapshot)

    def close(self) -> None:
        """Remove the folder with all KV snapshots. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(below: Path) -> None:
    """Remove this user's snapshot folders in `below` whose processes have died without `close`."""
    for path in below.glob(f"{_NAME}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
            finally:
                os.close(lock)


class NewFile:
    """A new file, writable at any offset. Raises `OSError`, also if a file of this name exists."""

    def __init__(self, path: str) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)

    def write(self, offset: int, data: Bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written

    def close(self, *, keep: bool) -> None:
        os.close(self._file)
        if not keep:
            remove(self._path)


class ExistingFile:
    """An existing file, opened for reading. Raises `OSError`, and `BadSnapshot` unless it belongs to this
    user and nobody else can read it."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            self.close()
            raise BadSnapshot("it is no private file of this user")
        self.size = found.st_size

    def read(self, offset: int, size: int) -> Bytes:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            got = os.preadv(self._file, [view[done:]], offset + done)
            if not got:
                break
            done += got
        return memoryview(data)[:done]

    def close(self) -> None:
        os.close(self._file)


def remove(path: str | Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)

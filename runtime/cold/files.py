"""A cold store of files: KV that outlives the process."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ramify.radix.cold import ColdIndex, Segment
from ramify.runtime.cold.store import Finished, SegmentWriter
from ramify.runtime.kv_transfer.files import ExistingFile, NewFile, remove
from ramify.runtime.kv_transfer.snapshot import BadSnapshot, SnapshotReader, SnapshotWriter

log = logging.getLogger("ramify")

SUFFIX, UNFINISHED, PACE = ".kv", ".part", "pace"
_FOLDER, _FILE = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{16}\.(kv|part)")
"""Names of the tier's own folders and files. Nothing else is removed from a folder that a user names."""
PROBE_BYTES = 8 << 20
KEPT = 0.9
"""Share of `most_bytes` that is left when the oldest segments are removed, so that not every new segment has
to list the folder."""
HELD = 0.8
"""Share of `most_bytes` that one prefix may take. With its headers that is less than KEPT, so that a prefix
which is being written does not remove its own first pages."""
LISTING = 64
"""Number of new segments after which the folder is listed again: other engines write there too."""


class FileStore:
    """Segments as files: KV snapshots in the folder ``below/identity``.

    A file is named ``*.part`` until it is complete, so that `kill -9` at any byte leaves whole segments only.
    Any number of engines may use one folder: a file never changes after it has got its name, and a file that
    another engine has removed is a miss. Files have mode 0600, folders 0700. When the files below `below`,
    those of other identities too, exceed `most_bytes`, the least recently used ones (by mtime) are removed.

    Raises `OSError` if the folder cannot be used. A folder that can only be read is used for reading.
    """

    def __init__(
        self, below: Path, identity: str, *, page_size: int, page_bytes: int, most_bytes: int
    ) -> None:
        self._below, self.path = below, below / identity
        self._identity = identity
        self._page_size, self._page_bytes = page_size, page_bytes
        self._most_bytes = most_bytes
        self.most_pages = int(HELD * most_bytes) // page_bytes
        self._room = 0
        """Bytes that may still be written before the folder is listed again."""
        self._written = LISTING
        self._open: tuple[Segment, ExistingFile, SnapshotReader] | None = None
        """The segment that was read last."""
        self.index = ColdIndex(page_size)
        self.damaged = 0
        """Number of damaged files that were found, and removed, when the folder was read."""
        below.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # on a read-only disk the folder may be there already
            self.path.mkdir(mode=0o700, exist_ok=True)
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{self.path} is no private folder of this user")
        self._load()

    def begin(self, scope: str, ids: np.ndarray, first: int) -> SegmentWriter:
        return _FileWriter(self, scope, ids, first)

    def read(self, segment: Segment, first: int, count: int) -> torch.Tensor:
        if self._open is None or self._open[0] is not segment:
            self.close()
            with contextlib.ExitStack() as undo:
                file = ExistingFile(str(self.path / segment.name))
                undo.callback(file.close)
                self._open = segment, file, self._checked(file, segment)
                undo.pop_all()
        data = self._open[2].pages(first, count)
        return torch.frombuffer(data, dtype=torch.uint8).view(count, -1)

    def drop(self, segment: Segment) -> None:
        self.close()
        with contextlib.suppress(OSError):
            remove(self.path / segment.name)

    def touch(self, segment: Segment) -> None:
        with contextlib.suppress(OSError):
            now = time.time_ns()  # finer than the time that the kernel would take
            os.utime(self.path / segment.name, ns=(now, now))

    def close(self) -> None:
        """Close the file that was read last."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def seconds_a_byte(self, segment: Segment) -> float:
        """Seconds for each byte of `segment` from the disk, measured on at most `PROBE_BYTES`. What the
        operating system has of the file in memory is written out and dropped first. Raises `OSError`."""
        with open(self.path / segment.name, "rb", buffering=0) as file:
            os.fdatasync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            size = len(file.read(PROBE_BYTES))
            return (time.perf_counter() - began) / max(1, size)

    def keep_pace(self, token_s: float | None) -> None:
        if token_s is None:
            return
        new = self.path / f"{secrets.token_hex(8)}{UNFINISHED}"
        file = NewFile(str(new))
        try:
            file.write(0, repr(token_s).encode())
            new.replace(self.path / PACE)
        finally:
            file.close(keep=False)

    def kept_pace(self) -> float | None:
        try:
            found = float((self.path / PACE).read_text())
        except (OSError, ValueError):
            return None
        return found if 0 < found < math.inf else None

    def make_room(self, size: int) -> tuple[str, ...]:
        """Remove the least recently used files until there is room for `size` bytes more. Returns the names
        of removed files in this store's folder. Raises `OSError` if there is no room."""
        if size > self._most_bytes:
            raise OSError(f"a segment has {size} bytes, and the cold tier may have {self._most_bytes}")
        self._room -= size
        self._written += 1
        if self._room >= 0 and self._written < LISTING:
            return ()
        self._written = 0
        found = sorted(self._files(), key=lambda file: file[0])
        total, removed = size + sum(each for _, each, _ in found), []
        for _, each, path in found if total > self._most_bytes else ():
            if total > KEPT * self._most_bytes and _removed(path):
                total -= each
                if path.parent == self.path:
                    removed.append(path.name)
        if total > self._most_bytes:
            raise OSError(f"{self._below} has {total} bytes that cannot be removed")
        self._room = self._most_bytes - total
        return tuple(removed)

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """(mtime in ns, bytes, path) of each file of the tier, in the folders of all identities."""
        for folder in self._below.iterdir():
            if not _FOLDER.fullmatch(folder.name) or folder.is_symlink():
                continue
            try:
                names = [name for name in os.listdir(folder) if _FILE.fullmatch(name)]
            except OSError:  # another user's, or a file
                continue
            for name in names:
                with contextlib.suppress(OSError):  # another engine has removed it
                    status = (folder / name).lstat()
                    if stat.S_ISREG(status.st_mode):
                        yield status.st_mtime_ns, status.st_size, folder / name

    def _load(self) -> None:
        """Read the headers of the segments in the folder. Remove damaged files, and unfinished ones whose
        writers are gone."""
        files = sorted(self._files(), key=lambda file: file[0])
        others = sum(size for _, size, path in files if path.parent != self.path)
        if others:
            log.info(
                "%s has %d MB of other models or options: not used here, and removed when room is needed",
                self._below,
                others >> 20,
            )
        for _, _, path in files:
            if path.suffix == UNFINISHED:
                _removed(path)
            if path.suffix == UNFINISHED or path.parent != self.path:
                continue
            try:
                self.index.add(self._read_header(path))
            except FileNotFoundError:  # another engine has removed it
                continue
            except (OSError, BadSnapshot) as error:
                log.warning("%s is not used: %s", path, error)
                self.damaged += 1
                _removed(path)

    def _read_header(self, path: Path) -> Segment:
        file = ExistingFile(str(path))
        try:
            snapshot = self._checked(file)
            header = snapshot.header
            return Segment(path.name, header.scope, snapshot.ids, header.first_page)
        finally:
            file.close()

    def _checked(self, file: ExistingFile, segment: Segment | None = None) -> SnapshotReader:
        """The KV snapshot in `file`. Raises `BadSnapshot` if it is of another engine, or not that of
        `segment`."""
        snapshot = SnapshotReader(file)
        header = snapshot.header
        page = self._identity, self._page_size, self._page_bytes
        if (header.identity, header.page_size, header.page_bytes) != page:
            raise BadSnapshot("it is of another model, or of an engine with other options")
        if segment is not None and not (
            (header.scope, header.first_page) == (segment.scope, segment.first)
            and np.array_equal(snapshot.ids, segment.ids)
        ):
            raise BadSnapshot("it has other tokens than before")
        return snapshot


class _FileWriter:
    def __init__(self, store: FileStore, scope: str, ids: np.ndarray, first: int) -> None:
        self._store = store
        self._segment = Segment(f"{secrets.token_hex(8)}{SUFFIX}", scope, ids, first)
        self._path = (store.path / self._segment.name).with_suffix(UNFINISHED)
        pages = len(ids) // store._page_size - first
        self._removed = store.make_room(pages * store._page_bytes)
        with contextlib.ExitStack() as undo:
            self._file = NewFile(str(self._path))
            undo.callback(self._file.close, keep=False)
            self._lock = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, self._lock)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            self._snapshot = SnapshotWriter(
                self._file,
                identity=store._identity,
                scope=scope,
                ids=ids,
                page_size=store._page_size,
                page_bytes=store._page_bytes,
                first_page=first,
            )
            undo.pop_all()

    def write(self, data: torch.Tensor) -> None:
        self._snapshot.write_pages(data.numpy().data)

    def finish(self) -> Finished:
        self._snapshot.finish()
        self._path.rename(self._store.path / self._segment.name)
        self._file.close(keep=True)
        os.close(self._lock)
        return Finished(self._segment, self._removed)

    def cancel(self) -> None:
        self._file.close(keep=False)
        os.close(self._lock)


def _removed(path: Path) -> bool:
    """Remove a file, if it can be removed and is not that of a writer, which has it locked, that is alive.
    Returns whether it was removed."""
    try:
        if path.suffix != UNFINISHED:
            remove(path)
            return True
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(path)
        finally:
            os.close(file)
    except OSError:
        return False
    return True

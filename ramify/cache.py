"""Ramify's cache folder: entries that appear whole or not at all, also under concurrent writers."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ramify.errors import EngineError

log = logging.getLogger(__name__)


class NotWritable(EngineError):
    """The cache folder takes nothing: who can do without an entry does."""


def home() -> Path:
    """`$RAMIFY_HOME`, or `~/.cache/ramify`."""
    given = os.environ.get("RAMIFY_HOME")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "ramify"


def made_of(files: Sequence[Path], kind: str, name: str, *identity: object) -> Path:
    """The entry of what is made of `files` in the way that `identity` tells.

    Named by the files' paths and what tells their contents apart: sizes and times of change.
    """
    paths = [path.resolve() for path in files]
    place = hashlib.sha256("\0".join(map(str, paths)).encode()).hexdigest()[:12]
    stats = [path.stat() for path in paths]
    whole = repr((*identity, [(stat.st_size, stat.st_mtime_ns) for stat in stats]))
    return home() / kind / f"{name}-{place}" / hashlib.sha256(whole.encode()).hexdigest()[:16]


def remove_older(entry: Path) -> None:
    """Remove what was made of the same files when they, or the way, were others."""
    for old in entry.parent.iterdir():
        if old.is_dir() and old != entry and not old.name.startswith("."):
            shutil.rmtree(old, ignore_errors=True)


def ensure(entry: Path, build: Callable[[Path], None]) -> Path:
    """The folder `entry`; where it does not exist yet, `build` fills a folder that then becomes it.

    A folder under its final name is complete: it is built under another name, flushed to disk, and
    renamed. Of several processes one builds and the others wait for it. What an interrupted build
    left behind is removed by the next.
    """
    if entry.is_dir():
        return entry
    with _lock(entry.with_name(f".{entry.name}.lock")):
        if entry.is_dir():  # somebody else has built it meanwhile
            return entry
        partial = entry.with_name(f".{entry.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            build(partial)
            for path in partial.rglob("*"):
                _flush(path)
            partial.rename(entry)
            _flush(entry.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return entry


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held until the block or the process ends. The file stays: removing it would let two hold it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a")
    except OSError as error:
        raise NotWritable(
            f"The cache folder {home()} cannot be written: {error.strerror}.",
            remedy="Set RAMIFY_HOME to a folder that can be.",
        ) from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("Waiting for another process that holds %s", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Ramify's cache folder. An entry becomes visible only when it is complete, also with concurrent writers."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import itertools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR
from typing import TypeVar

from ramify.errors import EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")
_FLUSH = "flush of the cache"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class NotWritable(EngineError):
    """The cache folder cannot be written. A caller that can do without the cache catches this error."""


def home() -> Path:
    """`$RAMIFY_HOME`, or `~/.cache/ramify`."""
    given = os.environ.get("RAMIFY_HOME")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "ramify"


def entry_of(files: Sequence[Path], kind: str, name: str, *identity: object) -> Path:
    """The path of the entry for something made from `files`.

    `identity`: the versions and options with which it is made.

    The last part of the path is a hash of `identity` and of the files' sizes and modification times. The
    folder around it is named by `name` and by a hash of the files' paths.
    """
    paths = [path.resolve() for path in files]
    folder = hashlib.sha256("\0".join(map(str, paths)).encode()).hexdigest()[:12]
    stats = [path.stat() for path in paths]
    version = repr((*identity, [(stat.st_size, stat.st_mtime_ns) for stat in stats]))
    return home() / kind / f"{name}-{folder}" / hashlib.sha256(version.encode()).hexdigest()[:16]


def remove_outdated(entry: Path) -> None:
    """Remove entries made from the same files as `entry` with another `identity`, size or modification
    time."""
    for old in entry.parent.iterdir():
        if old.is_dir() and old != entry and not old.name.startswith("."):
            shutil.rmtree(old, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class Entry:
    """All versions of what the cache holds under one kind and name."""

    kind: str
    name: str
    path: Path
    size: int
    """Size in bytes."""
    used: float
    """Time of the last change or use, in seconds since the epoch."""


def entries(kind: str | None = None) -> list[Entry]:
    """The entries of `kind`, or if it is None, of all kinds. The last used entry comes first."""
    kinds = [home() / kind] if kind else [path for path in home().glob("[!.]*") if path.is_dir()]
    found = [entry for folder in kinds for entry in entries_in(folder, folder.name)]
    return sorted(found, key=lambda entry: (-entry.used, entry.kind, entry.name))


def entries_in(folder: Path, kind: str) -> list[Entry]:
    """The entries in `folder`, which need not be in `home`."""
    found = []
    for path in folder.glob("[!.]*"):
        stats = _stats(path)
        if stats:
            size = sum(stat.st_size for stat in stats if not S_ISDIR(stat.st_mode))
            found.append(Entry(kind, path.name, path, size, max(stat.st_mtime for stat in stats)))
    return found


def _stats(path: Path) -> list[os.stat_result]:
    """Stat results of `path` and of everything below it.

    Files that another process renames or removes meanwhile are left out.
    """
    parts = [str(path)]
    if not path.is_symlink():
        parts += [os.path.join(at, name) for at, *names in os.walk(path) for name in itertools.chain(*names)]
    found = []
    for part in parts:
        with contextlib.suppress(FileNotFoundError):
            found.append(os.stat(part))
    return found


def remove(entry: Entry) -> None:
    """Remove an entry. Processes that have mapped its files can still use them."""
    if entry.path.is_dir() and not entry.path.is_symlink():
        shutil.rmtree(entry.path, ignore_errors=True)
    else:
        entry.path.unlink(missing_ok=True)


def bound(kind: str, most: int, *, using: Path) -> None:
    """Mark `using`, an entry of `kind`, as used now.

    Then remove the least recently used other entries until all entries of `kind` together take at most `most`
    bytes.
    """
    with contextlib.suppress(OSError):
        os.utime(using)
    total = 0
    for entry in entries(kind):
        total += entry.size
        if total > most and not using.is_relative_to(entry.path):
            log.info("Removing %s, as %s take more than %.1f GB", entry.path, kind, most / 1e9)
            remove(entry)


def ensure(entry: Path, build: Callable[[Path], None]) -> Path:
    """Return the folder `entry`. If it does not exist, `build` is called to fill it.

    The folder is built under another name, flushed to disk and then renamed, so a folder under its final name
    is complete. If several processes need the folder, one builds it and the others wait. The next build
    removes the remains of an interrupted build. If a process has built the folder and dies before the rename,
    the next process uses the built folder, unless the system was rebooted since.
    """
    if not entry.is_dir():
        with _lock(entry):
            if not entry.is_dir():  # another process may have built it meanwhile
                _publish(_built(entry, build), entry)
    return entry


def opened(entry: Path, build: Callable[[Path], None], use: Callable[[Path], T]) -> T:
    """Return `use(folder)` for the folder that `ensure` returns, without waiting for the flush to disk.

    If this process builds the folder, `use` gets the folder under its temporary name. A thread flushes and
    renames the folder afterwards. Files that `use` has mapped stay mapped.
    """
    if entry.is_dir():
        return use(entry)
    with contextlib.ExitStack() as lock:
        lock.enter_context(_lock(entry))
        if entry.is_dir():
            return use(entry)
        folder = _built(entry, build)
        found = use(folder)
        held = lock.pop_all()

    def publish() -> None:
        with held:
            try:
                _publish(folder, entry)
            except FileNotFoundError as error:  # `ramify cache --clear` has removed it meanwhile
                log.warning("%s could not be kept: %s", entry, error)
            except OSError as error:
                # The kernel may drop pages that it could not write, even if they are mapped.
                log.error(
                    "%s could not be written to disk: %s. The weights of the running model are mapped from "
                    "it and may be lost: restart the engine.",
                    entry,
                    error,
                )

    threading.Thread(target=publish, name=_FLUSH).start()
    return found


def finish() -> None:
    """Wait for the threads that `opened` has started."""
    for thread in threading.enumerate():
        if thread.name == _FLUSH:
            thread.join()


def _built(entry: Path, build: Callable[[Path], None]) -> Path:
    """The complete folder, under its temporary name, that is to become `entry`."""
    boot = _boot()
    written = entry.with_name(f".{entry.name}.{boot}.written") if boot else None
    if written is not None and written.is_dir():
        return written  # the process that wrote it has died
    folder = entry.with_name(f".{entry.name}.partial")
    for old in (folder, *entry.parent.glob(f".{glob.escape(entry.name)}.*.written")):
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir()
    try:
        build(folder)
        return folder if written is None else folder.rename(written)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _boot() -> str:
    """The id of the current boot; empty if the system has none.

    Data that a process has written but not flushed is in the page cache of the kernel. It survives the
    process, but not a reboot. Without an id only flushed folders are used.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _publish(folder: Path, entry: Path) -> None:
    try:
        for path in folder.rglob("*"):
            _flush(path)
        folder.rename(entry)
        _flush(entry.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lock(entry: Path) -> Iterator[None]:
    """Lock a file beside `entry` until the block or the process ends.

    The file is never removed: otherwise two processes could hold the lock, one on the removed file and one on
    a new file.
    """
    path = entry.with_name(f".{entry.name}.lock")
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
            log.info("Another thread or process is making %s in the cache; waiting for it.", entry)
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing does not unlock if a forked process has the file


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

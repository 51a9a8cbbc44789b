"""The private folder of batch files, which outlives the server.

    lock            locked by the server that uses the folder
    file-….json     a `StoredFile`; file-….jsonl is its content
    batch_….json    a `Batch`; batch_….jsonl has the results so far

A description is replaced atomically. All names are made here: a file name from a client is only shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from ramify.errors import EngineError, InvalidRequest, NotFound
from ramify.lang.batch.output import FULL
from ramify.runtime.server.service import KEY

logger = logging.getLogger("ramify.server")

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
MAX_STORED = 10_000
"""Maximum number of files, and of batches. A new batch takes the place of the oldest that has ended."""
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
CONTENT = re.compile(r"upload-[0-9a-f]{16}|(file-|batch_)[0-9a-f]{24}\.jsonl(\.\d+\.new)?")
"""Name of a file with the content of a file or the results of a batch, or of one that is being written."""


class StoredFile(msgspec.Struct, kw_only=True):
    """OpenAI's file object, and its owner."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"
    owner: str
    """`Account.owner` of the API key; "" without keys."""


class LineError(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Errors(msgspec.Struct, frozen=True):
    data: list[LineError]
    object: Literal["list"] = "list"


class Counts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """OpenAI's batch object, its owner and the served model."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    """The model that the first line names."""
    errors: Errors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    usage: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    owner: str
    served: str
    """The model that was served when the batch was created. A server of another model leaves it alone."""

    def enter(self, status: Status) -> None:
        """Change the status, and note the time."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


Stored = TypeVar("Stored", StoredFile, Batch)


class DiskFull(EngineError):
    """The error 507 (RFC 4918, section 11.5)."""

    code = "disk_full"
    status = 507


class FolderInUse(EngineError):
    """The error 409 (RFC 9110, section 15.5.10)."""

    code = "batch_dir_in_use"
    status = 409


class Store:
    """The files and batches in `folder`, which is made if it is missing. Opening it blocks.

    Its dicts change on the event loop alone; threads only use the disk. Raises `FolderInUse` if another
    server uses the folder, and OSError if it cannot be made.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._saving, self._measuring = asyncio.Lock(), asyncio.Lock()
        self._reserved: list[tuple[str, int]] = []
        """(owner, bytes) of each upload that has not ended."""
        self.files: dict[str, StoredFile] = {}
        """Id → file, the oldest first."""
        self.batches: dict[str, Batch] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise FolderInUse(
                f"Another server keeps its batch files in {folder}.",
                remedy="Start this one with a --batch-dir of its own.",
            ) from None
        self._read()

    def _read(self) -> None:
        """Read the descriptions, and remove what a server that was killed has left without one."""
        self._read_all(StoredFile, "file-*.json")
        self._read_all(Batch, "batch_*.json")
        for path in self.folder.iterdir():
            if not CONTENT.fullmatch(path.name):
                continue  # the folder may be one in which a user keeps other files
            identity = path.name.partition(".")[0]
            batch = self.batches.get(identity)
            has_ended = batch is not None and batch.status not in UNFINISHED
            if has_ended or path.suffix != ".jsonl" or not (self.folder / f"{identity}.json").exists():
                path.unlink()

    def _read_all(self, kind: type[Stored], names: str) -> None:
        known: list[Stored] = []
        for path in self.folder.glob(names):
            try:
                known.append(msgspec.json.decode(path.read_bytes(), type=kind))
            except (OSError, msgspec.MsgspecError) as error:
                logger.warning("%s cannot be read: %s", path, error)
        self._known(kind).update({one.id: one for one in sorted(known, key=lambda one: one.created_at)})

    def _known(self, kind: type[Stored]) -> dict[str, Stored]:
        return cast("dict[str, Stored]", self.files if kind is StoredFile else self.batches)

    def close(self) -> None:
        self._lock.close()

    def path(self, identity: str) -> Path:
        """The file with the content of a file, or with the results of a batch."""
        return self.folder / f"{identity}.jsonl"

    def get(self, kind: type[Stored], identity: str) -> Stored:
        """The file or batch with this id. Raises `NotFound` also for the one of another API key."""
        found = self._known(kind).get(identity)
        if found is None or found.owner != KEY.get().account.owner:
            what = "file" if kind is StoredFile else "batch"
            raise NotFound(f"There is no {what} {identity[:100]!r} here.", field="id")
        return found

    def own(self, kind: type[Stored]) -> Iterator[Stored]:
        """The files or batches of this API key, the newest first."""
        owner = KEY.get().account.owner
        return (one for one in reversed(list(self._known(kind).values())) if one.owner == owner)

    async def save(self, what: Stored) -> None:
        """Write the description of a file or batch to the disk, and remember it."""
        async with self._saving:  # so the last of several calls writes last
            await asyncio.to_thread(self._write, what.id, msgspec.json.encode(what))
        self._known(type(what))[what.id] = what
        if len(self.batches) > MAX_STORED:
            ended = [one for one in self.batches.values() if one.status not in UNFINISHED]
            ((owner, _),) = Counter([one.owner for one in ended]).most_common(1)
            oldest = next(one for one in ended if one.owner == owner)
            del self.batches[oldest.id]
            (self.folder / f"{oldest.id}.json").unlink(missing_ok=True)

    def _write(self, identity: str, description: bytes) -> None:
        with whole_file(self.folder / f"{identity}.json") as file:
            file.write(description)

    async def remove(self, file: StoredFile) -> None:
        """Remove a file. Raises `InvalidRequest` if a batch still reads it."""
        for batch in self.batches.values():
            if batch.input_file_id == file.id and batch.status in UNFINISHED:
                raise InvalidRequest(
                    f"{file.id} is the input of {batch.id}, which is {batch.status}.",
                    field="id",
                    remedy="Cancel the batch first.",
                )
        del self.files[file.id]
        await asyncio.to_thread(self._unlink, file.id)

    def _unlink(self, identity: str) -> None:
        (self.folder / f"{identity}.json").unlink(missing_ok=True)
        self.path(identity).unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def room(self, size: int) -> AsyncIterator[None]:
        """Reserve `size` bytes during the block. Raises `DiskFull` if there is no room for them, or the key
        would have more than it leaves free (`fair_room`)."""
        owner = KEY.get().account.owner
        async with self._measuring:
            used, files = await asyncio.to_thread(self._used), Counter[str]()
            for other, reserved in self._reserved:
                used[other] += reserved
                files[other] += 1
            files.update([file.owner for file in self.files.values()])
            if not (fair_room(used, size, self._most_bytes - 1) and fair_room(files, 1, MAX_STORED)):
                share = f" {files[owner]} are of this key, {used[owner] / 2**30:.1f} GiB;" if owner else ""
                raise DiskFull(
                    f"There are {files.total()} batch files, of {used.total() / 2**30:.1f} GiB:{share} "
                    f"{size / 2**20:.1f} MiB more are not taken.",
                    remedy="Delete some (DELETE /v1/files/ID), or start the server with a larger --batch-gb.",
                )
            self._reserved.append((owner, size))
        try:
            yield
        finally:
            self._reserved.remove((owner, size))

    def _used(self) -> Counter[str]:
        """Owner → number of bytes in the folder. Those of uploads are reserved instead."""
        used = Counter[str]()
        for entry in os.scandir(self.folder):
            identity = entry.name.partition(".")[0]
            known = self.files.get(identity) or self.batches.get(identity)
            with contextlib.suppress(FileNotFoundError):
                if not entry.name.startswith("upload-"):
                    used["" if known is None else known.owner] += entry.stat().st_size
        return used


def fair_room(taken: Counter[str], amount: int, most: int) -> bool:
    """Whether the current API key may take `amount` of `most`, of which each owner has `taken`. With a file
    of keys it gets no more than it leaves free: of n keys that take what they can, each has most / (n + 1),
    and a key that comes later finds room (dynamic thresholds: Choudhury and Hahne, 1998)."""
    account = KEY.get().account
    free = most - taken.total() - amount
    shared = amount and account.prefix
    return free >= (taken[account.owner] + amount if shared else 0)


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Any]:
    """A file to write to, which replaces `path` at the end of the block, unless that raises."""
    part = path.with_name(f"upload-{secrets.token_hex(8)}")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def disk_error(error: OSError) -> EngineError:
    """The error of a file that could not be written."""
    if error.errno in FULL:
        return DiskFull("The disk with the batch files is full.", remedy="Make room, and send it again.")
    return EngineError(f"The batch files cannot be written: {error.strerror or error}.")

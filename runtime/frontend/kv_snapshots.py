"""KV snapshots as bytes: out of one engine and into another one, however they are carried."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ramify.engine_messages import ExportPrefix, ImportPrefix, Reply, Texts, Transferred
from ramify.errors import Overloaded
from ramify.runtime.kv_transfer.files import NewFile, SnapshotFolder, remove

Post = Callable[[ExportPrefix | ImportPrefix], Awaitable[Reply | Texts]]


class KVSnapshots:
    """`post` sends a message into the engine core and has its answer; `new_rid` gives ids."""

    def __init__(self, post: Post, new_rid: Callable[[], str]) -> None:
        self._post = post
        self._new_rid = new_rid
        self._folder: SnapshotFolder | None = None

    async def export(
        self, ids: Sequence[int], scope: str, skip: int, *, room: int = 0
    ) -> tuple[Transferred, bytes]:
        """The KV snapshot of the whole pages of `ids` that the tree's `scope` holds, without the first `skip`
        tokens.

        room : bytes that have to be free where it lies before it is read

        Raises `Overloaded` where they are not, and `RamifyError` where the tree holds no more, or pages are
        not transferred.
        """
        path = self._new_path(room)
        message = ExportPrefix(rid=self._new_rid(), ids=tuple(ids), scope=scope, path=path, skip=skip)
        try:
            reply = await self._post(message)
            snapshot = await asyncio.to_thread(_read, path)
        finally:
            remove(path)
        return _transferred(reply), snapshot

    async def import_(self, snapshot: bytes) -> Transferred:
        """Take the pages of `snapshot` into the prefix tree. `tokens` are those of its prefix that the tree
        has then.

        Raises `InvalidRequest` for a KV snapshot that does not fit this engine or is damaged, and
        `Overloaded` where there is no room for it; nothing has changed then.
        """
        path = self._new_path(len(snapshot))
        try:
            await asyncio.to_thread(_write, path, snapshot)
            reply = await self._post(ImportPrefix(rid=self._new_rid(), path=path))
        finally:
            remove(path)
        return _transferred(reply)

    def close(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def _new_path(self, room: int) -> str:
        self._folder = self._folder or SnapshotFolder()
        if self._folder.room() < room:
            raise Overloaded(f"There is no room for a KV snapshot: {room >> 20} MB in {self._folder.path}.")
        return self._folder.new()


def _transferred(reply: Reply | Texts) -> Transferred:
    assert isinstance(reply, Reply)
    assert reply.transferred is not None
    return reply.transferred


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write(path: str, snapshot: bytes) -> None:
    file = NewFile(path)
    try:
        file.write(0, snapshot)
    except BaseException:
        file.close(keep=False)
        raise
    file.close(keep=True)

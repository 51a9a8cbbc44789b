"""KV snapshots as bytes: exported from one engine and imported into another, by any transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ramify.engine_messages import ExportPrefix, ImportPrefix, Reply, Texts, Transferred
from ramify.errors import Overloaded
from ramify.runtime.kv_transfer.files import NewFile, SnapshotFolder, remove

Post = Callable[[ExportPrefix | ImportPrefix], Awaitable[Reply | Texts]]


class KVSnapshots:
    """Exports and imports KV snapshots. `post` sends a message to the engine core and returns the answer;
    `new_rid` returns new ids."""

    def __init__(self, post: Post, new_rid: Callable[[], str]) -> None:
        self._post = post
        self._new_rid = new_rid
        self._folder: SnapshotFolder | None = None

    async def export(
        self, ids: Sequence[int], scope: str, skip: int, *, room: int = 0
    ) -> tuple[Transferred, bytes]:
        """The KV snapshot of the whole pages of `ids` that the tree holds in `scope`, without those of the
        first `skip` tokens.

        room : bytes that must be free in the snapshot folder beforehand

        Raises `Overloaded` if fewer bytes are free, and `RamifyError` if the tree holds no pages beyond
        `skip`, or if pages are not transferred.
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
        """Take the pages of `snapshot` into the prefix tree. `tokens` of the result is the number of tokens
        of the snapshot's prefix that the tree holds afterwards.

        Raises `InvalidRequest` if the KV snapshot is damaged or does not fit this engine, and `Overloaded` if
        there is no room for it. The tree is unchanged in these cases.
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

"""Images of cached pages as bytes: out of an engine and into another one, however they are carried."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ramify.errors import RamifyError
from ramify.ring_messages import ExportPrefix, ImportPrefix, Reply, Texts
from ramify.runtime.kv_transfer.files import ImageFolder, NewFile, remove

Post = Callable[[ExportPrefix | ImportPrefix], Awaitable[Reply | Texts]]


class Images:
    """`post` sends a message into the ring and has its answer; `new_rid` gives ids."""

    def __init__(self, post: Post, new_rid: Callable[[], str]) -> None:
        self._post = post
        self._new_rid = new_rid
        self._folder: ImageFolder | None = None

    async def export(self, ids: Sequence[int], scope: str, skip: int) -> bytes | None:
        """The image of the whole pages of `ids` that the tree's `scope` holds, without the first `skip`
        tokens; None where it holds no more."""
        path = self._new_path()
        message = ExportPrefix(rid=self._new_rid(), ids=tuple(ids), scope=scope, path=path, skip=skip)
        try:
            await self._post(message)
            return await asyncio.to_thread(_read, path)
        except RamifyError:
            return None
        finally:
            remove(path)

    async def import_(self, image: bytes) -> int:
        """Take the pages of `image` into the prefix tree. Returns the tokens of its prefix that the tree has
        then.

        Raises `InvalidRequest` for an image that does not fit this engine or is damaged, and `Overloaded`
        where no page is free for it; nothing has changed then.
        """
        path = self._new_path()
        try:
            await asyncio.to_thread(_write, path, image)
            reply = await self._post(ImportPrefix(rid=self._new_rid(), path=path))
        finally:
            remove(path)
        assert isinstance(reply, Reply)
        assert reply.transferred is not None
        return reply.transferred.tokens

    def close(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def _new_path(self) -> str:
        self._folder = self._folder or ImageFolder()
        return str(self._folder.new())


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _write(path: str, image: bytes) -> None:
    file = NewFile(path)
    try:
        file.write(0, image)
    except BaseException:
        file.close(keep=False)
        raise
    file.close(keep=True)

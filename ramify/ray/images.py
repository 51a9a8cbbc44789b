"""Cached pages between machines: objects of Ray's store, which the frontend names, but never reads.

    frontend ──▶ source    export: its ring writes a file, which becomes an object      ─▶ a reference to it
    frontend ──▶ target    import: the object is pulled to its machine, and is a file there for its ring

The object is the image's bytes as they are (`ramify.runtime.kv_transfer.image`); Ray pickles no bytes. The
ring that takes it checks it as it checks a file on its own machine.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable
from typing import Any

from ramify.errors import EngineError, InvalidRequest, RamifyError, WorkerDied, from_info
from ramify.ring_messages import INTERNAL, ExportPrefix, Failed, ImportPrefix, Reply, Texts
from ramify.runtime.frontend.images import Images
from ramify.runtime.frontend.tasks import Tasks


class RemoteImages:
    """A frontend's references to the images on their way, by name; an `ImageStore`. Ray frees an image when
    the last reference to it is gone."""

    def __init__(self) -> None:
        self._images: dict[str, Any] = {}

    def new(self) -> str:
        name = secrets.token_hex(8)
        self._images[name] = None
        return name

    def has_room(self, size: int) -> bool:
        """The replicas look on their own machines."""
        return True

    def put(self, name: str, image: Any) -> None:
        """What a transport calls the image. Nothing where it is not needed any more."""
        if name in self._images:
            self._images[name] = image

    def get(self, name: str) -> Any:
        """Raises KeyError."""
        return self._images[name]

    def remove(self, image: str) -> None:
        self._images.pop(image, None)

    def close(self) -> None:
        self._images.clear()


class ReplicaImages:
    """A replica's exports and imports. They go on to their end where the caller has gone away, so that no
    file stays.

    send : sends a message into the ring
    """

    def __init__(self, send: Callable[[ExportPrefix | ImportPrefix], None]) -> None:
        self._send = send
        self._images = Images(self._post, self._new_rid)
        self._asked: dict[str, asyncio.Future[Reply]] = {}
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._tasks = Tasks()

    async def export(
        self, message: ExportPrefix, page_bytes: int, page_size: int
    ) -> tuple[Reply | Failed, bytes | None]:
        """The answer to `message`, and the image: None where it failed.

        page_bytes, page_size : bytes and tokens of a page of this ring
        """
        # Twice: as a file, and as an object in the same shared memory.
        room = 2 * page_bytes * max(0, len(message.ids) - message.skip) // page_size
        try:
            work = self._images.export(message.ids, message.scope, message.skip, room=room)
            done, image = await self._tasks.finish(work)
        except (RamifyError, OSError) as error:
            return _failed(message.rid, error), None
        return Reply(rid=message.rid, transferred=done), image

    async def import_(self, message: ImportPrefix, image: object) -> Reply | Failed:
        """The answer to `message`, whose path means nothing here."""
        try:
            if not isinstance(image, bytes):
                raise InvalidRequest(f"The image cannot be used: it is {type(image).__name__}, not bytes.")
            done = await self._tasks.finish(self._images.import_(image))
        except (RamifyError, OSError) as error:
            return _failed(message.rid, error)
        return Reply(rid=message.rid, transferred=done)

    def answered(self, answer: Reply | Texts | Failed) -> bool:
        """Take an answer of the ring; False where it is none to these messages."""
        found = self._asked.pop(answer.rid, None)
        if found is None:
            return False
        if not found.done():
            if isinstance(answer, Reply):
                found.set_result(answer)
            elif isinstance(answer, Failed):
                found.set_exception(from_info(answer.error))
        return True

    def ring_lost(self, reason: str) -> None:
        """What has been asked of the ring gets no answer."""
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(WorkerDied(reason))

    async def aclose(self) -> None:
        self.ring_lost("The replica has been stopped.")
        await self._tasks.cancel()
        self._images.close()

    async def _post(self, message: ExportPrefix | ImportPrefix) -> Reply:
        asked: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asked[message.rid] = asked
        self._send(message)
        return await asked

    def _new_rid(self) -> str:
        return f"{INTERNAL}image-{self._name}-{next(self._numbers)}"


def _failed(rid: str, error: RamifyError | OSError) -> Failed:
    found = error if isinstance(error, RamifyError) else EngineError(str(error))
    return Failed(rid=rid, error=found.to_info())

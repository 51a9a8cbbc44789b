"""KV snapshots on their way between machines, as objects in Ray's store. The frontend never reads them.

    frontend ──▶ source    export: the engine core writes a file, the replica makes an object of the bytes,
                           and the frontend gets a reference to the object
    frontend ──▶ target    import: Ray copies the object to the replica's machine, the replica writes a file,
                           and the engine core reads the file

The object is exactly the bytes of the KV snapshot (`ramify.runtime.kv_transfer.snapshot`), which Ray does not
pickle. The importing engine core checks them as it checks a file of its own machine.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable
from typing import Any

from ramify.engine_messages import INTERNAL, ExportPrefix, Failed, ImportPrefix, Reply, Texts
from ramify.errors import EngineError, InvalidRequest, RamifyError, WorkerDied, from_info
from ramify.runtime.frontend.tasks import Tasks
from ramify.runtime.kv_transfer.kv_snapshots import KVSnapshots


class RemoteSnapshots:
    """A `SnapshotStore` of a frontend: name → reference to a KV snapshot on its way between replicas.

    Ray frees a KV snapshot when the last reference to it is gone.
    """

    def __init__(self) -> None:
        self._snapshots: dict[str, Any] = {}

    def new(self) -> str:
        name = secrets.token_hex(8)
        self._snapshots[name] = None
        return name

    def has_room(self, size: int) -> bool:
        """Always True, as the replicas check the room on their own machines."""
        return True

    def put(self, name: str, snapshot: Any) -> None:
        """Keep the transport's handle of a KV snapshot, unless the name has been removed meanwhile."""
        if name in self._snapshots:
            self._snapshots[name] = snapshot

    def get(self, name: str) -> Any:
        """The transport's handle of a KV snapshot. Raises KeyError for an unknown name."""
        return self._snapshots[name]

    def remove(self, snapshot: str) -> None:
        self._snapshots.pop(snapshot, None)

    def close(self) -> None:
        self._snapshots.clear()


class ReplicaSnapshots:
    """The exports and imports of a replica.

    An export or import runs to its end even if the caller is cancelled, so that no file is left behind.

    send : sends a message to the engine core
    """

    def __init__(self, send: Callable[[ExportPrefix | ImportPrefix], None]) -> None:
        self._send = send
        self._snapshots = KVSnapshots(self._post, self._new_rid)
        self._asked: dict[str, asyncio.Future[Reply]] = {}
        self._name = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._tasks = Tasks()

    async def export(
        self, message: ExportPrefix, page_bytes: int, page_size: int
    ) -> tuple[Reply | Failed, bytes | None]:
        """Export a prefix.

        Returns the answer to `message` and the KV snapshot, which is None if the export failed.

        page_bytes, page_size : bytes, and tokens, of a page of this engine core
        """
        # Twice the size: a file, and an object in the same shared memory.
        room = 2 * page_bytes * max(0, len(message.ids) - message.skip) // page_size
        try:
            work = self._snapshots.export(message.ids, message.scope, message.skip, room=room)
            done, snapshot = await self._tasks.finish(work)
        except (RamifyError, OSError) as error:
            return _failed(message.rid, error), None
        return Reply(rid=message.rid, transferred=done), snapshot

    async def import_(self, message: ImportPrefix, snapshot: object) -> Reply | Failed:
        """Import `snapshot`; returns the answer to `message`.

        The path in `message` is the frontend's and is not used.
        """
        try:
            if not isinstance(snapshot, bytes):
                raise InvalidRequest(
                    f"The KV snapshot cannot be used: it is {type(snapshot).__name__}, not bytes."
                )
            done = await self._tasks.finish(self._snapshots.import_(snapshot))
        except (RamifyError, OSError) as error:
            return _failed(message.rid, error)
        return Reply(rid=message.rid, transferred=done)

    def answered(self, answer: Reply | Texts | Failed) -> bool:
        """Take an answer of the engine core. Returns False if it does not answer a message of this object."""
        found = self._asked.pop(answer.rid, None)
        if found is None:
            return False
        if not found.done():
            if isinstance(answer, Reply):
                found.set_result(answer)
            elif isinstance(answer, Failed):
                found.set_exception(from_info(answer.error))
        return True

    def engine_lost(self, reason: str) -> None:
        """Fail all exports and imports, as the engine core is lost and will not answer."""
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(WorkerDied(reason))

    async def aclose(self) -> None:
        self.engine_lost("The replica has been stopped.")
        await self._tasks.cancel()
        self._snapshots.close()

    async def _post(self, message: ExportPrefix | ImportPrefix) -> Reply:
        asked: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asked[message.rid] = asked
        self._send(message)
        return await asked

    def _new_rid(self) -> str:
        return f"{INTERNAL}snapshot-{self._name}-{next(self._numbers)}"


def _failed(rid: str, error: RamifyError | OSError) -> Failed:
    found = error if isinstance(error, RamifyError) else EngineError(str(error))
    return Failed(rid=rid, error=found.to_info())

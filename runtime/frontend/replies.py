"""Control calls of the frontend that have not been answered."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable

from ramify.engine_messages import (
    Detokenize,
    ExportPrefix,
    FlushCache,
    GetSnapshot,
    GetStats,
    ImportPrefix,
    LoadLora,
    Reply,
    Texts,
    Tokenize,
    ToTokenizer,
    UnloadLora,
)
from ramify.errors import RamifyError
from ramify.runtime.faults import unsendable

ControlCall = (
    GetStats
    | GetSnapshot
    | FlushCache
    | LoadLora
    | UnloadLora
    | Tokenize
    | Detokenize
    | ExportPrefix
    | ImportPrefix
)
"""Messages that the engine core answers by `Reply` or `Texts`."""


class Replies:
    """Control calls by id. `send` sends a message to the replicas."""

    def __init__(self, send: Callable[[ToTokenizer], None]) -> None:
        self._send = send
        self.waiting: dict[str, asyncio.Future[Reply | Texts]] = {}
        """Id of a control call → future of its answer."""

    def post(self, message: ControlCall) -> asyncio.Future[Reply | Texts]:
        """Send a control call at once. Returns the future of its answer."""
        future: asyncio.Future[Reply | Texts] = asyncio.get_running_loop().create_future()
        self.waiting[message.rid] = future
        future.add_done_callback(lambda _: self.waiting.pop(message.rid, None))
        try:
            self._send(message)
        except Exception as error:
            future.set_exception(unsendable(error))
        return future

    def take(self, answer: Reply | Texts) -> None:
        future = self.waiting.get(answer.rid)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, rid: str, error: RamifyError) -> None:
        future = self.waiting.get(rid)
        if future is not None and not future.done():
            future.set_exception(error)

    def fail_all(self, error: RamifyError) -> None:
        for future in list(self.waiting.values()):
            if not future.done():
                future.set_exception(copy.copy(error))

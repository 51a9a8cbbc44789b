"""The LoRA adapters of an engine: loaded by name into the scheduler, and again into every new ring."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping

import msgspec

from ramify.errors import EngineError, InvalidRequest
from ramify.ring_messages import LoadLora, Reply, Texts, UnloadLora
from ramify.runtime.model.lora.names import checked_name, unknown

log = logging.getLogger("ramify")

Answer = asyncio.Future[Reply | Texts]
Ask = Callable[[LoadLora | UnloadLora], Answer]


class LoadedLora(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that requests can name."""

    path: str
    revision: str
    """Changes with the adapter's files."""


class Loras:
    """The adapters that requests can name. `ask` sends a message into the ring."""

    def __init__(self, ask: Ask, new_rid: Callable[[], str]) -> None:
        self._ask = ask
        self._new_rid = new_rid
        self.loaded: dict[str, LoadedLora] = {}

    def check(self, name: str) -> None:
        """Raise `NotFound` for a name of no adapter."""
        if name and name not in self.loaded:
            raise unknown(name, self.loaded)

    async def load(self, name: str, path: str) -> None:
        """Load the folder at `path`. Raises `InvalidRequest` and `UnsupportedField`."""
        checked_name(name)
        if not isinstance(path, str) or not path:
            raise InvalidRequest(f"The path of the LoRA adapter {name!r} is {path!r}.", field="lora")
        reply = await self._ask(LoadLora(rid=self._new_rid(), name=name, path=path))
        assert isinstance(reply, Reply)
        self.loaded[name] = LoadedLora(path=path, revision=reply.lora)

    async def load_all(self, paths: Mapping[str, str]) -> None:
        for name, path in paths.items():
            await self.load(name, path)

    async def unload(self, name: str) -> None:
        """Forget a name. Requests that run or wait with the adapter end with it. Raises `NotFound`."""
        self.check(name)
        found = self.loaded.pop(name)
        try:
            await self._ask(UnloadLora(rid=self._new_rid(), name=name))
        except EngineError:
            self.loaded.setdefault(name, found)
            raise

    def restore(self) -> None:
        """A new ring has started, which has no adapters: load them into it. Messages keep their order, so
        that requests sent from now on find them."""
        for name, lora in self.loaded.items():
            answer = self._ask(LoadLora(rid=self._new_rid(), name=name, path=lora.path))
            answer.add_done_callback(functools.partial(self._restored, name, lora))

    def _restored(self, name: str, before: LoadedLora, answer: Answer) -> None:
        if answer.cancelled() or self.loaded.get(name) is not before:
            return
        error = answer.exception()
        if error is None:
            reply = answer.result()
            assert isinstance(reply, Reply)
            self.loaded[name] = LoadedLora(path=before.path, revision=reply.lora)
        elif not isinstance(error, EngineError):  # else there is no ring
            log.warning("the LoRA adapter %s is gone: %s", name, error)
            del self.loaded[name]

"""The LoRA adapters of an engine: loaded into the scheduler by name, and again into every new engine core."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ramify.engine_messages import LoadLora, Reply, Texts, UnloadLora
from ramify.errors import EngineClosed, EngineError, InvalidRequest, WorkerDied
from ramify.runtime.lora_names import checked_name, unknown

log = logging.getLogger("ramify")

Answer = asyncio.Future[Reply | Texts]
Ask = Callable[[LoadLora | UnloadLora], Answer]


class LoadedLora(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that requests can name."""

    path: str
    revision: str
    """Identifies the content of the adapter's files."""


class Loras:
    """The adapters that requests can name.

    ask : sends a message to the engine core, and returns the future of the answer
    reserved : returns the names that stand for the model without an adapter in requests over HTTP
    """

    def __init__(
        self, ask: Ask, new_rid: Callable[[], str], reserved: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._reserved = reserved
        self._ask = ask
        self._new_rid = new_rid
        self.loaded: dict[str, LoadedLora] = {}

    def revision(self, name: str) -> str:
        """Revision of the adapter `name`; "" for the name "", which means the model without an adapter.
        Raises `NotFound` for an unknown name."""
        if not name:
            return ""
        if name not in self.loaded:
            raise unknown(name, self.loaded)
        return self.loaded[name].revision

    async def load(self, name: str, path: str) -> None:
        """Load the adapter in the folder `path` under `name`. Raises the errors of `Engine.load_lora`."""
        checked_name(name, "name")
        if name in self._reserved():
            raise InvalidRequest(
                f"An adapter cannot have the name {name!r}, which is the model's.",
                field="name",
                remedy="Give it another one.",
            )
        if not isinstance(path, str) or not path:
            raise InvalidRequest(f"The path of the LoRA adapter {name!r} is {path!r}.", field="path")
        answer = self._ask(LoadLora(rid=self._new_rid(), name=name, path=path))
        answer.add_done_callback(functools.partial(self._record, name, path))
        await asyncio.shield(answer)  # if the caller is cancelled, the adapter is loaded all the same

    def _record(self, name: str, path: str, answer: Answer) -> None:
        if not answer.cancelled() and answer.exception() is None:
            reply = answer.result()
            assert isinstance(reply, Reply)
            self.loaded[name] = LoadedLora(path=path, revision=reply.lora)

    async def load_all(self, paths: Mapping[str, str]) -> None:
        for name, path in paths.items():
            await self.load(name, path)

    async def unload(self, name: str) -> None:
        """Forget an adapter. Running and waiting requests that use it keep it until they finish. Raises
        `NotFound` for an unknown name."""
        if name not in self.loaded:
            raise unknown(name, self.loaded, "name")
        found = self.loaded.pop(name)
        try:
            await self._ask(UnloadLora(rid=self._new_rid(), name=name))
        except EngineError:
            self.loaded.setdefault(name, found)
            raise

    def restore(self) -> None:
        """Load all adapters into an engine core that has just started without any. Messages keep their order,
        so requests sent from now on find the adapters."""
        for name, lora in self.loaded.items():
            answer = self._ask(LoadLora(rid=self._new_rid(), name=name, path=lora.path))
            answer.add_done_callback(functools.partial(self._restored, name, lora))

    def _restored(self, name: str, before: LoadedLora, answer: Answer) -> None:
        if answer.cancelled() or self.loaded.get(name) is not before:
            return
        error = answer.exception()
        if error is None:
            self._record(name, before.path, answer)
            if self.loaded[name] != before:
                log.warning("the files of the LoRA adapter %s have changed: %s", name, before.path)
        elif not isinstance(error, WorkerDied | EngineClosed):  # else there is no engine core
            log.warning("the LoRA adapter %s is gone: %s", name, error)
            del self.loaded[name]

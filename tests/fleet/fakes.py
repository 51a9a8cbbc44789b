"""Engine cores without processes, and a fleet and a frontend in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from ramify.engine_messages import StepText
from ramify.errors import EngineError, WorkerDied
from ramify.messages import (
    Finish,
    Generate,
    LimitHint,
    ProgramHint,
    TextChunk,
)
from ramify.model_info import ModelInfo
from ramify.radix.digest import Digests
from ramify.runtime.config import EngineConfig
from ramify.runtime.fleet.local import LocalFleet
from ramify.runtime.fleet.replica import EngineEvents, FleetEvents
from ramify.runtime.frontend.frontend import Frontend

PREFIX = tuple(range(1000))


def model_info(**fields: Any) -> ModelInfo:
    """The info of a small model, with `fields` in place of its own."""
    own = {
        "name": "model",
        "path": "",
        "vocab_size": 2000,
        "context_length": 1000,
        "eos_token_ids": (0,),
        "bos_token_id": None,
        "dtype": "float32",
        "device": "cpu",
        "chat_format": None,
        "max_running": 8,
        "page_size": 16,
        "digest": "content",
    }
    return ModelInfo(**(own | fields))


class FakeEngine:
    """An `EngineCore` for tests. A test reads the received messages from `sent`, and answers by `receive`.

    page_bytes : size of a KV page in bytes; 0 if pages are not moved
    """

    def __init__(
        self,
        config: EngineConfig,
        workers: Any,
        *,
        events: EngineEvents,
        name: str,
        page_bytes: int = 0,
        **options: Any,
    ) -> None:
        self.sent: list[Any] = []
        self.receive, self.died, self.came_back, self.gave_up = events
        self.name = name
        self.refuses: Callable[[Any], bool] = lambda message: False
        """Whether a simulated bug keeps a message from being sent."""
        self.page_bytes = page_bytes
        self.restarting = False
        self.heartbeat_age_s = 0.0
        self.info: Any = model_info(page_size=config.page_size or 16)
        self.max_prompt_tokens = 1000
        self.pids: dict[str, int] = {}
        self.closed = False

    async def start(self) -> None:
        pass

    async def aclose(self) -> None:
        self.closed = True

    def close_now(self) -> None:
        self.closed = True

    def send(self, message: Any) -> None:
        if self.refuses(message):
            raise ValueError("a bug")
        msgspec.msgpack.encode(message)
        self.sent.append(message)

    def take(self, *kinds: type) -> list[Any]:
        """Remove and return the messages of these types in `sent`."""
        found = [one for one in self.sent if isinstance(one, kinds)]
        self.sent = [one for one in self.sent if not isinstance(one, kinds)]
        return found

    def end(self, rid: str, *ids: int, text: str = "") -> TextChunk:
        """Send the last chunk of a request."""
        chunk = TextChunk(rid=rid, text=text, ids=ids, finish=Finish(reason="length"))
        self.receive(StepText(chunks=(chunk,)))
        return chunk


class Timers:
    """Timers that expire when a test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.seconds: list[float] = []
        """The durations of all timers in seconds, expired ones included."""

    def __call__(self, seconds: float, call: Callable[[], None]) -> Any:
        self.waiting.append(call)
        self.seconds.append(seconds)
        waiting = self.waiting

        class Timer:
            def cancel(self) -> None:
                if call in waiting:
                    waiting.remove(call)

        return Timer()


class Fleet:
    """A started `LocalFleet` of two `FakeEngine`s, and its messages to the frontend.

    fleet_options : options of `LocalFleet`; the other options are those of `EngineConfig`
    """

    def __init__(
        self, *, page_bytes: int = 0, fleet_options: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.got: list[Any] = []
        self.lost: list[list[str]] = []
        self.errors: list[WorkerDied | None] = []
        self.gave_up: list[EngineError] = []
        self.trees: list[tuple[str, Any]] = []
        self.restarts = 0
        self.timers = Timers()
        self.engines: list[FakeEngine] = []
        """Engine cores, in the order in which they were made."""
        self._page_bytes = page_bytes
        self.fleet = LocalFleet(
            EngineConfig(device="cpu", **{"replicas": 2, **options}),
            None,
            FleetEvents(
                receive=self.got.append,
                lost=self._lose,
                restarted=self._restarted,
                gave_up=self.gave_up.append,
                tree_changed=lambda name, change: self.trees.append((name, change)),
            ),
            make_engine=self._make,
            later=self.timers,
            **(fleet_options or {}),
        )
        asyncio.run(self.fleet.start())
        self.send = self.fleet.send

    def _make(self, *arguments: Any, **options: Any) -> FakeEngine:
        self.engines.append(FakeEngine(*arguments, page_bytes=self._page_bytes, **options))
        return self.engines[-1]

    def _lose(self, error: WorkerDied | None, rids: Sequence[str]) -> bool:
        self.lost.append(list(rids))
        self.errors.append(error)
        return False

    def _restarted(self) -> None:
        self.restarts += 1

    def kill(self, index: int) -> None:
        self.engines[index].died(WorkerDied("dead"))

    def homes(self, rid: str) -> list[int]:
        """Indices of the engine cores that have been sent the request."""
        return [
            index
            for index, engine in enumerate(self.engines)
            if any(isinstance(one, Generate) and one.rid == rid for one in engine.sent)
        ]

    def home(self, rid: str) -> int:
        (found,) = self.homes(rid)
        return found

    def requests(self) -> int:
        """Number of requests that have a replica."""
        return sum(status.requests for status in self.fleet.statuses())


class Served:
    """A `Frontend` in front of engine cores of the class `engine`. `options` are those of `EngineConfig`."""

    def __init__(self, engine: type[FakeEngine] = FakeEngine, **options: Any) -> None:
        self._engine = engine
        self.engines: list[FakeEngine] = []
        """Engine cores, in the order in which they were made."""
        config = EngineConfig(**{"device": "cpu", "max_running": 8, **options})
        self.frontend = Frontend(
            config, make_fleet=lambda events: LocalFleet(config, None, events, make_engine=self._make)
        )

    def _make(self, *arguments: Any, **options: Any) -> FakeEngine:
        self.engines.append(self._engine(*arguments, **options))
        return self.engines[-1]

    def kill(self, index: int = 0) -> bool:
        """Let an engine core die and come back. Returns whether a request is known to be the cause."""
        engine = self.engines[index]
        explained = engine.died(WorkerDied("The scheduler process died."))
        engine.sent.clear()
        engine.came_back()
        return explained

    def ask(self, rid: str, prompt: tuple[int, ...] = tuple(range(900))) -> asyncio.Task[list[TextChunk]]:
        """Start a task that sends a request and returns all its chunks."""

        async def read() -> list[TextChunk]:
            request = Generate(rid=rid, prompt=(prompt,))
            return [chunk async for chunk in self.frontend.generate(request)]

        return asyncio.ensure_future(read())

    def requests(self) -> list[Generate]:
        """Requests in `sent` of the engine cores. The requests of a killed engine core are lost."""
        return [one for engine in self.engines for one in engine.sent if isinstance(one, Generate)]


def asked(rid: str, *more: int, program: str = "", limit: int | None = None, **fields: Any) -> Generate:
    """A request with the prompt `PREFIX` + `more`. `limit`: most tokens of its `program`."""
    limits = () if limit is None else (LimitHint(id="l", max_total_tokens=limit),)
    hint = ProgramHint(program=program, limits=limits) if program else None
    return Generate(rid=rid, prompt=(PREFIX + more,), hint=hint, **fields)


def page_ends(ids: Sequence[int], page_size: int = 16) -> tuple[int, ...]:
    """Digests of the whole pages of `ids`, as a replica's tree has them."""
    return tuple(Digests().page_ends(np.array(ids, np.int32), "", page_size))

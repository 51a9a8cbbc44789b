"""What a fleet needs of an engine core, and what it remembers of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

import msgspec

from ramify.engine_messages import INTERNAL, ToFrontend, ToTokenizer
from ramify.errors import EngineError, WorkerDied
from ramify.messages import ModelInfo

State = Literal["starting", "up", "draining", "gone"]
"""Of a replica: it takes nothing yet, or is being replaced; it takes requests; it takes no new ones; it will
not come back by itself."""


HEARTBEAT_S = 2.0
"""How often a scheduler is asked for its counters, so that a message comes back even from an idle engine
core."""
HEARTBEAT = f"{INTERNAL}heartbeat"
"""The id of these questions, whose answers only show that the engine core lives."""
SILENT_S = 30.0
"""An engine core without a message for this long hangs, as a step takes seconds at most; a frontend that
has sent a replica nothing for this long is gone."""


class Timer(Protocol):
    def cancel(self) -> object: ...


Later = Callable[[float, Callable[[], None]], Timer]
"""Calls a function after a number of seconds, unless the timer is cancelled."""


class EngineCore(Protocol):
    """A `EngineSupervisor`, or an engine core somewhere else that is used in the same way."""

    info: ModelInfo | None
    """Set by `start`."""
    max_prompt_tokens: int
    page_bytes: int
    """Of a KV page; 0 where its pages are not moved."""

    @property
    def pids(self) -> Mapping[str, int]: ...
    @property
    def restarting(self) -> bool: ...
    @property
    def heartbeat_age_s(self) -> float: ...
    async def start(self) -> None: ...
    async def aclose(self) -> None: ...
    def close_now(self) -> None: ...
    def send(self, message: ToTokenizer) -> None: ...


class EngineEvents(NamedTuple):
    """What an engine core calls, on the fleet's event loop."""

    receive: Callable[[ToFrontend], None]
    """With every message from the engine core."""
    died: Callable[[WorkerDied], bool]
    """When what it ran is lost, with the error for requests that cannot go on. It returns whether a request
    is known to be the cause."""
    restarted: Callable[[], None]
    """When it has started anew, with an empty tree and without adapters."""
    gave_up: Callable[[EngineError], None]
    """When it will not start again."""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A replica, for people to look at."""

    name: str
    state: State
    requests: int
    """That it runs or has queued."""
    heartbeat_age_s: float
    """Seconds since its last message."""
    pids: dict[str, int]
    """Its processes by role."""


def status_of(name: str, engine: EngineCore, state: State, requests: int) -> ReplicaStatus:
    age_s = engine.heartbeat_age_s if engine.info is not None else 0.0
    return ReplicaStatus(
        name=name, state=state, requests=requests, heartbeat_age_s=age_s, pids=dict(engine.pids)
    )


MakeEngine = Callable[[EngineEvents], EngineCore]


@dataclasses.dataclass(slots=True, eq=False)
class Replica:
    """An engine core of the fleet. `up`: it takes messages. `left`: it is not in the fleet any more."""

    engine: EngineCore
    up: bool = False
    draining: bool = False
    gone: bool = False
    left: bool = False
    loras: dict[str, str] = dataclasses.field(default_factory=dict)
    """Its LoRA adapters: name → revision."""

    @property
    def state(self) -> State:
        if self.gone:
            return "gone"
        if self.draining:
            return "draining"
        return "up" if self.up else "starting"

    @property
    def usable(self) -> bool:
        """It takes requests, or will when it has started."""
        return not (self.draining or self.gone)

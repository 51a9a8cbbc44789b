"""An engine core as its fleet uses it, and a replica: the core with its state in the fleet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from ramify.engine_messages import INTERNAL, ToFrontend, ToTokenizer, TreeChange
from ramify.errors import EngineError, WorkerDied
from ramify.messages import ModelInfo

State = Literal["starting", "up", "draining", "gone"]
"""State of a replica.

starting    it takes nothing yet, or is being replaced
up          it takes requests
draining    it takes no new ones
gone        it will not come back by itself
"""


HEARTBEAT_S = 2.0
"""Seconds between two heartbeats: the scheduler is asked for its counters, so that even an idle engine core
sends a message."""
HEARTBEAT = f"{INTERNAL}heartbeat"
"""Id of these control calls; their answers only show that the engine core lives."""
SILENT_S = 30.0
"""An engine core without a message for this long hangs, as a step takes seconds at most; a frontend that
has sent a replica nothing for this long is gone."""


class Timer(Protocol):
    def cancel(self) -> object: ...


Later = Callable[[float, Callable[[], None]], Timer]
"""Calls a function after a number of seconds, unless the timer is cancelled."""


class EngineCore(Protocol):
    """An `EngineSupervisor`, or an engine core somewhere else that is used in the same way."""

    info: ModelInfo | None
    """Set by `start`."""
    max_prompt_tokens: int
    page_bytes: int
    """Bytes of a KV page; 0 where its pages are not moved."""

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
    """Callbacks of an engine core. It calls them on the fleet's event loop."""

    receive: Callable[[ToFrontend], None]
    """Takes every message from the engine core."""
    died: Callable[[WorkerDied], bool]
    """Called when the running requests are lost, with the error for those that cannot go on. Returns whether
    a request is known to be the cause."""
    restarted: Callable[[], None]
    """Called when the core has started anew, with an empty tree and without adapters."""
    gave_up: Callable[[EngineError], None]
    """Called when the core will not start again."""


class FleetEvents(NamedTuple):
    """Callbacks of a fleet."""

    receive: Callable[[ToFrontend], None]
    """Takes every message for the frontend."""
    lost: Callable[[WorkerDied | None, Sequence[str]], bool]
    """Called with the ids of requests whose replica has died or has left, to be sent again, and with the
    error for those that cannot go on: None where nothing has died. Returns whether one of them is known to
    be the cause."""
    restarted: Callable[[], None]
    """Called when a replica without adapters is up, before any request goes there."""
    gave_up: Callable[[EngineError], None]
    """Called with the reason when the last replica is gone."""
    tree_changed: Callable[[str, TreeChange | None], None]
    """Called with a replica's name and the change of its prefix tree; with None where the tree is gone."""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a replica, for people to look at."""

    name: str
    state: State
    requests: int
    """Requests that it runs or has queued."""
    heartbeat_age_s: float
    """Seconds since its last message."""
    pids: dict[str, int]
    """Role → process id."""


def status_of(name: str, engine: EngineCore, state: State, requests: int) -> ReplicaStatus:
    age_s = engine.heartbeat_age_s if engine.info is not None else 0.0
    return ReplicaStatus(
        name=name, state=state, requests=requests, heartbeat_age_s=age_s, pids=dict(engine.pids)
    )


MakeEngine = Callable[[EngineEvents], EngineCore]


@dataclasses.dataclass(slots=True, eq=False)
class Replica:
    """An engine core of the fleet, with its state. `up`: it takes messages. `left`: the fleet has removed
    it."""

    engine: EngineCore
    up: bool = False
    draining: bool = False
    gone: bool = False
    left: bool = False
    loras: dict[str, str] = dataclasses.field(default_factory=dict)
    """LoRA adapters: name → revision."""

    @property
    def state(self) -> State:
        if self.gone:
            return "gone"
        if self.draining:
            return "draining"
        return "up" if self.up else "starting"

    @property
    def usable(self) -> bool:
        """Whether it takes requests, or will when it has started."""
        return not (self.draining or self.gone)

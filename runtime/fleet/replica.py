"""A replica: an engine core with its state in the fleet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from ramify.engine_messages import INTERNAL, ToFrontend, ToTokenizer, TreeChange
from ramify.errors import EngineError, WorkerDied
from ramify.model_info import ModelInfo

State = Literal["starting", "up", "draining", "gone"]
"""State of a replica.

starting    not ready yet, or its engine core is being restarted
up          takes requests
draining    takes no new requests
gone        has failed, and will not come back by itself
"""


HEARTBEAT_S = 2.0
"""Seconds between two heartbeats. A heartbeat asks the scheduler for its counters, so that even an idle
engine core sends a message."""
HEARTBEAT = f"{INTERNAL}heartbeat"
"""Id of the heartbeats' control calls. Their answers only show that the engine core is alive."""
SILENT_S = 30.0
"""Seconds of silence after which an engine core counts as hung, since a step takes seconds at most. A
frontend counts as gone if a replica has received nothing from it for this time."""


class Timer(Protocol):
    def cancel(self) -> object: ...


Later = Callable[[float, Callable[[], None]], Timer]
"""Schedules a function to run after a number of seconds. Returns a timer that can cancel it."""


class EngineCore(Protocol):
    """The interface of an engine core: an `EngineSupervisor`, or an engine core on another machine."""

    info: ModelInfo | None
    """Description of the model; None before `start`."""
    max_prompt_tokens: int
    page_bytes: int
    """Bytes of a KV page; 0 if pages of this engine core cannot be moved."""

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
    """Callbacks of an engine core, called on the fleet's event loop."""

    receive: Callable[[ToFrontend], None]
    """Called with every message from the engine core."""
    died: Callable[[WorkerDied], bool]
    """Called when the running requests are lost, with the error for requests that cannot be run again.
    Returns whether a request is known to be the cause."""
    restarted: Callable[[], None]
    """Called when the engine core has been restarted, with an empty tree and without adapters."""
    gave_up: Callable[[EngineError], None]
    """Called with the reason when the engine core will not be restarted."""


class FleetEvents(NamedTuple):
    """Callbacks of a fleet."""

    receive: Callable[[ToFrontend], None]
    """Called with every message for the frontend."""
    lost: Callable[[WorkerDied | None, Sequence[str]], bool]
    """Called when a replica has died or left, with the ids of its requests, which are to be sent again. The
    error is for requests that cannot be run again, None if the replica has not died. Returns whether one of
    the requests is known to be the cause."""
    restarted: Callable[[], None]
    """Called when a replica has come up without adapters, before any request is sent to it."""
    gave_up: Callable[[EngineError], None]
    """Called with the reason when the last replica is gone."""
    tree_changed: Callable[[str, TreeChange | None], None]
    """Called with the name of a replica and a change of its prefix tree; with None if the tree is gone."""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a replica, for display."""

    name: str
    state: State
    requests: int
    """Number of running and queued requests of the replica."""
    heartbeat_age_s: float
    """Seconds since the replica's last message; 0 before it has started."""
    pids: dict[str, int]
    """Role → process id."""


MakeEngine = Callable[[EngineEvents], EngineCore]


@dataclasses.dataclass(slots=True, eq=False)
class Replica:
    """An engine core of the fleet, with its state. `up`: the engine core takes messages. `left`: the fleet
    has removed the replica."""

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
        """Whether the replica takes requests, or will take them once it has started."""
        return not (self.draining or self.gone)

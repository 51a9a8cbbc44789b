"""The settings that all requests of one run share, and the models that the run uses."""

from __future__ import annotations

import itertools
import time
import uuid
from dataclasses import dataclass, field

from ramify.lang.backends.base import Backend
from ramify.lang.prompt.view import PromptModel


class Session:
    """The id, the clock and the settings that all requests of one run share."""

    def __init__(self, *, scope: str, stream: bool, in_batch: bool, started: float | None = None) -> None:
        self.program = uuid.uuid4().hex
        self.scope = scope
        self.stream = stream
        """Whether the caller may iterate over the text while the program runs."""
        self.in_batch = in_batch
        """Whether the run is a row of a batch, or was started by the run of a row."""
        self.started: float = time.perf_counter() if started is None else started
        """The start of the outermost program, as `time.perf_counter` gives it. All times of a trace are
        counted from here."""
        self.heard_s = 0.0
        """The time at which the latest chunk of any request arrived, as `time.perf_counter` gives it."""
        self._numbers = itertools.count()

    def clock(self) -> float:
        """Seconds since the outermost program began."""
        return time.perf_counter() - self.started

    def next_rid(self) -> str:
        """The id of a new request."""
        return f"{self.program}-{next(self._numbers)}"


@dataclass(eq=False, slots=True)
class Target(PromptModel):
    """A model that a run sends requests to. One target is the run's own; steps may name other backends."""

    backend: Backend
    name: str
    """The name of the backend in the run's `Router`; without a router, the name of the model."""
    priority: int = 0
    lora: str = ""
    ended: list[str] = field(default_factory=list)
    """The keys of branches and forks that have ended since the last request to this backend."""

"""Counters of one scheduler since its start."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ramify.runtime.scheduler.request import Request


@dataclasses.dataclass
class Counters:
    """Fields are those of `SchedulerStats`, which says what they count. `clock` is in seconds."""

    clock: dataclasses.InitVar[Callable[[], float]]
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    forced_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    model_draft_tokens: int = 0
    model_accepted_tokens: int = 0
    draft_model_tokens: int = 0
    draft_model_s: float = 0.0
    retractions: int = 0
    exported_tokens: int = 0
    exported_bytes: int = 0
    imported_tokens: int = 0
    imported_bytes: int = 0
    refused_imports: int = 0
    step_s: float = 0.0
    model_s: float = 0.0

    def __post_init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    @contextlib.contextmanager
    def model_time(self) -> Iterator[None]:
        """Count the time of this block as the model's."""
        began = self._clock()
        yield
        self.model_s += self._clock() - began

    def drafted(self, request: Request) -> None:
        """The draft tokens of `request` are verified."""
        for counts in (self, request.stats):
            counts.draft_tokens += request.draft_len
            counts.model_draft_tokens += request.draft_len * request.speculation.by_model

    def accepted(self, request: Request) -> None:
        """One of them was accepted."""
        for counts in (self, request.stats):
            counts.accepted_tokens += 1
            counts.model_accepted_tokens += request.speculation.by_model

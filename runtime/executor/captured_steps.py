"""Captured steps of one kind by the forms of their attention plans, and the choice among them.

A step takes the graph of its form. If there is none, it takes the smallest graph that has room for its plan,
and runs eagerly if no graph has. Meanwhile its form is counted: a form that has come up `OFTEN` times is
captured. At most `MOST_LATE` graphs are captured while serving. A further one takes the place of the graph
that was replayed the longest ago, unless that was during the last `OFTEN` steps of its own form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, Self, TypeVar

from ramify.runtime.executor.graph_buffers import GraphBuffers, GraphStep

OFTEN = 8
"""Number of steps of a form after which the form is captured, so that rare forms are not captured. The number
is not based on a measurement: see docs/kernels.md."""
MOST_LATE = 64
"""The most graphs that are captured while serving and kept."""
MOST_WAITING = 1024
"""The most forms that are counted. The form that has waited the longest is forgotten first."""


class Room(Protocol):
    """The form of a plan, or of the room that a graph has (`attention_graph.Form`, `TokenForm`)."""

    def holds(self, other: Self, /) -> bool:
        """Whether every plan of the form `other` fits into this one."""
        ...


R = TypeVar("R", bound=Room)
Key = tuple[int, tuple[R, ...]]
"""(index of a size, forms of the plans: one for each window size)."""


@dataclasses.dataclass(slots=True)
class _Late:
    step: GraphStep
    used: int
    """Step count at the last replay."""


@dataclasses.dataclass(slots=True)
class _Waiting:
    since: int
    """Step count from which steps of the form are compared with replays of the graphs."""
    steps: int = 0


class CapturedSteps(Generic[R]):
    """Planned steps, which stay, and late ones, which are captured while serving.

    make : a new, uncaptured step for a key; None if its softmax states exceed the reserved memory
    planned : keys of the steps that are captured at start
    most : late steps that are kept
    """

    def __init__(
        self,
        buffers: GraphBuffers,
        make: Callable[[Key[R]], GraphStep | None],
        planned: Iterable[Key[R]],
        most: int = MOST_LATE,
    ) -> None:
        self._most = most
        self._buffers = buffers
        self._make = make
        made = {key: make(key) for key in dict.fromkeys(planned)}
        self.planned = {key: step for key, step in made.items() if step is not None}
        self._late: dict[Key[R], _Late] = {}
        """By last use, ascending."""
        self._waiting: dict[Key[R], _Waiting] = {}
        self._roomy: dict[tuple[Key[R], int], Key[R] | None] = {}
        """Results of `_smallest`, until the captured steps change."""
        self._count = 0

    @property
    def steps(self) -> dict[Key[R], GraphStep]:
        """All steps by key, planned and late."""
        return self.planned | {key: late.step for key, late in self._late.items()}

    def find(self, key: Key[R], last: int) -> tuple[int, GraphStep | None]:
        """(index of the size, step) for plans of the forms of `key`. The step is None if no graph has room.

        last : index of the largest size that the step may be padded to
        """
        self._count += 1
        found = key
        if key not in self.planned and key not in self._late and not self._capture(key):
            holder = self._roomy.get((key, last), key)
            if holder is key:
                holder = self._roomy[key, last] = self._smallest(key, last)
            if holder is None:
                return key[0], None
            found = holder
        step = self.planned.get(found)
        if step is None:
            late = self._late[found] = self._late.pop(found)
            late.used, step = self._count, late.step
        return found[0], step

    def _capture(self, key: Key[R]) -> bool:
        """Count the form of `key`, and make it a late step if it came up often. Returns whether it is one."""
        if key not in self._waiting and len(self._waiting) == MOST_WAITING:
            self._forget(next(iter(self._waiting)))
        waiting = self._waiting.setdefault(key, _Waiting(self._count))
        waiting.steps += 1
        self._buffers.captured.awaited += waiting.steps <= OFTEN
        if waiting.steps % OFTEN:
            return False
        oldest = next(iter(self._late.items()), None) if len(self._late) == self._most else None
        if oldest is not None and oldest[1].used >= waiting.since:
            waiting.since = self._count  # the next `OFTEN` steps are compared with what is replayed meanwhile
            return False
        step = self._make(key)
        if step is None:
            return False
        if oldest is not None:
            self._buffers.release(self._late.pop(oldest[0]).step)
        self._forget(key)
        self._late[key] = _Late(step, self._count)
        self._roomy.clear()
        return True

    def _forget(self, key: Key[R]) -> None:
        del self._waiting[key]
        self._roomy = {asked: holder for asked, holder in self._roomy.items() if asked[0] != key}

    def _smallest(self, key: Key[R], last: int) -> Key[R] | None:
        """Key of the step that launches the fewest programs among those with room for plans of `key`, at the
        smallest size that has any."""
        index, forms = key
        steps = self.steps
        fitting = [
            other
            for other in steps
            if index <= other[0] <= last
            and all(room.holds(form) for room, form in zip(other[1], forms, strict=True))
        ]
        return min(fitting, key=lambda other: (other[0], steps[other].programs), default=None)

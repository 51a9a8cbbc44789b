"""Page counts by state, counts of state slots, and the error of a failed conservation check."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state: free + evictable + leased + in_use == total. `evicted` counts since the start."""

    free: int
    evictable: int
    """In the tree, without a lock or a lease."""
    leased: int
    """In the tree, leased and without a lock; evicted only when nothing else is evictable."""
    in_use: int
    """Locked in the tree by running requests, or private to one."""
    total: int
    evicted: int


@dataclasses.dataclass(frozen=True, slots=True)
class StateCounts:
    """Slots of states: free + held + in_use == total. `evicted` counts since the start."""

    free: int
    held: int
    """At the ends of nodes; a request can take all of them."""
    in_use: int
    total: int
    evicted: int


class ConservationError(RuntimeError):
    """The counts contradict each other: a defect in the cache, or a caller that broke its rules."""

"""How many pages are where."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class PageCounts:
    """Conservation: free + evictable + leased + in_use == total. `evicted` counts since the start."""

    free: int
    evictable: int
    """In the tree; no running request and no live lease needs them."""
    leased: int
    """In the tree, kept for a program that will come back; given up only when nothing is evictable."""
    in_use: int
    """Locked in the tree by running requests, or private to one."""
    total: int
    evicted: int


class ConservationError(RuntimeError):
    """The books of the cache do not balance: a defect in the cache, or a caller that broke its rules."""

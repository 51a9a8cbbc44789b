"""The values that `PrefixCache` hands out: a match, a lock, a page table after `commit`, and counts."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ramify.radix.node import Node


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The result of `PrefixCache.match`. It locks nothing: `acquire` matches again if the tree changed."""

    length: int
    """Tokens in the tree, counted from the first; of a cache with states, up to the deepest state."""
    known: int
    """Tokens in the tree, whatever states it holds."""
    key: bytes
    scope: str
    node: Node | None
    """The node in which the match ends; None where the scope has no tree."""
    version: int


@dataclasses.dataclass(slots=True, eq=False)
class PrefixLock:
    """A locked path in the tree. Read its fields; only the cache changes them."""

    length: int
    """Tokens ``[0, length)`` are in the tree and stay there."""
    pages: list[int]
    """The page of every slot of ``[0, length)`` in this request's table; the last may be partial."""
    private_from: int
    """The first slot whose page the request owns."""
    node: Node | None
    """The node whose end is token `length`; None once released."""


class Committed(NamedTuple):
    """A request's page table after `commit`. Pages of slots ``[private_from, …)`` are its own."""

    pages: list[int]
    private_from: int


@dataclasses.dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state: free + evictable + leased + in_use == total. `evicted` counts since the start."""

    free: int
    evictable: int
    """Pages in the tree without a lock or a lease."""
    leased: int
    """Pages in the tree under a lease and without a lock; evicted only when nothing else is evictable."""
    in_use: int
    """Pages locked in the tree by running requests, or private to one."""
    total: int
    evicted: int


@dataclasses.dataclass(frozen=True, slots=True)
class StateCounts:
    """Slots of states: free + held + in_use == total. `evicted` counts since the start."""

    free: int
    held: int
    """Slots at the ends of nodes; a request can take all of them."""
    in_use: int
    total: int
    evicted: int

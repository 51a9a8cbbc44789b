"""The values that `PrefixCache` returns: a match, a lock, and counts."""

from __future__ import annotations

import dataclasses

from ramify.radix.node import Node


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The result of `PrefixCache.match`. A match locks nothing: `acquire` matches again if the tree has
    changed since."""

    length: int
    """The number of matched tokens. In a cache with states the match ends at the deepest state on its
    path."""
    known: int
    """The length of the prefix that is in the tree, with or without a state at its end."""
    key: bytes
    scope: str
    node: Node | None
    """The node in which the match ends; None if the scope has no tree."""
    version: int


@dataclasses.dataclass(slots=True, eq=False)
class PrefixLock:
    """A locked path in the tree. Only the cache changes the fields; others read them."""

    length: int
    """Tokens ``[0, length)`` are in the tree and stay there."""
    pages: list[int]
    """The page of every slot of ``[0, length)`` in the request's page table. The last slot may be partial."""
    private_from: int
    """The first slot whose page the request owns."""
    node: Node | None
    """The node that ends at token `length`; None once the lock is released."""


@dataclasses.dataclass(frozen=True, slots=True)
class PageCounts:
    """Numbers of pages: free + evictable + leased + in_use == total. `evicted` is the number of pages that
    `allocate` and `trim` have evicted since the cache was made."""

    free: int
    evictable: int
    """Pages in the tree without a lock or a lease."""
    leased: int
    """Pages in the tree with a lease and without a lock. They are evicted only if no page is evictable;
    pinned ones not at all."""
    in_use: int
    """Pages that running requests have locked in the tree, and private pages of requests."""
    total: int
    evicted: int
    pinned: int
    """Pages in the tree with a pin, in use or leased."""
    touched: int
    """Pages that take memory; the others are free."""


@dataclasses.dataclass(frozen=True, slots=True)
class StateCounts:
    """Numbers of state slots: free + held + in_use == total. `evicted` is the number of states evicted since
    the cache was made, to free their slots."""

    free: int
    held: int
    """Slots that nodes of the tree hold. The state in each of them can be evicted for a request."""
    in_use: int
    total: int
    evicted: int

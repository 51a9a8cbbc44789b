"""Leases: a program will come back for a prefix, so its pages go last, and those it needs last go first."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import TypeVar

from ramify.radix.node import Node

IMPATIENCE = 0.5
"""A wait that has taken longer than was expected is expected to take half as long again as it has."""

K = TypeVar("K")
L = TypeVar("L")


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
    """`owner` wants the path to `node` until the clock shows `expires` (seconds)."""

    owner: str
    part: str
    """Which of the owner's: a branch of a program. Leases of one part stand in for each other."""
    node: Node | None
    """None once the lease has ended."""
    expires: float
    since: float
    """When `needed` was estimated first."""
    needed: float
    """When the owner is expected to come back, by the clock; infinite where nobody knows."""


class LeaseBook:
    """Who leases what until when, and when it is needed.

    One lease per part of an owner and node, and none that a longer one covers. Knows nothing of counts:
    methods return the leases that have ended, with the node they were on.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_owner: dict[str, dict[str, dict[Node, Lease]]] = {}
        self._by_node: dict[Node, dict[tuple[str, str], Lease]] = {}
        self._expiry: list[tuple[float, int, Lease]] = []
        """A heap with one entry for each live lease, at or before its expiry, and some ended ones."""
        self._waits: list[tuple[float, int, Lease]] = []
        """A heap by `needed`; entries that do not say when their lease is needed now are stale."""
        self._numbers = itertools.count()
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def at(self, node: Node) -> int:
        """Leases that end at `node`."""
        return len(self._by_node.get(node, ()))

    def owners(self, node: Node) -> Iterable[str]:
        """Whose leases end at `node`."""
        return dict.fromkeys(owner for owner, _ in self._by_node.get(node, ()))

    def needed(self, node: Node) -> float | None:
        """When the first of those who lease `node` itself is expected; None where nobody does."""
        leases = self._by_node.get(node)
        return min(lease.needed for lease in leases.values()) if leases else None

    def take(
        self, node: Node, owner: str, seconds: float, needed_in: float = math.inf, part: str = ""
    ) -> tuple[bool, list[Node]]:
        """Lease the path to `node`; a lease that `owner` has there for this part is never shortened.

        Returns whether this is a new lease, and the nodes above at which a lease of the same part ended
        because the new one covers it.
        """
        now = self._clock()
        expires = now + seconds
        owned = self._by_owner.get(owner, {}).get(part, {})
        lease = owned.get(node)
        if lease is not None:
            lease.expires = expires = max(lease.expires, expires)
            self._estimate(lease, now, now + needed_in)
        else:
            self._enter(Lease(owner, part, node, expires, now, now + needed_in))
        covered = []
        above = node.parent
        while above is not None and owned:
            old = owned.get(above)
            if old is not None and old.expires <= expires:
                covered.append(above)
                self._end(old)
            above = above.parent
        return lease is None, covered

    def expect(self, owner: str, part: str, needed_in: float) -> list[Node]:
        """The leases of a part are needed in so many seconds from now. Returns where they are."""
        now = self._clock()
        owned = self._by_owner.get(owner, {}).get(part, {})
        for lease in owned.values():
            self._estimate(lease, now, now + needed_in)
        return list(owned)

    def reconsider(self) -> list[Node]:
        """Expect those later who have not come when they were expected. Returns where they are.

        Not those who were expected at once: they are here, and wait for room.
        """
        now, late = self._clock(), []
        while self._waits and self._waits[0][0] < now:
            needed, _, lease = heappop(self._waits)
            if lease.node is not None and lease.needed == needed:
                late.append(lease.node)
                lease.needed = now + IMPATIENCE * (now - lease.since)
                heappush(self._waits, (lease.needed, next(self._numbers), lease))
        return late

    def expire(self) -> list[Node]:
        """End the leases whose time is over."""
        if not self._expiry:
            return []
        ended = []
        now = self._clock()
        while self._expiry and self._expiry[0][0] <= now:
            _, _, lease = heappop(self._expiry)
            if lease.node is None:
                continue
            if lease.expires > now:  # renewed since it was queued
                heappush(self._expiry, (lease.expires, next(self._numbers), lease))
            else:
                ended.append(lease.node)
                self._end(lease)
        return ended

    def end(self, owner: str, part: str | None = None) -> list[Node]:
        """End all leases of `owner`, or those of one part."""
        parts = self._by_owner.get(owner, {})
        found = parts.values() if part is None else [parts.get(part, {})]
        leases = [lease for owned in found for lease in owned.values()]
        ended = []
        for lease in leases:
            assert lease.node is not None
            ended.append(lease.node)
            self._end(lease)
        return ended

    def retreat(self, leaf: Node) -> int:
        """`leaf` is to leave the tree: its leases move to its parent and go on covering what is left.

        Returns how many ended instead: there is no token left, or the same part has a lease there already.
        """
        parent = leaf.parent
        assert parent is not None
        ended = 0
        for lease in list(self._by_node.get(leaf, {}).values()):
            self._end(lease)
            there = self._by_owner.get(lease.owner, {}).get(lease.part, {}).get(parent)
            if there is not None:
                there.expires = max(there.expires, lease.expires)
                if lease.needed < there.needed:
                    self._estimate(there, lease.since, lease.needed)
                ended += 1
            elif parent.parent is None:
                ended += 1
            else:
                moved = Lease(lease.owner, lease.part, parent, lease.expires, lease.since, lease.needed)
                self._enter(moved)
        return ended

    def _enter(self, lease: Lease) -> None:
        assert lease.node is not None
        self._by_owner.setdefault(lease.owner, {}).setdefault(lease.part, {})[lease.node] = lease
        self._by_node.setdefault(lease.node, {})[lease.owner, lease.part] = lease
        self._live += 1
        heappush(self._expiry, (lease.expires, next(self._numbers), lease))
        if len(self._expiry) > 2 * self._live + 64:
            self._expiry = [entry for entry in self._expiry if entry[2].node is not None]
            heapify(self._expiry)
        self._estimate(lease, lease.since, lease.needed)

    def _estimate(self, lease: Lease, since: float, needed: float) -> None:
        lease.since, lease.needed = since, needed
        if since < needed < math.inf:
            heappush(self._waits, (needed, next(self._numbers), lease))
            if len(self._waits) > 2 * self._live + 64:
                self._waits = [
                    entry
                    for entry in self._waits
                    if entry[2].node is not None and entry[2].needed == entry[0]
                ]
                heapify(self._waits)

    def _end(self, lease: Lease) -> None:
        node = lease.node
        assert node is not None
        lease.node = None
        self._live -= 1
        parts = self._by_owner[lease.owner]
        _remove(parts, lease.part, node)
        if not parts:
            del self._by_owner[lease.owner]
        _remove(self._by_node, node, (lease.owner, lease.part))


def _remove(index: dict[K, dict[L, Lease]], key: K, subkey: L) -> None:
    del index[key][subkey]
    if not index[key]:
        del index[key]

"""Leases: a program will come back for a prefix, so its pages go last, and those it needs last go first."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import TypeVar

from ramify.radix.node import Node

K = TypeVar("K")
L = TypeVar("L")


class NextUse(enum.IntEnum):
    """When a prefix is needed again. What is needed later is evicted first."""

    NEVER = 0
    """No live program needs it."""
    UNKNOWN = 1
    """Its program lives, and nobody knows what it waits for: a person, or code of its own."""
    TOOL = 2
    """After a tool has returned."""
    JOIN = 3
    """After sibling branches have finished."""
    SOON = 4
    """As the program's next step, or by a request that is waiting already."""


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
    """`owner` wants the path to `node` until the clock shows `expires` (seconds)."""

    owner: str
    part: str
    """Which of the owner's: a branch of a program. Leases of one part stand in for each other."""
    node: Node | None
    """None once the lease has ended."""
    expires: float
    next_use: NextUse


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

    def next_use(self, node: Node) -> NextUse:
        """The soonest use of those who lease `node` itself; of a leaf, the soonest there is."""
        leases = self._by_node.get(node)
        return max(lease.next_use for lease in leases.values()) if leases else NextUse.NEVER

    def take(
        self, node: Node, owner: str, seconds: float, next_use: NextUse = NextUse.UNKNOWN, part: str = ""
    ) -> tuple[bool, list[Node]]:
        """Lease the path to `node`; a lease that `owner` has there for this part is never shortened.

        Returns whether this is a new lease, and the nodes above at which a lease of the same part ended
        because the new one covers it.
        """
        expires = self._clock() + seconds
        owned = self._by_owner.get(owner, {}).get(part, {})
        lease = owned.get(node)
        if lease is not None:
            lease.expires = expires = max(lease.expires, expires)
            lease.next_use = next_use
        else:
            self._enter(Lease(owner, part, node, expires, next_use))
        covered = []
        above = node.parent
        while above is not None and owned:
            old = owned.get(above)
            if old is not None and old.expires <= expires:
                covered.append(above)
                self._end(old)
            above = above.parent
        return lease is None, covered

    def expect(self, owner: str, part: str, next_use: NextUse) -> list[Node]:
        """The leases of a part are needed at another time than was thought. Returns where they are."""
        owned = self._by_owner.get(owner, {}).get(part, {})
        for lease in owned.values():
            lease.next_use = next_use
        return list(owned)

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
                there.next_use = max(there.next_use, lease.next_use)
                ended += 1
            elif parent.parent is None:
                ended += 1
            else:
                self._enter(Lease(lease.owner, lease.part, parent, lease.expires, lease.next_use))
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

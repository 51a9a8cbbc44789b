"""Leases: a program will come back for a prefix, so its pages go last."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TypeVar

from ramify.radix.node import Node

K = TypeVar("K")
L = TypeVar("L")


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
    """`owner` wants the path to `node` until the clock shows `expires` (seconds)."""

    owner: str
    node: Node | None
    """None once the lease has ended."""
    expires: float


class LeaseBook:
    """Who leases what until when. One lease per owner and node, and none that a longer one covers.

    Knows nothing of counts: methods return the leases that have ended, with the node they were on.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_owner: dict[str, dict[Node, Lease]] = {}
        self._by_node: dict[Node, dict[str, Lease]] = {}
        self._expiry: list[tuple[float, int, Lease]] = []
        """A heap with one entry for each live lease, at or before its expiry, and some ended ones."""
        self._numbers = itertools.count()
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def at(self, node: Node) -> int:
        """Leases that end at `node`."""
        return len(self._by_node.get(node, ()))

    def take(self, node: Node, owner: str, seconds: float) -> tuple[bool, list[Node]]:
        """Lease the path to `node`; a lease that `owner` has there is never shortened.

        Returns whether this is a new lease, and the nodes above at which a lease of `owner` ended
        because the new one covers it.
        """
        expires = self._clock() + seconds
        owned = self._by_owner.get(owner, {})
        lease = owned.get(node)
        if lease is not None:
            lease.expires = expires = max(lease.expires, expires)
        else:
            self._enter(Lease(owner, node, expires))
        covered = []
        above = node.parent
        while above is not None and owned:
            old = owned.get(above)
            if old is not None and old.expires <= expires:
                covered.append(above)
                self._end(old)
            above = above.parent
        return lease is None, covered

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

    def end(self, owner: str) -> list[Node]:
        """End all leases of `owner`."""
        ended = []
        for node, lease in list(self._by_owner.get(owner, {}).items()):
            ended.append(node)
            self._end(lease)
        return ended

    def retreat(self, leaf: Node) -> int:
        """`leaf` is to leave the tree: its leases move to its parent and go on covering what is left.

        Returns how many ended instead: there is no token left, or the owner has a lease there already.
        """
        parent = leaf.parent
        assert parent is not None
        ended = 0
        for owner, lease in list(self._by_node.get(leaf, {}).items()):
            expires = lease.expires
            self._end(lease)
            there = self._by_owner.get(owner, {}).get(parent)
            if there is not None:
                there.expires = max(there.expires, expires)
                ended += 1
            elif parent.parent is None:
                ended += 1
            else:
                self._enter(Lease(owner, parent, expires))
        return ended

    def _enter(self, lease: Lease) -> None:
        assert lease.node is not None
        self._by_owner.setdefault(lease.owner, {})[lease.node] = lease
        self._by_node.setdefault(lease.node, {})[lease.owner] = lease
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
        _remove(self._by_owner, lease.owner, node)
        _remove(self._by_node, node, lease.owner)


def _remove(index: dict[K, dict[L, Lease]], key: K, subkey: L) -> None:
    del index[key][subkey]
    if not index[key]:
        del index[key]

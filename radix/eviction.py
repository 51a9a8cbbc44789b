"""Tree pages in use, leased and evictable, and the order in which leaves are evicted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from ramify.radix.node import Node


class EvictionQueue:
    """The leaves that may be evicted. Leaves without a lease go first, the least recently used before others.
    Then leased leaves go, beginning with the leaf that is needed furthest in the future.

    With `states`, leaves without a state go before all other unleased leaves, because no request can continue
    from their pages. Leased leaves without a state go first only among leased leaves that are needed at the
    same time.

    A binary heap with lazy deletion: stale entries are skipped when they surface, so every operation costs
    O(log n) amortised. An entry is live while its id is the node's `queue_entry`.
    """

    def __init__(self, needed: Callable[[Node], float | None], *, states: bool = False) -> None:
        self._needed = needed
        self._states = states
        self._heap: list[tuple[bool, float, float, int, Node]] = []
        """(leased, minus the time when the lease is needed, last use, entry id, node)"""
        self._entry_ids = itertools.count(1)
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, node: Node) -> None:
        """Queue `node`; if it is queued already, update its place in the order."""
        if not node.queue_entry:
            self._live += 1
        node.queue_entry = next(self._entry_ids)
        last_used = -math.inf if self._states and node.state is None else node.last_used
        heappush(self._heap, (*self._order(node), last_used, node.queue_entry, node))
        if len(self._heap) > 2 * self._live + 64:
            self._heap = [entry for entry in self._heap if entry[4].queue_entry == entry[3]]
            heapify(self._heap)

    def discard(self, node: Node) -> None:
        """Take `node` out if it is queued."""
        if node.queue_entry:
            node.queue_entry = 0
            self._live -= 1

    def pop(self) -> Node:
        """Remove and return the leaf to evict next. Raises `IndexError` if there is none."""
        node = self.first()
        heappop(self._heap)
        self.discard(node)
        return node

    def first(self) -> Node:
        """The leaf to evict next, which stays queued. Raises `IndexError` if there is none."""
        while (node := self._heap[0][4]).queue_entry != self._heap[0][3]:
            heappop(self._heap)
        return node

    def misfiled(self) -> list[Node]:
        """Queued leaves whose entry does not match their present lease."""
        return [
            node
            for leased, needed, _, entry_id, node in self._heap
            if node.queue_entry == entry_id and (leased, needed) != self._order(node)
        ]

    def _order(self, node: Node) -> tuple[bool, float]:
        needed = self._needed(node)
        return (False, 0.0) if needed is None else (True, -needed)


class Usage:
    """Counts the locks and leases of nodes and the pages in use, leased and evictable; queues leaves that can
    be evicted.

    A node is in use if it has locks, else leased if it has leases, else evictable. A lock or lease counts on
    every node of its path. So the parent of a node in use is in use, and the parent of a leased node is
    leased or in use. Each call costs O(nodes on the path).
    """

    def __init__(self, needed: Callable[[Node], float | None], *, states: bool = False) -> None:
        self.queue = EvictionQueue(needed, states=states)
        self.locked_pages = 0
        self.leased_pages = 0
        self.evictable_pages = 0
        self.releases = 0
        """Number of unlocks so far; the `last_used` of the path that was unlocked last."""

    def lock(self, node: Node, above: Node | None) -> None:
        """Lock `node` and its ancestors up to, but without, `above`; all of them if `above` is None."""
        step: Node | None = node
        while step is not above:
            assert step is not None
            if not step.locks:
                self._count(step, -1)
                self.queue.discard(step)
                self.locked_pages += step.owned
            step.locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Remove one lock from the path from the root to `node`, and make it the most recently used path."""
        self.releases += 1
        step: Node | None = node
        while step is not None:
            step.last_used = self.releases
            step.locks -= 1
            if not step.locks:
                self.locked_pages -= step.owned
                self._count(step, 1)
                self.offer(step)
            step = step.parent

    def offer(self, node: Node) -> None:
        """Queue `node` for eviction if it is a leaf without a lock."""
        if not node.locks and not node.children and node.parent is not None:
            self.queue.push(node)

    def add(self, node: Node) -> None:
        """Count the pages of `node`, a new node without a lock."""
        self._count(node, 1)

    def drop(self, node: Node, pages: int) -> None:
        """Subtract `pages` pages, which leave `node`. `node` has no lock."""
        if node.leases:
            self.leased_pages -= pages
        else:
            self.evictable_pages -= pages

    def lease(self, node: Node, change: int = 1) -> None:
        """Add one lease to the path from the root to `node`, or remove one (`change` -1)."""
        step: Node | None = node
        while step is not None:
            if step.locks or (step.leases and step.leases + change):
                step.leases += change
            else:
                self._count(step, -1)
                step.leases += change
                self._count(step, 1)
            step = step.parent
        self.offer(node)

    def _count(self, node: Node, sign: int) -> None:
        """Add (sign 1) or subtract (-1) the pages of `node` as leased or evictable, without regard to
        locks."""
        self.drop(node, -sign * node.owned)

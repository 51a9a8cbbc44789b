"""Tree pages in use, pinned, leased and evictable, and the order in which leaves are evicted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from ramify.radix.node import Node


class EvictionQueue:
    """The leaves that may be evicted. Leaves without a lease go first, the least recently used before others.
    Then leased leaves go, beginning with the leaf that is needed furthest in the future; pinned leaves go
    last.

    With `states`, leaves without a state go before all other unleased leaves, because no request can continue
    from their pages. Leased leaves without a state go first only among leased leaves that are needed at the
    same time.

    A binary heap with lazy deletion: stale entries are skipped when they surface, so every operation costs
    O(log n) amortised. An entry is live while its id is the node's `queue_entry`.
    """

    def __init__(self, order: Callable[[Node], tuple[int, float]], *, states: bool = False) -> None:
        self._order = order
        self._states = states
        self._heap: list[tuple[int, float, float, int, Node]] = []
        """(`LeaseBook.order`, last use, entry id, node)"""
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

    def leaves(self) -> Iterator[Node]:
        """Iterate over the queued leaves, in no order."""
        return (node for *_, entry_id, node in self._heap if node.queue_entry == entry_id)

    def misfiled(self) -> list[Node]:
        """Queued leaves whose entry does not match their present lease."""
        return [
            node
            for rank, needed, _, entry_id, node in self._heap
            if node.queue_entry == entry_id and (rank, needed) != self._order(node)
        ]


class Usage:
    """Counts the locks and leases of nodes and the pages in use, pinned, leased and evictable; queues leaves
    that can be evicted.

    A node is in use if it has locks, else pinned if it has pins, else leased if it has leases, else
    evictable. A lock, lease or pin counts on every node of its path. So the parent of a node in use is in
    use, and the parent of a leased node is leased, pinned or in use. Each call costs O(nodes on the path).
    """

    def __init__(self, order: Callable[[Node], tuple[int, float]], *, states: bool = False) -> None:
        self.queue = EvictionQueue(order, states=states)
        self.locked_pages = 0
        self.pinned_pages = 0
        self.held_pages = 0
        """Pages of nodes with pins, in use or not."""
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
        self._add(node, -pages)
        if node.pins:
            self.held_pages -= pages

    def lease(self, node: Node, leases: int = 1, pins: int = 0) -> None:
        """Add `leases` leases, of which `pins` are pins, to the path from the root to `node`. Negative
        numbers remove them; (0, 1) makes a lease a pin."""
        step: Node | None = node
        while step is not None:
            pinned = step.pins > 0
            if not step.locks:
                self._count(step, -1)
            step.leases += leases
            step.pins += pins
            self.held_pages += step.owned * ((step.pins > 0) - pinned)
            if not step.locks:
                self._count(step, 1)
            step = step.parent
        self.offer(node)

    def _count(self, node: Node, sign: int) -> None:
        """Add (sign 1) or subtract (-1) the pages of `node` as pinned, leased or evictable, without regard to
        locks."""
        self._add(node, sign * node.owned)

    def _add(self, node: Node, pages: int) -> None:
        if node.pins:
            self.pinned_pages += pages
        elif node.leases:
            self.leased_pages += pages
        else:
            self.evictable_pages += pages

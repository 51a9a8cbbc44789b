"""Page counts of the tree by state (in use, leased, evictable), updated along the paths that change."""

from __future__ import annotations

from collections.abc import Callable

from ramify.radix.eviction import EvictionPolicy, EvictionQueue
from ramify.radix.node import Node


class Usage:
    """Counts locks and leases on nodes and the pages in each state; queues leaves that can be evicted.

    A node is in use if it has locks, else leased if it has leases, else evictable. A lock or lease counts on
    every node of its path, so a parent's state is never below its child's. Each call costs O(nodes on the
    path).
    """

    def __init__(self, policy: EvictionPolicy, needed: Callable[[Node], float | None]) -> None:
        self.queue = EvictionQueue(policy, needed)
        self.locked_pages = 0
        self.leased_pages = 0
        self.evictable_pages = 0
        self._releases = 0

    def lock(self, node: Node, above: Node | None) -> None:
        """Lock the path to `node` from below `above`, or from the root if `above` is None."""
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
        """Remove one lock from the path from the root to `node`, which is now the most recently used."""
        self._releases += 1
        step: Node | None = node
        while step is not None:
            step.last_used = self._releases
            step.locks -= 1
            if not step.locks:
                self.locked_pages -= step.owned
                self._count(step, 1)
                self.offer(step)
            step = step.parent

    def lease(self, node: Node) -> None:
        """Add one lease to the path from the root to `node`."""
        self._change_leases(node, 1)

    def unlease(self, node: Node) -> None:
        """Remove one lease from the path from the root to `node`."""
        self._change_leases(node, -1)

    def offer(self, node: Node) -> None:
        """Queue `node` for eviction if it is a leaf that nobody uses."""
        if not node.locks and not node.children and node.parent is not None:
            self.queue.push(node)

    def add(self, node: Node) -> None:
        """Count the pages of `node`, a new node without a lock."""
        self._count(node, 1)

    def drop(self, node: Node, pages: int) -> None:
        """Subtract `pages` pages of `node`, which has no lock and gives them up."""
        if node.leases:
            self.leased_pages -= pages
        else:
            self.evictable_pages -= pages

    def _change_leases(self, node: Node, change: int) -> None:
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
        """Add (sign 1) or subtract (-1) the pages of `node` in its state without locks."""
        self.drop(node, -sign * node.owned)

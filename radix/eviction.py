"""The order of eviction: a queue of the leaves that nobody uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Protocol

from ramify.radix.node import Node


class EvictionPolicy(Protocol):
    """The order of eviction among leaves without a lease: the lowest key first, then first in, first out.

    `key` is computed when a node becomes a leaf that nobody uses. A key that grows from child to parent,
    as recency does, keeps the most shared prefixes longest.
    """

    def key(self, node: Node) -> float: ...


class LeastRecentlyUsed:
    """Evict by recency: the key is the number of the last release of a path through the node."""

    def key(self, node: Node) -> float:
        return node.last_used


class EvictionQueue:
    """The leaves that may be evicted. Leaves without a lease go first, by the policy's key; then leased
    leaves, those needed furthest in the future first.

    A binary heap with lazy deletion: stale entries are skipped when they surface, so every operation costs
    O(log n) amortised. An entry is live while its id is the node's `queue_entry`.
    """

    def __init__(self, policy: EvictionPolicy, needed: Callable[[Node], float | None]) -> None:
        self._policy = policy
        self._needed = needed
        self._heap: list[tuple[bool, float, float, int, Node]] = []
        """(leased, minus the time when it is needed, key, entry id, node)"""
        self._entry_ids = itertools.count(1)
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, node: Node) -> None:
        """Queue `node`; if it is queued, update its place."""
        if not node.queue_entry:
            self._live += 1
        node.queue_entry = next(self._entry_ids)
        heappush(self._heap, (*self._order(node), self._policy.key(node), node.queue_entry, node))
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
        while True:
            *_, entry_id, node = heappop(self._heap)
            if node.queue_entry == entry_id:
                self.discard(node)
                return node

    def misfiled(self) -> list[Node]:
        """Queued leaves whose entry is out of date about their lease."""
        return [
            node
            for leased, needed, _, entry_id, node in self._heap
            if node.queue_entry == entry_id and (leased, needed) != self._order(node)
        ]

    def _order(self, node: Node) -> tuple[bool, float]:
        needed = self._needed(node)
        return (False, 0.0) if needed is None else (True, -needed)

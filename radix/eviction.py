"""Which leaf goes next."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Protocol

from ramify.radix.node import Node


class EvictionPolicy(Protocol):
    """Says in which order leaves are evicted: the lowest key first, equal keys by their arrival.

    `key` is asked when a node becomes a leaf that nobody uses. A key that grows from child to parent,
    as recency does, keeps what is most shared.
    """

    def key(self, node: Node) -> float: ...


class LeastRecentlyUsed:
    """By the last time that a request which used the node ended."""

    def key(self, node: Node) -> float:
        return node.last_used


class EvictionQueue:
    """The leaves that may be evicted: those without a lease first, then what is needed last, then by the
    policy's key.

    A binary heap whose stale entries are skipped when they surface, so that every operation costs
    O(log n). An entry is live while its ticket is the node's.
    """

    def __init__(self, policy: EvictionPolicy, needed: Callable[[Node], float | None]) -> None:
        self._policy = policy
        self._needed = needed
        self._heap: list[tuple[bool, float, float, int, Node]] = []
        """(leased, minus the time when it is needed, key, ticket, node)"""
        self._tickets = itertools.count(1)
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, node: Node) -> None:
        """Queue `node`, or move it to the place that it has now."""
        if not node.ticket:
            self._live += 1
        node.ticket = next(self._tickets)
        heappush(self._heap, (*self._order(node), self._policy.key(node), node.ticket, node))
        if len(self._heap) > 2 * self._live + 64:
            self._heap = [entry for entry in self._heap if entry[4].ticket == entry[3]]
            heapify(self._heap)

    def discard(self, node: Node) -> None:
        """Take `node` out if it is queued."""
        if node.ticket:
            node.ticket = 0
            self._live -= 1

    def pop(self) -> Node:
        """The leaf to evict now. Raises `IndexError` when there is none."""
        while True:
            *_, ticket, node = heappop(self._heap)
            if node.ticket == ticket:
                self.discard(node)
                return node

    def misfiled(self) -> list[Node]:
        """Queued leaves whose entry does not say when they are needed now."""
        return [
            node
            for leased, needed, _, ticket, node in self._heap
            if node.ticket == ticket and (leased, needed) != self._order(node)
        ]

    def _order(self, node: Node) -> tuple[bool, float]:
        needed = self._needed(node)
        return (False, 0.0) if needed is None else (True, -needed)

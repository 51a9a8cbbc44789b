"""The order of eviction, and that stale entries of the queue are skipped and forgotten."""

from __future__ import annotations

import pytest

from ramify.radix.eviction import EvictionQueue, LeastRecentlyUsed
from ramify.radix.node import Node, Root


def leaf(last_used: int, leases: int = 0) -> Node:
    node = Node(Root(""), b"aaaa", 0, (0,), False)
    node.last_used, node.leases = last_used, leases
    return node


def drain(queue: EvictionQueue) -> list[Node]:
    return [queue.pop() for _ in range(len(queue))]


def test_unleased_first_then_least_recently_used_then_by_arrival() -> None:
    queue = EvictionQueue(LeastRecentlyUsed())
    old_lease, tie_a, tie_b, oldest = leaf(1, leases=1), leaf(5), leaf(5), leaf(2)
    for node in (old_lease, tie_a, tie_b, oldest):
        queue.push(node)
    assert drain(queue) == [oldest, tie_a, tie_b, old_lease]
    with pytest.raises(IndexError):
        queue.pop()


def test_a_discarded_leaf_does_not_come_out() -> None:
    queue = EvictionQueue(LeastRecentlyUsed())
    first, second = leaf(1), leaf(2)
    queue.push(first)
    queue.push(second)
    queue.discard(first)
    queue.discard(first)
    assert len(queue) == 1
    assert drain(queue) == [second]


def test_a_leaf_pushed_again_has_one_place_the_new_one() -> None:
    queue = EvictionQueue(LeastRecentlyUsed())
    moved, other = leaf(1), leaf(5)
    queue.push(moved)
    queue.push(other)
    moved.leases = 1
    assert queue.misfiled() == [moved]
    queue.push(moved)
    assert queue.misfiled() == []
    assert drain(queue) == [other, moved]


def test_stale_entries_do_not_pile_up() -> None:
    queue = EvictionQueue(LeastRecentlyUsed())
    nodes = [leaf(number) for number in range(10)]
    for _ in range(500):
        for node in nodes:
            queue.push(node)
    assert len(queue) == 10
    assert len(queue._heap) < 200
    assert drain(queue) == nodes

"""The order of eviction, and that stale entries of the queue are skipped and forgotten."""

from __future__ import annotations

import math

import pytest

from ramify.radix.eviction import EvictionQueue
from ramify.radix.node import Node, Root


def leaf(last_used: int) -> Node:
    node = Node(Root(""), b"aaaa", 0, (0,), False)
    node.last_used = last_used
    return node


class Needs(dict[Node, float]):
    """When nodes are needed; nodes that are not listed have no lease."""

    def __call__(self, node: Node) -> tuple[int, float]:
        return (1, -self[node]) if node in self else (0, 0.0)


def drain(queue: EvictionQueue) -> list[Node]:
    return [queue.pop() for _ in range(len(queue))]


def test_what_is_needed_last_goes_first_then_least_recently_used_then_by_arrival() -> None:
    needs = Needs()
    queue = EvictionQueue(needs)
    wanted = {needed: leaf(number) for number, needed in enumerate((0.0, 5.0, 7.5, math.inf))}
    needs.update({node: needed for needed, node in wanted.items()})
    tie_a, tie_b, oldest = leaf(5), leaf(5), leaf(2)
    for node in (*wanted.values(), tie_a, tie_b, oldest):
        queue.push(node)
    assert drain(queue) == [oldest, tie_a, tie_b, *reversed(wanted.values())]
    with pytest.raises(IndexError):
        queue.pop()


def test_stale_entries_do_not_pile_up() -> None:
    queue = EvictionQueue(Needs())
    nodes = [leaf(number) for number in range(10)]
    for _ in range(500):
        for node in nodes:
            queue.push(node)
    assert len(queue) == 10
    assert len(queue._heap) < 200
    assert drain(queue) == nodes

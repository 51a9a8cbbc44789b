"""Snapshots of the tree for dashboards."""

from __future__ import annotations

import pytest

from ramify.radix.cache import PrefixCache
from tests.radix.world import World


def run(world: World, sequence: list[int], scope: str = "") -> None:
    request = world.admit(scope, sequence)
    assert request is not None
    assert world.compute(request, [])
    world.retire(request)


def test_nodes_with_their_parents_and_states() -> None:
    world = World(100, 4)
    run(world, [1, 2, 3, 4, 5, 6])
    run(world, [1, 2, 3, 7, 8])
    held = world.admit("", [1, 2, 3, 7, 8, 9])
    assert held is not None
    leased = world.cache.acquire(world.cache.match([1, 2, 3, 4, 5, 6]))
    world.cache.lease(leased, "program", 10.0)
    world.cache.release(leased)
    views = world.cache.snapshot(10)
    found = {(view.start, view.tokens): view for view in views}
    root, trunk, leaf, used = found[0, 0], found[0, 3], found[3, 3], found[3, 2]
    assert (root.parent, views[trunk.parent], views[leaf.parent], views[used.parent]) == (
        -1,
        root,
        trunk,
        trunk,
    )
    assert [view.state for view in (trunk, used, leaf)] == ["in_use", "in_use", "leased"]
    assert (used.locks, leaf.owners) == (1, ("program",))
    assert (
        sum(view.pages for view in views)
        == 100 - world.cache.counts().free - len(held.pages) + held.lock.private_from
    )
    assert all(view.parent < place for place, view in enumerate(views))
    assert not any(view.hidden for view in views)


@pytest.mark.parametrize("most", [1, 2, 7, 50])
def test_it_is_bounded_and_says_what_it_leaves_out(most: int) -> None:
    cache = PrefixCache(1000, 1)
    for first in range(300):
        lock = cache.acquire(cache.match([]))
        pages = cache.allocate(2)
        assert pages is not None
        cache.commit(lock, [first, first], pages)
        cache.release(lock)
    views = cache.snapshot(most)
    assert len(views) == most
    assert views[0].hidden == 300 - (most - 1)
    assert cache.snapshot(1000)[0].hidden == 0


def test_an_empty_tree() -> None:
    assert PrefixCache(4, 4).snapshot(10) == []

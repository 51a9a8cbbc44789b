"""Callers' mistakes are refused, and inconsistencies inside the cache are found."""

from __future__ import annotations

import numpy as np
import pytest

from ramify.radix.cache import NaiveCache, PrefixCache
from ramify.radix.integrity import ConservationError
from tests.radix.world import World


@pytest.mark.parametrize("cache_class", [PrefixCache, NaiveCache])
def test_a_lock_is_released_once(cache_class: type[PrefixCache]) -> None:
    cache = cache_class(4, 2)
    lock = cache.acquire(cache.match([1]))
    cache.release(lock)
    for use in (
        lambda: cache.release(lock),
        lambda: cache.lease(lock, "program", 1),
        lambda: cache.commit(lock, [], []),
    ):
        with pytest.raises(ValueError, match="has been released"):
            use()
    with pytest.raises(ValueError, match="another cache"):
        cache_class(4, 2).release(cache.acquire(cache.match([1])))


@pytest.mark.parametrize("cache_class", [PrefixCache, NaiveCache])
def test_a_commit_that_does_not_fit_changes_nothing(cache_class: type[PrefixCache]) -> None:
    cache = cache_class(6, 2)
    lock = cache.acquire(cache.match([1, 2, 3]))
    pages = cache.allocate(2)
    assert pages is not None
    for sequence, table, message in (
        ([1, 2, 3], pages[:1], "2 pages are needed"),
        ([1, 2, 3, 4, 5], pages, "3 pages are needed"),
        ([1, 2, 3], [pages[0], pages[0]], "named twice"),
        ([1, 2, 3], [pages[0], 5], "not private"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.commit(lock, sequence, table)
        cache.check()
    assert cache.commit(lock, [1, 2, 3], pages) == pages
    if cache_class is PrefixCache:
        with pytest.raises(ValueError, match="not those of the lock"):
            cache.commit(lock, [1, 2, 3, 4], [pages[1], pages[0]])
        with pytest.raises(ValueError, match="lock of 3 tokens"):
            cache.commit(lock, [1, 2], pages[:1])
        with pytest.raises(ValueError, match="not private"):
            cache.free(pages)
    cache.check()


def test_pages_are_given_back_once_and_by_their_owner() -> None:
    cache = PrefixCache(4, 2)
    pages = cache.allocate(2)
    assert pages is not None
    for wrong in ([pages[0], pages[0]], [pages[0], 3]):
        with pytest.raises(ValueError, match="not private"):
            cache.free(wrong)
    cache.free(pages)


def test_check_finds_what_is_wrong() -> None:
    def corrupt(change) -> None:
        world = World(20, 4)
        first = world.admit("", list(range(10)))
        assert first is not None
        world.compute(first, [])
        world.retire(first)
        request = world.admit("", [0, 1, 2, 3, 4, 5, 9])
        assert request is not None
        world.compute(request, [])
        world.commit(request)
        world.verify()
        leaf = world.cache.tree.walk(world.cache.tree.roots[""], np.arange(10, dtype=np.int32).tobytes())[0]
        change(world.cache, leaf)
        with pytest.raises(ConservationError):
            world.cache.check()

    def borrow(cache: PrefixCache, leaf) -> None:
        leaf.borrows_head = False

    def leak(cache: PrefixCache, leaf) -> None:
        cache._untouched.pop()

    def lock(cache: PrefixCache, leaf) -> None:
        leaf.locks += 1

    def count(cache: PrefixCache, leaf) -> None:
        cache.usage.evictable_pages += 1

    def unqueue(cache: PrefixCache, leaf) -> None:
        cache.usage.queue.discard(leaf)

    def lose_a_token(cache: PrefixCache, leaf) -> None:
        leaf.tokens = leaf.tokens[:-8]

    def misfile(cache: PrefixCache, leaf) -> None:
        leaf.parent.children[77] = leaf.parent.children.pop(6)

    for change in (borrow, leak, lock, count, unqueue, lose_a_token, misfile):
        corrupt(change)

"""One test for each promise of the cache."""

from __future__ import annotations

import numpy as np
import pytest

from ramify.radix.cache import PrefixCache
from tests.radix.world import World


def tokens(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


def run(world: World, sequence: list[int], scope: str = "") -> int:
    """Run a request to its end. Returns how many of its tokens came from the tree."""
    request = world.admit(scope, sequence)
    assert request is not None
    assert world.compute(request, [])
    world.retire(request)
    world.verify()
    return request.reused


@pytest.mark.parametrize("page_size", range(1, 9))
def test_sharing_is_exact_to_the_token(page_size: int) -> None:
    world = World(300, page_size)
    sequence = tokens(0, 20)
    run(world, sequence)
    for fork in range(21):
        assert run(world, [*sequence[:fork], 1000 + fork, 7]) == fork


@pytest.mark.parametrize("page_size", range(1, 9))
@pytest.mark.parametrize("fork", range(1, 17))
def test_a_fork_copies_at_most_one_page(page_size: int, fork: int) -> None:
    world = World(100, page_size)
    run(world, tokens(0, 16))
    before = world.cache.counts()
    request = world.admit("", [*tokens(0, fork), 99])
    assert request is not None
    shared = fork // page_size
    assert request.pages[:shared] == request.lock.pages[:shared]
    assert (request.copy is not None) == (fork % page_size > 0)
    assert before.free - world.cache.counts().free == 1, "one page: for the new token, and for the copy"


def test_a_long_prompt_that_is_wholly_cached_needs_no_more_than_one_page() -> None:
    world = World(40, 4)
    run(world, tokens(0, 100))
    request = world.admit("", tokens(0, 100), limit=99)
    assert request is not None
    assert request.reused == 99
    assert world.cache.counts().free == 40 - 25 - 1


def test_scopes_do_not_see_each_other() -> None:
    world = World(20, 4)
    assert run(world, tokens(0, 10), "a") == 0
    assert run(world, tokens(0, 10), "b") == 0
    assert run(world, tokens(0, 10), "") == 0
    assert run(world, tokens(0, 10), "a") == 10
    assert world.cache.match(tokens(0, 10), "c").length == 0


def test_a_match_changes_nothing() -> None:
    world = World(20, 4)
    run(world, tokens(0, 10))
    run(world, tokens(50, 60))
    before = world.tree()
    for _ in range(3):
        assert world.cache.match(tokens(0, 6)).length == 6
    assert world.tree() == before
    world.allocate(15)  # 14 are free: the sequence that was used first loses a page, though just matched
    assert world.cache.match(tokens(0, 10)).length == 8
    assert world.cache.match(tokens(50, 60)).length == 10


def test_a_limit_bounds_the_match() -> None:
    world = World(20, 4)
    run(world, tokens(0, 10))
    assert [world.cache.match(tokens(0, 10), limit=limit).length for limit in (0, 5, 10, 11)] == [
        0,
        5,
        10,
        10,
    ]


def test_leaves_go_first_and_the_least_recently_used_of_them() -> None:
    world = World(12, 2)
    run(world, tokens(0, 8))  # 4 pages
    run(world, [*tokens(0, 4), 20, 21, 22, 23])  # 2 more below the first 2
    run(world, [*tokens(0, 4), 30, 31, 32, 33])  # 2 more
    run(world, [*tokens(0, 4), 20, 21, 22, 23])  # the first branch is the oldest now
    world.cache.free(world.allocate(4 + 2) or [])
    assert world.cache.match(tokens(0, 8)).length == 4
    assert world.cache.match([*tokens(0, 4), 30, 31, 32, 33]).length == 8
    world.cache.free(world.allocate(6 + 2) or [])
    assert world.cache.match([*tokens(0, 4), 30, 31, 32, 33]).length == 4
    world.cache.free(world.allocate(8 + 3) or [])
    assert world.cache.match([*tokens(0, 4), 20, 21, 22, 23]).length == 2
    world.verify()


def test_eviction_takes_no_more_than_is_missing() -> None:
    world = World(10, 4)
    run(world, tokens(0, 38))
    pages = world.allocate(3)
    assert pages is not None
    assert world.cache.match(tokens(0, 38)).length == 28
    world.cache.free(pages)
    world.verify()


def test_what_runs_is_never_evicted() -> None:
    world = World(10, 2)
    request = world.admit("", tokens(0, 8))
    assert request is not None
    world.compute(request, [])
    world.commit(request)
    run(world, [*tokens(0, 8), 50, 51])
    assert world.cache.available() == 6
    assert world.cache.allocate(7) is None
    assert len(world.cache.allocate(6) or []) == 6
    assert world.cache.match(tokens(0, 8)).length == 8


def test_leased_pages_go_last_and_from_their_end() -> None:
    world = World(8, 2)
    request = world.admit("", tokens(0, 8))
    assert request is not None
    world.compute(request, [])
    world.retire(request, owner="program", seconds=10)
    run(world, tokens(20, 26))
    counts = world.cache.counts()
    assert (counts.free, counts.evictable, counts.leased) == (1, 3, 4)
    world.cache.free(world.allocate(4) or [])
    assert (world.cache.match(tokens(0, 8)).length, world.cache.match(tokens(20, 26)).length) == (8, 0)
    pages = world.allocate(7)  # no evictable page is left: the lease gives up what is needed and no more
    assert world.cache.match(tokens(0, 8)).length == 2
    assert world.cache.counts().leased == 1
    world.cache.free(pages or [])
    assert world.cache.end_leases("program") == 1
    assert world.cache.counts().leased == 0
    world.verify()


def test_pinned_pages_stay_until_the_pin_ends_or_becomes_a_lease() -> None:
    world = World(8, 2)
    for start, seconds in ((0, 10), (20, 20)):
        request = world.admit("", tokens(start, start + 4))
        assert request is not None
        world.compute(request, [])
        world.retire(request, owner=f"pin {start}", seconds=seconds, pinned=True)
    assert (world.cache.counts().pinned, world.cache.available()) == (4, 4)
    assert world.allocate(5) is None
    run(world, tokens(40, 48))
    assert (world.cache.match(tokens(0, 4)).length, world.cache.match(tokens(20, 24)).length) == (4, 4)
    first = world.cache.unpin()
    assert first is not None
    assert (first.owner, world.cache.available()) == ("pin 0", 6), (
        "the one that expires first gives way first"
    )
    world.verify()
    world.clock.now = 20
    assert world.cache.available() == 8, "nothing else has looked at the clock"
    assert world.cache.counts().pinned == 0


def test_a_flush_may_leave_pins() -> None:
    world = World(8, 2)
    request = world.admit("", tokens(0, 4))
    assert request is not None
    world.compute(request, [])
    world.retire(request, owner="p", seconds=10, pinned=True)
    run(world, [*tokens(0, 4), *tokens(20, 24)])
    assert world.cache.flush(pins=False) == 2
    assert world.cache.match(tokens(0, 4)).length == 4
    world.verify()
    assert world.cache.flush() == 2
    world.verify()


def test_a_lease_that_loses_a_branch_keeps_what_is_above() -> None:
    world = World(8, 1)
    run(world, [1, 2, 3])
    request = world.admit("", [1, 2, 4, 5])
    assert request is not None
    world.compute(request, [])
    world.retire(request, owner="program", seconds=10)
    world.cache.free(world.allocate(6) or [])  # 3 are free: token 3 goes, then tokens 4 and 5
    assert world.cache.counts().leased == 2
    world.verify()
    world.clock.now = 10
    assert world.cache.counts().leased == 0
    assert world.cache.match([1, 2]).length == 2
    world.verify()


def test_expired_leases_count_as_none() -> None:
    world = World(8, 2)
    for start in (0, 20):
        request = world.admit("", tokens(start, start + 8))
        assert request is not None
        world.compute(request, [])
        world.retire(request, owner="program", seconds=10 - start / 4)
    assert world.cache.counts().leased == 8
    world.clock.now = 5.0
    pages = world.cache.allocate(4)  # before anything else looks at the clock
    assert (world.cache.match(tokens(0, 8)).length, world.cache.match(tokens(20, 28)).length) == (8, 0)
    world.cache.free(pages or [])
    world.clock.now = 9.99
    assert world.cache.counts().leased == 4
    world.clock.now = 10.0
    assert world.cache.counts().leased == 0
    assert world.cache.end_leases("program") == 0


def test_a_lease_is_renewed_and_never_shortened() -> None:
    world = World(8, 2)
    request = world.admit("", tokens(0, 8))
    assert request is not None
    world.compute(request, [])
    world.commit(request)
    lock = request.lock
    world.cache.lease(lock, "program", 5)
    world.cache.lease(lock, "program", 10)
    world.cache.lease(lock, "program", 1)
    world.cache.lease(lock, "other", 1)
    world.retire(request)
    for now, leased in ((1, 4), (5, 4), (9, 4), (10, 0)):
        world.clock.now = now
        assert world.cache.counts().leased == leased
        world.verify()


def test_a_conversation_keeps_one_lease() -> None:
    world = World(40, 4)
    sequence: list[int] = []
    for turn in range(6):
        sequence += tokens(10 * turn, 10 * turn + 5)
        request = world.admit("", sequence)
        assert request is not None
        world.compute(request, [])
        world.retire(request, owner="program", seconds=10)
        world.verify()
    assert world.cache.end_leases("program") == 1


@pytest.mark.parametrize("page_size", [1, 4, 7])
def test_a_conversation_becomes_one_node_and_wastes_no_page(page_size: int) -> None:
    world = World(60, page_size)
    sequence: list[int] = []
    for turn in range(8):
        sequence += tokens(10 * turn, 10 * turn + 5)
        assert run(world, sequence) == 5 * turn
    assert len([node for *_, node in world.walk_tree() if node.parent is not None]) == 1
    assert world.cache.counts().evictable == world.slots(len(sequence))


def test_chunked_prefill_makes_one_node() -> None:
    world = World(60, 4)
    request = world.admit("", tokens(0, 50))
    assert request is not None
    for stop in (7, 8, 21, 40, 50):
        world.compute(request, [], stop)
        world.commit(request)
        world.verify()
    assert len([node for *_, node in world.walk_tree() if node.parent is not None]) == 1


@pytest.mark.parametrize("page_size", range(1, 9))
@pytest.mark.parametrize("same", range(12))
def test_two_requests_that_compute_the_same_tokens_end_with_one_copy(page_size: int, same: int) -> None:
    world = World(60, page_size)
    first = world.admit("", [*tokens(0, same), 50, 51])
    second = world.admit("", [*tokens(0, same), 60, 61])
    assert first is not None
    assert second is not None
    for request in (first, second):
        world.compute(request, [])
        world.commit(request)
        world.verify()
    whole = same // page_size
    assert first.pages[:whole] == second.pages[:whole]
    in_use = world.slots(same + 2) * 2 - whole
    assert world.cache.counts().in_use == in_use, "the duplicates are free"
    for request in (second, first):
        world.compute(request, [7])
        world.retire(request)
        world.verify()


def test_the_slower_of_two_equal_requests_goes_on_writing_its_own_page() -> None:
    world = World(20, 4)
    first, second = (world.admit("", tokens(0, 6)) for _ in range(2))
    assert first is not None
    assert second is not None
    world.compute(first, [])
    world.compute(second, [])
    own = second.pages[1]
    world.commit(first)
    world.commit(second)
    assert second.pages == [first.pages[0], own]
    assert (first.lock.private_from, second.lock.private_from) == (2, 1)
    world.compute(first, [100, 101])
    world.compute(second, [200, 201, 202])
    world.verify()
    for request in (first, second):
        world.retire(request)
        world.verify()
    assert world.cache.match([*tokens(0, 6), 200, 201, 202]).length == 9


def test_a_pool_without_other_users_fits_a_request_of_its_size() -> None:
    """After a flush a prompt matches nothing, whatever was branched before."""
    world = World(8, 4)
    for fork in (3, 6, 9, 13):
        run(world, [*tokens(0, fork), 100 + fork])
    world.flush()
    request = world.admit("", tokens(0, 2))
    assert request is not None
    for token in range(2, 32):
        assert world.compute(request, [token])
        world.commit(request)
        world.verify()
    assert world.cache.counts().in_use == 8
    assert not world.compute(request, [32])


def test_matching_costs_the_same_in_any_tree() -> None:
    """Counted in look-ups of children, so that no clock is needed."""

    class Counting(dict):
        lookups = 0

        def get(self, *args):
            Counting.lookups += 1
            return super().get(*args)

    def lookups_of_a_match(others: int) -> int:
        cache = PrefixCache(4 * others + 100, 4)
        prompt = np.arange(64, dtype=np.int32)
        rng = np.random.default_rng(0)
        prompts = [prompt, *(np.r_[prompt[:32], 100 + i, rng.integers(0, 9, 6)] for i in range(others))]
        for sequence in prompts:
            lock = cache.acquire(cache.match(sequence, limit=len(sequence) - 1))
            full = lock.length // 4
            fresh = cache.allocate(-(-len(sequence) // 4) - full)
            assert fresh is not None
            pages = cache.commit(lock, sequence, lock.pages[:full] + fresh)
            cache.free(pages[lock.private_from :])
            cache.release(lock)
        for node in cache.tree.nodes():
            node.children = Counting(node.children)
        Counting.lookups = 0
        assert cache.match(prompt).length == 64
        return Counting.lookups

    assert lookups_of_a_match(10) == lookups_of_a_match(3000) == 2


def test_evicting_pages_costs_by_the_pages_and_not_by_the_tree() -> None:
    """Counted in entries of the queue: one for each leaf that becomes one."""
    cache = PrefixCache(2000, 1)
    for sequence in ([i, i] for i in range(1000)):
        lock = cache.acquire(cache.match(sequence))
        cache.commit(lock, sequence, cache.allocate(2))
        cache.release(lock)

    def entries() -> int:
        return max(node.queue_entry for node in cache.tree.nodes())

    before = entries()
    for _ in range(100):
        cache.free(cache.allocate(cache.counts().free + 1))
    assert entries() <= before + 100


@pytest.mark.parametrize("left", range(1, 8))
def test_a_match_that_was_evicted_since_is_matched_again(left: int) -> None:
    """Eviction between `match` and `acquire` trims the node or removes it."""
    world = World(8, 1)
    run(world, tokens(0, 4))
    run(world, tokens(20, 24))
    match = world.cache.match(tokens(0, 4))
    world.cache.free(world.cache.allocate(8 - left) or [])
    assert world.admit_match("", tokens(0, 4), match) is not None  # `World` compares with a fresh match
    world.verify()


def test_a_match_whose_node_was_joined_since_is_matched_again() -> None:
    world = World(12, 2)
    first = world.admit("", tokens(0, 4))
    assert first is not None
    world.compute(first, [])
    world.commit(first)
    second = world.admit("", tokens(0, 8))  # a node of its own below the held one
    assert second is not None
    world.compute(second, [])
    world.retire(second)
    world.retire(first)
    third = world.admit("", tokens(0, 8))
    assert third is not None
    match = world.cache.match(tokens(0, 4))  # ends at the upper of two nodes
    assert match.node is not None
    world.retire(third)  # nothing tells them apart any more
    assert match.node.parent is None
    assert world.admit_match("", tokens(0, 4), match) is not None
    world.verify()


def test_pages_within_the_limit_are_touched_before_anything_is_evicted() -> None:
    world = World(20, 4)
    cache = world.cache
    cache.limit = 8
    run(world, tokens(0, 16))
    run(world, tokens(100, 116))
    assert (cache.touched, cache.available()) == (8, 8)
    run(world, tokens(200, 208))
    assert (cache.touched, cache.counts().evicted) == (8, 2), "the limit: the oldest prefix lost its end"
    assert cache.allocate(9) is None
    cache.limit = 20
    run(world, tokens(300, 340))
    assert (cache.touched, cache.counts().evicted) == (18, 2)


def test_trimming_evicts_the_least_recently_used_and_returns_all_free_pages() -> None:
    world = World(20, 4)
    cache = world.cache
    for start in (0, 100, 200):
        run(world, tokens(start, start + 16))
    mark = cache.usage.releases
    run(world, tokens(0, 16))
    world.trim(6, used_before=mark)
    found = [cache.match(tokens(start, start + 16)).length for start in (0, 100, 200)]
    assert (found, cache.touched) == ([16, 0, 8], 6), "the prefix in use since the mark stays"
    world.trim(0, used_before=mark)
    assert cache.touched == 4
    request = world.admit("", tokens(0, 16), limit=15)
    assert request is not None
    world.trim(0)
    assert (cache.match(tokens(0, 16)).length, cache.counts().in_use) == (15, 5), "requests keep their pages"
    world.retire(request)
    world.trim(0)
    assert (cache.touched, cache.counts().free) == (0, 20)
    world.verify()

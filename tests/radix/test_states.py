"""States at the ends of nodes: where matches end, and which state goes first."""

from __future__ import annotations

import random

import pytest

from ramify.radix.cache import PrefixCache
from ramify.radix.integrity import ConservationError
from ramify.radix.lock import StateCounts
from ramify.radix.node import Node
from tests.radix.world import World


def grown(world: World, *tokens: list[int], uses: float = 1.0) -> None:
    """Run a request that computes all `tokens`, and keeps a copy of its state behind each of them but the
    last, where it ends."""
    request = world.admit("", tokens[0])
    assert request is not None
    for more in [*tokens[1:], None]:
        assert world.compute(request, [])
        world.commit(request)
        if more is None:
            break
        world.copy_state(request, uses)
        assert world.compute(request, more)
    world.retire(request)
    world.verify()


def length(world: World, tokens: list[int]) -> int:
    return world.cache.match(tokens).length


def test_a_match_ends_in_the_deepest_state() -> None:
    world = World(32, 4, num_states=8)
    grown(world, [1] * 9, [2] * 4, [3] * 7)
    assert length(world, [1] * 9 + [2] * 4 + [3] * 7 + [5]) == 20
    assert length(world, [1] * 9 + [2] * 4 + [3] * 6) == 13
    match = world.cache.match([1] * 9 + [2] * 3)
    assert (match.length, match.known) == (9, 12)
    assert length(world, [1] * 8) == 0
    # What follows the state is computed again, and the tree keeps its own pages of it.
    free = world.cache.counts().free
    grown(world, [1] * 9 + [2] * 4 + [3] * 3, [4])
    assert world.cache.counts().free == free - 1
    assert length(world, [1] * 9 + [2] * 4 + [3] * 3 + [4]) == 17


def test_a_cache_without_states_refuses_them() -> None:
    cache = PrefixCache(4, 2)
    lock = cache.acquire(cache.match([1]))
    assert cache.allocate_state() is cache.copy_state(lock) is None
    assert cache.state_counts() == StateCounts(0, 0, 0, 0, 0)
    for use in (lambda: cache.free_state(0), lambda: cache.keep_state(lock, 0)):
        with pytest.raises(ValueError, match="not in use"):
            use()


def test_slots_are_given_back_once_and_conserved() -> None:
    world = World(8, 2, num_states=2)
    cache = world.cache
    slot = cache.allocate_state()
    assert slot is not None
    cache.free_state(slot)
    with pytest.raises(ValueError, match="not in use"):
        cache.free_state(slot)
    grown(world, [1, 2, 3])
    cache.states.in_use.add(next(iter(cache.states.holders.values())).slot)
    with pytest.raises(ConservationError, match="2 of 2 state slots are somewhere, in 3 places"):
        cache.check()


def test_the_state_that_saves_least_goes_first_and_its_pages_stay() -> None:
    world = World(64, 4, num_states=4)
    grown(world, [1] * 40, [2] * 4, [3] * 20)  # states at 40, 44 and 64
    grown(world, [7] * 30)  # the fourth slot
    assert world.cache.state_counts().free == 0
    request = world.admit("", [9] * 8)
    assert request is not None
    both = [1] * 40 + [2] * 4
    assert length(world, both) == 40  # 4 tokens from the state above: least
    assert world.cache.match(both).known == 44
    assert length(world, [*both, *[3] * 20]) == 64
    assert length(world, [7] * 30) == 30
    assert world.cache.state_counts().evicted == 1


def test_a_copy_takes_no_slot_of_better_states() -> None:
    world = World(64, 4, num_states=3)
    grown(world, [1] * 40)
    grown(world, [2] * 40)
    request = world.admit("", [3] * 4)
    assert request is not None
    assert world.compute(request, [])
    world.commit(request)
    world.copy_state(request)  # 4 tokens, against 40
    assert world.cache.state_counts().evicted == 0
    assert world.compute(request, [3] * 100)
    world.commit(request)
    world.copy_state(request, uses=0.01)  # 104 tokens, but a hundred times less likely
    assert world.cache.state_counts().evicted == 0
    world.copy_state(request)
    assert world.cache.state_counts().evicted == 1
    world.verify()


def test_states_that_a_lease_needs_go_last() -> None:
    world = World(64, 4, num_states=3)
    request = world.admit("", [1] * 4)
    assert request is not None
    assert world.compute(request, [])
    world.commit(request)
    world.copy_state(request)
    assert world.compute(request, [1])
    # The lease ends behind the state that it needs.
    world.retire(request, owner="p", seconds=10, needed_in=5.0)
    world.cache.states.drop(max(world.cache.states.holders, key=lambda node: node.end))
    grown(world, [2] * 40)
    for tokens in ([3] * 8, [4] * 8):
        assert world.admit("", tokens) is not None
    assert length(world, [1] * 5) == 4
    assert length(world, [2] * 40) == 0
    world.clock.now = 20.0
    world.cache.counts()  # ends the lease
    assert world.admit("", [5] * 8) is not None
    assert length(world, [1] * 5) == 0
    assert world.admit("", [6] * 8) is None, "requests have all slots"


def test_states_go_in_the_order_of_their_ranks() -> None:
    """The order by the definition: leased ones last, those needed furthest in the future first, then by
    value."""
    chosen = random.Random(1)
    world = World(400, 4, num_states=12)
    states = world.cache.states
    assert states is not None

    def rank(node: Node) -> tuple[bool, float, float]:
        ends = [(states.at_or_above(end, end.end), when) for end, when in states._leases.ends()]
        needed = [when for holder, when in ends if holder is node]
        above = states.at_or_above(node.parent, node.end)
        state = states.holders[node]
        saved = node.end - (0 if above is None else above.end)
        value = saved * state.uses / (states.now - state.since + 1)
        return bool(needed), -min(needed, default=0.0), value

    leased = 0
    for turn in range(120):
        parts = [[chosen.randint(1, 2)] * chosen.randint(1, 9) for _ in range(4)]
        request = world.admit("", parts[0])
        assert request is not None
        for more in parts[1:]:
            assert world.compute(request, more)
            world.commit(request)
            world.copy_state(request, chosen.choice((0.5, 1.0, 2.0)))
        owner = f"p{turn}" if chosen.random() < 0.4 else ""
        world.retire(request, owner=owner, seconds=chosen.randint(1, 40), needed_in=chosen.randint(1, 20))
        world.clock.now += chosen.random()
        world.verify()
        lowest = min(states.holders, key=rank)
        assert states.lowest() is lowest
        leased += rank(lowest)[0]
        if turn % 20 == 19:  # leases on all
            unleased = [node for node in states.holders if not rank(node)[0]]
            for node in unleased:
                states.drop(node)
            leased += bool(states.holders) and states.lowest() is min(states.holders, key=rank)
    assert leased
    assert states.evicted > 100


def test_pages_that_no_state_reaches_go_first() -> None:
    world = World(16, 4, num_states=4)
    grown(world, [1] * 16)
    grown(world, [2] * 16)
    grown(world, [3] * 16)
    (useless,) = [node for node in world.cache.states.holders if node.tokens[:1] == b"\x03"]
    world.cache.states.drop(useless)
    world.cache.usage.offer(useless)
    assert world.allocate(8) is not None
    assert [length(world, [n] * 16) for n in (1, 2, 3)] == [16, 16, 0]
    # A leaf that loses its end loses its state.
    assert world.allocate(1) is not None
    assert (length(world, [1] * 16), world.cache.match([1] * 16).known) == (0, 12)
    world.verify()


def test_a_state_keeps_its_node_apart() -> None:
    world = World(32, 4, num_states=4)
    grown(world, [1] * 8, [1] * 8)
    assert [node.end for *_, node in world.walk_tree()] == [0, 8, 16]
    (inner,) = [node for node in world.cache.states.holders if node.end == 8]
    world.cache.states.drop(inner)
    grown(world, [1] * 16)  # a release joins what can be joined
    assert [node.end for *_, node in world.walk_tree()] == [0, 16]

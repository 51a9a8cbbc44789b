"""Thousands of seeded random operations, to reach states that short examples do not.

Two tokens and sequences of a few pages make nearly every prompt share something with another, and
make requests diverge from each other in the middle of pages.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from ramify.radix.cache import NaiveCache, PrefixCache
from ramify.radix.lock import Match
from ramify.radix.node import Node
from ramify.radix.tree import RadixTree
from tests.radix.world import Request, World

pytestmark = pytest.mark.slow

ACTIONS = {
    "admit": 6,
    "fork": 8,
    "match": 5,
    "admit_match": 4,
    "twin": 4,
    "echo": 6,
    "overtake": 3,
    "compute": 14,
    "commit": 10,
    "copy_state": 3,
    "finish": 5,
    "abort": 2,
    "retract": 2,
    "lease": 2,
    "expect": 1,
    "end_leases": 1,
    "unpin": 0.3,
    "flush_unpinned": 0.2,
    "probe": 4,
    "time": 2,
    "pressure": 1,
    "flush": 0.2,
    "trim": 0.5,
    "trim_old": 0.5,
    "limit": 0.5,
}
OWNERS = ("p", "q")
PARTS = ("", "a", "b")
NEEDED = (0.0, 1.0, 4.0, float("inf"))


class Dice:
    """One run of random operations on a world."""

    def __init__(self, seed: int, cache_class: type[PrefixCache] = PrefixCache) -> None:
        self.random = random.Random(seed)
        page_size = self.random.randint(1, 8)
        num_pages, num_states = self.random.randint(8, 40), (0, 3, 9)[seed % 3]
        self.world = World(num_pages, page_size, cache_class, num_states)
        self.longest = 4 * page_size + 4
        self.matches: list[tuple[str, list[int], Match]] = []

    def tokens(self, most: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(self.random.randint(1, most))]

    def pick(self) -> Request | None:
        return self.random.choice(self.world.requests) if self.world.requests else None

    def step(self) -> None:
        (action,) = self.random.choices(list(ACTIONS), ACTIONS.values())
        getattr(self, action)(self.pick())

    def admit(self, _: Request | None) -> None:
        scope = "b" if self.random.random() < 0.1 else ""
        limit = None if self.random.random() < 0.7 else self.random.randint(0, self.longest)
        self.world.admit(scope, self.tokens(self.longest), limit)

    def fork(self, request: Request | None) -> None:
        if request is not None and len(self.world.requests) < 8:
            cut = self.random.randint(0, len(request.tokens))
            self.world.admit(request.scope, request.tokens[:cut] + self.tokens(5))

    def match(self, request: Request | None) -> None:
        """Match now, admit later."""
        scope, known = (request.scope, request.tokens) if request is not None else ("b", [])
        tokens = known[: self.random.randint(0, len(known))] + self.tokens(3)
        self.matches.append((scope, tokens, self.world.cache.match(np.array(tokens, np.int32), scope)))

    def admit_match(self, _: Request | None) -> None:
        if self.matches and len(self.world.requests) < 8:
            self.world.admit_match(*self.matches.pop(self.random.randrange(len(self.matches))))

    def twin(self, request: Request | None) -> None:
        """Admit a request without cached tokens that computes the same tokens as another."""
        if request is not None and len(self.world.requests) < 8:
            limit = self.random.randint(0, request.lock.length)
            cut = self.random.randint(1, len(request.tokens))
            self.world.admit(request.scope, request.tokens[:cut], limit)

    def echo(self, request: Request | None) -> None:
        """Compute and commit the continuation that another request has, then perhaps other tokens."""
        if request is None:
            return
        known = len(request.tokens)
        others = [
            other.tokens[known:]
            for other in self.world.requests
            if other.scope == request.scope and other.tokens[:known] == request.tokens
        ]
        more = max(others, key=len)[: self.random.randint(0, 3)] + self.tokens(2)
        if known + len(more) <= self.longest and self.world.compute(request, more):
            self.world.commit(request)

    def overtake(self, request: Request | None) -> None:
        """Fork a request at its end, commit the fork first, then give the request the fork's next tokens."""
        if request is None or not self.world.compute(request, []):
            return
        self.world.commit(request)
        fork = self.world.admit(request.scope, request.tokens + self.tokens(3))
        if fork is not None and self.world.compute(fork, []):
            self.world.commit(fork)
        self.echo(request)

    def compute(self, request: Request | None) -> None:
        if request is None:
            return
        more = self.tokens(4) if self.random.random() < 0.6 else []
        known = len(request.tokens) + len(more)
        if known <= self.longest:
            until = known if self.random.random() < 0.6 else self.random.randint(request.computed, known)
            self.world.compute(request, more, until)

    def commit(self, request: Request | None) -> None:
        if request is not None:
            self.world.commit(request)

    def copy_state(self, request: Request | None) -> None:
        if request is not None:
            self.world.commit(request)
            self.world.copy_state(request, self.random.choice((0.1, 1.0)))

    def finish(self, request: Request | None) -> None:
        if request is not None:
            owner, part, needed_in = map(self.random.choice, (OWNERS, PARTS, NEEDED))
            seconds = self.random.choice((0, 0, 1, 4))
            self.world.retire(request, owner=owner, seconds=seconds, needed_in=needed_in, part=part)

    def abort(self, request: Request | None) -> None:
        if request is not None:
            self.world.retire(request, commit=False)

    def retract(self, request: Request | None) -> None:
        if request is not None:
            self.world.retire(request)
            self.world.admit(request.scope, request.tokens, len(request.tokens) - 1)

    def lease(self, request: Request | None) -> None:
        """Lease the whole lock or a prefix of it, of any length."""
        if request is not None:
            owner, part, needed_in = map(self.random.choice, (OWNERS, PARTS, NEEDED))
            length = max(0, request.lock.length - self.random.choice((0, self.random.randint(0, 14))))
            seconds = self.random.randint(1, 6)
            pinned = self.random.random() < 0.3
            self.world.cache.lease(request.lock, owner, seconds, needed_in, part, length, pinned=pinned)

    def unpin(self, _: Request | None) -> None:
        self.world.cache.unpin()

    def flush_unpinned(self, _: Request | None) -> None:
        pinned = self.world.pinned()
        self.world.cache.flush(pins=False)
        self.world.lost_some = True
        assert self.world.pinned() == pinned

    def expect(self, _: Request | None) -> None:
        self.world.cache.expect(*map(self.random.choice, (OWNERS, PARTS, NEEDED)))

    def end_leases(self, _: Request | None) -> None:
        owner, part = self.random.choice(OWNERS), self.random.choice((None, *PARTS))
        self.world.cache.end_leases(owner, part)
        assert self.world.cache.end_leases(owner, part) == 0

    def probe(self, request: Request | None) -> None:
        """A match changes nothing, and finds at least the locked tokens and at most the committed ones."""
        world = self.world
        scope, tokens = ("", self.tokens(14)) if request is None else (request.scope, request.tokens)
        before = world.tree()
        match = world.cache.match(np.array(tokens, dtype=np.int32), scope)
        assert world.tree() == before
        longest = world.longest_committed(scope, tokens)
        assert match.length <= match.known <= longest
        assert match.length == match.known or world.states
        assert request is None or match.known >= request.lock.length
        if not world.lost_some and not isinstance(world.cache, NaiveCache):
            assert match.known == longest

    def time(self, _: Request | None) -> None:
        self.world.clock.now += self.random.randint(1, 3)

    def pressure(self, _: Request | None) -> None:
        pages = self.world.allocate(self.random.randint(1, self.world.cache.available() or 1))
        if pages is not None:
            self.world.cache.free(pages)

    def trim(self, _: Request | None) -> None:
        self.world.trim(self.random.randint(0, self.world.cache.num_pages))

    def limit(self, _: Request | None) -> None:
        self.world.cache.limit = self.random.randint(
            self.world.cache.num_pages // 2, self.world.cache.num_pages
        )

    def trim_old(self, _: Request | None) -> None:
        releases = self.world.cache.usage.releases
        most = self.random.randint(0, self.world.cache.num_pages)
        self.world.trim(most, used_before=self.random.randint(0, releases))

    def flush(self, _: Request | None) -> None:
        self.world.flush()


def run(seed: int, steps: int, cache_class: type[PrefixCache] = PrefixCache) -> None:
    dice = Dice(seed, cache_class)
    for _ in range(steps):
        dice.step()
        dice.world.verify()
    for request in list(dice.world.requests):
        dice.world.retire(request)
        dice.world.verify()
    assert dice.world.cache.counts().in_use == 0
    dice.world.flush()
    assert dice.world.cache.counts().free == dice.world.cache.counts().total
    assert len(dice.world.cache.tree.roots) == 0


@pytest.mark.parametrize("seed", range(40))
def test_everybody_reads_its_own(seed: int) -> None:
    run(seed, 250)


@pytest.mark.parametrize("seed", range(3))
def test_naive_cache_likewise(seed: int) -> None:
    run(seed, 250, NaiveCache)


class CountingTree(RadixTree):
    """Counts the kinds of split, trim, borrowed page and join."""

    def __init__(self, page_size: int, seen: Counter[str]) -> None:
        super().__init__(page_size)
        self.seen = seen

    def append(self, parent, tokens, pages, borrows_head) -> Node:
        self.seen["borrow from parent"] += borrows_head and parent.pages[-1] == pages[0]
        self.seen["borrow from above parent"] += borrows_head and parent.pages[-1] != pages[0]
        self.seen["own copy"] += not borrows_head and parent.end % self.page_size > 0
        return super().append(parent, tokens, pages, borrows_head)

    def split(self, node, at) -> Node:
        self.seen["cut in a page" if at % self.page_size else "cut between pages"] += 1
        in_head = at // self.page_size == node.start // self.page_size
        self.seen["cut a borrower in its head"] += node.borrows_head and in_head
        return super().split(node, at)

    def join(self, child):
        spare = super().join(child)
        self.seen[{None: "not joined", (): "joined"}.get(spare, "joined, page spared")] += 1
        return spare

    def trim(self, leaf, count):
        self.seen["trim a lease" if leaf.leases else "trim"] += 1
        return super().trim(leaf, count)


def test_the_dice_reach_every_branch() -> None:
    """The runs above reach every kind of split, trim, borrowed page and join."""
    seen: Counter[str] = Counter()
    for seed in range(40):
        dice = Dice(seed)
        dice.world.cache.tree = CountingTree(dice.world.page_size, seen)
        for _ in range(250):
            dice.step()
    assert len(seen) == 11
    assert min(seen.values()) >= 5, seen

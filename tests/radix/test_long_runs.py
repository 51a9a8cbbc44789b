"""Thousands of seeded random operations, to reach states that short examples do not.

Two tokens and sequences of a few pages make nearly every prompt share something with another, and
make requests diverge from each other in the middle of pages.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from ramify.radix.cache import PrefixCache
from ramify.radix.lock import Match
from ramify.radix.naive import NaiveCache
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
    "end_leases": 1,
    "time": 2,
    "pressure": 1,
    "flush": 0.2,
}
OWNERS = ("p", "q")


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
            seconds = self.random.choice((0, 0, 1, 4))
            self.world.retire(request, owner=self.random.choice(OWNERS), seconds=seconds)

    def abort(self, request: Request | None) -> None:
        if request is not None:
            self.world.retire(request, commit=False)

    def retract(self, request: Request | None) -> None:
        if request is not None:
            self.world.retire(request)
            self.world.admit(request.scope, request.tokens, len(request.tokens) - 1)

    def lease(self, request: Request | None) -> None:
        if request is not None:
            self.world.cache.lease(request.lock, self.random.choice(OWNERS), self.random.randint(1, 6))

    def end_leases(self, _: Request | None) -> None:
        self.world.cache.end_leases(self.random.choice(OWNERS))

    def time(self, _: Request | None) -> None:
        self.world.clock.now += self.random.randint(1, 3)

    def pressure(self, _: Request | None) -> None:
        pages = self.world.allocate(self.random.randint(1, self.world.cache.available() or 1))
        if pages is not None:
            self.world.cache.free(pages)

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


@pytest.mark.parametrize("seed", range(40))
def test_everybody_reads_its_own(seed: int) -> None:
    run(seed, 250)


@pytest.mark.parametrize("seed", range(3))
def test_naive_cache_likewise(seed: int) -> None:
    run(seed, 250, NaiveCache)


def test_the_dice_reach_every_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs above reach every kind of split, trim, borrowed page and join."""
    seen: Counter[str] = Counter()
    append, split, join, trim = RadixTree.append, RadixTree.split, RadixTree.join, RadixTree.trim

    def counted_append(tree, parent, tokens, pages, borrows_head) -> Node:
        if borrows_head:
            seen["borrow from parent" if parent.pages[-1] == pages[0] else "borrow from above parent"] += 1
        elif parent.end % tree.page_size:
            seen["own copy"] += 1
        return append(tree, parent, tokens, pages, borrows_head)

    def counted_split(tree, node, at) -> Node:
        seen["cut in a page" if at % tree.page_size else "cut between pages"] += 1
        seen["cut a borrower in its head"] += node.borrows_head and at // tree.page_size == (
            node.start // tree.page_size
        )
        return split(tree, node, at)

    def counted_join(tree, child):
        spare = join(tree, child)
        seen[{None: "not joined", (): "joined"}.get(spare, "joined, page spared")] += 1
        return spare

    def counted_trim(tree, leaf, count):
        seen["trim a lease" if leaf.leases else "trim"] += 1
        return trim(tree, leaf, count)

    monkeypatch.setattr(RadixTree, "append", counted_append)
    monkeypatch.setattr(RadixTree, "split", counted_split)
    monkeypatch.setattr(RadixTree, "join", counted_join)
    monkeypatch.setattr(RadixTree, "trim", counted_trim)
    for seed in range(40):
        dice = Dice(seed)
        for _ in range(250):
            dice.step()
    assert all(
        seen[branch] >= 5
        for branch in (
            "borrow from parent",
            "borrow from above parent",
            "own copy",
            "cut in a page",
            "cut between pages",
            "cut a borrower in its head",
            "not joined",
            "joined",
            "joined, page spared",
            "trim",
            "trim a lease",
        )
    ), seen

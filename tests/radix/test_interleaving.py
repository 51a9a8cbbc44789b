"""Any interleaving of requests reads its own tokens and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ramify.radix.cache import PrefixCache
from ramify.radix.naive import NaiveCache
from tests.radix.world import World

pytestmark = pytest.mark.slow

SCOPES = st.sampled_from(["", "b"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
MORE = st.lists(st.integers(0, 1), max_size=6)
PICK = st.integers(0, 50)
OWNERS = st.sampled_from(["p", "q"])
PARTS = st.sampled_from(["", "a", "b"])
NEEDED = st.sampled_from([0.0, 1.0, 4.0, float("inf")])


class Interleaving(RuleBasedStateMachine):
    cache_class: type[PrefixCache] = PrefixCache

    @initialize(
        page_size=st.integers(1, 8), num_pages=st.integers(2, 24), num_states=st.sampled_from([0, 0, 2, 6])
    )
    def start(self, page_size: int, num_pages: int, num_states: int) -> None:
        self.world = World(num_pages, page_size, self.cache_class, num_states)
        self.matches: list = []

    def pick(self, number: int):
        return self.world.requests[number % len(self.world.requests)]

    def running(self) -> bool:
        return bool(self.world.requests)

    @rule(scope=SCOPES, tokens=TOKENS, limit=st.none() | st.integers(0, 14))
    def admit(self, scope, tokens, limit) -> None:
        self.world.admit(scope, tokens, limit)

    @rule(scope=SCOPES, tokens=TOKENS, limit=st.none() | st.integers(0, 14))
    def match_for_later(self, scope, tokens, limit) -> None:
        match = self.world.cache.match(np.array(tokens, dtype=np.int32), scope, limit)
        self.matches.append((scope, tokens[:limit], match))

    @precondition(lambda self: self.matches)
    @rule(number=PICK, more=MORE)
    def admit_a_stale_match(self, number, more) -> None:
        scope, tokens, match = self.matches.pop(number % len(self.matches))
        self.world.admit_match(scope, tokens + more, match)

    @precondition(running)
    @rule(number=PICK, cut=st.integers(0, 20), more=MORE)
    def fork(self, number, cut, more) -> None:
        request = self.pick(number)
        self.world.admit(request.scope, request.tokens[:cut] + more or [0])

    @precondition(running)
    @rule(number=PICK)
    def same_again(self, number) -> None:
        request = self.pick(number)
        self.world.admit(request.scope, request.tokens, max(0, len(request.tokens) - 1))

    @precondition(running)
    @rule(number=PICK, more=MORE)
    def compute(self, number, more) -> None:
        self.world.compute(self.pick(number), more)

    @precondition(running)
    @rule(number=PICK, count=st.integers(1, 8))
    def compute_a_chunk(self, number, count) -> None:
        request = self.pick(number)
        self.world.compute(request, [], min(len(request.tokens), request.computed + count))

    @precondition(running)
    @rule(number=PICK)
    def commit(self, number) -> None:
        self.world.commit(self.pick(number))

    @precondition(running)
    @rule(number=PICK, more=MORE)
    def compute_and_commit(self, number, more) -> None:
        if self.world.compute(self.pick(number), more):
            self.world.commit(self.pick(number))

    @precondition(running)
    @rule(number=PICK, uses=st.sampled_from([0.1, 1.0]))
    def commit_and_copy_the_state(self, number, uses) -> None:
        self.world.commit(self.pick(number))
        self.world.copy_state(self.pick(number), uses)

    @precondition(running)
    @rule(number=PICK)
    def finish(self, number) -> None:
        self.world.retire(self.pick(number))

    @precondition(running)
    @rule(number=PICK)
    def abort(self, number) -> None:
        self.world.retire(self.pick(number), commit=False)

    @precondition(running)
    @rule(number=PICK)
    def retract_and_resume(self, number) -> None:
        request = self.pick(number)
        self.world.retire(request)
        self.world.admit(request.scope, request.tokens, max(0, len(request.tokens) - 1))

    @precondition(running)
    @rule(number=PICK, owner=OWNERS, seconds=st.integers(1, 5), needed_in=NEEDED, part=PARTS)
    def finish_with_a_lease(self, number, owner, seconds, needed_in, part) -> None:
        self.world.retire(self.pick(number), owner=owner, seconds=seconds, needed_in=needed_in, part=part)

    @precondition(running)
    @rule(number=PICK, owner=OWNERS, seconds=st.integers(1, 5), part=PARTS, less=st.integers(0, 14))
    def lease(self, number, owner, seconds, part, less) -> None:
        """Lease the whole lock or a prefix of it, of any length."""
        lock = self.pick(number).lock
        self.world.cache.lease(lock, owner, seconds, 3.0, part, max(0, lock.length - less))

    @rule(owner=OWNERS, part=PARTS, needed_in=NEEDED)
    def expect(self, owner, part, needed_in) -> None:
        self.world.cache.expect(owner, part, needed_in)

    @rule(owner=OWNERS, part=PARTS)
    def end_a_part(self, owner, part) -> None:
        self.world.cache.end_leases(owner, part)
        assert self.world.cache.end_leases(owner, part) == 0

    @rule(seconds=st.integers(1, 4))
    def time_passes(self, seconds) -> None:
        self.world.clock.now += seconds

    @rule(owner=OWNERS)
    def end_leases(self, owner) -> None:
        self.world.cache.end_leases(owner)
        assert self.world.cache.end_leases(owner) == 0

    @rule(n=st.integers(0, 24))
    def pressure(self, n) -> None:
        pages = self.world.allocate(n)
        if pages is not None:
            self.world.cache.free(pages)

    @rule()
    def flush(self) -> None:
        self.world.flush()

    @rule(scope=SCOPES, tokens=TOKENS)
    def probe(self, scope, tokens) -> None:
        """A match changes nothing, and finds at least the locked tokens and at most the committed ones."""
        world = self.world
        before = world.tree()
        match = world.cache.match(np.array(tokens, dtype=np.int32), scope)
        assert world.tree() == before
        longest = world.longest_committed(scope, tokens)
        assert match.length <= match.known <= longest
        assert match.length == match.known or world.states
        if not world.lost_some and self.cache_class is PrefixCache:
            assert match.known == longest

    @invariant()
    def everybody_reads_its_own(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.verify()
        for request in self.world.requests:
            match = self.world.cache.match(np.array(request.tokens, dtype=np.int32), request.scope)
            assert match.known >= request.lock.length

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for request in list(self.world.requests):
            self.world.retire(request)
        self.world.verify()
        counts = self.world.cache.counts()
        assert counts.in_use == 0
        self.world.flush()
        assert self.world.cache.counts().free == counts.total
        assert len(self.world.cache.tree.roots) == 0


class NaiveInterleaving(Interleaving):
    cache_class = NaiveCache


def few(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


TestInterleaving = Interleaving.TestCase
TestInterleaving.settings = few(200, 40)
TestNaiveInterleaving = NaiveInterleaving.TestCase
TestNaiveInterleaving.settings = few(25, 30)

"""Requests on a cache whose pages have contents, so that wrong sharing and wrong writes are detected.

A row holds what the KV of a token depends on: its scope and all tokens up to it. `World` does what the
scheduler does with pages and what the worker does with rows; `verify` then reads every row that a
running request or the tree relies on.
"""

from __future__ import annotations

import math

import numpy as np

from ramify.radix.cache import PrefixCache
from ramify.radix.digest import Digests
from ramify.radix.lock import Match, PrefixLock
from ramify.radix.tree_log import Page, TreeLog

POISON = "poison"
DIGESTS = Digests()


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Request:
    """Tokens ``[0, computed)`` have been written to rows, ``[0, lock.length)`` are committed."""

    def __init__(self, scope: str, tokens: list[int], lock: PrefixLock, pages: list[int]) -> None:
        self.scope = scope
        self.tokens = list(tokens)
        self.lock = lock
        self.pages = pages
        self.computed = lock.length
        self.copy: tuple[int, int] | None = None
        self.reused = lock.length
        self.slot: int | None = None
        """Tokens of its state, where the cache has states."""


class World:
    def __init__(
        self,
        num_pages: int,
        page_size: int,
        cache_class: type[PrefixCache] = PrefixCache,
        num_states: int = 0,
    ) -> None:
        self.clock = FakeClock()
        self.log = TreeLog(page_size, tokens=True)
        self.cache = cache_class(num_pages, page_size, num_states=num_states, log=self.log, clock=self.clock)
        self.told: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Contents of the tree as `log` has told them: digest → scope and tokens, put together from pages."""
        self.states: list[object] = [POISON] * num_states
        """Scope and tokens that the state of each slot has seen, by slot."""
        self.page_size = page_size
        self.rows = [[POISON] * page_size for _ in range(num_pages)]
        self.requests: list[Request] = []
        self.committed: set[tuple[str, tuple[int, ...]]] = set()
        self.lost_some = False
        """Something has been evicted or flushed."""

    # --- what the scheduler does ------------------------------------------------------------------

    def admit(self, scope: str, tokens: list[int], limit: int | None = None) -> Request | None:
        match = self.cache.match(np.array(tokens, dtype=np.int32), scope, limit)
        return self.admit_match(scope, tokens, match)

    def admit_match(self, scope: str, tokens: list[int], match: Match) -> Request | None:
        """Admit a request. `match`, of a prefix of `tokens`, may be stale; the lock is up to date."""
        now = self.cache.match(np.frombuffer(match.key, np.int32), scope)
        lock = self.cache.acquire(match)
        assert lock.length == now.length
        self.read(scope, tokens, lock.length, lock.pages)
        full = lock.length // self.page_size
        state = self.cache.use_state(lock) if self.states else None
        if self.states and lock.length:
            assert state is not None
            assert self.states[state] == self.content(scope, tokens, lock.length - 1)
        content = POISON if state is None else self.states[state]
        slot = self.cache.allocate_state()
        fresh = None
        if slot is not None or not self.states:
            fresh = self.allocate(self.slots(len(tokens)) - full)
        if fresh is None:
            if slot is not None:
                self.cache.free_state(slot)
            self.cache.release(lock)
            return None
        request = Request(scope, tokens, lock, lock.pages[:full] + fresh)
        request.slot = slot
        if slot is not None:
            self.states[slot] = content
        if lock.length % self.page_size:
            # A match of all tokens ends in the last slot, for which there is a fresh page as well.
            request.copy = (lock.pages[full], fresh[0])
        self.requests.append(request)
        return request

    def allocate(self, n: int) -> list[int] | None:
        before, tree, pinned = self.cache.counts(), self.tree(), self.pinned()
        available, idle_pins = self.cache.available(), self.idle_pins()
        pages = self.cache.allocate(n)
        after = self.cache.counts()
        if pages is None:
            assert n > available
            assert (after, self.tree()) == (before, tree)
            return None
        assert n <= available
        assert len(pages) == n
        evicted = max(0, n - (available - before.evictable - before.leased + idle_pins))
        assert after.evicted == before.evicted + evicted, "evicts exactly what is missing"
        assert before.leased - after.leased == max(0, evicted - before.evictable), "leased pages go last"
        assert self.pinned() == pinned, "pinned pages stay"
        self.lost_some |= evicted > 0
        for page in pages:
            self.rows[page] = [POISON] * self.page_size
        return pages

    def compute(self, request: Request, tokens: list[int], until: int | None = None) -> bool:
        """Append `tokens` and compute up to `until` (None: to the end). False if pages are short."""
        missing = self.slots(len(request.tokens) + len(tokens)) - len(request.pages)
        if missing > 0:
            fresh = self.allocate(missing)
            if fresh is None:
                return False
            request.pages += fresh
        request.tokens += tokens
        if request.copy is not None:
            source, target = request.copy
            self.rows[target] = list(self.rows[source])
            request.copy = None
        until = len(request.tokens) if until is None else until
        for position in range(request.computed, until):
            page, row = request.pages[position // self.page_size], position % self.page_size
            self.rows[page][row] = self.content(request.scope, request.tokens, position)
        request.computed = max(request.computed, until)
        if request.slot is not None and request.computed:
            self.states[request.slot] = self.content(request.scope, request.tokens, request.computed - 1)
        return True

    def commit(self, request: Request) -> None:
        if request.computed == request.lock.length or request.copy is not None:
            return
        slots = self.slots(request.computed)
        tokens = np.array(request.tokens[: request.computed], dtype=np.int32)
        request.pages[:slots] = self.cache.commit(request.lock, tokens, request.pages[:slots])
        self.committed.update(
            (request.scope, tuple(request.tokens[: end + 1])) for end in range(request.computed)
        )

    def copy_state(self, request: Request, uses: float = 1.0) -> None:
        """Have the tree keep a copy of the request's state, where its tokens are committed."""
        if request.slot is None or request.computed != request.lock.length:
            return
        before = self.cache.state_counts()
        slot = self.cache.copy_state(request.lock, uses)
        after = self.cache.state_counts()
        assert after.held - before.held == (slot is not None) - (after.evicted - before.evicted)
        if slot is not None:
            self.states[slot] = self.states[request.slot]

    def retire(
        self, request: Request, commit: bool = True, owner: str = "", seconds: float = 0.0, **lease: object
    ) -> None:
        if commit:
            self.commit(request)
        if seconds:
            self.cache.lease(request.lock, owner, seconds, **lease)
        if request.slot is not None:
            if request.computed == request.lock.length:
                self.cache.keep_state(request.lock, request.slot)
            else:
                self.cache.free_state(request.slot)
        self.cache.free(request.pages[request.lock.private_from :])
        self.cache.release(request.lock)
        self.requests.remove(request)

    def flush(self) -> None:
        before = self.cache.counts()
        assert self.cache.flush() == before.evictable + before.leased
        after = self.cache.counts()
        assert (after.evictable, after.leased, after.in_use) == (0, 0, before.in_use)
        assert self.cache.state_counts().held == 0
        self.lost_some = True

    def trim(self, most: int, used_before: float = math.inf) -> None:
        before, pinned, idle_pins = self.cache.counts(), self.pinned(), self.idle_pins()
        for page in self.cache.trim(most, used_before):
            self.rows[page] = [POISON] * self.page_size
        after = self.cache.counts()
        evicted = after.evicted - before.evicted
        assert after.free == after.total - after.touched, "all free pages are untouched"
        assert after.in_use == before.in_use
        assert self.pinned() == pinned, "pinned pages stay"
        held = before.evictable + before.leased
        if used_before == math.inf:
            assert evicted == min(held - idle_pins, max(0, held + before.in_use - most))
        else:
            assert evicted <= min(before.evictable, max(0, held + before.in_use - most))
        self.lost_some |= evicted > 0

    # --- what must hold ---------------------------------------------------------------------------

    def slots(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @staticmethod
    def content(scope: str, tokens: list[int], position: int) -> tuple[str, tuple[int, ...]]:
        return scope, tuple(tokens[: position + 1])

    def read(self, scope: str, tokens: list[int], length: int, pages: list[int]) -> None:
        assert len(pages) >= self.slots(length)
        for position in range(length):
            found = self.rows[pages[position // self.page_size]][position % self.page_size]
            assert found == self.content(scope, tokens, position), (position, found)

    def tree(self) -> list[tuple]:
        """The whole tree as comparable values."""
        return sorted(
            (scope, prefix, pages, node.locks, node.leases, node.state and node.state.slot)
            for scope, prefix, pages, node in self.walk_tree()
        )

    def pinned(self) -> list[tuple]:
        """The pinned part of the tree as comparable values."""
        return sorted((scope, prefix, pages) for scope, prefix, pages, node in self.walk_tree() if node.pins)

    def idle_pins(self) -> int:
        """Pages with a pin that no request uses."""
        return sum(node.owned for *_, node in self.walk_tree() if node.pins and not node.locks)

    def walk_tree(self):
        """(scope, prefix, table, node) of every node."""
        stack = [(scope, (), (), root) for scope, root in self.cache.tree.roots.items()]
        while stack:
            scope, prefix, pages, node = stack.pop()
            yield scope, prefix, pages, node
            for child in node.children.values():
                head = child.start // self.page_size
                tokens = tuple(np.frombuffer(child.tokens, np.int32).tolist())
                stack.append((scope, prefix + tokens, pages[:head] + child.pages, child))

    def verify(self) -> None:
        self.cache.check()
        counts = self.cache.counts()
        assert counts.free + counts.evictable + counts.leased + counts.in_use == counts.total
        limit = max(counts.touched, min(counts.total, self.cache.limit))
        assert self.cache.available() == limit - counts.in_use - self.idle_pins()
        for request in self.requests:
            if request.copy is None:
                self.read(request.scope, request.tokens, request.computed, request.pages)
            else:
                full = request.lock.length // self.page_size
                table = [*request.pages[:full], request.copy[0]]
                self.read(request.scope, request.tokens, request.lock.length, table)
        ends: set[int] = set()
        for scope, prefix, pages, node in self.walk_tree():
            ends.update(DIGESTS.page_ends(np.array(prefix, np.int32), scope, self.page_size))
            assert prefix == () or (scope, prefix) in self.committed
            self.read(scope, list(prefix), len(prefix), list(pages))
            if node.state is not None:
                assert self.states[node.state.slot] == (scope, prefix)
        pages, removed = self.log.take()
        for digest in removed:
            del self.told[digest]
        for page in pages:
            assert page.digest not in self.told, "is told once"
            self.tell(self.told, page)
        whole: dict[int, tuple[str, tuple[int, ...]]] = {}
        for page in self.log.whole(self.cache.tree.nodes()):
            self.tell(whole, page)
        assert self.told == whole
        assert set(whole) == ends
        for digest, (scope, tokens) in whole.items():
            assert DIGESTS.page_ends(np.array(tokens, np.int32), scope, self.page_size)[-1] == digest
        slots = self.cache.state_counts()
        assert slots.free + slots.held + slots.in_use == slots.total == len(self.states)
        for request in self.requests:
            if request.slot is not None and request.computed:
                content = self.content(request.scope, request.tokens, request.computed - 1)
                assert self.states[request.slot] == content

    def tell(self, told: dict[int, tuple[str, tuple[int, ...]]], page: Page) -> None:
        """Put `page` behind the pages that were told before it."""
        scope, before = (page.scope, ()) if page.before is None else told[page.before]
        assert scope == page.scope
        tokens = tuple(np.frombuffer(page.tokens, np.int32).tolist())
        assert len(tokens) == self.page_size
        told[page.digest] = (scope, before + tokens)

    def longest_committed(self, scope: str, tokens: list[int]) -> int:
        length = 0
        while length < len(tokens) and (scope, tuple(tokens[: length + 1])) in self.committed:
            length += 1
        return length

"""The prefix cache as the scheduler sees it: which page holds which tokens, and who owns the page.

A page is in one of three places: free in the pool, private to a running request, or in the tree. A free page
is untouched if it takes no memory: nobody has had it yet, or `trim` has returned it. With page size P, slot i
of a sequence holds its tokens ``[i * P, (i + 1) * P)``; a request's page table has one page for each slot.

Example with P = 4. The tree has tokens 0 to 9 of request A in pages 7, 2, 5; page 5 is half full. Prompt B
shares the first 9 of them:

    match(B)      length 9
    acquire       cuts A's node before token 9; lock.length 9, lock.pages [7, 2, 5], lock.private_from 2
    allocate(1)   page 3. The request copies row 0 of page 5 (token 8) into it; its page table is [7, 2, 3]
    prefill       writes token 9 and those after it, from row 1 of page 3 on; A goes on reading page 5
    commit        adds a node for tokens [9, …) with page 3: slot 2 now has one page on each branch

Who owns the pages of a request with a lock on ``[0, lock.length)``:

    slots ``[0, lock.private_from)``   the tree; the lock keeps them there; the request never frees them
    slots ``[lock.private_from, …)``   the request, until `commit` or `free`

`private_from` is ``lock.length / P``. If that is no whole number, the lock ends inside a slot. The number is
rounded down while the request owns the page of that slot, and up once the request has put the page into the
tree.

Who may write which rows:

- A request writes the rows of tokens ``[lock.length, …)`` in its own table, and no others.
- After `acquire` with a length that is no multiple of P, the request may not write to the last page of
  `lock.pages`. It allocates a page for that slot and copies the first ``lock.length % P`` rows into it
  (copy-on-write). The source page does not change while the lock is kept.
- After `commit` the request may write to the page in which the lock ends, from row ``lock.length % P`` on.
  The page is either private, or this request put it into the tree. In the second case no node of the tree
  covers a row from ``lock.length % P`` on.

So every row of a page has one writer, no row is written after others can read it, and the rows that
a request's table covers hold the KV of that request's own tokens.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable

from ramify.radix.evicted import EvictionRecord, Lost
from ramify.radix.eviction import Usage
from ramify.radix.integrity import verify
from ramify.radix.key import TOKEN_BYTES, Tokens, encode
from ramify.radix.lease import Ended, Lease, LeaseBook
from ramify.radix.lock import Match, PageCounts, PrefixLock, StateCounts
from ramify.radix.node import Node
from ramify.radix.states import States
from ramify.radix.tree import RadixTree
from ramify.radix.tree_log import TreeLog
from ramify.radix.views import HeldPrefix, NodeView, Prefix, covered, prefix, prefixes, snapshot

FLUSH, TRIM = "flush", "trim"
"""The `taker` on record for pages that `PrefixCache.flush` or `PrefixCache.trim` evicted."""


class PrefixCache:
    """Maps token sequences to KV pages; sharing is exact to the token at every page size.

    Not thread-safe. `clock` returns monotonic seconds, by which leases expire. A method that raises has
    changed nothing. `num_states` is the number of state slots, 0 for a model without states
    (`ramify.radix.states`). `log` records the pages that enter and leave the tree. The parts of the cache
    (`tree`, `usage`, `states`, `record`, `log`) are public for reading only.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        num_states: int = 0,
        log: TreeLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.tree = RadixTree(page_size)
        self._clock = clock
        self._leases = LeaseBook(clock)
        self.usage = Usage(self._leases.order, states=num_states > 0)
        self.states = States(num_states, self.tree, self._leases, self.usage.offer)
        self.record = EvictionRecord()
        self.log = log
        self.limit = num_pages
        """The most touched pages. `allocate` evicts rather than touch more; `trim` makes a lower limit
        true."""
        self._free: list[int] = []
        self._untouched = list(range(num_pages - 1, -1, -1))
        self._private: set[int] = set()
        self._locks: set[PrefixLock] = set()
        self._evicted = 0

    # --- matching and locking ---------------------------------------------------------------------

    def match(self, tokens: Tokens, scope: str = "", limit: int | None = None) -> Match:
        """The longest prefix of `tokens` (n,), at most `limit` tokens, that is in the tree. Changes nothing.

        In a cache with states, the longest such prefix at whose end a node holds a state. Costs O(n + nodes
        on the path); an int32 array is the fast case.
        """
        return self._find(encode(tokens[:limit]), scope)

    def following(self, tokens: Tokens, scope: str, count: int) -> list[int]:
        """At most `count` tokens that follow `tokens` (n,) in the tree; empty unless all n are in the tree.

        At a fork of the tree, follows the most recently used branch. Changes nothing; costs O(n).
        """
        key, root = encode(tokens), self.tree.roots.get(scope)
        if root is None:
            return []
        node, matched_bytes = self.tree.walk(root, key)
        return self.tree.following(node, len(tokens), count) if matched_bytes == len(key) else []

    def acquire(self, match: Match) -> PrefixLock:
        """Lock the prefix that `match` found, so that it is not evicted until `release`.

        If the tree has changed since the match, the tokens are matched again: the locked prefix may be longer
        or shorter than `match.length`.
        """
        if match.version != self.tree.version:
            match = self._find(match.key, match.scope)
        node = match.node or self.tree.root(match.scope)
        if node.end > match.length:
            node = self.tree.split(node, match.length)
        self.usage.lock(node, None)
        lock = PrefixLock(match.length, self.tree.path_pages(node), match.length // self.page_size, node)
        self._locks.add(lock)
        return lock

    def lost(self, tokens: Tokens, scope: str, found: int) -> Lost:
        """The tokens that follow the first `found` of `tokens` (n,) and have been evicted, as a `Lost`.

        Only evictions that are still on record count (`ramify.radix.evicted`). Costs O(n).
        """
        return self.record.lost(encode(tokens), scope, found)

    def release(self, lock: PrefixLock) -> None:
        """Unlock the path of `lock`. Raises `ValueError` if `lock` has been released before.

        The path becomes the most recently used one. Its tokens stay in the tree until they are evicted. The
        request's private pages stay private until `free`.
        """
        node = self._checked_lock(lock)
        self._locks.remove(lock)
        lock.node = None
        self.usage.unlock(node)
        self._join_path(node)
        self.tree.prune(node)

    # --- pages ------------------------------------------------------------------------------------

    @property
    def touched(self) -> int:
        """Pages that take memory."""
        return self.num_pages - len(self._untouched)

    def available(self) -> int:
        """Pages that `allocate` can hand out now: free pages within `limit`, evictable and leased pages, but
        no pinned ones."""
        if self.usage.pinned_pages:
            self._tick_leases()
        return len(self._free) + self._growth() + self.usage.evictable_pages + self.usage.leased_pages

    def allocate(self, n: int, taker: str = "") -> list[int] | None:
        """`n` pages, private to the caller; None, with nothing evicted, if fewer are available.

        Touched free pages are taken first, then untouched pages within `limit`. Then leaves are evicted:
        first leaves without a lease, the least recently used before others, then leased leaves, beginning
        with the one that is needed furthest in the future. Pinned leaves are not evicted. The last of these
        leaves loses only as many pages as are still missing, from its end. `taker` is recorded with the
        evicted tokens; `lost` reports it later.
        """
        short = n - len(self._free)
        if short > 0:
            if n > self.available():
                return None
            grown = min(short, self._growth())
            if grown:
                self._free += self._untouched[-grown:]
                del self._untouched[-grown:]
            if short > grown:
                self._tick_leases()
                self._evict(short - grown, taker)
        pages = [self._free.pop() for _ in range(n)]
        self._private.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give private pages back. Raises `ValueError` for a page that is not private or is named twice."""
        returned = list(pages)
        self._claim(returned)
        self._private.difference_update(returned)
        self._free += returned

    def commit(self, lock: PrefixLock, tokens: Tokens, pages: list[int]) -> list[int]:
        """Put the tokens that a request has computed into the tree, and extend `lock` to their end.

        Args:
            lock: The request's lock.
            tokens: (n,) tokens of the request, all computed. ``n >= lock.length``, and the first
                ``lock.length`` are the locked tokens.
            pages: The request's page table, one page for each slot of ``[0, n)``. Slots
                ``[0, lock.private_from)`` are as in `lock.pages`; the others are private.

        Returns the request's new page table, of which `lock` has a copy. The request owns the pages from slot
        ``lock.private_from`` on. A slot that had a private page now has:

        - the tree's page, if the tree has all of the slot's tokens already (another request was faster).
          The request's own page is freed.
        - the same page, now owned by the tree, if the slot holds a token that is new to the tree.
        - the same page, still private, if the slot is partial and all of its tokens are in the tree already.

        Raises `ValueError` if the arguments do not fit together.
        """
        node = self._checked(lock, tokens, pages)
        key, pages, length = encode(tokens[lock.length :]), list(pages), len(tokens)
        node, matched_bytes = self.tree.walk(node, key)
        matched = lock.length + matched_bytes // TOKEN_BYTES
        if node.end > matched:
            node = self.tree.split(node, matched)
        whole = matched // self.page_size
        table = self.tree.path_pages(node, lock.node, pages)[:whole] + pages[whole:]
        duplicates = pages[lock.private_from : whole]

        if matched < length:
            borrows_head = whole < lock.private_from
            node = self.tree.append(node, key[matched_bytes:], tuple(table[whole:]), borrows_head)
            if self.log is not None:
                self.log.added(node)
            self._private.difference_update(node.owned_pages)
            self.usage.add(node)
            private_from = len(table)
        else:
            # If this request put the page of a partial last slot into the tree before, it is not private.
            private_from = max(whole, lock.private_from)
        self.usage.lock(node, lock.node)
        if matched < length:
            self.tree.join(node)
        self._private.difference_update(duplicates)
        self._free += duplicates
        lock.node, lock.length, lock.pages, lock.private_from = node, length, table, private_from
        return list(table)

    # --- states -----------------------------------------------------------------------------------

    def allocate_state(self) -> int | None:
        """A slot for the state of a request. If no slot is free, the least valuable state in the tree is
        evicted.

        None if requests have all slots, or if the cache has no states.
        """
        return self.states.take()

    def free_state(self, slot: int) -> None:
        """Give a request's slot back. Raises `ValueError` for a slot that no request has."""
        self.states.give_back(slot)

    def use_state(self, lock: PrefixLock) -> int | None:
        """The slot of the state at the end of `lock`, or None if the tree holds no state there. The request
        of `lock` begins from that state, which counts as a use of it. The next `allocate_state` may evict
        that state and hand out its slot."""
        node = self._checked_lock(lock)
        return None if node.state is None else self.states.use(node)

    def keep_state(self, lock: PrefixLock, slot: int) -> None:
        """Hand `slot` of a request to the tree. `slot` has the state after the last token of `lock`. If the
        tree has that state already, `slot` is freed. Raises `ValueError` for a slot that no request has."""
        node = self._checked_lock(lock)
        if node.parent is None or node.state is not None:
            self.states.give_back(slot)
        else:
            self.states.hold(node, slot)

    def copy_state(self, lock: PrefixLock, uses: float = 1.0) -> int | None:
        """A slot that the tree holds from now on for the state after the last token of `lock`. The caller
        copies the state to that slot. `uses` is the number of requests that are expected to begin from the
        state.

        None if `lock` is empty, if the tree has that state already, or if no slot is free and no unleased
        state in the tree is worth less.
        """
        node = self._checked_lock(lock)
        if node.parent is None or node.state is not None:
            return None
        slot = self.states.take_for(node, uses)
        if slot is not None:
            self.states.hold(node, slot, uses)
        return slot

    def state_counts(self) -> StateCounts:
        """State slots now: free + held + in_use == total."""
        states = self.states
        free, held, in_use = len(states.free_slots), len(states.holders), len(states.in_use)
        return StateCounts(free, held, in_use, states.total, states.evicted)

    # --- leases -----------------------------------------------------------------------------------

    def lease(
        self,
        lock: PrefixLock,
        owner: str,
        seconds: float,
        needed_in: float = math.inf,
        part: str = "",
        length: int | None = None,
        *,
        pinned: bool = False,
        note: object = None,
    ) -> None:
        """Lease the first `length` tokens of `lock` (None: all) to `owner` until `seconds` from now.

        The lease outlives the lock. The owner is expected to use the tokens in `needed_in` seconds. Leased
        pages are evicted after all others, those needed furthest in the future first (`ramify.radix.lease`).
        When some of the pages are evicted, the lease goes on for the remaining prefix. `part` names some of
        the owner's leases, for `expect` and `end_leases`. With `pinned`, the pages are not evicted as long as
        the lease lasts, unless `unpin` makes it an ordinary one. `note` is kept as `Lease.note`.
        """
        node = self._checked_lock(lock)
        end = lock.length if length is None else length
        if end == 0:
            return
        while node.start >= end:
            assert node.parent is not None
            node = node.parent
        if node.end > end:
            node = self.tree.split(node, end)
        new, pins, covered = self._leases.take(
            node, owner, seconds, needed_in, part, pinned=pinned, note=note
        )
        if new or pins:
            self.usage.lease(node, new, pins)
        else:
            self.usage.offer(node)
        self._unlease(covered)

    def expect(self, owner: str, part: str, needed_in: float) -> None:
        """Expect `owner` to need its leases of `part` in `needed_in` seconds; 0 if `owner` is waiting now."""
        for node in self._leases.expect(owner, part, needed_in):
            self.usage.offer(node)

    def end_leases(self, owner: str, part: str | None = None) -> int:
        """End the leases of `owner`: those of `part`, or all if `part` is None. Returns their number."""
        ended = self._leases.end(owner, part)
        self._unlease(ended)
        return len(ended)

    def leases(self) -> list[Lease]:
        """All leases, by owner. Callers only read them."""
        self._tick_leases()
        return list(self._leases)

    def now(self) -> float:
        """The clock of `Lease.expires` and `Lease.needed`, in seconds."""
        return self._clock()

    def unpin(self) -> Lease | None:
        """Make the pin that expires first an ordinary lease, and return it; None if there is no pin."""
        lease = self._leases.unpin()
        if lease is not None:
            assert lease.node is not None
            self.usage.lease(lease.node, 0, -1)
        return lease

    def pinned_length(self, match: Match) -> int:
        """The number of tokens, from the first on, that `match` has found and that are pinned."""
        node = match.node
        while node is not None and not node.pins:
            node = node.parent
        return 0 if node is None else min(node.end, match.known)

    # --- memory -----------------------------------------------------------------------------------

    def trim(self, most: int, used_before: float = math.inf) -> list[int]:
        """Evict leaves until at most `most` pages are touched. All free pages are untouched from now on: the
        caller returns their memory to the system. Running requests and pins keep theirs.

        Returns the free pages, also those that were untouched before: memory is returned in runs of pages.

        used_before : if given, only unleased leaves are evicted that no request has used since
        `Usage.releases` had this value
        """
        self._tick_leases()
        queue = self.usage.queue
        while (excess := self.touched - len(self._free) - most) > 0 and queue:
            leaf = queue.first()
            if leaf.pins or (used_before < math.inf and (leaf.leases or leaf.last_used > used_before)):
                break
            if leaf.owned:
                self._evict(min(excess, leaf.owned), TRIM)
            else:
                self._drop(queue.pop(), TRIM)
        self._untouched = sorted([*self._untouched, *self._free], reverse=True)
        self._free = []
        return self._untouched.copy()

    # --- the whole cache --------------------------------------------------------------------------

    def flush(self, *, pins: bool = True) -> int:
        """Evict every page that no running request uses, leased or not, and every state in the tree. Without
        `pins`, pinned pages stay.

        Returns the number of pages freed.
        """
        before = len(self._free)
        self.states.drop_all(pins=pins)
        while self.usage.queue:
            leaf = self.usage.queue.pop()
            if leaf.pins and not pins:
                self.usage.offer(leaf)
                break  # the others are pinned too
            self._drop(leaf, FLUSH)
        return len(self._free) - before

    def counts(self) -> PageCounts:
        """Pages by state, now: free + evictable + leased + in_use == total."""
        self._tick_leases()
        return PageCounts(
            free=len(self._free) + len(self._untouched),
            touched=self.touched,
            evictable=self.usage.evictable_pages,
            leased=self.usage.leased_pages + self.usage.pinned_pages,
            in_use=self.usage.locked_pages + len(self._private),
            total=self.num_pages,
            evicted=self._evicted,
            pinned=self.usage.held_pages,
        )

    def snapshot(self, most: int) -> list[NodeView]:
        """A sample of at most `most` nodes, parents before their children; see `ramify.radix.views`."""
        self._tick_leases()
        return snapshot(self.tree, self._leases.owners, most)

    def prefixes(self, most: int) -> list[HeldPrefix]:
        """The prefixes most worth keeping, at most `most` tokens in all; see `ramify.radix.views`. Costs
        O(tree)."""
        self._tick_leases()
        return prefixes(self.tree, self._leases.owners, most)

    def extent(self, leases: Iterable[Lease]) -> tuple[int, int]:
        """(distinct tokens, pages) of the prefixes of `leases` together. Costs O(nodes on their paths)."""
        nodes = covered(lease.node for lease in leases)
        return sum(node.end - node.start for node in nodes), sum(node.owned for node in nodes)

    def prefix(self, lease: Lease, ids: int) -> Prefix:
        """The prefix of `lease`, with its last `ids` tokens."""
        assert lease.node is not None
        return prefix(lease.node, ids)

    def unheld(self, most: int, ids: int) -> list[Prefix]:
        """The longest prefixes without a lease that end in a leaf without a lock, at most `most`, each with
        its last `ids` tokens."""
        leaves = [leaf for leaf in self.usage.queue.leaves() if not leaf.leases]
        longest = heapq.nlargest(most, leaves, key=lambda leaf: leaf.end)
        return [prefix(leaf, ids) for leaf in longest]

    def check(self) -> None:
        """Check every count against a recount from scratch, in O(tree). Raises `ConservationError` naming
        each violation."""
        verify(
            self.tree,
            self.usage,
            self.num_pages,
            self._free + self._untouched,
            self._leases,
            self._private,
            self._locks,
            self.states,
        )

    # --- internals --------------------------------------------------------------------------------

    def _growth(self) -> int:
        """Untouched pages that `limit` allows to touch."""
        return max(0, min(len(self._untouched), self.limit - self.touched))

    def _find(self, key: bytes, scope: str) -> Match:
        root = self.tree.roots.get(scope)
        if root is None:
            return Match(0, 0, key, scope, None, self.tree.version)
        node, matched_bytes = self.tree.walk(root, key)
        length = known = matched_bytes // TOKEN_BYTES
        if self.states.total:
            node = self.states.at_or_above(node, known) or root
            length = node.end
        return Match(length, known, key, scope, node, self.tree.version)

    def _checked_lock(self, lock: PrefixLock) -> Node:
        if lock.node is None:
            raise ValueError("This lock has been released.")
        if lock not in self._locks:
            raise ValueError("This lock belongs to another cache.")
        return lock.node

    def _checked(self, lock: PrefixLock, tokens: Tokens, pages: list[int]) -> Node:
        """The lock's node. Raises `ValueError` unless the arguments of a `commit` fit together."""
        node = self._checked_lock(lock)
        slots = -(-len(tokens) // self.page_size)
        if len(tokens) < lock.length or len(pages) != slots:
            raise ValueError(
                f"{len(tokens)} tokens and {len(pages)} pages committed to a lock of {lock.length} tokens;"
                f" {slots} pages are needed."
            )
        if pages[: lock.private_from] != lock.pages[: lock.private_from]:
            raise ValueError("The table's first pages are not those of the lock.")
        self._claim(pages[lock.private_from :])
        return node

    def _claim(self, pages: list[int]) -> None:
        if len(set(pages)) != len(pages) or not self._private.issuperset(pages):
            wrong = sorted({page for page in pages if page not in self._private or pages.count(page) > 1})
            raise ValueError(f"Pages {wrong} are not private to a request, or are named twice.")

    def _join_path(self, node: Node) -> None:
        while node.parent is not None:
            spare = None
            if len(node.parent.children) == 1:
                spare = self.tree.join(node)
            if spare is None:
                node = node.parent
            elif spare:
                self.usage.drop(node, len(spare))
                self._free += spare

    def _tick_leases(self) -> None:
        ended, late = self._leases.tick()
        self._unlease(ended)
        for node in late:
            self.usage.offer(node)

    def _unlease(self, ended: Iterable[Ended]) -> None:
        for node, pinned in ended:
            self.usage.lease(node, -1, -pinned)

    def _evict(self, count: int, taker: str) -> None:
        """Free `count` pages of leaves without a lock. The caller has checked that there are enough of
        them."""
        self._evicted += count
        while count > 0:
            leaf = self.usage.queue.pop()
            if leaf.owned > count:
                self.usage.drop(leaf, count)
                kept = (leaf.start // self.page_size + len(leaf.pages) - count) * self.page_size
                digest = self.record.note(leaf, kept, taker)
                if self.log is not None:
                    self.log.removing(leaf, kept)
                self.states.drop(leaf)
                self._free += self.tree.trim(leaf, count)
                leaf.digest = digest
                self.usage.offer(leaf)
                return
            count -= leaf.owned
            self._drop(leaf, taker)

    def _drop(self, leaf: Node, taker: str) -> None:
        """Take `leaf`, which has no lock and is no longer queued, out of the tree, and free its pages."""
        self.record.note(leaf, leaf.start, taker)
        if self.log is not None:
            self.log.removing(leaf, leaf.start)
        self.states.drop(leaf)
        ended = self._leases.retreat(leaf)
        self.usage.drop(leaf, leaf.owned)
        self._free += leaf.owned_pages
        parent = self.tree.remove(leaf)
        self._unlease(Ended(parent, pinned) for pinned in ended)
        self.usage.offer(parent)
        self.tree.prune(parent)


class NaiveCache(PrefixCache):
    """A cache without sharing: every match is empty, and every page stays private. The interface and the
    errors are those of `PrefixCache`."""

    def match(self, tokens: Tokens, scope: str = "", limit: int | None = None) -> Match:
        """A match of length 0, always."""
        return super().match(tokens[:0], scope, limit)

    def commit(self, lock: PrefixLock, tokens: Tokens, pages: list[int]) -> list[int]:
        """Put nothing into the tree: the lock stays empty, and `pages` are returned unchanged."""
        self._checked(lock, tokens, pages)
        return list(pages)

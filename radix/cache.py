"""The prefix cache as the scheduler sees it: which pages hold which tokens, and whose they are.

A page is in one of three places: free in the pool, private to a running request, or in the tree. With
page size P, slot i of a sequence holds its tokens ``[i * P, (i + 1) * P)``; a request's page table has
one page for each slot.

Who owns the pages of a request that holds ``[0, hold.length)``:

    slots ``[0, hold.private_from)``   the tree; the hold keeps them there; never freed by the request
    slots ``[hold.private_from, …)``   the request, until `commit` or `free`

`private_from` is ``hold.length / P``, rounded down where the slot in which the hold ends is a page of
the request's own, and up where it is one that the request has put into the tree.

Who may write which rows:

- A request writes the rows of tokens ``[hold.length, …)`` in its own table, and no others.
- After `acquire` with a length that is no multiple of P, the last page of `hold.pages` is not the
  request's to write: before it writes, it takes a fresh page for that slot and copies the rows below
  ``hold.length % P`` into it. The source stays as it is for as long as the hold is kept.
- After `commit` the page in which the hold ends may be written on at once. It is either private or was
  put into the tree by this request, and the tree says that nobody may read its rows after ``hold.length``.

So every row of a page has one writer, no row is written after it can be read by others, and what
a reader finds in the rows that its own table covers is the KV of its own tokens.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ramify.radix.evicted import EvictionRecord, Lost
from ramify.radix.eviction import EvictionPolicy, LeastRecentlyUsed
from ramify.radix.integrity import verify
from ramify.radix.key import TOKEN_BYTES, Tokens, encode
from ramify.radix.lease import LeaseBook
from ramify.radix.node import Node
from ramify.radix.pages import PagePool
from ramify.radix.snapshot import NodeView, snapshot
from ramify.radix.stats import PageCounts
from ramify.radix.tree import RadixTree
from ramify.radix.usage import Usage

FLUSH = "flush"
"""Who took the pages that `PrefixCache.flush` dropped."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Match:
    """What the tree had when it was asked. It locks nothing: `acquire` looks again if need be."""

    length: int
    """Tokens found, from the first on."""
    key: bytes
    scope: str
    node: Node | None
    """The node in which the match ends; None where the scope has no tree."""
    version: int


@dataclasses.dataclass(slots=True, eq=False)
class PrefixLock:
    """A locked path in the tree. Read its fields; only the cache changes them."""

    length: int
    """Tokens ``[0, length)`` are in the tree and stay there."""
    pages: list[int]
    """The page of every slot of ``[0, length)`` in this request's table; the last may be partial."""
    private_from: int
    """First slot whose page the request owns itself."""
    node: Node | None
    """The node at whose end the hold ends; None once released."""


class Committed(NamedTuple):
    """A request's page table after `commit`. Pages of slots ``[private_from, …)`` are its own."""

    pages: list[int]
    private_from: int


class PrefixCache:
    """Maps token sequences to KV pages; sharing is exact to the token at every page size.

    Not thread-safe. `clock` returns seconds and never goes back; leases expire by it. A method that
    raises has changed nothing.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.page_size = page_size
        self._tree = RadixTree(page_size)
        self._pool = PagePool(num_pages)
        self._leases = LeaseBook(clock)
        self._usage = Usage(policy or LeastRecentlyUsed(), self._leases.needed)
        self._record = EvictionRecord()
        self._private: set[int] = set()
        self._locks: set[PrefixLock] = set()
        self._evicted = 0

    # --- finding and holding ----------------------------------------------------------------------

    def match(self, tokens: Tokens, scope: str = "", limit: int | None = None) -> Match:
        """How much of `tokens` (n,), at most the first `limit`, is in the tree. Changes nothing.

        Costs O(n + nodes on the path), whatever else is in the tree; fastest with an int32 array.
        """
        if limit is not None:
            if limit < 0:
                raise ValueError(f"limit is {limit}; it must be 0 or more.")
            tokens = tokens[:limit]
        return self._find(encode(tokens), scope)

    def following(self, tokens: Tokens, scope: str, count: int) -> list[int]:
        """At most `count` tokens that came after `tokens` (n,), where all of these are in the tree.

        Of several ways on, the one used last. Changes nothing; costs O(n).
        """
        match = self._find(encode(tokens), scope)
        if match.node is None or match.length < len(tokens):
            return []
        return self._tree.following(match.node, match.length, count)

    def acquire(self, match: Match) -> PrefixLock:
        """Lock what `match` found, so that it is not evicted until `release`.

        If the tree has changed since, its tokens are matched again, and the hold may be longer or
        shorter than the match.
        """
        if match.version != self._tree.version:
            match = self._find(match.key, match.scope)
        node = match.node or self._tree.root(match.scope)
        if node.end > match.length:
            node = self._tree.split(node, match.length)
        self._usage.lock(node, None)
        lock = PrefixLock(match.length, self._tree.path_pages(node), match.length // self.page_size, node)
        self._locks.add(lock)
        return lock

    def lost(self, tokens: Tokens, scope: str, found: int) -> Lost:
        """How many of `tokens` (n,) behind the first `found` are missing because they were evicted.

        As far back as evictions are remembered (`ramify.radix.evicted`). Costs O(n).
        """
        return self._record.lost(encode(tokens), scope, found)

    def release(self, lock: PrefixLock) -> None:
        """Unlock the hold's path, which is now the most recently used. Raises if released before.

        The tokens stay in the tree until they are evicted. Private pages are not touched: see `free`.
        """
        node = self._checked_lock(lock)
        self._locks.remove(lock)
        lock.node = None
        self._usage.unlock(node)
        self._join_path(node)
        self._tree.prune(node)

    # --- pages ------------------------------------------------------------------------------------

    def available(self) -> int:
        """Pages that `allocate` could hand out now: free, evictable and leased ones."""
        return len(self._pool) + self._usage.evictable_pages + self._usage.leased_pages

    def allocate(self, n: int, taker: str = "") -> list[int] | None:
        """`n` pages, private to the caller, or None (and nothing is evicted) where there are too few.

        Takes free pages, then evicts what nobody needs, then what is leased, and of that what is needed
        last; leaves first, by the policy. Of the last leaf only as many pages go as are needed, from its
        end. `lost` tells of `taker` when what was evicted is asked for.
        """
        if n < 0:
            raise ValueError(f"{n} pages asked for; it must be 0 or more.")
        short = n - len(self._pool)
        if short > 0:
            if n > self.available():
                return None
            self._expire_leases()
            for node in self._leases.reconsider():
                self._usage.offer(node)
            self._evict(short, taker)
        pages = self._pool.allocate(n)
        self._private.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give private pages back. Raises `ValueError` for a page that is not private, or is named twice."""
        returned = list(pages)
        self._claim(returned)
        self._private.difference_update(returned)
        self._pool.free(returned)

    def commit(self, lock: PrefixLock, tokens: Tokens, pages: list[int]) -> Committed:
        """Put what the request has computed into the tree, and move `hold` to its end.

        Args:
            hold: Of a request that has KV for all of `tokens`.
            tokens: (n,) with ``n >= hold.length``; the first ``hold.length`` are those of the hold.
            pages: The request's page table, one page for each slot of ``[0, n)``. Slots
                ``[0, hold.private_from)`` are as in `hold.pages`, the others private.

        Returns the table to go on with. Of the slots that were private,

        - one that the tree has by now in full (another request was faster) is the tree's page; the
          duplicate is freed;
        - one that holds any token new to the tree is the same page, which the tree owns now;
        - one that is partial and holds nothing new stays the request's own, to write on.

        Raises `ValueError` where the arguments do not fit together.
        """
        node = self._checked(lock, tokens, pages)
        key, pages, length = encode(tokens[lock.length :]), list(pages), len(tokens)
        node, matched_bytes = self._tree.walk(node, key)
        matched = lock.length + matched_bytes // TOKEN_BYTES
        if node.end > matched:
            node = self._tree.split(node, matched)
        whole = matched // self.page_size
        table = self._tree_pages(node, lock.node, pages[:whole]) + pages[whole:]
        duplicates = pages[lock.private_from : whole]

        if matched < length:
            borrows_head = whole < lock.private_from
            node = self._tree.append(node, key[matched_bytes:], tuple(table[whole:]), borrows_head)
            self._private.difference_update(node.owned_pages)
            self._usage.add(node)
            private_from = len(table)
        else:
            # A page of a partial last slot that this request put into the tree before is not private.
            private_from = max(whole, lock.private_from)
        self._usage.lock(node, lock.node)
        if matched < length:
            self._tree.join(node)
        self._private.difference_update(duplicates)
        self._pool.free(duplicates)
        lock.node, lock.length, lock.pages, lock.private_from = node, length, table, private_from
        return Committed(list(table), private_from)

    # --- leases -----------------------------------------------------------------------------------

    def lease(
        self,
        lock: PrefixLock,
        owner: str,
        seconds: float,
        needed_in: float = math.inf,
        part: str = "",
        length: int | None = None,
    ) -> None:
        """Lease the hold's first `length` tokens (None: all) to `owner` for so many seconds from now.

        It stands whether or not the hold does. Leased pages are evicted after all others, those first
        that are needed last: the owner is expected to come back in `needed_in` seconds, and when it does
        not, later. A lease that gives pages up keeps the rest. `part` tells an owner's leases apart, so
        that `expect` and `end_leases` can name one.
        """
        node = self._checked_lock(lock)
        if not seconds > 0 or math.isnan(seconds):
            raise ValueError(f"A lease of {seconds} seconds; it must be above 0.")
        if length is not None and not 0 <= length <= lock.length:
            raise ValueError(f"A lease of {length} tokens on a hold of {lock.length}.")
        end = lock.length if length is None else length
        if math.isnan(needed_in) or needed_in < 0:
            raise ValueError(f"A lease that is needed in {needed_in} seconds; it must be 0 or more.")
        if end == 0:
            return
        while node.start >= end:
            assert node.parent is not None
            node = node.parent
        if node.end > end:
            node = self._tree.split(node, end)
        is_new, covered = self._leases.take(node, owner, seconds, needed_in, part)
        if is_new:
            self._usage.lease(node)
        else:
            self._usage.offer(node)
        self._unlease(covered)

    def expect(self, owner: str, part: str, needed_in: float) -> None:
        """That part of the owner's leases is needed in so many seconds from now; 0: it is waited for."""
        for node in self._leases.expect(owner, part, needed_in):
            self._usage.offer(node)

    def end_leases(self, owner: str, part: str | None = None) -> int:
        """End all leases of `owner`, or those of one part. Returns how many there were."""
        ended = self._leases.end(owner, part)
        self._unlease(ended)
        return len(ended)

    # --- the whole --------------------------------------------------------------------------------

    def flush(self) -> int:
        """Drop all that no running request uses, leased or not. Returns the number of pages freed."""
        before = len(self._pool)
        while self._usage.queue:
            self._drop(self._usage.queue.pop(), FLUSH)
        return len(self._pool) - before

    def counts(self) -> PageCounts:
        """Where the pages are now: free + evictable + leased + in_use == total."""
        self._expire_leases()
        return PageCounts(
            free=len(self._pool),
            evictable=self._usage.evictable_pages,
            leased=self._usage.leased_pages,
            in_use=self._usage.locked_pages + len(self._private),
            total=self._pool.num_pages,
            evicted=self._evicted,
        )

    def snapshot(self, most: int) -> list[NodeView]:
        """At most `most` nodes of the tree as they are now, parents before their children."""
        self._expire_leases()
        return snapshot(self._tree, self._leases.owners, most)

    def check(self) -> None:
        """Recount everything from scratch, in O(tree). Raises `ConservationError` saying what is wrong."""
        verify(self._tree, self._usage, self._pool, self._leases, self._private, self._locks)

    # --- inside -----------------------------------------------------------------------------------

    def _find(self, key: bytes, scope: str) -> Match:
        root = self._tree.roots.get(scope)
        if root is None:
            return Match(0, key, scope, None, self._tree.version)
        node, matched_bytes = self._tree.walk(root, key)
        return Match(matched_bytes // TOKEN_BYTES, key, scope, node, self._tree.version)

    def _checked_lock(self, lock: PrefixLock) -> Node:
        if lock.node is None:
            raise ValueError("This hold has been released.")
        if lock not in self._locks:
            raise ValueError("This hold belongs to another cache.")
        return lock.node

    def _checked(self, lock: PrefixLock, tokens: Tokens, pages: list[int]) -> Node:
        """The hold's node. Raises unless the arguments of a `commit` fit together."""
        node = self._checked_lock(lock)
        slots = -(-len(tokens) // self.page_size)
        if len(tokens) < lock.length or len(pages) != slots:
            raise ValueError(
                f"{len(tokens)} tokens and {len(pages)} pages committed to a hold of {lock.length} tokens;"
                f" {slots} pages are needed."
            )
        if pages[: lock.private_from] != lock.pages[: lock.private_from]:
            raise ValueError("The table's first pages are not those of the hold.")
        self._claim(pages[lock.private_from :])
        return node

    def _claim(self, pages: list[int]) -> None:
        """Raise unless `pages` are private and all different."""
        if len(set(pages)) != len(pages) or not self._private.issuperset(pages):
            wrong = sorted({page for page in pages if page not in self._private or pages.count(page) > 1})
            raise ValueError(f"Pages {wrong} are not private to a request, or are named twice.")

    def _tree_pages(self, node: Node, above: Node | None, pages: list[int]) -> list[int]:
        """`pages`, a table's first, with those of the path from below `above` to `node` in their place."""
        path = []
        step: Node | None = node
        while step is not above:
            assert step is not None
            path.append(step)
            step = step.parent
        count = len(pages)
        for step in reversed(path):
            head = step.start // self.page_size
            pages[head : head + len(step.pages)] = step.pages
        return pages[:count]

    def _join_path(self, node: Node) -> None:
        """Join what can be joined on the path from the root to `node`."""
        while node.parent is not None:
            spare = None
            if len(node.parent.children) == 1:
                spare = self._tree.join(node)
            if spare is None:
                node = node.parent
            elif spare:
                self._usage.drop(node, len(spare))
                self._pool.free(spare)

    def _expire_leases(self) -> None:
        self._unlease(self._leases.expire())

    def _unlease(self, ended: list[Node]) -> None:
        for node in ended:
            self._usage.unlease(node)

    def _evict(self, count: int, taker: str) -> None:
        """Free `count` pages of what nobody uses; there are so many."""
        self._evicted += count
        while count > 0:
            leaf = self._usage.queue.pop()
            if leaf.owned > count:
                self._usage.drop(leaf, count)
                kept = (leaf.start // self.page_size + len(leaf.pages) - count) * self.page_size
                digest = self._record.note(leaf, kept, taker)
                self._pool.free(self._tree.trim(leaf, count))
                leaf.digest = digest
                self._usage.offer(leaf)
                return
            count -= leaf.owned
            self._drop(leaf, taker)

    def _drop(self, leaf: Node, taker: str) -> None:
        """Take a leaf that nobody uses, and that is not queued any more, out of the tree."""
        self._record.note(leaf, leaf.start, taker)
        ended = self._leases.retreat(leaf)
        self._usage.drop(leaf, leaf.owned)
        self._pool.free(leaf.owned_pages)
        parent = self._tree.remove(leaf)
        self._unlease([parent] * ended)
        self._usage.offer(parent)
        self._tree.prune(parent)

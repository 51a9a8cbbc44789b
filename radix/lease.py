"""Leases on prefixes that programs will use again.

Leased prefixes are evicted after all others; of leased prefixes, the one needed latest goes first.

Example, with the clock at 100 s:

    A leases prefix x for 60 s, needed in 5 s       expected reuse at 105 s
    B leases prefix y for 60 s, needed in 20 s      expected reuse at 120 s
    at 101 s pages are short                        unleased leaves go first, then y (needed last), then x
    at 112 s pages are short again, A is overdue    x is expected at 112 + IMPATIENCE * 12 = 118 s
    at 160 s                                        both leases expire; x and y are evictable like any leaf

When a leased leaf is evicted, its lease moves to the parent node and still covers the rest of the prefix.

A pin is a lease whose pages are not evicted while it lasts. It becomes an ordinary lease (`LeaseBook.unpin`)
if a request that runs alone has no other pages.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple, TypeVar

from ramify.radix.node import Node

IMPATIENCE = 0.5
"""Factor for leases past their expected time of reuse: an owner that has been away for t seconds is expected
back after another IMPATIENCE * t seconds."""

K = TypeVar("K")
L = TypeVar("L")


class Ended(NamedTuple):
    """A lease that has ended."""

    node: Node
    pinned: bool


@dataclasses.dataclass(slots=True, eq=False)
class Lease:
    """A lease: `owner` wants the path to `node` until the clock reads `expires` (seconds)."""

    owner: str
    part: str
    """The part of the owner, such as a branch of a program, that the lease is for. A lease on more tokens
    ends the leases of the same part that it covers."""
    node: Node | None
    """None once the lease has ended."""
    expires: float
    since: float
    """The clock when `needed` was last set by the owner."""
    needed: float
    """The clock when the owner is expected to come back; infinite if unknown."""
    pinned: bool = False
    note: object = None
    """A value of the caller, to tell the lease from others."""
    queued: float = math.inf
    """The time of the lease's live entry in `LeaseBook._queue`; infinite if there is no such entry."""


class LeaseBook:
    """All leases, by owner, by node, and by the next time at which the lease expires or its owner is late.

    There is at most one lease for each owner, part and node. A lease ends the leases of the same owner and
    part on shorter prefixes of its tokens, unless these expire later or only they are pins. The book does not
    change the counts on nodes: its methods return the leases that have ended to the caller.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_owner: dict[str, dict[str, dict[Node, Lease]]] = {}
        self._by_node: dict[Node, dict[tuple[str, str], Lease]] = {}
        self._queue: list[tuple[float, int, Lease]] = []
        """A heap by time. Each live lease has one live entry, at the time of the lease's next event or
        earlier. Other entries are stale."""
        self._numbers = itertools.count()
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def at(self, node: Node) -> int:
        """Number of leases that end at `node`."""
        return len(self._by_node.get(node, ()))

    def pins_at(self, node: Node) -> int:
        """Number of pins that end at `node`."""
        return sum(lease.pinned for lease in self._by_node.get(node, {}).values())

    def __iter__(self) -> Iterator[Lease]:
        """Iterate over the leases, by owner."""
        for parts in self._by_owner.values():
            for owned in parts.values():
                yield from owned.values()

    def ends(self) -> Iterator[tuple[Node, float]]:
        """Yield (node, `needed`) for each lease, (node, -inf) for each pin."""
        for node, leases in self._by_node.items():
            for lease in leases.values():
                yield node, -math.inf if lease.pinned else lease.needed

    def owners(self, node: Node) -> Iterable[str]:
        """The owners of the leases that end at `node`, each once."""
        return dict.fromkeys(owner for owner, _ in self._by_node.get(node, ()))

    def order(self, node: Node) -> tuple[int, float]:
        """Sort key of the leaf `node` for eviction: (0 without a lease that ends here, 1 with one, 2 with a
        pin; minus the earliest `needed` of these leases)."""
        leases = self._by_node.get(node)
        if not leases:
            return 0, 0.0
        pinned = any(lease.pinned for lease in leases.values())
        return 1 + pinned, -min(lease.needed for lease in leases.values())

    def take(
        self,
        node: Node,
        owner: str,
        seconds: float,
        needed_in: float = math.inf,
        part: str = "",
        *,
        pinned: bool = False,
        note: object = None,
    ) -> tuple[int, int, list[Ended]]:
        """Lease the path to `node`. An existing lease of the same owner, part and node is never shortened,
        and stays a pin if it is one.

        Returns (number of new leases, number of new pins, the leases of the same part above `node` that have
        ended because the lease on `node` covers them).
        """
        now = self._clock()
        expires = now + seconds
        owned = self._by_owner.get(owner, {}).get(part, {})
        lease = owned.get(node)
        new_pins = int(pinned and not (lease and lease.pinned))
        if lease is not None:
            lease.pinned = pinned = pinned or lease.pinned
            lease.note = note
            lease.expires = expires = max(lease.expires, expires)
            self._estimate(lease, now, now + needed_in)
        else:
            self._enter(Lease(owner, part, node, expires, now, now + needed_in, pinned, note))
        covered = []
        above = node.parent
        while above is not None and owned:
            old = owned.get(above)
            if old is not None and old.expires <= expires and old.pinned <= pinned:
                covered.append(self._end(old))
            above = above.parent
        return int(lease is None), new_pins, covered

    def unpin(self) -> Lease | None:
        """Make the pin that expires first an ordinary lease, and return it; None if there is no pin."""
        pins = [lease for lease in self if lease.pinned]
        if not pins:
            return None
        first = min(pins, key=lambda lease: lease.expires)
        first.pinned = False
        return first

    def expect(self, owner: str, part: str, needed_in: float) -> list[Node]:
        """Expect the leases of `owner` and `part` to be needed in `needed_in` seconds. Returns their
        nodes."""
        now = self._clock()
        owned = self._by_owner.get(owner, {}).get(part, {})
        for lease in owned.values():
            self._estimate(lease, now, now + needed_in)
        return list(owned)

    def tick(self) -> tuple[list[Ended], list[Node]]:
        """End the leases that have expired, and postpone `needed` of the leases whose owner is late (see
        `IMPATIENCE`). Returns the ended leases and the nodes of the postponed ones.

        Leases that are needed at once (`needed_in` 0) are not postponed: their owner is waiting for pages.
        """
        ended: list[Ended] = []
        late: list[Node] = []
        going_on: list[Lease] = []
        now = self._clock()
        while self._queue and self._queue[0][0] <= now:
            time, _, lease = heappop(self._queue)
            if lease.node is None or lease.queued != time:
                continue
            lease.queued = math.inf
            if lease.expires <= now:
                ended.append(self._end(lease))
                continue
            if lease.since < lease.needed <= now:
                late.append(lease.node)
                lease.needed = now + IMPATIENCE * (now - lease.since)
            going_on.append(lease)
        for lease in going_on:
            self._put(lease)
        return ended, late

    def end(self, owner: str, part: str | None = None) -> list[Ended]:
        """End the leases of `owner`: those of `part`, or all if `part` is None. Returns them."""
        parts = self._by_owner.get(owner, {})
        found = parts.values() if part is None else [parts.get(part, {})]
        return [self._end(lease) for lease in [lease for owned in found for lease in owned.values()]]

    def retreat(self, leaf: Node) -> list[bool]:
        """Move the leases of `leaf`, which is about to leave the tree, to its parent.

        A lease ends instead if the parent is a root, or if the same owner and part have a lease on the parent
        already. The lease on the parent then takes the later `expires` and the earlier `needed` of the two,
        and is a pin if one of them is. Returns for each lease that ended whether there is one pin less now.
        """
        parent = leaf.parent
        assert parent is not None
        ended: list[bool] = []
        for lease in list(self._by_node.get(leaf, {}).values()):
            self._end(lease)
            there = self._by_owner.get(lease.owner, {}).get(lease.part, {}).get(parent)
            if there is not None:
                there.expires = max(there.expires, lease.expires)
                if lease.needed < there.needed:
                    self._estimate(there, lease.since, lease.needed)
                ended.append(lease.pinned and there.pinned)
                there.pinned = there.pinned or lease.pinned
            elif parent.parent is None:
                ended.append(lease.pinned)
            else:
                self._enter(dataclasses.replace(lease, node=parent, queued=math.inf))
        return ended

    def _enter(self, lease: Lease) -> None:
        assert lease.node is not None
        self._by_owner.setdefault(lease.owner, {}).setdefault(lease.part, {})[lease.node] = lease
        self._by_node.setdefault(lease.node, {})[lease.owner, lease.part] = lease
        self._live += 1
        self._put(lease)

    def _estimate(self, lease: Lease, since: float, needed: float) -> None:
        lease.since, lease.needed = since, needed
        if since < needed < lease.queued:
            self._put(lease)

    def _put(self, lease: Lease) -> None:
        lease.queued = min(lease.expires, lease.needed) if lease.since < lease.needed else lease.expires
        heappush(self._queue, (lease.queued, next(self._numbers), lease))
        if len(self._queue) > 2 * self._live + 64:
            self._queue = [
                (time, number, lease)
                for time, number, lease in self._queue
                if lease.node is not None and lease.queued == time
            ]
            heapify(self._queue)

    def _end(self, lease: Lease) -> Ended:
        node = lease.node
        assert node is not None
        lease.node = None
        self._live -= 1
        parts = self._by_owner[lease.owner]
        _remove(parts, lease.part, node)
        if not parts:
            del self._by_owner[lease.owner]
        _remove(self._by_node, node, (lease.owner, lease.part))
        return Ended(node, lease.pinned)


def _remove(index: dict[K, dict[L, Lease]], key: K, subkey: L) -> None:
    del index[key][subkey]
    if not index[key]:
        del index[key]

"""Prefix index: digests of the page ends that each replica holds, from the changes of its prefix tree.

Changes are hints. If a change is missing or late, tokens are computed again or a request waits longer; the
output stays the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ramify.engine_messages import TreeChange


@dataclasses.dataclass(slots=True)
class _Tree:
    """The known part of a replica's prefix tree. Example: change 3 is lost; a whole tree is sent later.

    number     1     2     4      5     whole 5   6
    follows    yes   yes   no     yes   yes       yes
    complete   yes   yes   no     no    yes       yes
    """

    bit: int
    """The replica's bit in the masks of `PrefixIndex`."""
    epoch: int = 0
    number: int = 0
    """Number of the last change."""
    complete: bool = True
    """Whether no change is missing since the last whole tree."""
    digests: set[int] = dataclasses.field(default_factory=set)

    def follows(self, change: TreeChange) -> bool:
        """Record a new change. Returns False if changes between the last one and this one are missing."""
        last = self.number if change.epoch == self.epoch else 0
        follows = change.whole or change.number == last + 1
        self.epoch, self.number = change.epoch, change.number
        self.complete = change.whole or (self.complete and follows)
        return follows


Masks = dict[int, int]
"""Digest → the bits of the replicas that have it. A digest that no replica has is left out."""


class PrefixIndex:
    """The page digests that each replica holds, and those promised for it: pages that it has yet to compute.

    Each digest has one bit mask over all replicas, so a lookup costs the same with 64 replicas as with two.
    """

    def __init__(self) -> None:
        self._trees: dict[str, _Tree] = {}
        self._names: dict[int, str] = {}
        """Bit → replica."""
        self._held: Masks = {}
        self._promised: Masks = {}

    def join(self, replica: str) -> None:
        """Add a replica, whose tree is empty."""
        bit = 1
        while bit in self._names:
            bit <<= 1
        self._names[bit] = replica
        self._trees[replica] = _Tree(bit)

    def leave(self, replica: str) -> None:
        tree = self._trees.pop(replica)
        self._clear(tree, tree.digests)
        _clear_bits(self._promised, list(self._promised), tree.bit)
        del self._names[tree.bit]

    def apply(self, replica: str, change: TreeChange) -> bool:
        """Apply a change of the replica's tree. Returns False if earlier changes are missing: then the caller
        has to ask the replica for a whole tree."""
        tree = self._trees[replica]
        if change.whole:
            self._clear(tree, tree.digests.difference(change.added))
        elif change.epoch != tree.epoch:
            self._clear(tree, set(tree.digests))
        elif change.number <= tree.number:
            return True  # the whole tree, which was asked for, contained it
        self._clear(tree, change.removed)
        self._set(tree, change.added)
        return tree.follows(change)

    def complete(self, replica: str) -> bool:
        """Whether no change of the replica's tree is missing since its last whole tree."""
        return self._trees[replica].complete

    def promise(self, replica: str, digests: Iterable[int]) -> None:
        _set_bits(self._promised, digests, self._trees[replica].bit)

    def break_promise(self, replica: str, digests: Iterable[int]) -> None:
        _clear_bits(self._promised, digests, self._trees[replica].bit)

    def pages(self, digests: Sequence[int], *, promised: bool = False) -> dict[str, int]:
        """Replica → number of consecutive whole pages of the prompt, from its start, that the replica holds.
        With `promised`, pages that the replica has yet to compute count too. Replicas with 0 are left out.

        Found by bisection, since a tree that holds a prefix holds every shorter one. Costs O(log pages) for
        each distinct number of pages.
        """
        more: Masks = self._promised if promised else {}

        def bits(place: int) -> int:
            digest = digests[place]
            return self._held.get(digest, 0) | more.get(digest, 0)

        found: dict[str, int] = {}
        mask = bits(0) if digests else 0
        spans = [(0, len(digests), mask)] if mask else []
        """(low, high, mask): the replicas in `mask` have page `low`, and the first page that each of them
        lacks is at most `high`."""
        while spans:
            low, high, mask = spans.pop()
            if low + 1 == high:
                while mask:
                    bit = mask & -mask
                    found[self._names[bit]] = high
                    mask ^= bit
                continue
            middle = (low + high) // 2
            there = mask & bits(middle)
            if there:
                spans.append((middle, high, there))
            if there != mask:
                spans.append((low, middle, mask & ~there))
        return found

    def _set(self, tree: _Tree, digests: Iterable[int]) -> None:
        tree.digests.update(digests)
        _set_bits(self._held, digests, tree.bit)

    def _clear(self, tree: _Tree, digests: Iterable[int]) -> None:
        _clear_bits(self._held, digests, tree.bit)
        tree.digests.difference_update(digests)


def _set_bits(masks: Masks, digests: Iterable[int], bit: int) -> None:
    for digest in digests:
        masks[digest] = masks.get(digest, 0) | bit


def _clear_bits(masks: Masks, digests: Iterable[int], bit: int) -> None:
    for digest in digests:
        left = masks.get(digest, 0) & ~bit
        if left:
            masks[digest] = left
        else:
            masks.pop(digest, None)

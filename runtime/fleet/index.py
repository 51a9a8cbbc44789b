"""Which replica holds which prefixes: the digests of page ends that its tree has told of.

Events are hints: where one is missing or late, a request is computed again or waits, and says the same text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class TreeEvents:
    """What changed in one replica's tree since the events before.

    `epoch` names the life of the tree, and `number` counts its events from 1. With `whole`, `added` is all
    that the tree holds.
    """

    epoch: int
    number: int
    added: Sequence[int] = ()
    removed: Sequence[int] = ()
    whole: bool = False


@dataclasses.dataclass(slots=True)
class _Held:
    epoch: int = 0
    number: int = 0
    digests: set[int] = dataclasses.field(default_factory=set)


class PrefixIndex:
    """The digests that each replica holds."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Held] = {}

    def join(self, replica: str) -> None:
        """A replica with an empty tree."""
        self._replicas[replica] = _Held()

    def leave(self, replica: str) -> None:
        del self._replicas[replica]

    def apply(self, replica: str, events: TreeEvents) -> bool:
        """Take `events`. False where some before them are missing: ask the replica for `whole` ones."""
        held = self._replicas[replica]
        if events.whole:
            self._replicas[replica] = _Held(events.epoch, events.number, set(events.added))
            return True
        if events.epoch != held.epoch:
            held.epoch, held.number = events.epoch, 0
            held.digests.clear()
        elif events.number <= held.number:
            return True  # the whole that was asked for had them
        complete = events.number == held.number + 1
        held.number = events.number
        held.digests.difference_update(events.removed)
        held.digests.update(events.added)
        return complete

    def pages(self, replica: str, digests: Sequence[int], promised: Iterable[int] | None = None) -> int:
        """How many of the prompt's whole pages, from the first on, the replica holds or is `promised`.

        By bisection: a tree that holds a prefix holds every shorter one. Costs O(log pages).
        """
        held = self._replicas[replica].digests
        more = promised if isinstance(promised, dict | set) else set(promised or ())
        if not digests or not (digests[0] in held or digests[0] in more):
            return 0  # as most replicas of a large fleet
        low, high = 0, len(digests)
        while low < high:
            middle = (low + high) // 2
            if digests[middle] in held or digests[middle] in more:
                low = middle + 1
            else:
                high = middle
        return low

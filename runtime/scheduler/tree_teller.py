"""Tells the frontend what enters and leaves the prefix tree, so that it can place requests on replicas."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from ramify.radix.cache import PrefixCache
from ramify.ring_messages import TreeChange


class TreeTeller:
    """Sends the changes of `cache`, which has a log, numbered from 1 within the life of this process."""

    def __init__(self, cache: PrefixCache, send: Callable[[TreeChange], None]) -> None:
        self._cache = cache
        self._send = send
        self._epoch = secrets.randbits(62)
        self._number = 0

    def tell(self) -> None:
        """Send what has changed since the last call, if anything has."""
        added, removed = self._cache.take_changes()
        if added or removed:
            self._number += 1
            change = TreeChange(
                epoch=self._epoch, number=self._number, added=tuple(added), removed=tuple(removed)
            )
            self._send(change)

    def tell_whole(self) -> None:
        """Send all that the tree holds now."""
        self.tell()
        added = tuple(self._cache.page_ends())
        self._send(TreeChange(epoch=self._epoch, number=self._number, added=added, whole=True))

"""A prefix cache that shares nothing: a baseline, a test oracle, and the way to switch sharing off."""

from __future__ import annotations

from ramify.radix.cache import PrefixCache
from ramify.radix.key import Tokens
from ramify.radix.lock import Match, PrefixLock


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

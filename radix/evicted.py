"""A record of recent evictions: which tokens of a prompt were evicted, and which request took their pages."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from ramify.radix.digest import MASK, Digests, of_scope
from ramify.radix.key import TOKEN_BYTES, first_token, shared_bytes
from ramify.radix.node import Node

MAX_TOKENS = 1 << 20
"""Most tokens on record, at four bytes each; the oldest evictions are forgotten first."""


class Lost(NamedTuple):
    """The number of evicted tokens of a prompt after its matched prefix, and the `taker` of most of these
    tokens; (0, "") if none were evicted."""

    tokens: int
    taker: str


class EvictionRecord:
    """Evicted edges of the tree, each keyed by the digest of the prefix before it.

    A node's digest covers all tokens up to the end of the node, so it stays valid when nodes are split or
    joined. Recording an edge costs O(tokens of the edge) once the digests of its ancestors are known.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._edges: dict[tuple[int, int, int], tuple[bytes, str]] = {}
        """(digest of the prefix before the edge, length of that prefix, first token) → (tokens of the edge,
        taker), oldest first."""
        self.tokens = 0
        self._digests = Digests()

    def note(self, leaf: Node, start: int, taker: str) -> int:
        """Record that tokens ``[start, leaf.end)`` are about to be evicted. Returns the digest of
        ``[0, start)``."""
        cut = leaf.tokens[(start - leaf.start) * TOKEN_BYTES :]
        if start == leaf.start:
            assert leaf.parent is not None
            digest = self._digests.of(leaf.parent)
        else:
            digest = (self._digests.of(leaf) - self._digests.weigh(cut, start)) & MASK
        place = (digest, start, first_token(cut))
        old = self._edges.pop(place, None)
        self.tokens += (len(cut) - (len(old[0]) if old is not None else 0)) // TOKEN_BYTES
        self._edges[place] = (cut, taker)
        while self.tokens > self._max_tokens:
            oldest, _ = self._edges.pop(next(iter(self._edges)))
            self.tokens -= len(oldest) // TOKEN_BYTES
        return digest

    def lost(self, key: bytes, scope: str, found: int) -> Lost:
        """The evicted tokens of `key` that follow its first `found` tokens. Costs O(tokens of `key`)."""
        takers: Counter[str] = Counter()
        if not self._edges:
            return Lost(0, "")
        place, end = found, len(key) // TOKEN_BYTES
        digest = (of_scope(scope) + self._digests.weigh(key[: found * TOKEN_BYTES], 0)) & MASK
        while place < end:
            at = place * TOKEN_BYTES
            edge, taker = self._edges.get((digest, place, first_token(key[at : at + TOKEN_BYTES])), (b"", ""))
            if not edge:
                break
            shared = shared_bytes(edge, key, at)
            takers[taker] += shared // TOKEN_BYTES
            if shared < len(edge):
                break
            digest = (digest + self._digests.weigh(edge, place)) & MASK
            place += shared // TOKEN_BYTES
        return Lost(takers.total(), takers.most_common(1)[0][0]) if takers else Lost(0, "")

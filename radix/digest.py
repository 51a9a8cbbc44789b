"""Digests of prefixes: 64 bits for tokens ``[0, n)`` of a cache scope.

The digest of a prefix is the digest of its scope plus the sum of (token + 1) * factor[position] over its
tokens, modulo 2^64 (universal hashing, Carter & Wegman 1979). The factors are one fixed random sequence, so a
digest is the same in every process. The digest of a longer prefix can be computed from that of a shorter one.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from ramify.radix.node import Node, Root

MASK = (1 << 64) - 1
_ONE = np.int64(1)  # added to each token, so that token 0 changes the digest too


class Digests:
    """Computes digests. Keeps the factors up to the highest position that was needed, 8 bytes each."""

    def __init__(self) -> None:
        self._factors = _random(1 << 10)

    def weigh(self, tokens: bytes, start: int) -> int:
        """The sum that `tokens` (native int32) add to a digest if they stand at the positions from `start`
        on. The sum is not reduced to [0, 2^64)."""
        ids = np.frombuffer(tokens, np.int32)
        return int(np.dot(ids + _ONE, self._until(start + len(ids))[start:]))

    def of(self, node: Node) -> int:
        """The digest of tokens ``[0, node.end)``, cached in the nodes of the path."""
        path = []
        step = node
        while step.digest is None:
            if step.parent is None:
                assert isinstance(step, Root)
                step.digest = of_scope(step.scope)
            else:
                path.append(step)
                step = step.parent
        digest = step.digest
        for step in reversed(path):
            digest = step.digest = (digest + self.weigh(step.tokens, step.start)) & MASK
        return digest

    def page_ends(self, tokens: npt.NDArray[np.int32], scope: str, page_size: int) -> list[int]:
        """The digests of tokens ``[0, page_size)``, ``[0, 2 * page_size)``, …, one for each whole page."""
        whole = len(tokens) - len(tokens) % page_size
        weights = ((tokens[:whole] + _ONE) * self._until(whole)).reshape(-1, page_size).sum(1).cumsum()
        found: list[int] = (weights.view(np.uint64) + np.uint64(of_scope(scope))).tolist()
        return found

    def _until(self, end: int) -> npt.NDArray[np.int64]:
        if end > len(self._factors):
            self._factors = _random(1 << end.bit_length())
        return self._factors[:end]


def of_scope(scope: str) -> int:
    """The digest of the empty prefix of `scope`."""
    return int.from_bytes(hashlib.blake2b(scope.encode(), digest_size=8).digest(), "little")


def _random(count: int) -> npt.NDArray[np.int64]:
    """The first `count` factors of one fixed sequence."""
    return np.random.default_rng(0).integers(-(1 << 63), 1 << 63, count, dtype=np.int64)

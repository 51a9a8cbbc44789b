"""Prompt lookup: an n-gram proposer of draft tokens (Saxena, "Prompt Lookup Decoding", 2023).

    tokens         the cat sat on the mat . the cat     length 9
    find           n = 2: the last 2 tokens, "the cat", stood before place 2
    copied, k = 3  sat on the

The longest n-gram at the end that stood before is taken, up to n = 8, and of its occurrences the latest.
Besides a request's own tokens, the outputs of earlier requests of the same cache scope are looked through.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np

LONGEST_MATCH = 8
"""Tokens of the longest n-gram that is looked for."""
CAPACITY = 8192
"""Output tokens remembered of a scope: looking through them takes about 8 us."""
SCOPES = 64
CONTEXT = LONGEST_MATCH
"""Prompt tokens remembered in front of each output, so that its first tokens can be found."""
_END = -1


class Found(NamedTuple):
    """The last `length` tokens of the sequence also stand right before `place`."""

    place: int
    length: int


def find(tokens: np.ndarray, end: np.ndarray) -> Found | None:
    """The latest of the longest matches of the last tokens of `end`, (n,) int32, in `tokens`, (m,) int32.

    A match at the very end of `tokens` does not count, as nothing follows it.
    """
    places = np.flatnonzero(tokens[:-1] == end[-1]) + 1
    if not len(places):
        return None
    length = 1
    for back in range(2, min(LONGEST_MATCH, len(end)) + 1):
        reaching = places[places >= back]
        longer = reaching[tokens[reaching - back] == end[-back]]
        if not len(longer):
            break
        places, length = longer, back
    return Found(int(places[-1]), length)


def copied(tokens: np.ndarray, place: int, count: int) -> list[int]:
    """`count` tokens from `place` on. Where `tokens` end, the copy repeats itself: from place 1 of "a b c",
    5 tokens are "b c b c b"."""
    found = tokens[place : place + count].tolist()
    period = len(found)
    while len(found) < count:
        found.append(found[-period])
    return found


class RecentOutputs:
    """The last output tokens of ended requests, by cache scope."""

    def __init__(self) -> None:
        self._scopes: OrderedDict[str, _Ring] = OrderedDict()

    def add(self, scope: str, tokens: np.ndarray) -> None:
        """Remember an output, (n,) int32, with the end of its prompt in front."""
        ring = self._scopes.get(scope)
        if ring is None:
            ring = self._scopes[scope] = _Ring()
            if len(self._scopes) > SCOPES:
                self._scopes.popitem(last=False)
        self._scopes.move_to_end(scope)
        ring.add(tokens)

    def find(self, scope: str, end: np.ndarray) -> Found | None:
        ring = self._scopes.get(scope)
        return None if ring is None else find(ring.tokens, end)

    def following(self, scope: str, place: int, count: int) -> list[int]:
        """At most `count` tokens from `place` on, to the end of their output."""
        found: list[int] = self._scopes[scope].tokens[place : place + count].tolist()
        return found[: found.index(_END)] if _END in found else found


class _Ring:
    """Outputs one after the other, each with an end mark; new outputs overwrite the oldest."""

    def __init__(self) -> None:
        self.tokens = np.full(CAPACITY, _END, dtype=np.int32)
        self._next = 0

    def add(self, tokens: np.ndarray) -> None:
        tokens = tokens[-(CAPACITY // 4) :]
        if self._next + len(tokens) + 1 > CAPACITY:
            self.tokens[self._next :] = _END
            self._next = 0
        stop = self._next + len(tokens)
        self.tokens[self._next : stop] = tokens
        self.tokens[stop] = _END
        self._next = stop + 1

"""Decisions about moves: whether the cached pages of a prefix are moved to the replica of a request.

Pages are moved if that is faster than computing them there.

Example: a prompt has 1,500 tokens, of 22.5 KB each. Its replica holds 96 tokens, another replica 1,408.

    to compute    1,312 tokens x 0.3 ms                 0.39 s
    to move       (30 MB + OVERHEAD_BYTES) / 300 MB/s   0.13 s, so they are moved

The pace of computing is measured by the replica's answers (`Placement`), the pace of moving by earlier moves.
If a move takes longer than computing, it is given up, and the pages are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

OVERHEAD_BYTES = 8 << 20
"""Overhead of a move, expressed in bytes: each of its four messages waits for a step of an engine core."""
FIRST_PACE = 1 / 300e6
"""Assumed seconds per byte before the first move has been measured."""
KEPT = 0.9
"""Decay of the measured pace: the factor by which the weight of earlier moves shrinks with each new one."""
LEAST_TOKENS = 64
"""Minimum tokens that a move must save: a step costs about as much as 50 tokens of a prefill (on the CPU)."""
LEAST_LIMIT_S = 0.05
"""Shortest time limit of a move, in seconds."""
MOST_LIMIT_S = 60.0
"""Longest time limit of a move, in seconds. The bound is needed since the pace of a replica is taken as 1 s a
token until its first answer."""


@dataclasses.dataclass(slots=True)
class MovePace:
    """Measured seconds per byte of a move, with the work of both engine cores. Recent moves weigh most."""

    seconds: float = 0.0
    bytes: float = 0.0

    def learn(self, seconds: float, size: int) -> None:
        self.seconds = KEPT * self.seconds + seconds
        self.bytes = KEPT * self.bytes + size + OVERHEAD_BYTES

    def seconds_for(self, size: int) -> float:
        pace = self.seconds / self.bytes if self.bytes else FIRST_PACE
        return pace * (size + OVERHEAD_BYTES)


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """A move of the pages ``[first, end)`` of the prompt from `source`, given up after `limit_s` seconds."""

    source: str
    first: int
    end: int
    gained: int
    """Tokens that the target need not compute."""
    limit_s: float


def choose(
    held: int,
    expected: int,
    replica_pace: float,
    sources: Sequence[tuple[str, int]],
    pace: MovePace,
    page_size: int,
    page_bytes: int,
) -> Move | None:
    """The move of a prompt's pages from the source that has most of them. None if moving saves fewer than
    `LEAST_TOKENS` tokens, or is not faster than computing. Whole pages are counted from the prompt's start.

    held : pages that the request's replica holds now
    expected : pages that this replica holds now or will have computed for other requests
    replica_pace : seconds in which this replica computes one token
    sources : other replicas, and the pages that each holds
    """
    if not sources or not page_bytes:
        return None
    source, end = max(sources, key=lambda found: found[1])
    gained = (end - expected) * page_size
    if gained < LEAST_TOKENS:
        return None
    computing = gained * replica_pace
    if pace.seconds_for((end - held) * page_bytes) >= computing:
        return None
    return Move(source, held, end, gained, limited(computing))


def limited(seconds: float) -> float:
    """The time limit of a move: `seconds`, bounded by `LEAST_LIMIT_S` and `MOST_LIMIT_S`."""
    return min(max(seconds, LEAST_LIMIT_S), MOST_LIMIT_S)

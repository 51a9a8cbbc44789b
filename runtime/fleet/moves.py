"""When the cached pages of a prefix are moved to the replica of a request instead of being computed there.

Example: a prompt has 1,500 tokens. Its replica holds 96 of them, another one 1,408; a token takes 22.5 KB.

    to compute    1,312 tokens x 0.3 ms                 0.39 s
    to move       (30 MB + OVERHEAD_BYTES) / 300 MB/s   0.11 s, so they are moved

Both paces are measured: the replica's by its answers (`Placement`), that of moves by those before. A move
that takes longer than computing would have taken is given up, and the request computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

OVERHEAD_BYTES = 8 << 20
"""Bytes that every move counts beside its pages: four messages wait for steps of engine cores."""
FIRST_PACE = 1 / 300e6
"""Seconds a byte before the first move."""
KEPT = 0.9
"""Weight of a move in the pace when the next one has ended."""
LEAST_TOKENS = 64
"""No move for fewer: a step costs about as much as 50 tokens of a prefill (CPU)."""
LEAST_LIMIT_S = 0.05
"""Least time limit of a move, in seconds."""
MOST_LIMIT_S = 60.0
"""Longest time limit of a move, in seconds: before the first answer of a replica its pace is taken as 1 s a
token."""


@dataclasses.dataclass(slots=True)
class MovePace:
    """Seconds for one byte of a move, its way through both engine cores included; the newest weigh most."""

    seconds: float = 0.0
    bytes: float = 0.0

    def learn(self, seconds: float, size: int) -> None:
        self.seconds = KEPT * self.seconds + seconds
        self.bytes = KEPT * self.bytes + size + OVERHEAD_BYTES

    def seconds_for(self, size: int) -> float:
        pace = self.seconds / self.bytes if self.bytes else FIRST_PACE
        return pace * (size + OVERHEAD_BYTES)


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """Pages of a request's prompt that its replica lacks, counted from the first page on.

    expected : pages that the replica holds, or will have computed for others
    """

    held: int
    expected: int
    pace: float
    """Seconds for a token that the replica computes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """Pages ``[first, end)`` of the prompt come from `source`, within `limit_s` seconds."""

    source: str
    first: int
    end: int
    gained: int
    """Tokens that need not be computed."""
    limit_s: float


def choose(
    need: Need, sources: Sequence[tuple[str, int]], pace: MovePace, page_size: int, page_bytes: int
) -> Move | None:
    """The move that saves most, None where none is cheaper than computing.

    sources : other replicas, and the pages that each holds
    """
    if not sources or not page_bytes:
        return None
    source, end = max(sources, key=lambda found: found[1])
    gained = (end - need.expected) * page_size
    if gained < LEAST_TOKENS:
        return None
    computing = gained * need.pace
    if pace.seconds_for((end - need.held) * page_bytes) >= computing:
        return None
    return Move(source, need.held, end, gained, limited(computing))


def limited(seconds: float) -> float:
    """The time limit of a move that may take about `seconds`."""
    return min(max(seconds, LEAST_LIMIT_S), MOST_LIMIT_S)

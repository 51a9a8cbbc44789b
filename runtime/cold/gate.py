"""The decision whether pages are read from the cold tier or computed, by measured times.

Example: a token takes 0.25 ms to compute and has 22.5 KB of KV; the disk reads 1.2 GB/s.

    512 tokens    11.5 MB    read in 3 + 10 ms, computed in 128 ms: read
     12 tokens    0.27 MB    read in 3 + 0.2 ms, computed in 3 ms: computed
"""

from __future__ import annotations

import dataclasses

OVERHEAD_S = 0.003
"""Seconds that a read takes besides its bytes: opening a file, two changes of threads, the commit."""
LEARNED = 0.9
"""Factor by which the weight of earlier measurements shrinks with each new one."""


@dataclasses.dataclass(slots=True)
class Pace:
    """Measured seconds per unit; recent measurements weigh most."""

    seconds: float = 0.0
    units: float = 0.0

    def learn(self, seconds: float, units: float) -> None:
        self.seconds = LEARNED * self.seconds + seconds
        self.units = LEARNED * self.units + units

    @property
    def each(self) -> float | None:
        """Seconds per unit; None before the first measurement."""
        return self.seconds / self.units if self.units else None


class Gate:
    """Decides whether reading is faster than computing: OVERHEAD_S + bytes x seconds a byte < tokens x
    seconds a token, both measured. Until both are known, reading is taken to be faster."""

    def __init__(self, token_s: float | None = None) -> None:
        self.tokens, self.bytes = Pace(), Pace()
        if token_s is not None:
            self.tokens.learn(token_s, 1.0)

    def reading_s(self, size: int) -> float:
        return OVERHEAD_S + size * (self.bytes.each or 0.0)

    def pays(self, tokens: int, size: int) -> bool:
        token_s, byte_s = self.tokens.each, self.bytes.each
        return token_s is None or byte_s is None or self.reading_s(size) < tokens * token_s

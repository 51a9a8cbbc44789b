"""Token throughput of the last ten minutes, in intervals of 5 s.

Each chunk of an answer is added as it comes: this needs no timer, and sums over all replicas.

    0 s to 5 s     a prompt of 300 tokens, 200 of them cached    (300, 200, 0)
    5 s to 10 s    chunks of 40 output tokens                    (0, 0, 40)
    12 s           `to_dict` has these two; the third interval has not ended
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

INTERVAL_S = 5.0
INTERVALS = 120
"""Number of intervals that are kept beside the current one."""


class Throughput:
    """Sums of prompt tokens, cached prompt tokens and output tokens in each interval. `clock` returns
    seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._origin = clock()
        self._current = 0
        """Number of the newest interval in `_sums`."""
        self._sums: collections.deque[list[int]] = collections.deque([[0, 0, 0]], maxlen=INTERVALS + 1)

    def add_tokens(self, prompt: int, cached: int, output: int) -> None:
        self._advance()
        sums = self._sums[-1]
        sums[0] += prompt
        sums[1] += cached
        sums[2] += output

    def to_dict(self) -> dict[str, Any]:
        """The intervals that have ended, oldest first."""
        self._advance()
        ended = list(self._sums)[:-1]
        names = ("prompt_tokens", "cached_tokens", "output_tokens")
        lists = {name: [sums[index] for sums in ended] for index, name in enumerate(names)}
        return {"interval_s": INTERVAL_S, "intervals": INTERVALS, **lists}

    def _advance(self) -> None:
        current = int((self._clock() - self._origin) / INTERVAL_S)
        self._sums.extend([0, 0, 0] for _ in range(min(current - self._current, INTERVALS + 1)))
        self._current = current

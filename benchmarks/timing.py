"""Times of calls on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence


def fastest(calls: Sequence[Callable[[], object]], seconds: float, *, repeat: int = 1) -> list[float]:
    """Seconds of each one's fastest call.

    The calls alternate, `repeat` times each, so that a drift of the machine's speed hits all alike; each is
    called once before. `seconds` is for each call.
    """
    for call in calls:
        call()
    times = [math.inf] * len(calls)
    ends = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < ends:
        for place, call in enumerate(calls):
            for _ in range(repeat):
                began = time.perf_counter()
                call()
                times[place] = min(times[place], time.perf_counter() - began)
    return times

"""Times of calls on a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence


def fastest(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Seconds of the fastest run of each call.

    The calls alternate, so that a drift of the machine's speed affects all alike. Each call is first run once
    untimed. `seconds` is the time spent for each call.
    """
    for call in calls:
        call()
    times = [math.inf] * len(calls)
    ends = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < ends:
        for place, call in enumerate(calls):
            began = time.perf_counter()
            call()
            times[place] = min(times[place], time.perf_counter() - began)
    return times

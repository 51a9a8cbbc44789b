"""Status of a frontend: whether it serves, and how it fares."""

from __future__ import annotations

import msgspec


class FrontendStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a frontend serves, and how it fares."""

    healthy: bool
    """Whether it takes requests, and the replicas are heard from."""
    gave_up: bool
    """Whether it takes no requests, and never will again."""
    in_flight: int
    """Requests that run or wait."""
    heartbeat_age_s: float
    """Seconds since the last message from any replica."""
    blocked_s: float
    """Seconds for which the event loop was blocked (`LoopWatchdog.total_s`)."""

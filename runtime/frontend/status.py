"""Status of a frontend."""

from __future__ import annotations

import msgspec


class FrontendStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a frontend, at one moment."""

    healthy: bool
    """Whether the frontend takes requests, and has heard from a replica within `SILENT_S`."""
    gave_up: bool
    """Whether the frontend is closed: it has not been started, was closed, or its last replica is gone."""
    in_flight: int
    """Number of running and waiting requests."""
    heartbeat_age_s: float
    """Seconds since the last message from any replica."""
    blocked_s: float
    """Seconds for which the event loop was blocked (`LoopWatchdog.total_s`)."""

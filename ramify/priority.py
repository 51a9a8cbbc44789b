"""Priorities of requests, as in SGLang: higher goes first. (In vLLM lower goes first.)"""

from __future__ import annotations

from ramify.errors import InvalidRequest

MOST = 100
"""Bound of priorities, which are between -MOST and MOST. A request that sets none has the priority 0."""

BATCH = -1
"""The priority of a batch for which none is set."""


def checked_priority(priority: int, field: str = "priority") -> int:
    """Return `priority`; raise `InvalidRequest` unless it is an integer in range."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MOST:
        raise InvalidRequest(
            f"{field} is {priority!r}; it must be an integer between -{MOST} and {MOST}.",
            field=field,
            remedy="Higher goes first.",
        )
    return priority

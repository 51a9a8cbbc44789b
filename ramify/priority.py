"""Priorities of requests, as SGLang has them: higher goes first. (vLLM's go the other way.)"""

from __future__ import annotations

from ramify.errors import InvalidRequest

MOST = 100
"""Priorities are between -MOST and MOST; without one a request has 0."""

BATCH = -1
"""The priority of a batch that is given none."""


def checked_priority(priority: int, field: str = "priority") -> int:
    """`priority`; raises `InvalidRequest` for anything but an integer in range."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MOST:
        raise InvalidRequest(
            f"{field} is {priority!r}; it must be an integer between -{MOST} and {MOST}.",
            field=field,
            remedy="Higher goes first.",
        )
    return priority

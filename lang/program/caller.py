"""The file, line and local names of the user's code that calls this package."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


def caller_line() -> str | None:
    """file:line of the nearest caller outside this package; None where all callers are inside."""
    frame = _caller()
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def caller_names() -> dict[str, Any]:
    """The local names of the nearest caller outside this package."""
    frame = _caller()
    return {} if frame is None else dict(frame.f_locals)


def _caller() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("ramify."):
        frame = frame.f_back
    return frame

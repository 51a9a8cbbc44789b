"""The user's code that calls this package: its file, line and local names."""

from __future__ import annotations

import pathlib
import sys
import sysconfig
import traceback
from types import FrameType
from typing import Any

STDLIB = sysconfig.get_path("stdlib")


def caller_line() -> str | None:
    """``file:line`` of the nearest caller outside this package; None if all callers are inside it."""
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


def raised_line(error: BaseException) -> str | None:
    """``file:line`` of the innermost frame of the user's code in the traceback of `error`; None if no frame
    is the user's."""
    line = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if is_users(frame.f_globals.get("__name__", "")):
            line = f"{frame.f_code.co_filename}:{number}"
    return line


def users_frames(error: BaseException) -> tuple[str | None, list[traceback.FrameSummary]]:
    """The file and line of the innermost frame of the user's code in a traceback, and the traceback's frames
    from the user's outermost frame on, without Ramify's own frames."""
    line, found = None, []
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if is_users(module):
            line = f"{frame.f_code.co_filename}:{number}"
        if line is not None and not module.startswith("ramify."):
            found.append((frame, number))
    return line, list(traceback.StackSummary.extract(iter(found)))


def is_users(module: str) -> bool:
    """Whether the module belongs to the user: not to Python's standard library, an installed package, or this
    package."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if top == "ramify" or (file is None and top in sys.stdlib_module_names and top != "__main__"):
        return False
    path = pathlib.PurePath(file or "")
    return not {"site-packages", "dist-packages"} & set(path.parts) and not path.is_relative_to(STDLIB)

"""Figures of a part: a line of JSON and a printed line for each case, written as soon as it is known."""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]


class Figures:
    """Appends the figures of one part to a file of JSON lines.

    tiny : whether the part is rehearsed on small shapes
    seconds : time limit of the part, from the start of its process on
    """

    def __init__(self, path: Path, part: str, *, tiny: bool = False, seconds: float = math.inf) -> None:
        self.path, self.part, self.tiny, self.seconds = path, part, tiny, seconds
        self.failures = 0

    def add(self, case: str, **values: Any) -> None:
        """Write one case. Values are JSON: numbers in seconds, bytes or shares, as their names say."""
        self.write(case, **values)
        shown = "  ".join(f"{name} {_short(value)}" for name, value in values.items())
        print(f"{self.part:<10} {case:<36} {shown}", flush=True)

    def write(self, case: str, **values: Any) -> None:
        """Write one case without printing it. A row with `so_far` replaces the case's earlier rows."""
        with self.path.open("a") as file:
            file.write(json.dumps({"part": self.part, "case": case, **values}) + "\n")

    @contextmanager
    def attempt(self, case: str) -> Iterator[None]:
        """Context in which a failure becomes a row with `error` and a printed traceback. The part goes on."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:  # kernels, compilers and libraries fail with types of their own
            self.failures += 1
            traceback.print_exc()
            text = f"{type(error).__name__}: {str(error).strip()[:300]}"
            self.add(case, error=text, seconds=time.monotonic() - began)


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_short, value))
    if isinstance(value, dict):
        return ",".join(f"{name}:{_short(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def place_of(trace: TracebackType | None) -> str:
    """The place where a process was cut: the innermost line of our own code, and the innermost line of all if
    it is a library's."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if _is_own(Path(frame.filename))]
    return " > ".join(dict.fromkeys(_place(frame) for frame in (*own[-1:], *frames[-1:])))


def _place(frame: traceback.FrameSummary) -> str:
    file = frame.filename.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]
    return f"{frame.name} ({file}:{frame.lineno})"


def _is_own(path: Path) -> bool:
    return path.is_relative_to(ROOT) and not path.is_relative_to(sys.prefix)

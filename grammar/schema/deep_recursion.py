"""Room for functions that call themselves once or more for each level of a schema or a value."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ramify.errors import InvalidConstraint

MAX_FRAMES = 12_000


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Raises `InvalidConstraint` where that is not enough.

    The limit of the interpreter stays raised: another thread may be deep in its own work.
    """
    sys.setrecursionlimit(max(sys.getrecursionlimit(), MAX_FRAMES))
    try:
        yield
    except RecursionError:
        raise InvalidConstraint("The schema or the value is nested too deeply.") from None

"""A higher recursion limit, for functions that recurse over the levels of a schema or a value."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ramify.errors import InvalidConstraint

MAX_FRAMES = 12_000


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Raise the interpreter's recursion limit to `MAX_FRAMES`, and turn `RecursionError` into
    `InvalidConstraint`.

    The limit is not lowered afterwards, since another thread may have recursed beyond the old one.
    """
    sys.setrecursionlimit(max(sys.getrecursionlimit(), MAX_FRAMES))
    try:
        yield
    except RecursionError:
        raise InvalidConstraint(
            "The schema or the value is nested too deeply.", remedy="Put parts of it beside one another."
        ) from None

"""Where code of a program runs, so that programs which it starts belong to its trace."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from ramify.lang.trace.calls import Call

if TYPE_CHECKING:
    from ramify.lang.program.run import Run


class Place(NamedTuple):
    """A program, and the call in its trace below which new programs stand. Neither is kept in memory."""

    call: weakref.ref[Call]
    run: weakref.ref[Run]


PLACE: ContextVar[Place | None] = ContextVar("ramify_place", default=None)
"""Set in the body of a program and in the tools that it calls."""


@contextlib.contextmanager
def placed(run: Run, call: Call) -> Iterator[None]:
    """The block is code of `run`, within `call`."""
    token = PLACE.set(Place(weakref.ref(call), weakref.ref(run)))
    try:
        yield
    finally:
        PLACE.reset(token)

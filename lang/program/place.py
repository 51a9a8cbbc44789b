"""The program whose code is running. Programs that this code starts belong to the program's trace."""

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
    """Weak references to a running program and to a call of its trace. Programs that are started at this
    place become children of the call."""

    call: weakref.ref[Call]
    run: weakref.ref[Run]


PLACE: ContextVar[Place | None] = ContextVar("ramify_place", default=None)
"""The current place; None outside of programs. Set in the body of a program, and in the tools that the
program calls."""


@contextlib.contextmanager
def placed(run: Run, call: Call) -> Iterator[None]:
    """A ``with`` block whose code belongs to `run`. Programs that are started in the block become children of
    `call`."""
    token = PLACE.set(Place(weakref.ref(call), weakref.ref(run)))
    try:
        yield
    finally:
        PLACE.reset(token)

"""Programs of given steps, the limits that their errors name, and a tool."""

from __future__ import annotations

import ramify as rm
from ramify.errors import BudgetExceeded
from ramify.lang.functions.function import Function
from ramify.lang.program.nodes import Node


def program_of(*items: str | Node) -> Function[[]]:
    """A program that appends these items, one after the other."""

    @rm.function
    def program(s: rm.ProgramState) -> None:
        for item in items:
            s += item

    return program


def cause(failed: rm.ProgramState | BaseException | None) -> BudgetExceeded:
    """The exceeded limit that made a state or a step fail."""
    error = failed.error() if isinstance(failed, rm.ProgramState) else failed
    while error is not None and not isinstance(error, BudgetExceeded):
        error = error.__cause__
    assert isinstance(error, BudgetExceeded)
    return error


@rm.tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b

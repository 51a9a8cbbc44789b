"""Programs of given steps."""

from __future__ import annotations

import ramify as rm
from ramify.lang.functions.function import Function
from ramify.lang.program.nodes import Node


def program_of(*items: str | Node) -> Function[[]]:
    """A program that appends these items, one after the other."""

    @rm.function
    def program(s: rm.ProgramState) -> None:
        for item in items:
            s += item

    return program

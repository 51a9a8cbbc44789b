"""Keywords that cannot be enforced exactly: refused, or checked afterwards under ``strict="validate"``."""

from __future__ import annotations

from typing import NoReturn

from ramify.errors import InvalidConstraint


class Unenforceable(InvalidConstraint):
    """Error: the keyword at `pointer` is valid and satisfiable, but the grammar cannot enforce it."""

    def __init__(self, message: str, *, pointer: str, remedy: str) -> None:
        super().__init__(message, pointer=pointer, remedy=remedy)


class NotCanonical(Exception):
    """Error: each value must have exactly one text here, but the values that the message names have
    several."""

    def __init__(self, values: str, remedy: str) -> None:
        super().__init__(values)
        self.remedy = remedy


def refuse(pointer: str, what: str, remedy: str) -> NoReturn:
    """Raise `Unenforceable`.

    `what` names the limit in a sentence without its full stop, `remedy` what to write instead.
    """
    raise Unenforceable(f"{what}.", pointer=pointer, remedy=remedy)

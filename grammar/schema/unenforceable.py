"""Keywords that cannot be enforced exactly: refused, or checked afterwards under ``strict="validate"``."""

from __future__ import annotations

from typing import NoReturn

from ramify.errors import InvalidConstraint


class Unenforceable(InvalidConstraint):
    """The keyword at `pointer` is valid and satisfiable, but the grammar cannot enforce it."""


class NotCanonical(Exception):
    """Some values have several texts where each must have one. The message names the values."""


def refuse(pointer: str, what: str, remedy: str) -> NoReturn:
    """Raise `Unenforceable`; `what` is a sentence without its full stop."""
    raise Unenforceable(f"{what}.", pointer=pointer, remedy=remedy)

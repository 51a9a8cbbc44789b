"""A keyword that cannot be enforced exactly: refused, unless the caller asks to have it left out."""

from __future__ import annotations

from typing import NoReturn

from ramify.errors import InvalidConstraint


class Unenforceable(InvalidConstraint):
    """The keyword at `pointer` is valid, and values satisfy it, but no grammar for it is made."""


class NotCanonical(Exception):
    """Values that are to have one text each have several. The message says which values."""


def refuse(pointer: str, what: str, remedy: str) -> NoReturn:
    raise Unenforceable(f"{what}.", pointer=pointer, remedy=remedy)

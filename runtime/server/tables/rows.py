"""Rows of the tables of fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Row:
    """Fields of one object that are treated alike."""

    names: tuple[str, ...]
    effect: Literal["taken", "ignored", "refused"]
    words: str = ""
    """Words about the fields in the docs."""
    allowed: Sequence[Any] | None = None
    """The values that an ignored field may have; None for all."""
    remedy: str = ""
    """Remedy in errors. Taken fields have one if some objects of this kind do not have the field."""


def taken(names: str, words: str = "", *, elsewhere: str = "") -> Row:
    """Fields that the code reads. Names are separated by spaces.

    elsewhere : if objects in one place are of several kinds, such as messages of several roles: the remedy in
        objects that do not have the field
    """
    return Row(tuple(names.split()), "taken", words, remedy=elsewhere)


def ignored(
    names: str, words: str = "", *, allowed: Sequence[Any] | None = None, remedy: str = "Leave it out."
) -> Row:
    """Fields without an effect on the answer: they are named in the header ``x-ramify-ignored``. Values other
    than `allowed` are refused with `remedy`."""
    return Row(tuple(names.split()), "ignored", words, allowed, remedy)


def refused(names: str, remedy: str = "") -> Row:
    """Fields that are refused by name, unless their value asks for nothing: null, false or empty."""
    return Row(tuple(names.split()), "refused", remedy=remedy)


class FieldTable:
    """The fields of one object."""

    def __init__(self, path: str, *rows: Row) -> None:
        self.path = path
        """Place in the body, such as ``messages[]``; "" for the body itself."""
        self.rows = rows
        self.ignored = {name: row for row in rows if row.effect == "ignored" for name in row.names}
        """Field without an effect → its row."""
        self.refused = {
            name: row.remedy
            for row in rows
            for name in row.names
            if row.effect == "refused" or (row.effect == "taken" and row.remedy)
        }
        """Field that is refused → its remedy or ""."""

    def names(self, effect: str) -> list[str]:
        return [name for row in self.rows if row.effect == effect for name in row.names]


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The fields of one endpoint's body."""

    title: str
    """Title of the list in the docs."""
    path: str
    body: FieldTable
    """The endpoint's own fields."""
    shared: Sequence[FieldTable] = ()
    """Tables of fields that other endpoints have as well."""
    inner: Sequence[FieldTable] = ()
    """Tables of the objects in the body."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Field that a body must have → a valid value. See `parsing.parse_body`."""

    limit: str = ""
    """Field with the most output tokens; "" if nothing is generated."""
    default_tokens: int | None = None
    """Value of `limit` if a request leaves it out; None for as many as fit into the context."""

    @cached_property
    def whole(self) -> FieldTable:
        """The body's own and shared fields."""
        return FieldTable("", *(row for table in (*self.shared, self.body) for row in table.rows))

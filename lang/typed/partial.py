"""Partial values: the complete values in a JSON text that is still incomplete.

    text      {"name": "Café", "days": [1, 12        (12 is open: 3 could follow, for 123)
    value     Plan(name='Café', days=[1])
    path      ("days", 1)

A string is closed by its quote, an object or array by its bracket, and a number, ``true``, ``false`` or
``null`` by the character after it. An open object or array is part of the value, with the members that have
come. Each value is validated when it is closed, against its own type or subschema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ramify.lang.typed.open_object import fields_in
from ramify.lang.typed.partial_types import TypeChecker

if TYPE_CHECKING:
    from ramify.lang.typed.partial_schema import SchemaChecker

T = TypeVar("T")

BLANK = " \t\r\n"
ENDS = BLANK + ",]}"
"""The characters that can follow a number, ``true``, ``false`` or ``null``."""


@dataclass(frozen=True)
class Partial(Generic[T]):
    """A value while it is generated."""

    value: T
    """The value so far. If `complete`, the value of the variable.

    Otherwise the fields of an open model or dataclass that have come are attributes; reading another field
    raises AttributeError, and no default is filled in. Other open objects are dicts: those of a TypedDict, of
    a JSON schema, and of a union while its `Literal` members allow several types. Open arrays are lists.
    Closed values have the types of the schema. None before the first object or array opens."""
    complete: bool = False
    path: tuple[str | int, ...] = ()
    """The keys and indices that lead to the innermost open value."""
    open_text: str = ""
    """The text so far of the open string; empty if no string is open."""

    def __contains__(self, place: str | int | tuple[str | int, ...]) -> bool:
        """Whether the member `place` of the value has come, open or closed: ``"days" in partial``, or by its
        path ``("stops", 0, "name") in partial``. Fields have the names of their attributes. Methods and
        properties are no members."""
        value: Any = self.value
        for key in place if isinstance(place, tuple) else (place,):
            if isinstance(value, list | tuple):
                if key not in range(len(value)):
                    return False
            else:
                value = value if isinstance(value, Mapping) else fields_in(value)
                if key not in value:
                    return False
            value = value[key]
        return True


class InvalidPart(ValueError):
    """The error of a closed value that is invalid. `path` has the keys and indices that lead to the value."""

    def __init__(self, path: tuple[str | int, ...], problem: Exception) -> None:
        pointer = "".join(f"/{key}" for key in path)
        super().__init__(f"The value at {pointer or 'the root'} is not valid: {problem}")
        self.path = path


@dataclass
class _Open:
    checker: TypeChecker | SchemaChecker
    start: int
    members: dict[str, Any] | list[Any]
    key: str | None = None
    """The key of the open member of an object; None between members, and for an array."""
    reads_key: bool = False

    @property
    def place(self) -> str | int:
        """The key or index of the open member."""
        return len(self.members) if isinstance(self.members, list) else self.key or ""


class PartialReader:
    """A reader of the text of one JSON value, piece by piece. Raises `InvalidPart` when an invalid value is
    closed. The text should be JSON, as constrained output is; text that is not JSON raises ValueError when a
    value in it is closed."""

    def __init__(self, checker: TypeChecker | SchemaChecker) -> None:
        self._root = checker
        self._text = ""
        self._at = 0
        self._stack: list[_Open] = []
        self._start: int | None = None
        """The index at which the open scalar (such as a string) begins; None if no scalar is open."""
        self._in_string = False
        self._closed: Any = None
        self.ended = False

    def push(self, text: str) -> bool:
        """Read `text`; return whether `partial` has changed."""
        self._text += text
        before = (self._at, self._start)
        changed = False
        while self._at < len(self._text) and not self.ended:
            if self._start is None:
                changed |= self._between(self._text[self._at])
            elif self._in_string:
                at = self._at
                changed |= self._string()
                if self._at == at:
                    break  # the text ends inside an escape
            elif self._text[self._at] in ENDS:
                self._close(self._start)
                self._start = None
                changed = True
            else:
                self._at += 1
        return changed or (self._in_string and before != (self._at, self._start) and not self._reads_key)

    @property
    def partial(self) -> Partial[Any]:
        """The value so far, with copies of its open objects and arrays."""
        if self.ended:
            return Partial(self._closed)
        value: Any = None
        for one in reversed(self._stack):
            members: Any = one.members.copy()
            if one is not self._stack[-1]:
                if isinstance(members, list):
                    members.append(value)
                else:
                    members[one.key] = value
            value = one.checker.opened(members)
        return Partial(value, False, self._path(), self._open_text())

    def _path(self) -> tuple[str | int, ...]:
        return tuple(one.place for one in self._stack if isinstance(one.members, list) or one.key is not None)

    @property
    def _reads_key(self) -> bool:
        return bool(self._stack) and self._stack[-1].reads_key

    def _open_text(self) -> str:
        if self._start is None or not self._in_string or self._reads_key:
            return ""
        text = self._text[self._start + 1 : self._at]
        for cut in range(7):  # the text may end inside an escape of up to 6 characters: \uXXXX
            try:
                return str(json.loads(f'"{text[: len(text) - cut]}"', strict=False))
            except ValueError:
                continue
        return ""

    def _between(self, char: str) -> bool:
        """Read a character outside of scalars. Returns whether an object or array was opened or closed."""
        top = self._stack[-1] if self._stack else None
        if char in "{[":
            checker = self._root if top is None else top.checker.child(top.place)
            members: dict[str, Any] | list[Any] = {} if char == "{" else []
            self._stack.append(_Open(checker, self._at, members, reads_key=char == "{"))
            self._at += 1
            return True
        if char in "}]":
            self._at += 1
            closed = self._stack.pop()
            self._put(closed.checker, closed.start)
            return True
        if char == ",":
            if top is not None and isinstance(top.members, dict):
                top.reads_key, top.key = True, None
        elif char == ":":
            if top is not None:
                top.reads_key = False
        elif char not in BLANK:
            self._start, self._in_string = self._at, char == '"'
        self._at += 1
        return False

    def _string(self) -> bool:
        """Read to the end of the open string or of the text. Returns whether a value was closed."""
        assert self._start is not None
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == "\\":
                if self._at + 1 == len(self._text):
                    return False
                self._at += 2
                continue
            self._at += 1
            if char == '"':
                self._in_string = False
                start, self._start = self._start, None
                if self._reads_key:
                    self._stack[-1].key = json.loads(self._text[start : self._at], strict=False)
                    return False
                self._close(start)
                return True
        return False

    def _close(self, start: int) -> None:
        top = self._stack[-1] if self._stack else None
        self._put(self._root if top is None else top.checker.child(top.place), start)

    def _put(self, checker: TypeChecker | SchemaChecker, start: int) -> None:
        """Validate the value that begins at `start` and has just been closed, and add the value to the object
        or array around it."""
        raw = self._text[start : self._at]
        path = self._path()
        try:
            value = checker.check(raw)
        except ValueError as error:
            raise InvalidPart(path, error) from error
        if not self._stack:
            self._closed, self.ended = value, True
            return
        top = self._stack[-1]
        if isinstance(top.members, list):
            top.members.append(value)
        else:
            top.members[top.key or ""] = value
            top.key = None

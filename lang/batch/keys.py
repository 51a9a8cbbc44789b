"""Keys of a batch's rows: read, checked, and each claimed by one row of the input.

A malformed row of a file is an `Unreadable`. It keeps its key if that can be read, so that the mended row
replaces its result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ramify.errors import InvalidRequest
from ramify.lang.batch.json_text import NotJson, canonical, encode
from ramify.spelling import nearest

if TYPE_CHECKING:
    from ramify.lang.batch.finished import FinishedRows


class Numbered(NamedTuple):
    """A row of a sample, with its number in the whole input."""

    number: int
    values: Any


class Unreadable(str):
    """Stands for a row of a file that cannot be read; the text gives the line and the reason."""

    key: Any = None
    """The row's key; None if it cannot be read."""

    def __new__(cls, why: str, key: Any = None) -> Unreadable:
        row = super().__new__(cls, why)
        row.key = key
        return row


def numbered(rows: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Each row with its number in the input, from 0."""
    for position, values in enumerate(rows):
        yield (values.number, values.values) if isinstance(values, Numbered) else (position, values)


def split(index: int, values: Any, name: str | None, columns: Iterable[str]) -> tuple[Any, Any]:
    """A row's key, from the column `name`, and the program's arguments.

    The key column is removed unless it is one of the program's parameters, `columns`. A row without a key
    becomes `Unreadable`.
    """
    if name is None:
        return None, values
    if isinstance(values, Unreadable):
        return (values.key if _written(values.key) is None else None), values
    if not isinstance(values, Mapping) or name not in values:
        return None, Unreadable(f"Row {index} has no {name!r}, the key column.")
    if values[name] is None:
        return None, Unreadable(f"The key of row {index}, {name!r}, is null.")
    if problem := _written(values[name]):
        return None, Unreadable(f"The key of row {index}, {name!r}, cannot be written: {problem}.")
    if name in columns:
        return values[name], values
    return values[name], {column: value for column, value in values.items() if column != name}


def _written(key: Any) -> str | None:
    """Reason why a key cannot be written; None if it can."""
    try:
        encode(key)
    except NotJson as problem:
        return str(problem)
    return None


def claim(seen: FinishedRows, index: int, name: str, key: Any, values: Any) -> int | None:
    """Identity of row `index`, noted in `seen`; None for a malformed row whose key another row has. Raises
    `InvalidRequest` if another row has the key of a well-formed row.
    """
    identity = key_identity(key)
    if before := seen.place(identity):
        if isinstance(values, Unreadable):
            return None
        raise InvalidRequest(
            f"Rows {before - 1} and {index} of the input have the same {name}: {key!r}.",
            field="key",
            remedy="Rows are counted from 0. Name a column whose values differ, or none.",
        )
    seen.set_place(identity, index + 1)
    return identity


def check_keys(rows: Iterable[Any], name: str) -> None:
    """Raise `InvalidRequest` if two rows have the same key, or no row has a key. Takes 16 bytes a row."""
    from ramify.lang.batch.finished import FinishedRows

    seen, first, is_column = FinishedRows(()), None, False
    for index, values in numbered(rows):
        key, rest = split(index, values, name, ())
        if key is not None:
            claim(seen, index, name, key, values)
        is_column = is_column or (isinstance(values, Mapping) and name in values)
        if first is None and not isinstance(values, Unreadable):
            first = rest, values
    if first is not None and not is_column:
        why, values = first
        columns = [str(column) for column in values] if isinstance(values, Mapping) else []
        raise InvalidRequest(
            f"{why} No other row has it either.",
            field="key",
            remedy=nearest(name, columns) or f"It has {', '.join(columns) or 'no columns'}.",
        )


def key_identity(key: Any) -> int:
    """64-bit identity of a key, the same for the key in the input and in its result line."""
    return hashed(canonical(msgspec.json.decode(encode(key))), b"key")


def hashed(data: bytes, kind: bytes = b"") -> int:
    """64-bit hash. It tells apart rows that differ by accident, not forged ones."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=kind).digest(), "big")

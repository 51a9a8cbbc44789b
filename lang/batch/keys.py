"""Keys of a batch's rows. No two well-formed rows of the input may have the same key.

A malformed row of a file is an `Unreadable`. If the key of a malformed row can be read, the key is kept, so
that the result of the corrected row replaces the result of the malformed row.
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
    """A row of a file that cannot be read. The text gives the line and the reason."""

    key: Any = None
    """The row's key; None if it cannot be read."""

    def __new__(cls, why: str, key: Any = None) -> Unreadable:
        row = super().__new__(cls, why)
        row.key = key
        return row


def numbered(rows: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield (number in the input, row); the first row is number 0."""
    for position, values in enumerate(rows):
        yield (values.number, values.values) if isinstance(values, Numbered) else (position, values)


def split(index: int, values: Any, name: str | None, columns: Iterable[str]) -> tuple[Any, Any]:
    """The key of a row, from the column `name`, and the program's arguments.

    The key is None if `name` is None, or if the row has no valid key. The key column is removed from the
    arguments unless it is one of `columns`, the program's parameters. The arguments of a row without a valid
    key are replaced by an `Unreadable`.
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
    """Reason why `key` cannot be written as JSON; None if `key` can be written."""
    try:
        encode(key)
    except NotJson as problem:
        return str(problem)
    return None


def claim(seen: FinishedRows, index: int, name: str, key: Any, values: Any) -> int | None:
    """Note row `index` in `seen`, and return the row's identity. If an earlier row has the same `key`,
    returns None for a malformed row (`values` is an `Unreadable`), and raises `InvalidRequest` for any other
    row."""
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
    """Raise `InvalidRequest` if two well-formed rows have the same key, or if no row has a key. Takes 16
    bytes of memory a row."""
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
    """64-bit identity of a key, the same whether the key comes from the input or from a result line."""
    return hashed(canonical(msgspec.json.decode(encode(key))), b"key")


def hashed(data: bytes, kind: bytes = b"") -> int:
    """64-bit hash. Collisions are unlikely by accident, but can be forged."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=kind).digest(), "big")

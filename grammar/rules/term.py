"""Immutable terms that store their hash: expressions, and formulas about JSON values.

Many dictionaries have terms as keys. If the hash were not stored, each look-up of a deep term would take time
proportional to its size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform


class Term:
    """Base of the classes that `term` decorates."""

    __slots__ = ("_hash",)
    _compared: ClassVar[Callable[[Term], object]]
    """A function that returns the fields by which terms are compared."""
    _hash: int

    def __post_init__(self) -> None:
        # Parts are made before the whole and store their hashes, so hashing never goes deeper than one level.
        kind = type(self)
        object.__setattr__(self, "_hash", hash((kind, kind._compared(self))))

    def __hash__(self) -> int:
        return self._hash


T = TypeVar("T", bound=Term)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def term(cls: type[T]) -> type[T]:
    """Make a subclass of `Term` a frozen dataclass with slots, whose hash is computed once."""
    made: Any = dataclasses.dataclass(frozen=True, slots=True)(cls)
    made._compared = attrgetter(*(field.name for field in dataclasses.fields(made) if field.compare))
    made.__hash__ = Term.__hash__
    return cast(type[T], made)

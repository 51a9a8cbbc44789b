"""Random types: pydantic takes every text that the grammar of a type allows, and the value round-trips."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import uuid
from random import Random
from typing import Annotated, Any, Literal, NotRequired, Optional

import pydantic
import pytest
from typing_extensions import TypedDict

from ramify.lang.typed.schema import schema_of
from tests.grammar.sampling import samples

TEXTS_OF_EACH = 12


class Color(enum.Enum):
    RED = "red"
    NONE = 0
    HALF = 0.5


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


SCALARS: list[Any] = [int, float, str, bool, None, Color, Level, Literal["a", 1, None], Literal[True, "true"]]
SCALARS += [datetime.date, datetime.time, datetime.datetime, datetime.timedelta, uuid.UUID, decimal.Decimal]
SCALARS += [bytes, pydantic.StrictInt, pydantic.StrictBool, pydantic.PositiveInt, pydantic.NegativeFloat]
KEYS: list[Any] = [
    str,
    int,
    bool,
    Color,
    Literal["x", "y"],
    Annotated[str, pydantic.Field(max_length=3)],
    uuid.UUID,
]


class Types:
    """Random types, at most `depth` inside each other."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._made = 0

    def any(self, depth: int) -> Any:
        if depth == 0 or self._random.random() < 0.2:
            return self._scalar()
        make = self._random.choice(
            [self._container, self._union, self._model, self._dataclass, self._typed_dict]
        )
        return make(depth - 1)

    def _scalar(self) -> Any:
        low = self._random.randint(-20, 20)
        high = low + self._random.randint(0, 30)
        bounded: list[Any] = [
            Annotated[int, pydantic.Field(ge=low, le=high)],
            Annotated[int, pydantic.Field(gt=low, multiple_of=3)],
            Annotated[float, pydantic.Field(ge=low, lt=high + 1)],
            Annotated[decimal.Decimal, pydantic.Field(ge=low, le=high)],
            Annotated[decimal.Decimal, pydantic.Field(max_digits=5, decimal_places=2)],
            Annotated[decimal.Decimal, pydantic.Field(max_digits=3)],
            Annotated[decimal.Decimal, pydantic.Field(decimal_places=1, gt=low)],
            Annotated[str, pydantic.Field(min_length=abs(low) // 4, max_length=abs(low) // 4 + 2)],
            Annotated[str, pydantic.Field(pattern=r"^[a-c]+\\d{2}$")],
            Annotated[int, pydantic.Strict()],
        ]
        return self._random.choice(SCALARS + bounded)

    def _container(self, depth: int) -> Any:
        size = pydantic.Field(min_length=self._random.randint(0, 2), max_length=self._random.randint(2, 4))
        item = self.any(depth)
        options: list[Any] = [
            list[item],
            Annotated[list[item], size],
            tuple[item, ...],
            tuple[item, self.any(depth)],
            dict[self._random.choice(KEYS), item],
            Annotated[dict[str, item], size],
            set[self._random.choice(KEYS)],
            frozenset[bool],
        ]
        return self._random.choice(options)

    def _union(self, depth: int) -> Any:
        return Optional[self.any(depth)] if self._random.random() < 0.5 else self.any(depth) | self.any(depth)  # noqa: UP045

    def _fields(self, depth: int) -> dict[str, Any]:
        self._made += 1
        return {name: self.any(depth) for name in ["a", "b c", "ä"][: self._random.randint(1, 3)]}

    def _model(self, depth: int) -> Any:
        config = pydantic.ConfigDict(
            extra=self._random.choice(["ignore", "forbid", "allow"]), strict=self._random.random() < 0.3
        )
        fields: dict[str, Any] = {
            f"field{i}": (kind, pydantic.Field(alias=name))
            if self._random.random() < 0.6
            else (Optional[kind], None)  # noqa: UP045
            for i, (name, kind) in enumerate(self._fields(depth).items())
        }
        return pydantic.create_model(f"Model{self._made}", __config__=config, **fields)

    def _dataclass(self, depth: int) -> Any:
        fields = [(f"field{i}", kind) for i, kind in enumerate(self._fields(depth).values())]
        return dataclasses.make_dataclass(f"Data{self._made}", fields)

    def _typed_dict(self, depth: int) -> Any:
        fields = self._fields(depth)
        made = {
            name: NotRequired[kind] if self._random.random() < 0.3 else kind for name, kind in fields.items()
        }
        make: Any = TypedDict
        return make(f"Dict{self._made}", made)


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 80))]
)
def test_what_the_grammar_of_a_type_allows_pydantic_accepts(seed: int) -> None:
    kind = Types(seed).any(3)
    schema = schema_of(kind)
    if schema.constraint is None:  # plain text
        return
    adapter = pydantic.TypeAdapter(kind)
    for text in samples(schema.constraint, TEXTS_OF_EACH, seed=seed):
        value = schema.parse(text)  # raises where pydantic refuses the text
        if "inf" not in repr(value):  # which pydantic dumps as null
            dumped = adapter.dump_json(value, by_alias=True)
            again = adapter.validate_json(dumped)
            # A number of a union of Decimal and str comes back as text; a set has no order.
            assert again == value or sorted(adapter.dump_json(again, by_alias=True)) == sorted(dumped), text


@pytest.mark.parametrize(
    "field", [{}, {"max_digits": 5, "decimal_places": 2}, {"max_digits": 3}, {"multiple_of": 0.5}]
)
def test_decimals_are_numbers(field: dict[str, Any]) -> None:
    kind: Any = Annotated[decimal.Decimal, pydantic.Field(**field)]
    schema = schema_of(kind)
    assert schema.constraint is not None
    texts = {*samples(schema.constraint, 200, budget=10)}
    assert any("." in text for text in texts)
    assert all(isinstance(schema.parse(text), decimal.Decimal) for text in texts)

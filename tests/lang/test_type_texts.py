"""The texts of a type's grammar are values of the type, or the type is refused when it is read."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import re
import uuid
import zoneinfo
from collections.abc import Hashable
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
from pydantic import Field, networks, types

from ramify.errors import InvalidConstraint
from ramify.lang.tools.tool import make_tool
from ramify.lang.typed.schema import schema_of
from ramify.lang.typed.text_patterns import dates_between
from tests.grammar.sampling import samples

TODAY = datetime.date(2024, 5, 17)
NOON = datetime.datetime(2024, 5, 17, 12)


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Colour(enum.StrEnum):
    RED = "red"


class Raw(enum.Enum):
    RED = "red"
    BYTES = b"bytes"


class Mixed(enum.Enum):
    RED = "red"
    HALF = 2.5


@dataclasses.dataclass
class Meeting:
    where: pathlib.Path
    when: pydantic.NaiveDatetime


class Pair(NamedTuple):
    left: datetime.date
    right: complex


LATE = datetime.datetime(2024, 5, 20)
EAST = datetime.timezone(datetime.timedelta(hours=14))

GENERATED: list[Any] = [
    *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta),
    *(pydantic.NaiveDatetime, pydantic.AwareDatetime, pydantic.PastDate, pydantic.FutureDate),
    *(pydantic.PastDatetime, pydantic.FutureDatetime),
    Annotated[datetime.date, Field(gt=TODAY)],
    Annotated[datetime.date, Field(ge=TODAY, lt=datetime.date(2026, 1, 1))],
    Annotated[datetime.date, Field(le=datetime.date(3, 2, 1))],
    Annotated[datetime.datetime, Field(lt=NOON)],
    Annotated[pydantic.NaiveDatetime, Field(ge=NOON, le=datetime.datetime(2024, 6, 1))],
    Annotated[pydantic.NaiveDatetime, Field(ge=datetime.datetime(2024, 5, 17), lt=LATE)],
    Annotated[pydantic.NaiveDatetime, Field(gt=datetime.datetime(2024, 5, 17), le=LATE)],
    Annotated[pydantic.NaiveDatetime, Field(ge=NOON.replace(tzinfo=EAST), le=LATE)],
    Annotated[datetime.datetime, Field(ge=NOON, gt=LATE, lt=datetime.datetime(2024, 5, 24, 1))],
    Annotated[datetime.datetime, Field(le=LATE, lt=NOON, ge=datetime.datetime(2024, 5, 14))],
    Annotated[pydantic.AwareDatetime, Field(gt=NOON.replace(tzinfo=datetime.UTC))],
    Annotated[pydantic.AwareDatetime, Field(gt=LATE.replace(tzinfo=EAST), lt=datetime.datetime(2024, 5, 27))],
    *(Annotated[datetime.date, Field(ge=TODAY, gt=TODAY, le=datetime.date.max)],),
    *(decimal.Decimal, pydantic.condecimal(max_digits=5, decimal_places=2), fractions.Fraction, complex),
    *(bytes, Annotated[bytes, Field(max_length=3)], Annotated[bytes, Field(min_length=2, max_length=9)]),
    *(pydantic.Base64Bytes, pydantic.Base64Str, pydantic.Base64UrlBytes, pydantic.Base64UrlStr),
    *(pathlib.Path, pathlib.PurePosixPath, re.Pattern[str], zoneinfo.ZoneInfo, pydantic.ByteSize),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network),
    *(ipaddress.IPv4Interface, ipaddress.IPv6Interface),
    *(pydantic.IPvAnyAddress, pydantic.IPvAnyNetwork, pydantic.IPvAnyInterface),
    *(uuid.UUID, pydantic.UUID1, pydantic.UUID3, pydantic.UUID4, pydantic.UUID5),
    *(pydantic.SecretStr, pydantic.SecretBytes, pydantic.Secret[int]),
    *(pydantic.AnyUrl, pydantic.HttpUrl, pydantic.FileUrl, pydantic.WebsocketUrl, pydantic.PostgresDsn),
    *(pydantic.RedisDsn, pydantic.MongoDsn, pydantic.NatsDsn, pydantic.KafkaDsn, networks.SnowflakeDsn),
    *(Number, Mixed, Meeting, Pair, collections.Counter[str], collections.deque[int], set[int]),
    *(dict[Number, bool], dict[Mixed, bool], dict[int | float, bool], dict[int | None, bool]),
    *(collections.OrderedDict[int, int], collections.Counter[int], dict[Literal["a", 1], int]),
    *(dict[Colour | int, int], dict[datetime.date | int, int], dict[decimal.Decimal, int]),
    *(dict[pydantic.NaiveDatetime, bool], dict[complex, bool], dict[bytes, bool], dict[Literal["a"], bool]),
]

REFUSED: list[Any] = [
    *(pydantic.Json, pydantic.Json[int], pydantic.FilePath, pydantic.DirectoryPath, pydantic.NewPath),
    *(pydantic.ImportString, types.PaymentCardNumber, re.Pattern[bytes], type[int], Hashable),
    *(dict[tuple[int, int], bool], dict[None, bool], dict[Literal[1, 2], bool]),
    *(dict[pydantic.NonNegativeInt, int], dict[int, bool | Literal[b"x"]], Literal[b"x"], Raw),
    Annotated[datetime.date, Field(gt=datetime.date.max)],
    Annotated[datetime.date, Field(lt=datetime.date.min)],
    Annotated[datetime.datetime, Field(ge=datetime.datetime.max)],
    Annotated[datetime.datetime, Field(gt=datetime.datetime.max.replace(tzinfo=datetime.UTC))],
    Annotated[datetime.datetime, Field(le=datetime.datetime.min)],
    Annotated[datetime.datetime, Field(le=datetime.datetime.min.replace(tzinfo=EAST))],
    Annotated[datetime.time, Field(ge=datetime.time(12))],
    Annotated[datetime.timedelta, Field(ge=datetime.timedelta(days=1))],
    Annotated[pydantic.PastDate, Field(gt=datetime.date(9000, 1, 1))],
]


@pytest.mark.parametrize("kind", GENERATED, ids=str)
def test_texts_are_values(kind: Any) -> None:
    schema = schema_of(kind)
    assert schema.constraint is not None
    texts = set(samples(schema.constraint, 16, budget=60))
    assert len(texts) > 1
    for text in texts:
        schema.parse(text)


@pytest.mark.parametrize("kind", REFUSED, ids=str)
def test_what_no_schema_describes_is_refused_when_it_is_read(kind: Any) -> None:
    with pytest.raises(InvalidConstraint) as error:
        schema_of(list[kind])
    assert error.value.field == "schema"
    assert error.value.remedy

    def call(value: kind) -> None: ...

    with pytest.raises(InvalidConstraint, match="The parameters of call"):
        make_tool(call)


def _dates_of(kind: Any, days: range) -> set[int]:
    """The days that the pattern of `kind` allows, among the `days` from 20 May 2024 on."""
    source = schema_of(list[kind]).constraint
    assert source is not None
    pattern = re.compile(json.loads(source.source)["items"]["allOf"][1]["pattern"])
    return {day for day in days if pattern.match((LATE + datetime.timedelta(day)).date().isoformat())}


def test_bounds_leave_out_no_more_days_than_they_must() -> None:
    bounds = Field(ge=LATE, lt=LATE + datetime.timedelta(3))
    assert _dates_of(Annotated[pydantic.NaiveDatetime, bounds], range(-5, 9)) == {0, 1, 2}
    assert _dates_of(Annotated[datetime.datetime, bounds], range(-5, 9)) == {1}
    with pytest.raises(InvalidConstraint, match="margin of one day at each for time zones"):
        schema_of(Annotated[datetime.datetime, Field(ge=LATE, lt=LATE + datetime.timedelta(2))])


@pytest.mark.parametrize("kind", [pydantic.FutureDate, pydantic.FutureDatetime])
def test_today_is_the_day_on_which_a_type_is_read(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A type is read anew each day: the bounds of a FutureDate move with it."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return today.replace(tzinfo=tz)

    class Calendar(datetime.date):
        @classmethod
        def today(cls) -> Any:
            return today.date()

    found = []
    monkeypatch.setattr(datetime, "datetime", Clock)
    monkeypatch.setattr(datetime, "date", Calendar)
    for today in (LATE, LATE + datetime.timedelta(6)):  # noqa: B007, read by the clocks
        found.append(min(_dates_of(kind, range(-3, 20))))
    assert found == [2, 8]


@pytest.mark.parametrize("module", [types, networks])
def test_no_type_of_pydantics_is_left_out(module: Any) -> None:
    """Each type that pydantic exports is read or refused, and none fails with an error of pydantic's own."""
    for name in module.__all__:
        kind = getattr(module, name)
        with contextlib.suppress(InvalidConstraint):
            schema_of(kind)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("2024-05-17", "2024-05-17"),
        ("2024-05-17", "2026-01-01"),
        ("1999-12-31", "2000-01-01"),
        ("0001-01-01", "9999-12-31"),
        ("0999-09-09", "1001-10-10"),
    ],
)
def test_dates_between(low: str, high: str) -> None:
    pattern = re.compile(dates_between(datetime.date.fromisoformat(low), datetime.date.fromisoformat(high)))
    first, last = datetime.date.fromisoformat(low).toordinal(), datetime.date.fromisoformat(high).toordinal()
    near = {edge + days for edge in (first, last) for days in (-400, -31, -1, 0, 1, 30, 365)}
    for ordinal in near & set(range(1, datetime.date.max.toordinal() + 1)):
        text = datetime.date.fromordinal(ordinal).isoformat()
        assert bool(pattern.match(text)) == (low <= text <= high), text

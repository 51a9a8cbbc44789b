"""Open objects have the fields that have come as attributes, and no others."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pickle
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import pydantic
import pydantic.dataclasses
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import TypedDict

import ramify as rm
from ramify.lang.typed.open_object import OpenObject
from ramify.lang.typed.partial import Partial, PartialReader
from ramify.lang.typed.partial_types import checker_of

MADE: list[Any] = []
"""Objects whose ``__post_init__`` or validators ran."""


class Stop(pydantic.BaseModel):
    name: str
    nights: int = 2


class Plan(pydantic.BaseModel):
    place: str = pydantic.Field(alias="where")
    stops: list[Stop] = []
    days: int = 7

    @property
    def shout(self) -> str:
        return self.place.upper()

    @functools.cached_property
    def names(self) -> list[str]:
        return [stop.name for stop in self.stops]

    def longer_than(self, days: int) -> bool:
        return self.days > days

    @classmethod
    def kind(cls) -> str:
        return cls.__name__

    @pydantic.model_validator(mode="after")
    def made(self) -> Plan:
        MADE.append(self)
        return self


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: int
    y: int = 3


@dataclasses.dataclass
class Built:
    x: int
    y: int = 3
    total: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        MADE.append(self)
        self.total = self.x + self.y


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: list[str]


class Note(TypedDict):
    text: str


class Root(pydantic.RootModel[Stop]):
    pass


class Stops(pydantic.RootModel[list[Stop]]):
    pass


def partial_of(text: str, kind: Any) -> Partial[Any]:
    reader = PartialReader(checker_of(kind))
    reader.push(text)
    return reader.partial


def test_a_model():
    MADE.clear()
    partial = partial_of('{"where": "Bern", "stops": [{"name": "A"}, {"name": "B", "nights": 1', Plan)
    plan = partial.value
    assert isinstance(plan, Plan)
    assert (plan.place, plan.shout, plan.names) == ("Bern", "BERN", ["A", "B"])
    assert plan.kind() == "Plan"
    assert type(plan.stops[0]) is Stop
    assert plan.stops[0].nights == 2  # this one is complete
    assert isinstance(plan.stops[1], Stop)
    assert repr(plan.stops) == "[Stop(name='A', nights=2), Stop(name='B')]"
    with pytest.raises(AttributeError, match=r"Stop\.nights has not come yet\."):
        _ = plan.stops[1].nights  # 1 may still become 12
    with pytest.raises(AttributeError, match=r"Plan\.days has not come yet\."):
        plan.longer_than(3)
    with pytest.raises(AttributeError, match="'Plan' object has no attribute 'nonsense'"):
        _ = plan.nonsense
    assert getattr(plan, "days", None) is None
    assert plan.stops[1].model_dump() == {"name": "B"}
    assert plan.stops[1].model_fields_set == {"name"}
    assert MADE == []


def test_what_has_come():
    partial = partial_of('{"where": "Bern", "stops": [{"name": "A"}, {"na', Plan)
    assert "place" in partial
    assert "stops" in partial
    assert "days" not in partial
    assert ("stops", 0, "nights") in partial
    assert ("stops", 1) in partial
    assert ("stops", 1, "name") not in partial
    assert ("stops", 2) not in partial
    assert ("place", "x", 0) not in partial
    assert "place" not in Partial(None)
    tree = partial_of('{"a": {"b": [1, 2', {"type": "object"})
    assert ("a", "b", 0) in tree
    assert ("a", "b", 1) not in tree
    assert ("a", "c") not in tree
    assert "days" in Partial(Plan(where="x"), complete=True)


@pytest.mark.parametrize("kind", [Frozen, Built])
def test_dataclasses_have_no_defaults_before_the_end(kind):
    MADE.clear()
    value = partial_of('{"x": 1, "y"', kind).value
    assert isinstance(value, kind)
    assert value.x == 1
    assert repr(value) == f"{kind.__name__}(x=1)"
    for name in {"y", "total"} & set(kind.__dataclass_fields__):
        with pytest.raises(AttributeError, match=f"{kind.__name__}.{name} has not come yet"):
            getattr(value, name)
    assert MADE == []
    match value:
        case Frozen(x=x) | Built(x=x):
            assert x == 1
        case _:
            pytest.fail("a class pattern matches an open object")


PETS = [Cat | Dog, Annotated[Cat | Dog | None, "pets"], Cat | Dog | list[int] | str]


@pytest.mark.parametrize("kind", PETS)
def test_a_union_is_a_dict_until_its_tag_decides(kind):
    undecided = partial_of('{"kind": "do', kind).value
    assert undecided == {}
    assert type(undecided) is dict
    assert partial_of('{"tricks": ["sit"], "kin', kind).value == {"tricks": ["sit"]}
    decided = partial_of('{"kind": "dog", "tricks": ["sit", "st', kind).value
    assert isinstance(decided, Dog)
    assert decided.tricks == ["sit"]


def test_one_object_type_in_a_union_is_decided():
    assert isinstance(partial_of('{"na', Stop | None).value, Stop)
    assert partial_of('{"name": "A"', Stop | dict[str, str]).value == {"name": "A"}
    assert partial_of('{"text": "A"', Note).value == {"text": "A"}
    assert partial_of('{"text": "A"', dict[str, str]).value == {"text": "A"}


T = TypeVar("T")


@dataclasses.dataclass
class Boxed(Generic[T]):
    label: str
    some: list[T]
    one: Annotated[T | None, "a mark"] = None


class BoxedDict(TypedDict, Generic[T]):
    one: T


class BoxedModel(pydantic.BaseModel, Generic[T]):
    one: T


@pytest.mark.parametrize("kind", [Boxed[Stop], list[Boxed[Stop] | None], BoxedModel[Stop], Boxed[T][Stop]])
def test_generic_types_with_arguments(kind):
    text = '{"label": "L", "some": [{"name": "A"}], "one": {"name": "B", '
    box = partial_of("[" * (kind == list[Boxed[Stop] | None]) + text, kind).value
    box = box[0] if isinstance(box, list) else box
    assert isinstance(box, Boxed | BoxedModel)
    assert isinstance(box.one, Stop)
    assert repr(box.one) == "Stop(name='B')"
    if isinstance(box, Boxed):
        assert box.some == [Stop(name="A")]


def test_generic_typed_dicts_with_arguments():
    one = partial_of('{"one": {"name": "B", ', BoxedDict[Stop]).value["one"]
    assert isinstance(one, Stop)
    assert partial_of('{"one": {"name": "B", ', BoxedDict).value["one"] == {"name": "B"}


def test_root_models():
    assert partial_of('{"name": "A"', Root).value.root.name == "A"
    stops = partial_of('[{"name": "A"}, {"name": "B"', Stops).value
    assert isinstance(stops, Stops)
    assert [stop.name for stop in stops.root] == ["A", "B"]


def test_extra_members_are_no_attributes():
    assert vars(partial_of('{"name": "A", "other": 1, ', Stop).value) == {"name": "A"}


class Loose(pydantic.BaseModel, extra="allow"):
    name: str
    days: int = 7


@pydantic.dataclasses.dataclass(config={"extra": "allow"})
class LooseData:
    name: str


@pytest.mark.parametrize("kind", [Loose, LooseData])
def test_extra_members_that_the_type_keeps_are_attributes(kind):
    partial = partial_of('{"other": 1, "name": "A", "list": [1, ', kind)
    whole = Partial(kind(name="A", other=1, list=[1]))
    for found in (partial, whole):
        assert (found.value.other, found.value.list) == (1, [1])
        assert "other" in found
        assert ("list", 0) in found
        assert "more" not in found
    assert repr(partial.value) == f"{kind.__name__}(name='A', other=1, list=[1])"
    assert partial.value != partial_of('{"other": 2, "name": "A", "list": [1, ', kind).value
    again = pickle.loads(pickle.dumps(partial.value))
    assert again == partial.value
    assert again.other == 1
    with pytest.raises(AttributeError, match=r"'Loose(Data)?' object has no attribute 'more'"):
        _ = partial.value.more


def test_a_model_dumps_its_extra_members():
    value = partial_of('{"other": 1, "name": "A", ', Loose).value
    assert value.model_dump() == {"name": "A", "other": 1}
    assert value.model_extra == {"other": 1}
    assert value.model_fields_set == {"name", "other"}


class Aliased(pydantic.BaseModel):
    days: int = pydantic.Field(
        2, validation_alias=pydantic.AliasChoices(pydantic.AliasPath("p", 0), "d", "dd")
    )
    nights: int = pydantic.Field(2, validation_alias="n", alias="x")


@dataclasses.dataclass
class AliasedData:
    days: Annotated[int, pydantic.Field(alias="d")]
    nights: int = pydantic.Field(2, alias="n")


@pydantic.dataclasses.dataclass
class AliasedPydantic:
    days: int = pydantic.Field(alias="d")
    nights: int = pydantic.Field(2, alias="n")


@pytest.mark.parametrize("kind", [Aliased, AliasedData, AliasedPydantic])
def test_aliases_are_those_of_the_schema(kind):
    assert list(pydantic.TypeAdapter(kind).json_schema()["properties"]) == ["d", "n"]
    partial = partial_of('{"d": 5, "n": 6, ', kind)
    assert vars(partial.value) == {"days": 5, "nights": 6}
    assert "days" in partial
    assert "d" not in partial


class Noisy(pydantic.BaseModel):
    name: str
    count: int
    tags: list[str] = []

    @property
    def boom(self) -> int:
        raise ValueError("read")

    @functools.cached_property
    def long(self) -> str:
        return self.name * 2

    def total(self) -> int:
        return self.count


@dataclasses.dataclass(slots=True)
class NoisyData:
    name: str
    count: int
    tags: list[str]
    total: ClassVar[int] = 5

    @property
    def boom(self) -> int:
        raise ValueError("read")


@pytest.mark.parametrize("kind", [Noisy, NoisyData, {"type": "object"}])
@pytest.mark.parametrize(
    "text", ['{"name": "A", "count": 3, "tags": ["x"], ', '{"name": "A", "count": 3, "tags": ["x"]}']
)
def test_only_data_are_members(kind, text):
    partial = partial_of(text, kind)
    if kind is Noisy:
        assert partial.value.long == "AA"
        assert "long" not in repr(partial.value)
        assert partial.value == partial_of(text, kind).value
    for name in ("name", "count", "tags"):
        assert name in partial
    for place in (
        "total",
        "boom",
        "long",
        "model_dump",
        "__len__",
        ("name", "upper"),
        ("name", 0),
        ("count", "real"),
    ):
        assert place not in partial
    for place in (("tags", "append"), ("tags", -1), ("tags", 1), ("tags", 0, "upper"), 0):
        assert place not in partial
    assert ("tags", 0) in partial


def test_a_class_variable_is_read():
    assert partial_of('{"name": "A", ', NoisyData).value.total == 5


def test_copies_and_pickles():
    value = partial_of('{"name": "A"', Stop).value
    for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert other == value
        assert other.name == "A"
        assert type(other) is OpenObject
    assert value != Stop(name="A")
    assert Stop(name="A") != value
    assert value != partial_of('{"name": "A"', Named).value


class Named(pydantic.BaseModel):
    name: str


names = st.text(max_size=5)
stops = st.lists(st.fixed_dictionaries({"name": names}, optional={"nights": st.integers()}), max_size=3)
plans = st.fixed_dictionaries({"where": names, "stops": stops}, optional={"days": st.integers()})
cats = st.fixed_dictionaries({"kind": st.just("cat"), "lives": st.integers()})
dogs = st.fixed_dictionaries({"kind": st.just("dog"), "tricks": st.lists(names, max_size=2)})


@settings(deadline=None, max_examples=100)
@given(plan=plans, cut=st.integers(1, 9), pets=st.lists(cats | dogs, max_size=2))
def test_what_has_come_is_in_the_end(plan, cut, pets):
    kind = tuple[Plan, list[Cat | Dog], Frozen]
    text = json.dumps([plan, pets, {"x": 5}])
    reader, found = PartialReader(checker_of(kind)), []
    for start in range(0, len(text), cut):
        if reader.push(text[start : start + cut]):
            found.append(reader.partial.value)
    whole = found[-1]
    assert whole == pydantic.TypeAdapter(kind).validate_json(text)
    for part in found[:-1]:
        check(part, list(whole))


def check(part: Any, whole: Any) -> None:
    """Every field that has come is that of the whole, or a part of it."""
    if isinstance(part, list):
        assert len(part) <= len(whole)
        for one, other in zip(part, whole, strict=False):
            check(one, other)
    elif type(part) is OpenObject or type(part) is dict:
        assert type(part) is dict or isinstance(whole, part.__class__)
        for name, value in (part if type(part) is dict else vars(part)).items():
            check(value, getattr(whole, name))
    else:
        assert part == whole


def test_in_a_program():
    @rm.function
    def program(s):
        s += "Plan: " + rm.gen("plan", schema=Plan)

    text = '{"where": "Bern", "stops": [{"name": "A", "nights": 1}], "days": 3}'
    state = program.run(backend=rm.ScriptedBackend([text]), stream=True)
    found = list(state.stream_objects("plan"))
    assert all(isinstance(one.value, Plan) for one in found)
    assert found[-1].value == Plan.model_validate_json(text)
    assert type(found[-1].value) is Plan

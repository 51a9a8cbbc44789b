"""Calls from `grammars.python_call`: Python reads every text, the arguments bind, and have their types."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
from typing import Annotated, Any, Literal, NewType, NotRequired

import pydantic
import pytest
from typing_extensions import TypedDict

import ramify as rm
from ramify.errors import InvalidConstraint
from ramify.lang.grammars import python_call, read_call
from tests.grammar.sampling import samples
from tests.grammar.vocabularies import accepts, compiled


class Color(enum.Enum):
    RED = "red"
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0
    tags: list[str] = dataclasses.field(default_factory=list)


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class User(pydantic.BaseModel):
    name: str = pydantic.Field(description="Her full name.")
    manager: Movie | None = None


Id = NewType("Id", int)


def weather(city: str, days: int = 1, *, unit: Literal["celsius", "it's", 3, None] = "celsius") -> None: ...
def nothing() -> None: ...
def untyped(value, *rest, other: Any = None, **more): ...  # type: ignore[no-untyped-def]
def scalars(a: int, b: float, c: bool, d: None, e: Id, f: Annotated[str, "A note."]) -> None: ...
def optional(a: int | None = None, b: str | list[int] | None = None, c: Color = Color.RED) -> None: ...
def containers(
    a: list[str],
    b: dict[str, list[int]],
    c: tuple[int, str],
    d: tuple[bool, ...],
    e: tuple[int],
    f: set[Literal["x", 1]],
    g: dict[int, Any],
    h: list,  # type: ignore[type-arg]
) -> None: ...
def objects(point: Point, movie: Movie, user: User, *, points: list[Point] = ()) -> None: ...  # type: ignore[assignment]
async def keywords_alone(*, a: int, b: int = 2, c: int) -> None: ...


FUNCTIONS = [weather, nothing, untyped, scalars, optional, containers, objects, keywords_alone]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("budget", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_python_reads_every_text(function: Any, budget: int) -> None:
    kinds = {}
    for one in inspect.signature(function, eval_str=True).parameters.values():
        kinds[one.name] = Any if one.annotation is one.empty else one.annotation
    for text in samples(python_call([function]), budget, budget=budget):
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        assert ast.unparse(call.func) == function.__name__
        named = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        bound = inspect.signature(function).bind(*map(ast.literal_eval, call.args), **named)
        read = read_call(text, [function])
        assert read.name == function.__name__
        assert read.arguments.keys() == bound.arguments.keys()
        for name, value in read.arguments.items():
            exact = pydantic.TypeAdapter(kinds[name])
            assert exact.validate_python(value, strict=True) == value, text


def test_one_of_several() -> None:
    found = {text.partition("(")[0] for text in samples(python_call(FUNCTIONS), 100)}
    assert found == {function.__name__ for function in FUNCTIONS}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("weather('Paris')", {"city": "Paris"}),
        ('weather("Paris", 3)', {"city": "Paris", "days": 3}),
        ("weather(\"Paris\", days=-3, unit='celsius')", {"city": "Paris", "days": -3, "unit": "celsius"}),
        ('weather(city="a\\n\\"\'", unit="it\'s")', {"city": "a\n\"'", "unit": "it's"}),
        ("weather('', unit=None)", {"city": "", "unit": None}),
        ("nothing()", {}),
        ("keywords_alone(a=1, c=3)", {"a": 1, "c": 3}),
        ("optional(c='red')", {"c": Color.RED}),
        ("optional(None, [1, 2], 2)", {"a": None, "b": [1, 2], "c": Color.BLUE}),
        (
            'objects({"x": 1, "tags": ["a"]}, {"title": "T"}, {"name": "N", "manager": None})',
            {"point": Point(1.0, tags=["a"]), "movie": {"title": "T"}, "user": User(name="N", manager=None)},
        ),
        (
            'containers([], {"a": [1]}, (1, "a"), (True,), (0,), {"x", 1}, {1: {"k": [None]}}, [0.5])',
            {"a": [], "b": {"a": [1]}, "c": (1, "a"), "d": (True,), "e": (0,), "f": {"x", 1}}
            | {"g": {1: {"k": [None]}}, "h": [0.5]},
        ),
    ],
)  # fmt: skip
def test_what_may_be_written_is_read(text: str, arguments: dict[str, Any]) -> None:
    assert accepts(compiled(python_call(FUNCTIONS)), text)
    assert read_call(text, FUNCTIONS) == rm.ToolCall(text.partition("(")[0], arguments)


@pytest.mark.parametrize(
    "text",
    [
        "weather()",
        "weather(3)",
        "weather('a', city='b')",
        "weather('a', 'b')",
        "weather('a', 1, 'celsius')",
        "weather(days=1)",
        "weather('a', unit='kelvin')",
        "weather('a'",
        "weather(open('x'))",
        "weather(f'{x}')",
        "weather(*x)",
        "weather('a', **x)",
        "other()",
        "nothing() + nothing()",
        "keywords_alone(1, 2, 3)",
        "scalars(1.5, 1.0, True, None, 1, 'a')",
        "containers(['a'], {}, (1,), (), (0,), set(), {}, [])",
        "'weather'",
    ],
)
def test_other_texts_are_neither_written_nor_read(text: str) -> None:
    assert not accepts(compiled(python_call(FUNCTIONS)), text)
    with pytest.raises(ValueError, match=r"weather|scalars|containers|keywords_alone|node|Expression|cannot"):
        read_call(text, FUNCTIONS)


def test_one_function_needs_no_list() -> None:
    assert python_call(nothing) == python_call([nothing])


def test_names_may_be_given() -> None:
    signature = inspect.Signature([inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY, annotation=int)])
    functions = {"geometry.area": signature, "w": weather}
    assert {text.partition("(")[0] for text in samples(python_call(functions), 50)} == {"geometry.area", "w"}
    assert read_call("geometry.area(x=3)", functions) == rm.ToolCall("geometry.area", {"x": 3})


def test_tools_are_functions() -> None:
    def local(point: Point) -> None:
        """A tool."""

    tool = rm.tool(local, name="renamed")
    assert accepts(compiled(python_call([tool])), 'renamed({"x": 1.5})')


class Tree(TypedDict):
    children: list[Tree]


def bare(x: int, /) -> None: ...
def tree(x: Tree) -> None: ...
def range_(x: Annotated[int, pydantic.Field(ge=3)]) -> None: ...
def complex_(x: complex) -> None: ...
def keys(x: dict[tuple[int, int], int]) -> None: ...
def model(x: Percent) -> None: ...


SCHEMA = {"type": "object", "properties": {"a": {}}}


class Percent(pydantic.BaseModel):
    value: float = pydantic.Field(le=100)


@pytest.mark.parametrize(
    ("functions", "why"),
    [
        ([], "no functions"),
        (None, "functions is None; it must be functions"),
        ("weather", "functions is 'weather'; it must be functions"),
        (["weather"], "'weather' has no name"),
        (functools.partial(nothing), "has no name to be called by"),
        ([bare], "bare(x): it cannot be given by name"),
        ([tree], "contains itself"),
        ([range_], "not enforced"),
        ([complex_], "has no literals"),
        ([keys], "no type of keys"),
        ([model], "model(x).value"),
        ([nothing, nothing], "Two functions"),
        ({"a-b": nothing}, "cannot be called by that name"),
        ({"if": nothing}, "cannot be called by that name"),
        ([rm.Tool.from_schema("t", "", SCHEMA, lambda **a: a)], "JSON schema"),
    ],
)  # fmt: skip
def test_what_is_refused_says_why(functions: Any, why: str) -> None:
    with pytest.raises(InvalidConstraint) as refused:
        python_call(functions)
    assert why in refused.value.message
    assert refused.value.field == "functions"

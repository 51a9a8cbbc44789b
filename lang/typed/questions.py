"""Questions of Python types, and the values of their answers.

bool                                            predicate: True, False
Literal["a", "b"], an Enum, ["a", "b"]          choice
{"a": "when a fits", "b": "when b fits"}        choice with descriptions
Annotated[int, Levels("low", "mid", "high")]    score: 0, 1, 2
a pydantic model, dataclass, TypedDict          a question for each field
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from ramify.decisions.answers import Answer
from ramify.decisions.values import option_names
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.graph_text import Scalar
from ramify.lang.typed.adapters import fields_of, members_of
from ramify.lang.typed.decision import Decision
from ramify.questions import Option, Question
from ramify.text import shortened

Described = tuple[Any, str]
"""The value of an option, and its description (may be empty)."""


@dataclass(frozen=True, init=False, repr=False)
class Levels:
    """Ordered levels, lowest first: ``Annotated[int, Levels("low", "mid", "high")]``. The value of the answer
    is the number of a level, from 0. A level may be a pair of its name and a description."""

    levels: tuple[Described, ...]

    def __init__(self, *levels: str | tuple[str, str]) -> None:
        object.__setattr__(self, "levels", tuple(map(_pair, levels)))

    def __repr__(self) -> str:
        return f"Levels({', '.join(repr(pair if pair[1] else pair[0]) for pair in self.levels)})"


@dataclass(frozen=True)
class Asked:
    """A question, and the Python value of each of its options."""

    question: Question
    values: tuple[Any, ...]

    @property
    def scalar(self) -> Scalar:
        """The type of the value in the JSON of a decision (`Decision.plain`)."""
        match self.question.kind:
            case "predicate":
                return "bool"
            case "score":
                return "int"
        return "str"

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of each value, as `str` of a decision gives it."""
        if self.question.kind == "predicate":
            return tuple(map(str, self.values))
        return tuple(option.name for option in self.question.options)

    def decision(self, answer: Answer) -> Decision:
        """The decision of `answer`."""
        return Decision(
            self.values[answer.best],
            dict(zip(self.values, answer.probabilities, strict=True)),
            answer.confidence,
            answer.option_mass,
            answer.layout,
            answer.temperature,
            kind=self.question.kind,
            texts=self.texts,
            score=answer.score,
        )


def plain(question: Question) -> Asked:
    """`question` with plain data as values: booleans, the names of options, the numbers of levels."""
    match question.kind:
        case "predicate":
            return Asked(question, (True, False))
        case "score":
            return Asked(question, tuple(range(len(question.options))))
    return Asked(question, tuple(option.name for option in question.options))


def questions_of(kind: Any, instructions: str | None, field: str = "") -> Asked | dict[str, Asked]:
    """The question of a type; for a type with fields, the question of each field.

    Raises `InvalidRequest` for options that are missing or equal, and for a predicate without instructions.
    Raises `UnsupportedField` for a type that is no question. `field` is the path in their messages.
    """
    members = members_of(kind)
    if members is None:
        return _question(kind, instructions, field or "kind")
    if instructions:
        raise InvalidRequest(
            f"{_name(kind)} has a question for each field, and no instructions of its own.",
            field="instructions",
            remedy="Write them into the descriptions of its fields, or into the state.",
        )
    found: dict[str, Asked] = {}
    for name, (hint, _) in members.items():
        where = f"{field}.{name}".removeprefix(".")
        description = _description(kind, name, hint)
        found[name] = _question(hint, description, where)
    if not found:
        raise InvalidRequest(f"{_name(kind)} has no fields to decide.", field=field or "kind")
    return found


def _question(kind: Any, instructions: str | None, field: str) -> Asked:
    """The question of a type without fields."""
    described: dict[Any, str] = {}
    levels = kind if isinstance(kind, Levels) else None
    if get_origin(kind) is Annotated:
        kind, *marks = get_args(kind)
        levels = next((mark for mark in marks if isinstance(mark, Levels)), None)
        described = next((dict(mark) for mark in marks if isinstance(mark, Mapping)), {})
    if instructions is not None and not isinstance(instructions, str):
        raise InvalidRequest(
            f"The instructions of {field} are {instructions!r}, no text.",
            field=field,
            remedy="The type comes first: (bool, 'Is it urgent?')." if isinstance(kind, str) else None,
        )
    text = (instructions or "").strip()
    if levels is not None:
        if kind not in (int, levels):
            raise InvalidRequest(f"Levels are for int, and {field} is {_name(kind)}.", field=field)
        options = _options([(name, about) for name, about in levels.levels], field)
        return plain(_checked(Question(kind="score", instructions=text, options=options), field))
    pairs = _pairs(kind, field)
    for value in described:
        if value not in [one for one, _ in pairs]:
            raise InvalidRequest(f"{value!r} is described, and is no option of {field}.", field=field)
    if described:
        pairs = [(value, described.get(value, about)) for value, about in pairs]
    if len(pairs) == 2 and all(type(value) is bool for value, _ in pairs):
        options = _options(sorted(pairs, reverse=True), field)
        if not text and not any(about for _, about in pairs):
            raise InvalidRequest(
                f"{field} asks nothing: a predicate needs instructions.",
                field=field,
                remedy="Write them third in a step, decide('urgent', bool, 'Is it urgent?'); as a pair in a "
                "mapping, (bool, 'Is it urgent?'); and as the description of a field, "
                "Annotated[bool, Field(description='Is it urgent?')].",
            )
        return plain(_checked(Question(kind="predicate", instructions=text, options=options), field))
    question = _checked(Question(kind="choice", instructions=text, options=_options(pairs, field)), field)
    values = tuple(value for value, _ in pairs)
    for place, value in enumerate(values):
        if value in values[:place]:
            raise InvalidRequest(
                f"{field} has the options {values[values.index(value)]!r} and {value!r}, which are equal in "
                "Python.",
                field=field,
                remedy="Write one of them as a text.",
            )
    return Asked(question, values)


def _checked(question: Question, field: str) -> Question:
    try:
        return question.check()
    except InvalidRequest as error:
        error.field = field
        raise


def _pairs(kind: Any, field: str) -> list[Described]:
    """The values of a type and their descriptions."""
    if kind is bool:
        return [(True, ""), (False, "")]
    if get_origin(kind) is Literal:
        return [(value, "") for value in get_args(kind)]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [(member, "") for member in kind]
    if isinstance(kind, Mapping):
        return [(value, about or "") for value, about in kind.items()]
    if isinstance(kind, list):
        return [_pair(one) for one in kind]
    if isinstance(kind, str):
        raise InvalidRequest(
            f"{field} is the text {shortened(repr(kind), 80)}; a question has a type.",
            field=field,
            remedy=f"For a yes or no, write the type before the text: (bool, {shortened(repr(kind), 80)}).",
        )
    raise UnsupportedField(
        f"{field} is {_name(kind)}, which is no question.",
        field=field,
        remedy="Take bool, Literal, an Enum, a list or mapping of options, or Annotated[int, Levels(...)]; "
        "for other types use gen(schema=...).",
    )


def _pair(one: Any) -> Described:
    if isinstance(one, tuple) and len(one) == 2:
        return one[0], one[1] or ""
    return one, ""


def _options(pairs: Sequence[Described], field: str) -> tuple[Option, ...]:
    for value, about in pairs:
        if not name_of(value) or not isinstance(about, str):
            raise InvalidRequest(
                f"{field} has the option {value!r} with the description {about!r}; an option is a non-empty "
                "text, a number, a bool or a member of an Enum, and a description is a text.",
                field=field,
            )
    values = [value if isinstance(value, bool) else name_of(value) for value, _ in pairs]
    names = option_names(values)
    return tuple(
        [Option(name=name, description=about) for name, (_, about) in zip(names, pairs, strict=True)]
    )


def name_of(value: Any) -> str:
    """The name of an option: a text itself, ``true`` or ``false``, digits, the text of an Enum's member, or
    the member's name if its value is no text. Empty for any other value."""
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value.value, str) else value.name
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int) else ""


def _description(kind: Any, name: str, hint: Any) -> str | None:
    """The description of a field: pydantic's, or that of a pydantic ``Field`` in an annotation."""
    fields = fields_of(kind)
    if fields is not None:
        return fields[name][1].description
    marks: Iterator[Any] = iter(get_args(hint)[1:]) if get_origin(hint) is Annotated else iter(())
    return next((mark.description for mark in marks if hasattr(mark, "description")), None)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", None) or repr(kind)

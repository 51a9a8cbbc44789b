"""The results of `decide`: the value of a question, and the probability of each of its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, NoReturn

from typing_extensions import TypeVar

from ramify.questions import QuestionKind

T = TypeVar("T", default=Any)


class Decision(Generic[T]):
    """The answer to one question, whose options are values of the type `T`.

    It has no truth value and equals nothing but other decisions: read `value`. ``str(decision)`` is `text`,
    and ``repr(decision)`` shows the probabilities, the confidence and the option mass.
    """

    def __init__(
        self,
        value: T,
        probabilities: Mapping[T, float],
        confidence: float,
        option_mass: float | None,
        layout: str,
        temperature: float,
        *,
        kind: QuestionKind,
        texts: tuple[str, ...],
        score: float,
    ) -> None:
        self.value = value
        """The most probable option as a Python value: bool, the option's own value, or the level's number."""
        self.probabilities = dict(probabilities)
        """Value → probability; the sum is 1."""
        self.confidence = confidence
        """Concentration of the probabilities, from 0 to 1 (definitions: docs/decide-definitions.md)."""
        self.option_mass = option_mass
        """Probability that the model answers with any of the options. Small if no option fits. None if a
        remote endpoint gave probabilities alone."""
        self.layout = layout
        """Name and version of the layout in which the question was asked."""
        self.temperature = temperature
        """Temperature that a calibration applied; 1 where none holds for the question as it was asked."""
        self.texts = texts
        """The text of each value of `probabilities`, in its order."""
        self.kind = kind
        """predicate, choice or score."""
        self._score = score

    @property
    def score(self) -> float:
        """Expected level, counted from 0. Raises AttributeError for a question without levels."""
        if self.kind != "score":
            raise AttributeError("Only a question with Levels has a score.")
        return self._score

    @property
    def text(self) -> str:
        """The text of `value`: the name of the option or level; of a predicate ``True`` or ``False``."""
        return self.texts[list(self.probabilities).index(self.value)]

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain data, for JSON. Probabilities are keyed by the names of options, by the
        numbers of levels, or by "true" and "false"."""
        names = self.texts if self.kind == "choice" else [str(value).lower() for value in self.probabilities]
        found: dict[str, Any] = {
            "value": self.plain,
            "text": self.text,
            "probabilities": dict(zip(names, self.probabilities.values(), strict=True)),
            "confidence": self.confidence,
            "option_mass": self.option_mass,
            "layout": self.layout,
            "temperature": self.temperature,
        }
        return {**found, "score": self._score} if self.kind == "score" else found

    @property
    def plain(self) -> bool | int | str:
        """`value` as plain data."""
        plain: bool | int | str = self.text if self.kind == "choice" else self.value  # type: ignore[assignment]
        return plain

    def __bool__(self) -> NoReturn:
        raise TypeError("A decision is neither true nor false: write decision.value.")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Decision):
            return self.__dict__ == other.__dict__
        raise TypeError(f"A decision is compared with {other!r}: write decision.value.")

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        shown = ", ".join(f"{value!r}: {p:.3f}" for value, p in self.probabilities.items())
        mass = "" if self.option_mass is None else f", option_mass={self.option_mass:.3g}"
        return f"Decision({self.value!r}, {{{shown}}}, confidence={self.confidence:.3f}{mass})"


class ModelDecision(Mapping[str, Decision], Generic[T]):
    """The answers to the questions of a pydantic model, dataclass or TypedDict `T`, by field.

    `value` is an instance of the type; the other attributes are dicts by field. It has no truth value.
    """

    def __init__(self, value: T, fields: Mapping[str, Decision]) -> None:
        self.value = value
        self._fields = dict(fields)

    @property
    def probabilities(self) -> dict[str, dict[Any, float]]:
        return {name: one.probabilities for name, one in self.items()}

    @property
    def confidence(self) -> dict[str, float]:
        return {name: one.confidence for name, one in self.items()}

    @property
    def option_mass(self) -> dict[str, float | None]:
        return {name: one.option_mass for name, one in self.items()}

    @property
    def layout(self) -> dict[str, str]:
        return {name: one.layout for name, one in self.items()}

    @property
    def temperature(self) -> dict[str, float]:
        return {name: one.temperature for name, one in self.items()}

    def to_dict(self) -> dict[str, Any]:
        """The decisions as plain data, for JSON: dicts by field, as the attributes are."""
        fields = {name: one.to_dict() for name, one in self.items()}
        names = ("value", "probabilities", "confidence", "option_mass", "layout", "temperature")
        return {name: {field: one[name] for field, one in fields.items()} for name in names}

    def __getitem__(self, name: str) -> Decision:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    __bool__ = Decision.__bool__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ModelDecision):
            return self._fields == other._fields
        raise TypeError(f"Decisions are compared with {other!r}: write decisions.value.")

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return ", ".join(f"{name}: {one}" for name, one in self.items())

    def __repr__(self) -> str:
        return f"ModelDecision({self.value!r}, {self._fields!r})"

"""The nodes of a program: frozen values, which a visitor interprets.

The visitor `Interpreter` runs a program; the visitor `RecordedBranch` in `lang/graph` traces a program.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, NoReturn

from typing_extensions import TypeVar

import ramify.graph as graph
from ramify.decisions.answers import Answer
from ramify.errors import InvalidRequest
from ramify.graph_text import Change, Scalar, changed, scalar_text
from ramify.lang.calls.choices import METHODS, ChoicesSamplingMethod
from ramify.lang.typed.decision import Decision, ModelDecision
from ramify.lang.typed.questions import Asked, plain
from ramify.lang.typed.schema import convert

if TYPE_CHECKING:
    from ramify.lang.backends.base import Backend
    from ramify.lang.program.branch import Branch
    from ramify.lang.program.variables import Variable
    from ramify.lang.tools.tool import Tool

T_co = TypeVar("T_co", covariant=True, default=Any)
"""The type of the value that a program reads."""


class StepVisitor:
    """Base of the visitors that interpret steps. As in `ast.NodeVisitor`, the method ``visit_NAME`` takes the
    steps of the class NAME. The method for a step that waits returns an awaitable."""

    def visit(self, step: Step, variable: Variable | None) -> Awaitable[None] | None:
        """Interpret `step`, and set `variable` (None for a step without a result) to its result. Returns an
        awaitable if the step waits, else None."""
        method: Callable[..., Awaitable[None] | None] = getattr(self, step.visited_by)
        return method(step, variable)


@dataclass(frozen=True)
class Node:
    """One step of a program, or a sequence of steps. ``+`` concatenates nodes and texts."""

    waits: ClassVar[bool] = False
    """Whether the node waits for the backend or for other branches."""

    def steps(self) -> Iterator[Step]:
        """The steps of the node, in order."""
        raise NotImplementedError

    def __add__(self, other: object) -> Node:
        return _concatenate(self, other)

    def __radd__(self, other: object) -> Node:
        return _concatenate(other, self)

    def __format__(self, spec: str) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot stand in an f-string, where it would become its own name; "
            'write "text" + gen(...) + "text".'
        )


@dataclass(frozen=True)
class Step(Node):
    """A single step."""

    visited_by: ClassVar[str]
    """The name of the method of a `StepVisitor` for steps of the class."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.visited_by = f"visit_{cls.__name__}"

    def steps(self) -> Iterator[Step]:
        yield self

    @property
    def variable(self) -> str | None:
        """The name of the variable that the step sets; None if the step sets no variable, or a variable
        without a name."""
        return None

    @property
    def bare(self) -> Step:
        """The step without its conditions."""
        return self


@dataclass(frozen=True)
class VariableStep(Step, Generic[T_co]):
    """A step with a result of the type `T_co`. The result is kept in a variable, which may have no name. A
    step with a name can be given wherever a variable's name is taken (`name_of`)."""


@dataclass(frozen=True)
class ModelStep(VariableStep[T_co]):
    """A step that calls a model: the step's node in a graph, and the arguments that a graph cannot hold."""

    waits: ClassVar[bool] = True
    node: graph.Gen | graph.Select | graph.CallTools | graph.Decide
    """The options of the step in the form of a graph's node."""
    backend: Backend | str | None = field(default=None, kw_only=True)
    """The backend that the step names. None stands for the run's own backend."""
    line: str | None = field(default=None, kw_only=True)

    @property
    def variable(self) -> str | None:
        return self.node.name

    @property
    def on(self) -> On:
        """The backend and the model that the step names."""
        return On(self.backend, self.node.model)

    def local(self) -> dict[str, object]:
        """Argument → value, for the arguments that a graph has no field for."""
        return {} if self.backend is None else {"backend": self.backend}


class On(NamedTuple):
    """A backend and a model, by its name on that backend; each None if none is named."""

    backend: Backend | str | None = None
    model: str | None = None

    def over(self, usual: On) -> On:
        """Backend and model named here, else those of `usual`, whose model is one of its backend."""
        return self if self.backend is not None else On(usual.backend, self.model or usual.model)


OWN = On()
"""The run's own backend and model."""


@dataclass(frozen=True)
class Row(Node):
    """A sequence of steps."""

    items: tuple[Step, ...]

    def steps(self) -> Iterator[Step]:
        return iter(self.items)


@dataclass(frozen=True)
class Text(Step):
    value: str


@dataclass(frozen=True)
class Interpolated(Step):
    """Append text that contains results of other steps, once these results are ready."""

    waits: ClassVar[bool] = True
    parts: tuple[str | ResultRef, ...]
    count: Callable[[str], None] | None = field(default=None, compare=False)
    """A function that is called with the text of each result, and raises `InvalidRequest` if the run has
    inserted too much text. None for no check."""


@dataclass(frozen=True)
class ResultRef:
    """A reference to a variable's value, or to a part of it. `read` and `value` may be called only when the
    variable is ready. They raise the error of the variable's step."""

    variable: Variable
    index: int | None = None
    """The index of the output, for a step with ``n`` > 1; else None."""
    then: tuple[Change, ...] = ()
    type: Scalar | None = None
    """The type of the value at `path`, if the variable's text is JSON; else None."""
    path: tuple[str | int, ...] = ()
    thinking: bool = False
    """Whether the reference is to the thoughts before the value, not to the value."""

    def read(self) -> str:
        """The value as text, changed by the methods in `then`."""
        if self.type is None:
            return changed(self.value(), self.then)
        self.variable.read()
        return changed(scalar_text(self.variable.text or "", self.path, self.type), self.then)

    def value(self) -> Any:
        """The value as the program reads it, without the methods in `then`."""
        value: Any = self.variable.read_thinking() if self.thinking else self.variable.read()
        value = value if self.index is None else value[self.index]
        for key in self.path:
            keyed = hasattr(value, "__getitem__") and not isinstance(value, ModelDecision)
            value = value[key] if keyed else getattr(value, str(key))
        return value


@dataclass(frozen=True)
class RoleBegin(Step):
    role: str
    line: str | None = None
    tools: bool = False


@dataclass(frozen=True)
class RoleEnd(Step):
    role: str


@dataclass(frozen=True)
class ScopeBegin(Step):
    """Begin a scope. The text from here to the `ScopeEnd` of the same name becomes the value of the variable
    `name`."""

    name: str


@dataclass(frozen=True)
class ScopeEnd(VariableStep):
    name: str

    @property
    def variable(self) -> str:
        return self.name


@dataclass(frozen=True)
class Gen(ModelStep[T_co]):
    """Generate text."""

    node: graph.Gen
    parse: Callable[[str], Any] | None = None
    """A function that parses the generated text to the value; None if the text itself is the value. Any
    exception fails the step."""
    kind: Any = None
    """The schema of the value, as the user gave it; None without a schema."""
    validate: Callable[[Any], object] | None = None
    """A function that is called with the value, and rejects it by raising ValueError or AssertionError."""
    retries: int = 0
    keep_failed: bool = False
    separate: bool = False
    """Whether the thoughts are also set as a variable of their own, NAME_reasoning_content."""

    def local(self) -> dict[str, object]:
        own = {"validate": self.validate, "retries": self.retries or None}
        return super().local() | {name: value for name, value in own.items() if value is not None}


@dataclass(frozen=True)
class Select(ModelStep[str]):
    """Append the choice that the model finds most likely."""

    node: graph.Select
    own_method: ChoicesSamplingMethod | None = None
    """A method for which graphs have no name; None if `node` names the method."""

    @property
    def method(self) -> ChoicesSamplingMethod:
        return self.own_method or METHODS[self.node.method]

    def local(self) -> dict[str, object]:
        own = {} if self.own_method is None else {"choices_method": self.own_method}
        return super().local() | own


@dataclass(frozen=True)
class Decide(ModelStep[T_co]):
    """Answer questions about the content so far."""

    node: graph.Decide
    asked: Mapping[str, Asked]
    """Field → question; the field of a single question is empty."""
    kind: Any = None
    """The type with the fields; None for a single question."""

    @classmethod
    def of(cls, node: graph.Decide, line: str | None) -> Decide:
        """The step of a graph's node, whose values are plain data."""
        return cls(node, {field: plain(question) for field, question in node.asked.items()}, line=line)

    def decision(self, answers: Sequence[Answer]) -> Decision | ModelDecision:
        """The result of the step. Raises ValueError if the type rejects the values."""
        found = {
            field: asked.decision(answer)
            for (field, asked), answer in zip(self.asked.items(), answers, strict=True)
        }
        if "" in found:
            return found[""]
        values = {field: one.value for field, one in found.items()}
        return ModelDecision(values if self.kind is None else convert(values, self.kind), found)


@dataclass(frozen=True)
class DescribeTools(Step):
    """Append the descriptions of tools."""

    tools: tuple[Tool[..., Any], ...]


@dataclass(frozen=True)
class CallTools(ModelStep):
    """Generate tool calls, run them, and append their results."""

    node: graph.CallTools
    tools: tuple[Tool[..., Any], ...]
    raises: bool = False
    """Whether the error of a tool fails the step, instead of being shown to the model."""

    def local(self) -> dict[str, object]:
        return super().local() | ({"errors": "raise"} if self.raises else {})


@dataclass(frozen=True)
class Fork(Step):
    """Start the children, which take the content of the branch."""

    children: tuple[Branch, ...]


@dataclass(frozen=True)
class Splice(Step):
    """Append the content that each child added after the fork, in order, once all children are done."""

    waits: ClassVar[bool] = True
    children: tuple[Branch, ...]


@dataclass(frozen=True)
class Guard:
    """The condition that the text of `value` is one of `among`; with `negated`, that it is none of
    `among`."""

    value: ResultRef
    among: tuple[str, ...]
    negated: bool = False


@dataclass(frozen=True)
class Guarded(Step):
    """A step that is skipped unless all conditions in `guards` hold."""

    waits: ClassVar[bool] = True
    step: Step
    guards: tuple[Guard, ...]

    @property
    def variable(self) -> str | None:
        return self.step.variable

    @property
    def bare(self) -> Step:
        return self.step


@dataclass(frozen=True)
class Either(VariableStep):
    """A step that sets a variable to the first of `sources` whose step was not skipped."""

    waits: ClassVar[bool] = True
    name: str | None
    sources: tuple[Variable, ...]

    @property
    def variable(self) -> str | None:
        return self.name


def name_of(variable: str | VariableStep) -> str:
    """The name of a variable, which is given by its name or by its step: ``s[score]`` is ``s["score"]``.

    Raises `InvalidRequest` for a step without a name, and for any other node.
    """
    if not isinstance(variable, Node):
        return variable
    name = variable.variable if isinstance(variable, Step) else None
    if name is None:
        kind = type(variable.bare if isinstance(variable, Step) else variable).__name__
        what = "several steps joined with +" if isinstance(variable, Row) else f"a {kind} without a name"
        raise InvalidRequest(
            f"A variable is given by {what}.",
            field="name",
            remedy='Give one step that has a name: score = gen("score", ...), then s[score].',
        )
    return name


def as_node(item: object) -> Node:
    """`item` as a node: a string becomes a `Text`, and a node is returned unchanged. Raises TypeError for
    anything else."""
    if isinstance(item, Node):
        return item
    if isinstance(item, str):
        return Text(item)
    if item is None:
        raise ValueError("Tried to append None to a state.")
    raise TypeError(f"Only text and expressions can be appended, not {type(item).__name__}; write str(...).")


def _concatenate(left: object, right: object) -> Node:
    return Row((*as_node(left).steps(), *as_node(right).steps()))

"""The nodes of a program: frozen values, each of which calls its own method on an interpreter.

A backend or a tracer that treats a node differently overrides one method of the interpreter; nothing
asks a node for its type.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from ramify.constraint import Constraint
from ramify.graph import Change, Scalar, changed, scalar_text

if TYPE_CHECKING:
    from ramify.lang.calls.choices import ChoicesSamplingMethod
    from ramify.lang.program.branch import Branch
    from ramify.lang.program.variables import Variable
    from ramify.lang.tools.tool import Tool


class Visitor(Protocol):
    """What runs nodes. Methods of nodes that wait return an awaitable; the others are done on return."""

    def text(self, node: Text) -> None: ...
    def role_begin(self, node: RoleBegin) -> None: ...
    def role_end(self, node: RoleEnd) -> None: ...
    def scope_begin(self, node: ScopeBegin) -> None: ...
    def scope_end(self, node: ScopeEnd, variable: Variable) -> None: ...
    def fork(self, node: Fork) -> None: ...
    def describe_tools(self, node: DescribeTools) -> None: ...
    def interpolated(self, node: Interpolated) -> Awaitable[None]: ...
    def splice(self, node: Splice) -> Awaitable[None]: ...
    def gen(self, node: Gen, variable: Variable) -> Awaitable[None]: ...
    def select(self, node: Select, variable: Variable) -> Awaitable[None]: ...
    def call_tools(self, node: CallTools, variable: Variable) -> Awaitable[None]: ...


@dataclass(frozen=True)
class Node:
    """One step of a program, or several in a row; ``+`` puts text and nodes in a row."""

    waits: ClassVar[bool] = False
    """Running it waits for the backend or for other branches."""

    def steps(self) -> Iterator[Step]:
        """The single steps, in order."""
        raise NotImplementedError

    def __add__(self, other: object) -> Node:
        return _in_a_row(self, other)

    def __radd__(self, other: object) -> Node:
        return _in_a_row(other, self)

    def __format__(self, spec: str) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot stand in an f-string, where it would become its own name; "
            'write "text" + gen(...) + "text".'
        )


@dataclass(frozen=True)
class Step(Node):
    """A node that is run as one."""

    def steps(self) -> Iterator[Step]:
        yield self

    @property
    def variable(self) -> str | None:
        """The variable that this step sets."""
        return None

    @property
    def sets(self) -> bool:
        """The step has an outcome that is kept, named or not."""
        return False

    @property
    def asks(self) -> bool:
        """The step asks the model."""
        return self.waits and self.sets

    def run(self, visitor: Visitor, variable: Variable | None) -> Awaitable[None] | None:
        raise NotImplementedError

    def abandon(self, error: Exception) -> None:
        """Called in place of `run` when an earlier step has failed."""


@dataclass(frozen=True)
class VariableStep(Step):
    """A step whose outcome is kept, under `name` where it has one."""

    name: str | None

    @property
    def variable(self) -> str | None:
        return self.name

    @property
    def sets(self) -> bool:
        return True


@dataclass(frozen=True)
class Row(Node):
    """Steps in a row."""

    items: tuple[Step, ...]

    def steps(self) -> Iterator[Step]:
        return iter(self.items)


@dataclass(frozen=True)
class Text(Step):
    value: str

    def run(self, visitor: Visitor, variable: Variable | None) -> None:
        visitor.text(self)


@dataclass(frozen=True)
class Interpolated(Step):
    """Append text that the outcomes of other steps are a part of, once they are there."""

    waits: ClassVar[bool] = True
    parts: tuple[str | ResultRef, ...]

    def run(self, visitor: Visitor, variable: Variable | None) -> Awaitable[None]:
        return visitor.interpolated(self)


@dataclass(frozen=True)
class ResultRef:
    """The outcome of a variable that may still have to be set; with `index`, one of its several outputs, and
    with `path`, what is there in it. `read` and `value` raise what the variable's step failed with; the
    variable must be ready."""

    variable: Variable
    index: int | None = None
    then: tuple[Change, ...] = ()
    type: Scalar | None = None
    """Of what is at `path`, where the variable's text is JSON."""
    path: tuple[str | int, ...] = ()

    def read(self) -> str:
        """The text of it."""
        if self.type is None:
            return changed(self.value(), self.then)
        self.variable.read()
        return changed(scalar_text(self.variable.text or "", self.path, self.type), self.then)

    def value(self) -> Any:
        """The value itself, as the program gets it."""
        value: Any = self.variable.read()
        value = value if self.index is None else value[self.index]
        for key in self.path:
            value = value[key] if hasattr(value, "__getitem__") else getattr(value, str(key))
        return value


@dataclass(frozen=True)
class RoleBegin(Step):
    role: str
    line: str | None = None
    tools: bool = False
    """The turn tells of tools."""

    def run(self, visitor: Visitor, variable: Variable | None) -> None:
        visitor.role_begin(self)


@dataclass(frozen=True)
class RoleEnd(Step):
    role: str

    def run(self, visitor: Visitor, variable: Variable | None) -> None:
        visitor.role_end(self)


@dataclass(frozen=True)
class ScopeBegin(Step):
    """From here to the `ScopeEnd` of the same name, all text becomes the value of the variable."""

    name: str

    def run(self, visitor: Visitor, variable: Variable | None) -> None:
        visitor.scope_begin(self)


@dataclass(frozen=True)
class ScopeEnd(VariableStep):
    name: str

    def run(self, visitor: Visitor, variable: Variable | None) -> None:
        assert variable is not None
        visitor.scope_end(self, variable)


@dataclass(frozen=True)
class Gen(VariableStep):
    """Generate text. `options` are fields of `SamplingParams`; those of the run fill in the rest."""

    waits: ClassVar[bool] = True
    options: Mapping[str, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    parse: Callable[[str], Any] | None = None
    """Text to value; None keeps the text. Any exception it raises fails the step."""
    stop: tuple[str, ...] = ()
    """Stop strings that belong to the constraint, beside those in `options`."""
    kind: Any = None
    """The schema as the user gave it; None without one."""
    validate: Callable[[Any], object] | None = None
    """Called with the value; raises ValueError or AssertionError for one that will not do."""
    retries: int = 0
    keep_failed: bool = False
    timeout: float | None = None
    """Seconds for the whole step."""
    line: str | None = None

    def run(self, visitor: Visitor, variable: Variable | None) -> Awaitable[None]:
        assert variable is not None
        return visitor.gen(self, variable)


@dataclass(frozen=True)
class Select(VariableStep):
    """Append the choice that the model finds most likely."""

    waits: ClassVar[bool] = True
    choices: tuple[str, ...]
    method: ChoicesSamplingMethod
    timeout: float | None = None
    line: str | None = None

    def run(self, visitor: Visitor, variable: Variable | None) -> Awaitable[None]:
        assert variable is not None
        return visitor.select(self, variable)


@dataclass(frozen=True)
class DescribeTools(Step):
    """Append what the model must know to call the tools."""

    tools: tuple[Tool[..., Any], ...]

    def run(self, visitor: Visitor, variable: Variable | None) -> None:
        visitor.describe_tools(self)


@dataclass(frozen=True)
class CallTools(VariableStep):
    """Have the model call tools, run them, and append their results."""

    waits: ClassVar[bool] = True
    tools: tuple[Tool[..., Any], ...]
    max_calls: int
    required: bool
    raises: bool
    """The error of a tool fails the step, and is not shown to the model."""
    options: Mapping[str, Any]
    timeout: float | None = None
    line: str | None = None

    def run(self, visitor: Visitor, variable: Variable | None) -> Awaitable[None]:
        assert variable is not None
        return visitor.call_tools(self, variable)


@dataclass(frozen=True)
class Fork(Step):
    """The children begin with what the branch holds here."""

    children: tuple[Branch, ...]

    def run(self, visitor: Visitor, variable: Variable | None) -> None:
        visitor.fork(self)

    def abandon(self, error: Exception) -> None:
        for child in self.children:
            child.fail(error)


@dataclass(frozen=True)
class Splice(Step):
    """Append what each child holds beyond the fork, in order, once all of them are done."""

    waits: ClassVar[bool] = True
    children: tuple[Branch, ...]

    def run(self, visitor: Visitor, variable: Variable | None) -> Awaitable[None]:
        return visitor.splice(self)


def as_node(item: object) -> Node:
    """A string as a `Text`, a node as itself; TypeError for anything else."""
    if isinstance(item, Node):
        return item
    if isinstance(item, str):
        return Text(item)
    if item is None:
        raise ValueError("Tried to append None to a state.")
    raise TypeError(f"Only text and expressions can be appended, not {type(item).__name__}; write str(...).")


def _in_a_row(left: object, right: object) -> Node:
    return Row((*as_node(left).steps(), *as_node(right).steps()))

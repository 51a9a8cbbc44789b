"""Tracing: a traced program's branches add their steps to a graph instead of running them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Generator, Sequence
from dataclasses import replace
from types import CellType
from typing import Any, Literal, NamedTuple, NoReturn, cast, get_args, get_origin

import ramify.graph as graph
from ramify.errors import ProgramError
from ramify.lang.backends.base import Backend
from ramify.lang.calls.choices import METHODS
from ramify.lang.calls.options import resolve_options
from ramify.lang.graph.symbolic import About, NotConcrete, Symbolic, SymbolicText, SymbolicValue
from ramify.lang.program.branch import Branch
from ramify.lang.program.nodes import (
    CallTools,
    DescribeTools,
    Fork,
    Gen,
    Interpolated,
    ModelStep,
    ResultRef,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Splice,
    Step,
    Text,
    VariableStep,
)
from ramify.lang.program.run import Run
from ramify.lang.program.state import ProgramState
from ramify.lang.program.statement import Statement
from ramify.lang.program.variables import Variable
from ramify.lang.trace.calls import Call
from ramify.messages import Generate, ModelInfo, TextChunk

BY_STEPS = "Run the program without compile(), step by step."
FIELDS = f"Fields that every result has can be put into text, and the whole can be returned. {BY_STEPS}"
APPENDED = f"Results can be appended as they are, or with + and f-strings. {BY_STEPS}"

Source = graph.Argument | graph.Result


class Submitted(NamedTuple):
    """A step as it was appended."""

    branch: str
    """The branch's key, which is the same in every run."""
    step: Step
    variable: Variable | None


class GraphBuilder(Run):
    """The run of a traced program, without a backend: the graph so far, and what tracing learned beside
    it."""

    def __init__(self, name: str) -> None:
        self.branches = 0
        super().__init__(name, _Nowhere(), NO_MODEL, {})
        self.nodes: list[graph.AnyNode] = []
        self.lines: dict[int, str] = {}
        self.steps: dict[int, Gen | Select] = {}
        self.values: list[tuple[int, int, str, Any]] = []
        self.reads: list[Variable] = []
        self.sources: dict[Variable, Source] = {}
        self.submitted: list[Submitted] = []
        """The steps before the first refusal, of all branches, in the order of the program."""
        self.refused: NotConcrete | None = None
        """The first refusal, even if the program caught it."""
        self.known = 0
        """Number of nodes at the first refusal."""

    def resolved(self, step: Step, backend: Backend | str | None = None) -> Step:
        """`step` with the backend that it names, else `backend`; names are looked up when the graph runs."""
        if isinstance(step, ModelStep) and step.backend is None:
            return replace(step, backend=backend)
        return step

    def branch(self, call: Call) -> RecordedBranch:
        return RecordedBranch(self, call)

    def argument(self, name: str) -> SymbolicText:
        """A placeholder for an argument that is given only when the graph runs."""
        variable = Variable(name)
        self.sources[variable] = graph.Argument(name=name)
        remedy = f"Give it when compiling: compile({name}=...)."
        return SymbolicText(About(f"The argument {name!r}", remedy, self.refuse), (ResultRef(variable),))

    def refuse(self, error: NotConcrete) -> None:
        if self.body_done.is_set():
            # A function that the program defined is called in a run, and still holds a symbolic value.
            raise ProgramError(error.message)
        if self.refused is None:
            self.refused, self.known = error, len(self.nodes)

    def caught(self) -> None:
        """Called where the program catches an exception: tracing itself may have caused it."""
        self.refuse_node("The program catches an exception, which a graph cannot do.")

    def refuse_node(self, message: str) -> NoReturn:
        """Raise `NotConcrete` for an operation that no graph has."""
        error = NotConcrete(message, BY_STEPS)
        self.refuse(error)
        raise error

    def add(self, node: graph.AnyNode, line: str | None = None) -> int:
        """Append a node; returns its index."""
        place = len(self.nodes)
        if line is not None:
            self.lines[place] = line
        self.nodes.append(node)
        return place

    def value_of(self, step: VariableStep, variable: Variable) -> Any:
        """The symbolic value that the program gets when it reads the variable of `step`."""
        kind = type(step).__name__.lower()
        what = f"The result of {kind} {step.name!r}" if step.name else f"The result of a {kind}"

        def outcome(index: int | None = None) -> Symbolic:
            source = ResultRef(variable, index)
            if isinstance(step, Gen) and not _is_text(step):
                return SymbolicValue(About(what, FIELDS, self.refuse), source, step.kind)
            return SymbolicText(About(what, APPENDED, self.refuse), (source,))

        several = resolve_options(step.options).n if isinstance(step, Gen) else 1
        return outcome() if several == 1 else [outcome(index) for index in range(several)]


def _is_text(step: Gen) -> bool:
    """The value is the generated text itself."""
    if get_origin(step.kind) is Literal:
        return all(type(value) is str for value in get_args(step.kind))
    return step.parse in (None, str)


class RecordedBranch(Branch):
    """A branch that adds its steps to the graph."""

    def __init__(self, builder: GraphBuilder, call: Call, parent: Branch | None = None) -> None:
        super().__init__(builder, call, parent)
        self.builder = builder
        self.number = builder.branches
        builder.branches += 1
        self._busy = False
        self._recorder = Recorder(self)

    def _submit(self, step: Step, statement: Statement) -> Variable | None:
        variable = self._declare(step)
        step.run(self._recorder, variable)
        if self.builder.refused is None:
            self.builder.submitted.append(Submitted(self.key, step, variable))
        return variable

    def fork(self, size: int) -> list[Branch]:
        self.builder.fork_key(size)  # branches have the keys that they have in a run
        calls = [Call("fork", f"fork {index}") for index in range(size)]
        children: list[Branch] = [RecordedBranch(self.builder, call, self) for call in calls]
        self.submit(Fork(tuple(children)))
        return children

    def gather(self, children: Any) -> None:
        children = tuple(children)
        super().gather(children)
        self.builder.add(graph.Join(branch=self.number, children=_numbers(children)))

    def recover(self) -> ProgramError:
        self.builder.refuse_node("recover() depends on a step that fails, which a graph cannot foresee.")

    def set_variable(self, name: str, value: Any) -> None:
        if issubclass(type(value), Symbolic):
            self.builder.refuse_node(
                f"{value._about.what} cannot be kept in the variable {name!r} of the state."
            )
        super().set_variable(name, value)
        self.builder.values.append((len(self.builder.nodes), self.number, name, value))


def _numbers(branches: Sequence[Branch]) -> tuple[int, ...]:
    return tuple(cast(RecordedBranch, branch).number for branch in branches)


class Done:
    """The awaitable that steps return while tracing: done at once."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


class Recorder:
    """Adds each step of one branch as a node; a `ramify.lang.program.nodes.Visitor`."""

    def __init__(self, branch: RecordedBranch) -> None:
        self._number, self._builder = branch.number, branch.builder

    def text(self, node: Text) -> None:
        self._append((node.value,))

    def interpolated(self, node: Interpolated) -> Awaitable[None]:
        self._append([part if isinstance(part, str) else self._source(part) for part in node.parts])
        return Done()

    def _source(self, part: ResultRef) -> Source:
        source = self._builder.sources[part.variable]
        if isinstance(source, graph.Result):
            return graph.Result(
                node=source.node, index=part.index, then=part.then, type=part.type, path=part.path
            )
        return graph.Argument(name=source.name, then=part.then)

    def _append(self, parts: Sequence[str | Source]) -> None:
        """Add text, merged with a text node of the same branch right before."""
        nodes = self._builder.nodes
        last = nodes[-1] if nodes else None
        if isinstance(last, graph.Text) and last.branch == self._number:
            nodes[-1] = graph.Text(branch=self._number, parts=_tied((*last.parts, *parts)))
        elif parts := _tied(parts):
            self._builder.add(graph.Text(branch=self._number, parts=parts))

    def role_begin(self, node: RoleBegin) -> None:
        self._builder.add(graph.RoleBegin(branch=self._number, role=cast(graph.Role, node.role)), node.line)

    def role_end(self, node: RoleEnd) -> None:
        self._builder.add(graph.RoleEnd(branch=self._number, role=cast(graph.Role, node.role)))

    def scope_begin(self, node: ScopeBegin) -> None:
        self._builder.add(graph.ScopeBegin(branch=self._number, name=node.name))

    def scope_end(self, node: ScopeEnd, variable: Variable) -> None:
        place = self._builder.add(graph.ScopeEnd(branch=self._number, name=node.name))
        self._resolve(node, variable, place)

    def gen(self, node: Gen, variable: Variable) -> Awaitable[None]:
        cells = getattr(node.validate, "__closure__", None) or ()
        if any(issubclass(type(_inside(cell)), Symbolic | ProgramState) for cell in cells):
            self._builder.refuse_node("validate uses a value that is not known before the program runs.")
        made = graph.Gen(
            branch=self._number,
            name=node.name,
            options=dict(node.options),
            constraint=node.constraint,
            stop=node.stop,
            timeout=node.timeout,
        )
        return self._outcome(node, made, variable)

    def select(self, node: Select, variable: Variable) -> Awaitable[None]:
        # A method without a name keeps the graph in this process: see `ramify.lang.graph.compiled`.
        method = next((name for name in METHODS if METHODS[name] is node.method), "token_length_normalized")
        made = graph.Select(
            branch=self._number,
            name=node.name,
            choices=node.choices,
            method=cast(graph.Method, method),
            timeout=node.timeout,
        )
        return self._outcome(node, made, variable)

    def _outcome(self, step: Gen | Select, made: graph.AnyNode, variable: Variable) -> Awaitable[None]:
        place = self._builder.add(made, step.line)
        self._builder.steps[place] = step
        self._resolve(step, variable, place)
        return Done()

    def _resolve(self, step: VariableStep, variable: Variable, place: int) -> None:
        self._builder.sources[variable] = graph.Result(node=place)
        variable.resolve(self._builder.value_of(step, variable))

    def fork(self, node: Fork) -> None:
        self._builder.add(graph.Fork(branch=self._number, children=_numbers(node.children)))

    def splice(self, node: Splice) -> Awaitable[None]:
        children = _numbers(node.children)
        self._builder.add(graph.Join(branch=self._number, children=children, mode="append"))
        return Done()

    def describe_tools(self, node: DescribeTools) -> None:
        self._builder.refuse_node("A graph cannot describe tools to the model.")

    def call_tools(self, node: CallTools, variable: Variable) -> Awaitable[None]:
        self._builder.refuse_node("call_tools runs functions of this process.")


def _inside(cell: CellType) -> object:
    """The value of a closure cell; None while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _tied(parts: Sequence[str | Source]) -> tuple[str | Source, ...]:
    """`parts` with adjacent strings merged and empty ones dropped."""
    tied: list[str | Source] = []
    for part in parts:
        if isinstance(part, str) and tied and isinstance(tied[-1], str):
            tied[-1] += part
        elif part != "":
            tied.append(part)
    return tuple(tied)


NO_MODEL = ModelInfo(
    name="none",
    path="",
    vocab_size=0,
    context_length=0,
    eos_token_ids=(),
    bos_token_id=None,
    dtype="",
    device="",
    chat_format=None,
)


class _Nowhere:
    """A backend that refuses to generate."""

    async def info(self) -> ModelInfo:
        return NO_MODEL

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        raise ProgramError("A traced program sends nothing.")

    async def end_program(self, program: str) -> None: ...

    async def aclose(self) -> None: ...

"""Branches for tracing, which add their steps to a graph instead of running the steps."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from types import CellType
from typing import Any, Literal, NamedTuple, NoReturn, cast, get_args, get_origin

import msgspec

import ramify.graph as graph
from ramify.errors import ProgramError
from ramify.lang.calls.limits import LIMITS, Limit, Limits
from ramify.lang.graph.execute import Source
from ramify.lang.graph.symbolic import (
    About,
    NotConcrete,
    Symbolic,
    SymbolicArgument,
    SymbolicCalls,
    SymbolicDecision,
    SymbolicText,
    SymbolicValue,
)
from ramify.lang.program import nodes
from ramify.lang.program.branch import Branch
from ramify.lang.program.run import Run
from ramify.lang.program.statement import Statement
from ramify.lang.program.variables import THOUGHTS, ThoughtsVariable, Variable
from ramify.lang.state.state import ProgramState
from ramify.lang.tools.tool import descriptions_of
from ramify.lang.trace.calls import Call
from ramify.lang.typed.questions import Asked
from ramify.lang.typed.static_type import KnownType
from ramify.messages import Generate, TextChunk
from ramify.model_info import ModelInfo
from ramify.sampling_options import resolve_options

BY_STEPS = "Run the program without compile(), step by step."
FIELDS = f"Fields that every result has can be put into text, and the whole can be returned. {BY_STEPS}"
APPENDED = f"Results can be appended as they are, or with + and f-strings. {BY_STEPS}"

CALLS = f"The model sees the results; the program can return the calls. {BY_STEPS}"


class Submitted(NamedTuple):
    """A step as the body appended it."""

    branch: str
    """The branch's key, which is the same in every run."""
    step: nodes.Step
    variable: Variable | None


class GraphBuilder(Run):
    """The run of a program that is being traced: the graph so far, and the lines, steps and reads that belong
    to the graph. The run has no backend."""

    def __init__(self, name: str) -> None:
        self.branches, self.name = 0, name
        self._limits_outside = LIMITS.get()
        self.blocks: dict[Limit, int] = {}
        """Limit of a ``with`` block of the body → index of the limit in the graph."""
        super().__init__(name, _Nowhere(), NO_MODEL, {})
        self.nodes: list[graph.AnyNode] = []
        self.lines: dict[int, str] = {}
        self.steps: dict[int, nodes.ModelStep] = {}
        self.values: list[tuple[int, int, str, Any]] = []
        self.reads: list[tuple[Variable, bool]] = []
        """The reads of the body in order: (variable, whether the read is under a condition)."""
        self.sources: dict[Variable, Source] = {}
        self.setters: dict[Variable, nodes.VariableStep] = {}
        """Variable of a result → the step that sets the variable. For an `Either`, the step of its first
        source."""
        self.submitted: list[Submitted] = []
        """The steps of all branches before the first refusal, in the order in which the body appended
        them."""
        self.refused: NotConcrete | None = None
        """The first refusal: the first `NotConcrete` that was raised, even if the program caught the
        exception."""
        self.known = 0
        """Number of nodes at the first refusal."""
        self.guards: tuple[graph.Guard, ...] = ()

    def resolved(self, step: nodes.Step, usual: nodes.On = nodes.OWN) -> nodes.Step:
        """`step`, with the backend and the model of `usual` if `step` names none. Names are looked up only
        when the graph runs."""
        if isinstance(step, nodes.Guarded):
            return replace(step, step=self.resolved(step.step, usual))
        if isinstance(step, nodes.ModelStep):
            backend, model = step.on.over(usual)
            return replace(step, backend=backend, node=msgspec.structs.replace(step.node, model=model))
        return step

    def branch(self, call: Call) -> RecordedBranch:
        return RecordedBranch(self, call)

    def argument(self, name: str) -> SymbolicArgument:
        """A placeholder for an argument that is given only when the graph runs."""
        variable = Variable(name)
        self.sources[variable] = graph.Argument(name=name)
        remedy = f"Give it when compiling: compile({name}=...)."
        return SymbolicArgument(
            About(f"The argument {name!r}", remedy, self.refuse), (nodes.ResultRef(variable),)
        )

    def refuse(self, error: NotConcrete) -> None:
        if self.body_done.is_set():
            # Tracing has ended: a function that the body defined is called in a run, with a symbolic value.
            raise ProgramError(error.message)
        if self.refused is None:
            self.refused, self.known = error, len(self.nodes)

    def made(self, arguments: tuple[str, ...] = (), nodes: int | None = None) -> graph.Graph:
        """The graph of the first `nodes` nodes (None: of all nodes). `arguments` are the names of its
        arguments."""
        limits = tuple(limit.bounds for limit in self.blocks)
        return graph.Graph(
            name=self.name, arguments=arguments, limits=limits, nodes=tuple(self.nodes[:nodes])
        )

    def limits_of(self, limits: Limits) -> tuple[int, ...]:
        """The indices in the graph of those `limits` that the body has set. After this call the body cannot
        read the amounts spent under these limits."""
        own = [limit for limit in limits if limit not in self._limits_outside]
        for limit in own:
            limit.refuse = self._refuse_spent
        return tuple(self.blocks.setdefault(limit, len(self.blocks)) for limit in own)

    def _refuse_spent(self) -> NoReturn:
        self.refuse_node("What a limit's steps have spent is not known before the program runs.")

    def caught(self) -> None:
        """Refuse a program that catches an exception. The exception may have been caused by tracing
        itself."""
        self.refuse_node("The program catches an exception, which a graph cannot do.")

    def refuse_node(self, message: str) -> NoReturn:
        """Raise `NotConcrete`, with `message`, for an operation that a graph cannot express."""
        error = NotConcrete(message, BY_STEPS)
        self.refuse(error)
        raise error

    def add_node(self, node: graph.AnyNode, line: str | None = None) -> int:
        """Append a node under the current conditions. Returns the index of the node."""
        place = len(self.nodes)
        if self.guards and not isinstance(node, graph.Either):
            if isinstance(node, graph.Fork | graph.Join):
                self.refuse_node("A fork cannot depend on a condition.")
            node = msgspec.structs.replace(node, when=self.guards)
        if line is not None:
            self.lines[place] = line
        self.nodes.append(node)
        return place

    def thoughts_of(self, step: nodes.Gen, variable: Variable) -> Any:
        """The symbolic thoughts of `variable`, which `step` sets; a list of symbolic thoughts if `step` has
        several outputs."""
        about = About(f"What the model thinks before {step.variable!r}", APPENDED, self.refuse)
        several = _samples(step)
        texts = [
            SymbolicText(about, (nodes.ResultRef(variable, None if several == 1 else index, thinking=True),))
            for index in range(several)
        ]
        return texts[0] if several == 1 else texts

    def value_of(self, step: nodes.VariableStep, variable: Variable) -> Any:
        """The symbolic value of `variable`, which `step` sets; a list of symbolic values if `step` has
        several outputs."""
        kind = type(step).__name__.lower()
        what = f"The result of {kind} {step.variable!r}" if step.variable else f"The result of a {kind}"

        def outcome(index: int | None = None) -> Symbolic:
            source = nodes.ResultRef(variable, index)
            if isinstance(step, nodes.CallTools):
                return SymbolicCalls(About(what, CALLS, self.refuse), source)
            if isinstance(step, nodes.Decide):
                about, asked = About(what, FIELDS, self.refuse), step.asked.get("")
                return SymbolicDecision(about, source, _shape_of(step), asked.texts if asked else ())
            if isinstance(step, nodes.Gen) and not _is_text(step):
                return SymbolicValue(About(what, FIELDS, self.refuse), source, step.kind)
            return SymbolicText(About(what, APPENDED, self.refuse), (source,))

        several = _samples(step)
        return outcome() if several == 1 else [outcome(index) for index in range(several)]


def _samples(step: nodes.VariableStep) -> int:
    return resolve_options(step.node.options).n if isinstance(step, nodes.Gen) else 1


def _shape_of(step: nodes.Decide) -> KnownType:
    """The type of a decision, as `Decision` and `ModelDecision` have attributes."""

    def by_field(of: Callable[[Asked], KnownType]) -> KnownType:
        found = {field: of(asked) for field, asked in step.asked.items()}
        return found[""] if "" in found else KnownType(parts=found)

    numbers = ("confidence", "option_mass", "temperature")
    number = {name: by_field(lambda _: KnownType("float")) for name in numbers}
    shape = {"value": by_field(_value_of), "probabilities": KnownType(), **number}
    if "" in step.asked:
        shape["text"] = KnownType("str")
        if step.asked[""].question.kind == "score":
            shape["score"] = KnownType("float")
    return KnownType(parts=shape)


def _value_of(asked: Asked) -> KnownType:
    """The type of a decision's value, whose text is known if it is that of the value in the JSON."""
    plain = asked.question.kind != "choice"
    names = [option.name for option in asked.question.options]
    return KnownType(asked.scalar if plain or list(map(str, asked.values)) == names else None)


def _kind_of(step: nodes.VariableStep) -> tuple[str, object]:
    if isinstance(step, nodes.Decide):
        return "decision", repr(
            [(field, asked.question.kind, asked.values) for field, asked in step.asked.items()]
        )
    if not isinstance(step, nodes.Gen):
        return ("calls" if isinstance(step, nodes.CallTools) else "text"), None
    several = _samples(step)
    if several > 1:
        return "list", several
    return ("text", None) if _is_text(step) else ("typed", repr(step.kind))


def _is_text(step: nodes.Gen) -> bool:
    if get_origin(step.kind) is Literal:
        return all(type(value) is str for value in get_args(step.kind))
    return step.parse in (None, str)


class RecordedBranch(Branch, nodes.StepVisitor):
    """A branch that adds its steps to the graph."""

    def __init__(self, builder: GraphBuilder, call: Call, parent: Branch | None = None) -> None:
        super().__init__(builder, call, parent)
        self.builder = builder
        self.number = builder.branches
        builder.branches += 1
        self._busy = False
        self._conditional: dict[str, list[Variable]] = {}
        """Name → the variables of this name that steps under conditions have set since the last merge."""

    def submit(self, node: nodes.Node, usual: nodes.On = nodes.OWN) -> Variable | None:
        before = dict(self.variables)
        variable = super().submit(node, usual)
        conditional, self._conditional = self._conditional, {}
        for name, variables in conditional.items():
            if self.variables[name] is variables[-1]:
                self._merge(name, [*reversed(variables), *filter(None, [before.get(name)])])
        return variable

    @contextlib.contextmanager
    def under(self, guards: Sequence[nodes.Guard]) -> Iterator[None]:
        """A ``with`` block whose steps are skipped unless all `guards` hold."""
        before, outer = dict(self.variables), self.builder.guards
        self.builder.guards = (*outer, *self._guards_of(guards))
        try:
            yield
        finally:
            self.builder.guards = outer
        for name, variable in list(self.variables.items()) if guards else ():
            if before.get(name) is not variable:
                self._merge(name, [variable, *filter(None, [before.get(name)])])

    def _merge(self, name: str, variables: Sequence[Variable]) -> None:
        """Set the variable `name` to the first of `variables` whose step is not skipped."""
        builder = self.builder
        of: dict[int, None] = {}
        for variable in variables:
            source = builder.sources.get(variable)
            if not isinstance(source, graph.Result):
                builder.refuse_node(f"{name!r} is set by a call under a condition, and before by no call.")
            node = builder.nodes[source.node]
            of |= dict.fromkeys(node.of if isinstance(node, graph.Either) else (source.node,))
        place = builder.add_node(graph.Either(branch=self.number, name=name, of=tuple(of)))
        merged = self.variables[name] = Variable(name)
        builder.sources[merged] = graph.Result(node=place)
        setters = [builder.setters[variable] for variable in variables]
        builder.setters[merged] = setters[0]
        if len({_kind_of(step) for step in setters}) > 1:
            about = About(f"{name!r}, which steps of several types set,", BY_STEPS, builder.refuse)
            merged.resolve(SymbolicValue(about, nodes.ResultRef(merged)))
        else:
            merged.resolve(builder.value_of(setters[0], merged))

    def _submit(self, step: nodes.Step, statement: Statement) -> Variable | None:
        self.limits = statement.limits
        variable = self._declare(step)
        self.visit(step, variable)
        if isinstance(step, nodes.Guarded) and step.variable is not None and variable is not None:
            self._conditional.setdefault(step.variable, []).append(variable)
        if self.builder.refused is None:
            self.builder.submitted.append(Submitted(self.key, step, variable))
        return variable

    def fork(self, size: int) -> list[Branch]:
        self.builder.fork_key(size)  # branches have the keys that they have in a run
        calls = [Call("fork", f"fork {index}") for index in range(size)]
        children: list[Branch] = [RecordedBranch(self.builder, call, self) for call in calls]
        self.submit(nodes.Fork(tuple(children)))
        return children

    def gather(self, children: Any) -> None:
        children = tuple(children)
        super().gather(children)
        self.builder.add_node(graph.Join(branch=self.number, children=_numbers(children)))

    def recover(self) -> ProgramError:
        self.builder.refuse_node("recover() depends on a step that fails, which a graph cannot foresee.")

    def set_variable(self, name: str, value: Any) -> None:
        if issubclass(type(value), Symbolic):
            self.builder.refuse_node(
                f"{value._about.what} cannot be kept in the variable {name!r} of the state."
            )
        if self.builder.guards:
            self.builder.refuse_node(f"{name!r} cannot be set under a condition.")
        super().set_variable(name, value)
        self.builder.values.append((len(self.builder.nodes), self.number, name, value))

    # --- the visitor ---

    def _guards_of(self, guards: Sequence[nodes.Guard]) -> tuple[graph.Guard, ...]:
        return tuple(
            graph.Guard(value=self._source(guard.value), among=guard.among, negated=guard.negated)
            for guard in guards
        )

    def visit_Guarded(self, step: nodes.Guarded, variable: Variable | None) -> None:
        outer = self.builder.guards
        self.builder.guards = (*outer, *self._guards_of(step.guards))
        try:
            self.visit(step.step, variable)
        finally:
            self.builder.guards = outer

    def visit_Text(self, step: nodes.Text, variable: None) -> None:
        self._append((step.value,))

    def visit_Interpolated(self, step: nodes.Interpolated, variable: None) -> None:
        self._append([part if isinstance(part, str) else self._source(part) for part in step.parts])

    def _source(self, part: nodes.ResultRef) -> Source:
        source = self.builder.sources[part.variable]
        if isinstance(source, graph.Result):
            return graph.Result(
                node=source.node,
                index=part.index,
                then=part.then,
                type=part.type,
                path=part.path,
                thinking=part.thinking,
            )
        return graph.Argument(name=source.name, then=part.then, path=part.path)

    def _append(self, parts: Sequence[str | Source]) -> None:
        """Append a text node. If the last node is a text node of the same branch with the same conditions,
        extend that node instead."""
        known = self.builder.nodes
        last = known[-1] if known else None
        guards = self.builder.guards
        if isinstance(last, graph.Text) and last.branch == self.number and last.when == guards:
            known[-1] = graph.Text(branch=self.number, parts=_tied((*last.parts, *parts)), when=guards)
        elif parts := _tied(parts):
            self.builder.add_node(graph.Text(branch=self.number, parts=parts))

    def visit_RoleBegin(self, step: nodes.RoleBegin, variable: None) -> None:
        self.builder.add_node(
            graph.RoleBegin(branch=self.number, role=cast(graph.Role, step.role)), step.line
        )

    def visit_RoleEnd(self, step: nodes.RoleEnd, variable: None) -> None:
        self.builder.add_node(graph.RoleEnd(branch=self.number, role=cast(graph.Role, step.role)))

    def visit_ScopeBegin(self, step: nodes.ScopeBegin, variable: None) -> None:
        self.builder.add_node(graph.ScopeBegin(branch=self.number, name=step.name))

    def visit_ScopeEnd(self, step: nodes.ScopeEnd, variable: Variable) -> None:
        place = self.builder.add_node(graph.ScopeEnd(branch=self.number, name=step.name))
        self._resolve(step, variable, place)

    def visit_Gen(self, step: nodes.Gen, variable: Variable) -> None:
        cells = getattr(step.validate, "__closure__", None) or ()
        if any(issubclass(type(_inside(cell)), Symbolic | ProgramState) for cell in cells):
            self.builder.refuse_node("validate uses a value that is not known before the program runs.")
        if step.node.thinking is not None:
            variable.thinking = self.builder.thoughts_of(step, variable)
        self._outcome(step, variable)

    def _outcome(self, step: nodes.ModelStep, variable: Variable) -> None:
        limits = self.builder.limits_of(self.limits)
        made = msgspec.structs.replace(step.node, branch=self.number, limits=limits)
        place = self.builder.add_node(made, step.line)
        self.builder.steps[place] = step
        self._resolve(step, variable, place)

    visit_Select = visit_CallTools = visit_Decide = _outcome

    def _resolve(self, step: nodes.VariableStep, variable: Variable, place: int) -> None:
        source = self.builder.sources[variable] = graph.Result(node=place)
        self.builder.setters[variable] = step
        named = self.variables.get(f"{step.variable}{THOUGHTS}")
        if isinstance(named, ThoughtsVariable) and named.source is variable:
            self.builder.sources[named] = source
        variable.resolve(self.builder.value_of(step, variable))

    def visit_Fork(self, step: nodes.Fork, variable: None) -> None:
        self.builder.add_node(graph.Fork(branch=self.number, children=_numbers(step.children)))

    def visit_Splice(self, step: nodes.Splice, variable: None) -> None:
        children = _numbers(step.children)
        limits = self.builder.limits_of(self.limits)
        self.builder.add_node(graph.Join(branch=self.number, children=children, mode="append", limits=limits))

    def visit_DescribeTools(self, step: nodes.DescribeTools, variable: None) -> None:
        self.builder.add_node(graph.Tools(branch=self.number, tools=descriptions_of(step.tools)))


def _numbers(branches: Sequence[Branch]) -> tuple[int, ...]:
    return tuple(cast(RecordedBranch, branch).number for branch in branches)


def _inside(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _tied(parts: Sequence[str | Source]) -> tuple[str | Source, ...]:
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
    async def info(self) -> ModelInfo:
        return NO_MODEL

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        raise ProgramError("A traced program sends nothing.")

    async def end_program(self, program: str) -> None: ...

    async def aclose(self) -> None: ...

"""Running a graph in this process: all nodes are submitted as steps before the first step begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ramify.graph as graph
from ramify.errors import BackendError, InvalidRequest
from ramify.graph_text import argument_text
from ramify.lang.calls.limits import LEAVE, Limit, under
from ramify.lang.program import nodes
from ramify.lang.program.branch import Branch
from ramify.lang.program.variables import Variable, skipped
from ramify.lang.tools.tool import Tool

Source = graph.Argument | graph.Result

Row = Mapping[str, Any]
"""The arguments of one run: name → JSON value."""

MAX_TEXT = 1 << 26
"""Most characters that one run may insert into its texts from arguments and results. The number is large
enough for a context of 10 million tokens. The limit is needed because a small graph can refer to a long text
many times."""


@dataclass(frozen=True)
class Traced:
    """A program as a graph, with the Python objects that a graph cannot hold."""

    graph: graph.Graph
    lines: Mapping[int, str] = field(default_factory=dict)
    """Node index → source line."""
    steps: Mapping[int, nodes.ModelStep] = field(default_factory=dict)
    """Node index → the step as written, with its Python types and functions."""
    blocks: Sequence[str] = ()
    """The names that error messages use for the graph's limits."""
    values: Sequence[tuple[int, int, str, Any]] = ()
    """Variables that the body set itself, in order: (index of the node before which the variable is set,
    branch, name, value)."""
    reads: Sequence[tuple[Variable, bool]] = ()
    """The reads of the body in order: (variable, whether the read is under a condition)."""
    sources: Mapping[Variable, Source] = field(default_factory=dict)
    """Variable of the trace → the argument or result that the variable stands for."""
    returned: Any = None
    """The return value of the body, which may hold symbolic values."""


class Execution:
    """A run of a graph with the arguments in `row`. The nodes are submitted to `root`, which must be idle,
    and to branches forked from it."""

    def __init__(self, traced: Traced, root: Branch, row: Row) -> None:
        self._traced, self._row = traced, row
        self.branches = {0: root}
        self.outcomes: dict[int, Variable] = {}
        self._characters = 0

    @property
    def failed(self) -> bool:
        """Whether a step of any branch has failed."""
        return any(branch.error is not None for branch in self.branches.values())

    def submit(self) -> None:
        """Submit all nodes, and close the run. Returns at once."""
        root, made = self.branches[0], self._traced.graph
        if root.run.options.get("n", 1) != 1:
            raise InvalidRequest("A graph has one output for each gen that does not set n.", field="n")
        unnamed = [f"limit {index} of {made.name!r}" for index in range(len(made.limits))]
        limits = [
            Limit(bounds, where, later=True, remedy=LEAVE)
            for bounds, where in zip(made.limits, self._traced.blocks or unnamed, strict=True)
        ]
        waiting = deque(self._traced.values)
        with root.paused():
            for place, node in enumerate(made.nodes):
                while waiting and waiting[0][0] <= place:
                    self._set_variable(*waiting.popleft())
                of_node = node.limits if isinstance(node, graph.Limited) else ()
                with under(tuple(limits[index] for index in of_node)):
                    self._submit_node(place, node)
            for value in waiting:
                self._set_variable(*value)
            root.run.close()

    def _submit_node(self, place: int, node: graph.AnyNode) -> None:
        branches = self.branches
        branch = branches[node.branch]
        match node:
            case graph.Fork():
                branches.update(zip(node.children, branch.fork(len(node.children)), strict=True))
            case graph.Join(mode="gather"):
                branch.gather(branches[child] for child in node.children)
            case graph.Join():
                branch.splice(branches[child] for child in node.children)
            case _:
                step = self._traced.steps.get(place) or self._step(place, node)
                if node.when:
                    guards = self._guards(node.when)
                    if guards is None:
                        outcome = self.outcomes[place] = Variable(step.variable)
                        outcome.fail(skipped(step.variable))
                        return
                    step = nodes.Guarded(step, guards) if guards else step
                variable = branch.submit(step)
                if variable is not None:
                    self.outcomes[place] = variable

    def _set_variable(self, _: int, branch: int, name: str, value: Any) -> None:
        self.branches[branch].set_variable(name, value)

    def _step(self, place: int, node: graph.AnyNode) -> nodes.Step:
        line = self._traced.lines.get(place)
        match node:
            case graph.Text():
                return self._text(node)
            case graph.RoleBegin():
                return nodes.RoleBegin(node.role, line)
            case graph.RoleEnd():
                return nodes.RoleEnd(node.role)
            case graph.ScopeBegin():
                return nodes.ScopeBegin(node.name)
            case graph.ScopeEnd():
                return nodes.ScopeEnd(node.name)
            case graph.Gen():
                return nodes.Gen(node, line=line)
            case graph.Select():
                return nodes.Select(node, line=line)
            case graph.Decide():
                return nodes.Decide.of(node, line)
            case graph.Tools():
                return nodes.DescribeTools(tuple(map(_tool, node.tools)))
            case graph.CallTools():
                return nodes.CallTools(node, tuple(map(_tool, node.tools)), line=line)
            case graph.Either():
                return nodes.Either(node.name, tuple(self.outcomes[one] for one in node.of))
            case _:
                raise AssertionError(f"{type(node).__name__} is no step")

    def _guards(self, when: tuple[graph.Guard, ...]) -> tuple[nodes.Guard, ...] | None:
        """The conditions in `when` that depend on results; None if a condition on an argument does not hold,
        which skips the step."""
        guards: list[nodes.Guard] = []
        for guard in when:
            if isinstance(guard.value, graph.Argument):
                if (self._argument(guard.value) in guard.among) == guard.negated:
                    return None
            else:
                guards.append(nodes.Guard(self._result_ref(guard.value), guard.among, guard.negated))
        return tuple(guards)

    def _argument(self, part: graph.Argument) -> str:
        text = argument_text(part.name, self._row[part.name], part.path, part.then)
        self._count(text, part.name)
        return text

    def _count(self, text: str, field: str | None = None) -> None:
        self._characters += len(text)
        if self._characters > MAX_TEXT:
            raise InvalidRequest(
                f"The arguments and results that the texts of this run refer to have more than {MAX_TEXT:,} "
                "characters in all.",
                field=field,
                remedy="Refer to a long text once.",
            )

    def _result_ref(self, part: graph.Result) -> nodes.ResultRef:
        return nodes.ResultRef(
            self.outcomes[part.node], part.index, part.then, part.type, part.path, part.thinking
        )

    def _text(self, node: graph.Text) -> nodes.Step:
        parts: list[str | nodes.ResultRef] = []
        for part in node.parts:
            match part:
                case graph.Argument():
                    parts.append(self._argument(part))
                case graph.Result():
                    parts.append(self._result_ref(part))
                case _:
                    parts.append(part)
        if any(isinstance(part, nodes.ResultRef) for part in parts):
            return nodes.Interpolated(tuple(parts), self._count)
        return nodes.Text("".join(map(str, parts)))


def _tool(tool: graph.ToolDescription) -> Tool[..., Any]:
    """A tool whose calls the client runs (`tool_results` of `Backend`). The function of the tool only raises
    `BackendError`."""

    def call(**arguments: Any) -> NoReturn:
        raise BackendError(f"No one here runs the tool {tool.name}.")

    return Tool.from_schema(tool.name, tool.description, tool.parameters, call, strict=tool.strict)

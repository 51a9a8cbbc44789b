"""Views of a graph: text with a line for each node, and a Mermaid flowchart of the graph's calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ramify.errors import UnsupportedNode
from ramify.graph import (
    AnyNode,
    Argument,
    CallTools,
    Decide,
    Either,
    Fork,
    Gen,
    Graph,
    Guard,
    Join,
    Limited,
    Result,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
    Tools,
)
from ramify.questions import Question
from ramify.text import shortened

MAX_TEXT = 40

CALLS = (Gen, Select, CallTools, Decide)

MERMAID = str.maketrans({'"': "#quot;", "#": "#35;", "&": "#amp;", "<": "#lt;", ">": "#gt;"})


class GraphView:
    """The graph of a compiled program, for display. ``print`` shows a line for each node, indented by
    branch."""

    def __init__(
        self,
        graph: Graph,
        lines: Mapping[int, str],
        local: Mapping[int, Mapping[str, object]],
    ) -> None:
        self._graph = graph
        self._lines = lines
        self._local = local
        """Node index → those arguments of the node's step that a graph cannot store."""

    @property
    def graph(self) -> Graph:
        """The graph itself, as `POST /v1/programs` takes it. Raises `UnsupportedNode` for an argument of a
        step that only the program's own process can apply: ``backend``, ``retries``, ``validate``, a `select`
        with its own ``choices_method``, and ``errors="raise"`` of `call_tools`."""
        for place, arguments in self._local.items():
            for name, value in arguments.items():
                raise UnsupportedNode(
                    f"Node {place}, {self.label(place)}, has {name}={_shown(value)}, which a graph has no "
                    "field for: a server would run the node without it.",
                    field=name,
                    remedy=f"Run the compiled program, which honours it here; or leave {name} out.",
                )
        return self._graph

    def __str__(self) -> str:
        depths = {0: 0}
        rows = []
        for place, node in enumerate(self._graph.nodes):
            if isinstance(node, Fork):
                depths.update(dict.fromkeys(node.children, depths[node.branch] + 1))
            indent = "  " * depths[node.branch]
            rows.append(
                (
                    f"{place:>4}  {indent}{self._branch(node)}{self._conditions(node)}{self.label(place)}",
                    self._lines.get(place),
                )
            )
        width = max(len(row) for row, _ in rows)
        listed = [row if line is None else f"{row:<{width}}  {line}" for row, line in rows]
        return "\n".join([f"{self._graph.name}({', '.join(self._graph.arguments)})", *listed])

    def _conditions(self, node: AnyNode) -> str:
        return f"if {' and '.join(map(self._condition, node.when))}: " if node.when else ""

    def _condition(self, guard: Guard) -> str:
        among = " or ".join(map(repr, guard.among))
        return f"{self._part(guard.value)} is {'not ' if guard.negated else ''}{among}"

    def _branch(self, node: AnyNode) -> str:
        return f"[{node.branch}] " if node.branch else ""

    def mermaid(self) -> str:
        """A flowchart of the calls for Mermaid (https://mermaid.js.org). An arrow leads to each call from
        each call that it waits for.

        A solid arrow comes from an earlier call in the same branch, or across a fork or join. A dashed arrow
        comes from a call of another branch, if the result of that call is inserted into the text or tested by
        a condition.
        """
        lines = ["flowchart TD"]
        for place, node in enumerate(self._graph.nodes):
            if isinstance(node, CALLS):
                label = self._branch(node) + self._conditions(node) + self.label(place)
                lines.append(f'  n{place}(["{label.translate(MERMAID)}"])')
        for before, after, arrow in self._waits():
            lines.append(f"  n{before} {arrow} n{after}")
        return "\n".join(lines) + "\n"

    def _waits(self) -> Iterator[tuple[int, int, str]]:
        """The arrows of the flowchart: (call, call that waits for it, Mermaid's arrow)."""
        pending: dict[int, dict[int, str]] = {0: {}}
        """Branch → {call that the branch's next call waits for: Mermaid's arrow}."""
        before: dict[int, set[int]] = {0: set()}
        """Branch → all calls that come before the branch's next call."""
        for place, node in enumerate(self._graph.nodes):
            waits = pending[node.branch]
            used = [guard.value for guard in node.when]
            if isinstance(node, Text):
                used += [part for part in node.parts if not isinstance(part, str)]
            for part in used:
                if isinstance(part, Result):
                    waits |= dict.fromkeys(self._calls(part.node) - before[node.branch], "-.->")
            match node:
                case Fork():
                    for child in node.children:
                        pending[child], before[child] = dict(waits), set(before[node.branch])
                case Join():
                    for child in node.children:
                        before[node.branch] |= before[child]
                        for call, arrow in pending[child].items():
                            waits.setdefault(call, arrow)
                case Gen() | Select() | CallTools() | Decide():
                    for call, arrow in waits.items():
                        yield call, place, arrow
                    pending[node.branch] = {place: "-->"}
                    before[node.branch].add(place)

    def _calls(self, place: int) -> set[int]:
        node = self._graph.nodes[place]
        if isinstance(node, Either):
            return {call for earlier in node.of for call in self._calls(earlier)}
        return {place} if isinstance(node, CALLS) else set()

    def label(self, place: int) -> str:
        """A short description of a node."""
        node = self._graph.nodes[place]
        match node:
            case Text():
                return " + ".join(map(self._part, node.parts))
            case RoleBegin():
                return f"{node.role}:"
            case RoleEnd():
                return f"end of {node.role}"
            case ScopeBegin():
                return f"scope {node.name}:"
            case ScopeEnd():
                return f"end of scope {node.name}"
            case Gen():
                kind = [] if node.constraint is None else [node.constraint.kind]
                options = [f"{name}={value!r}" for name, value in node.options.items()]
                return f"gen {node.name or ''}".rstrip() + self._on(place) + _in_brackets([*kind, *options])
            case Select():
                listed = _in_brackets(map(repr, node.choices))
                return f"select {node.name or ''}".rstrip() + self._on(place) + listed
            case Decide():
                listed = _in_brackets(
                    f"{field}: {_question(one)}".removeprefix(": ") for field, one in node.asked.items()
                )
                return f"decide {node.name or ''}".rstrip() + self._on(place) + listed
            case Tools():
                return f"describe {', '.join(tool.name for tool in node.tools)}"
            case CallTools():
                listed = _in_brackets([tool.name for tool in node.tools])
                return f"call_tools {node.name or ''}".rstrip() + self._on(place) + listed
            case Either():
                return f"{node.name} = {' or '.join(f'node {earlier}' for earlier in node.of)}"
            case Fork():
                return f"fork into {_listed(node.children)}"
            case Join():
                return f"{node.mode} {_listed(node.children)}"

    def _on(self, place: int) -> str:
        node = self._graph.nodes[place]
        limits = node.limits if isinstance(node, Limited) else ()
        listed = [f" in limit {index} ({self._graph.limits[index]})" for index in limits]
        named = (self._local.get(place, {}).get("backend"), getattr(node, "model", None))
        on = [f" on {_shown(one)}" for one in named if one is not None]
        return "".join([*on, *listed])

    def _part(self, part: str | Argument | Result) -> str:
        if isinstance(part, str):
            return repr(shortened(part, MAX_TEXT))
        return self._source(part) + "".join(f".{change}()" for change in part.then)

    def _source(self, part: Argument | Result) -> str:
        if isinstance(part, Argument):
            return part.name + "".join(f"[{key!r}]" for key in part.path)
        source = self._graph.nodes[part.node]
        name = getattr(source, "name", None) or f"node {part.node}"
        which = "" if part.index is None else f" {part.index}"
        path = "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in part.path)
        return f"‹{self._branch(source)}{name}{which}›{path}"


def _question(question: Question) -> str:
    names = " or ".join(repr(option.name) for option in question.options)
    return question.instructions or names


def _shown(value: object) -> str:
    """The short form of an argument: a string or number as it is written, the name of a function, the type of
    a backend."""
    if isinstance(value, str | int):
        return repr(value)
    return getattr(value, "__name__", type(value).__name__)


def _listed(branches: tuple[int, ...]) -> str:
    return ", ".join(f"[{branch}]" for branch in branches)


def _in_brackets(words: Iterator[str] | list[str]) -> str:
    text = ", ".join(words)
    return f" ({text if len(text) <= 2 * MAX_TEXT else text[: 2 * MAX_TEXT - 1] + '…'})" if text else ""

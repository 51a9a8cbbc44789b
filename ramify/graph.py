"""A program as a graph: the result of `compile` and the body of `POST /v1/programs`, in one definition.

Nodes stand in the order of the program. Each node appends to one branch, after all earlier nodes of that
branch. Branch 0 is the program; the other branches begin at a `Fork`. A text may hold arguments and the
results of earlier nodes only, so a graph has no cycles.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from ramify.constraint import Constraint
from ramify.errors import InvalidRequest, ProgramError
from ramify.sampling_params import SamplingParams

MAX_NODES = 4096
MAX_BRANCHES = 1024
"""Most branches of one graph, branch 0 included."""
MAX_DEPTH = 64
"""Most nested forks."""

Role = Literal["system", "user", "assistant"]
Method = Literal["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]
Scalar = Literal["str", "int", "float", "bool"]

Change = Literal["strip", "lstrip", "rstrip", "lower", "upper", "capitalize", "title"]
"""A method of Python's `str` that takes no arguments."""


def changed(text: str, changes: Iterable[Change]) -> str:
    """Apply the methods to `text`, in their order."""
    for change in changes:
        text = getattr(text, change)()
    return text


SCALARS: dict[Scalar, tuple[type, ...]] = {
    "str": (str,),
    "int": (int, float),
    "float": (float, int),
    "bool": (bool,),
}
"""Scalar → the Python types of its JSON values. The first one converts a value to the scalar."""


def scalar_text(text: str, path: Sequence[str | int], kind: Scalar) -> str:
    """The value at `path` in the JSON `text`, written as Python's `str` does: ``True``, ``1.0``.

    Raises `ProgramError` where `path` leads nowhere or to a value of another type.
    """
    try:
        value = json.loads(text)
        for key in path:
            value = value[key]
        if type(value) not in SCALARS[kind]:
            raise TypeError(f"there is {value!r}.")
        return str(SCALARS[kind][0](value))
    except (ValueError, TypeError, LookupError) as error:
        place = "".join(f"[{key!r}]" for key in path)
        raise ProgramError(
            f"A result has no {kind} at {place or 'its root'}: {error}", partial=text
        ) from None


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a text whose value is known only when the graph runs."""

    then: tuple[Change, ...] = ()
    """Methods applied to the value before it becomes part of the text."""


class Argument(Part, frozen=True, kw_only=True, tag_field="from", tag="argument"):
    """The value of an argument."""

    name: str


class Result(Part, frozen=True, kw_only=True, tag_field="from", tag="node"):
    """The result of an earlier node, or a value in it."""

    node: int
    """The index of the node in `Graph.nodes`."""
    index: int | None = None
    """The index of one output of a node with ``n`` > 1; None for a node with one output."""
    type: Scalar | None = None
    """With a type, the result is JSON text and the part is the scalar at `path` in it; see `scalar_text`."""
    path: tuple[str | Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    """Field names and list indices, outermost first."""


class Node(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="kind",
):
    """One step of one branch."""

    branch: int = 0


class Text(Node, frozen=True, kw_only=True, tag="text"):
    """Append text."""

    parts: tuple[str | Argument | Result, ...]


class RoleBegin(Node, frozen=True, kw_only=True, tag="role_begin"):
    role: Role


class RoleEnd(Node, frozen=True, kw_only=True, tag="role_end"):
    role: Role


class ScopeBegin(Node, frozen=True, kw_only=True, tag="scope_begin"):
    """Begin a scope: the text up to the `ScopeEnd` of the same name becomes the variable's value."""

    name: str


class ScopeEnd(Node, frozen=True, kw_only=True, tag="scope_end"):
    name: str


class Gen(Node, frozen=True, kw_only=True, tag="gen"):
    """Append generated text, and set a variable to it."""

    name: str | None = None
    options: dict[str, Any] = {}
    """Fields of `SamplingParams`. Fields not set here come from the options of the run."""
    constraint: Constraint | None = None
    stop: tuple[str, ...] = ()
    """Stop strings beside those in `options`."""
    timeout: float | None = None
    """Seconds for the whole step."""


class Select(Node, frozen=True, kw_only=True, tag="select"):
    """Append the likeliest choice, and set a variable to it."""

    name: str | None = None
    choices: tuple[str, ...]
    method: Method = "token_length_normalized"
    timeout: float | None = None


class Fork(Node, frozen=True, kw_only=True, tag="fork"):
    """Begin branches that share the content of this one."""

    children: tuple[int, ...]
    """The numbers of the new branches, which no earlier fork has used."""


class Join(Node, frozen=True, kw_only=True, tag="join"):
    """End branches. ``gather``: each variable that they set becomes the list of its values in this branch.
    ``append``: the text that each of them added is appended to this branch, in order."""

    children: tuple[int, ...]
    mode: Literal["gather", "append"] = "gather"


AnyNode = Text | RoleBegin | RoleEnd | ScopeBegin | ScopeEnd | Gen | Select | Fork | Join


class Graph(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A program without control flow."""

    name: str = "program"
    arguments: tuple[str, ...] = ()
    """The names of the arguments, all of which every row must give."""
    nodes: tuple[AnyNode, ...]

    def check(self, field: str = "graph") -> Graph:
        """Return self; raise `InvalidRequest` for the first wrong node, with its path below `field`."""
        _Check(self, field).all()
        return self

    def check_row(self, row: Mapping[str, Any], field: str) -> None:
        """Raise `InvalidRequest` unless `row` gives every argument and nothing else."""
        for name in self.arguments:
            if name not in row:
                raise InvalidRequest(f"{field} lacks the argument {name!r}.", field=field)
        for name, value in row.items():
            if name not in self.arguments:
                raise InvalidRequest(f"The graph has no argument {name!r}.", field=f"{field}.{name}")
            if not isinstance(value, str):
                raise InvalidRequest(
                    f"{field}.{name} must be text, not {type(value).__name__}.", field=f"{field}.{name}"
                )

    @property
    def width(self) -> int:
        """Most requests that one run can have in flight: the sum over branches of the widest step."""
        widest: dict[int, int] = {}
        for node in self.nodes:
            match node:
                case Gen():
                    size = node.options.get("n") or 1
                case Select():
                    size = 1  # the request carries all choices
                case _:
                    continue
            widest[node.branch] = max(widest.get(node.branch, 0), size)
        return sum(widest.values())


class _Check:
    """The state of `Graph.check` as it goes through the nodes."""

    def __init__(self, graph: Graph, field: str) -> None:
        self.graph, self.field = graph, field
        self.parents: dict[int, int | None] = {0: None}
        self.depths = {0: 0}
        self.ended: set[int] = set()
        self.scopes: set[tuple[int, str]] = set()
        self.here = ""
        """The path of the node that is being checked."""

    def all(self) -> None:
        nodes = self.graph.nodes
        if not nodes:
            raise InvalidRequest("The graph has no nodes.", field=f"{self.field}.nodes")
        if len(nodes) > MAX_NODES:
            raise InvalidRequest(
                f"The graph has {len(nodes)} nodes; at most {MAX_NODES} are accepted.",
                field=f"{self.field}.nodes",
                remedy="Split it over several programs.",
            )
        if len(set(self.graph.arguments)) < len(self.graph.arguments):
            raise InvalidRequest("An argument is named twice.", field=f"{self.field}.arguments")
        for index, node in enumerate(nodes):
            self.here = f"{self.field}.nodes[{index}]"
            if node.branch not in self.parents:
                self._wrong("branch", f"no earlier fork begins branch {node.branch}")
            if node.branch in self.ended:
                self._wrong("branch", f"branch {node.branch} has been joined")
            self._one(index, node)

    def _one(self, index: int, node: AnyNode) -> None:
        match node:
            case Text():
                for place, part in enumerate(node.parts):
                    self._part(index, part, f"parts[{place}]")
            case ScopeBegin():
                self.scopes.add((node.branch, node.name))
            case ScopeEnd():
                if (node.branch, node.name) not in self.scopes:
                    self._wrong("name", f"the scope {node.name!r} has not begun in branch {node.branch}")
                self.scopes.discard((node.branch, node.name))
            case Gen():
                self._gen(node)
            case Select():
                if not node.choices or not all(node.choices):
                    self._wrong("choices", "there must be choices, and none may be empty")
                self._timeout(node.timeout)
            case Fork():
                self._fork(node)
            case Join():
                self._join(node)
            case _:
                return  # a role is checked by its type, and by the chat template when it runs

    def _part(self, index: int, part: str | Argument | Result, where: str) -> None:
        if isinstance(part, Argument) and part.name not in self.graph.arguments:
            self._wrong(where, f"the graph has no argument {part.name!r}")
        if not isinstance(part, Result):
            return
        if not 0 <= part.node < len(self.graph.nodes):
            self._wrong(where, f"there is no node {part.node}")
        if part.node >= index:
            self._wrong(where, f"node {part.node} does not come before this one, and a graph has no cycles")
        source = self.graph.nodes[part.node]
        if not isinstance(source, Gen | Select | ScopeEnd):
            self._wrong(where, f"node {part.node} has no result")
        outputs = (source.options.get("n") or 1) if isinstance(source, Gen) else 1
        if (part.index is None) != (outputs == 1) or not 0 <= (part.index or 0) < outputs:
            self._wrong(where, f"node {part.node} has {outputs} outputs, and index is {part.index}")
        if part.path and part.type is None:
            self._wrong(where, "a path needs the type of what is there")
        if part.type is not None and (not isinstance(source, Gen) or outputs > 1):
            self._wrong(where, "only the single output of a gen has values of a type in it")

    def _gen(self, node: Gen) -> None:
        try:
            with self._below("options"):
                options = msgspec.convert(node.options, SamplingParams, str_keys=True).check()
            with self._below(""):
                msgspec.structs.replace(options, stop=(*options.stop, *node.stop)).check()
        except msgspec.ValidationError as error:
            self._wrong("options", str(error))
        if node.constraint is not None:
            with self._below("constraint"):
                node.constraint.check()
        self._timeout(node.timeout)

    @contextlib.contextmanager
    def _below(self, where: str) -> Iterator[None]:
        """Errors in the block name a field below `where`."""
        try:
            yield
        except InvalidRequest as error:
            error.field = ".".join(filter(None, (self.here, where, error.field)))
            raise

    def _timeout(self, timeout: float | None) -> None:
        if timeout is not None and not 0 < timeout < math.inf:
            self._wrong("timeout", f"it is {timeout}, and must be a number above 0")

    def _fork(self, node: Fork) -> None:
        if not node.children:
            self._wrong("children", "a fork has at least one branch")
        for child in node.children:
            if child in self.parents:
                self._wrong("children", f"branch {child} has begun before")
            self.parents[child] = node.branch
            self.depths[child] = self.depths[node.branch] + 1
        if self.depths[node.branch] >= MAX_DEPTH:
            self._wrong("children", f"more than {MAX_DEPTH} forks below each other")
        if len(self.parents) > MAX_BRANCHES:
            self._wrong("children", f"more than {MAX_BRANCHES} branches")

    def _join(self, node: Join) -> None:
        if not node.children:
            self._wrong("children", "a join has at least one branch")
        for child in node.children:
            if self.parents.get(child) != node.branch:
                self._wrong("children", f"branch {child} was not forked from branch {node.branch}")
            if child in self.ended:
                self._wrong("children", f"branch {child} has been joined")
            self.ended.add(child)

    def _wrong(self, where: str, problem: str) -> None:
        field = f"{self.here}.{where}"
        raise InvalidRequest(f"{field}: {problem}.", field=field)

"""A program as a graph: the result of `compile` and the body of `POST /v1/programs`, in one definition.

Nodes are in the order of the program. Each node appends to one branch, after all earlier nodes of that
branch. Branch 0 is the program; every other branch begins at a `Fork`. A text may contain only arguments and
the results of earlier nodes, so a graph has no cycles.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NoReturn, Self

import msgspec

from ramify.bounds import Bounds
from ramify.constraint import Constraint
from ramify.errors import InvalidRequest
from ramify.graph_text import Change, Scalar
from ramify.messages import Thinking
from ramify.priority import checked_priority
from ramify.questions import MAX_OPTIONS, MAX_QUESTIONS, LayoutName, Normalisation, OptionEnd, Question
from ramify.sampling_params import SamplingParams

MAX_NODES = 4096
MAX_BRANCHES = 1024
"""Most branches of one graph, branch 0 included."""
MAX_DEPTH = 64
"""Most levels of nested forks, and most levels of nested limits."""
MAX_LIMITS = 1024
"""Most limits of one graph."""
MAX_JSON_DEPTH = 128
"""Most levels of nested lists and objects in an argument."""
MAX_OF = 256
"""Most nodes that an `Either` chooses from."""

Role = Literal["system", "user", "assistant"]
Method = Literal["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"]


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a text whose value is known only when the graph runs."""

    then: tuple[Change, ...] = ()
    """Methods applied to the value before it becomes part of the text."""


class Argument(Part, frozen=True, kw_only=True, tag_field="from", tag="argument"):
    """The value of an argument, or the item at `path` in it, as Python's `str` writes it."""

    name: str
    path: tuple[str | Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    """Field names and list indices, outermost first."""


class Result(Part, frozen=True, kw_only=True, tag_field="from", tag="node"):
    """The result of an earlier node, or the value at `path` in it."""

    node: int
    """The index of the node in `Graph.nodes`."""
    thinking: bool = False
    """Whether the part is not the result, but the thoughts before it. Only for a gen with `thinking`."""
    index: int | None = None
    """The index of one output of a node with ``n`` > 1; None for a node with one output."""
    type: Scalar | None = None
    """The type of the scalar at `path` in a result that is JSON text (`scalar_text`). None: the part is the
    whole text of the result."""
    path: tuple[str | Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    """Field names and list indices, outermost first."""


class Guard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A condition of a node: the text of `value` is one of `among`."""

    value: Argument | Result
    among: tuple[str, ...]
    negated: bool = False
    """Whether the condition is the opposite: the text is none of `among`."""


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
    when: tuple[Guard, ...] = ()
    """Conditions of the node, which is skipped unless all hold. They are tested in order, up to the first
    that does not hold. A skipped node has no result."""


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


class Limited(Node, frozen=True, kw_only=True):
    """A step that a limit can end."""

    limits: tuple[int, ...] = ()
    """Indices in `Graph.limits` of the limits that hold for the step, outermost first."""


class Request(Limited, frozen=True, kw_only=True):
    """A step that sends requests to a model, and sets a variable."""

    name: str | None = None
    timeout: float | None = None
    """Time limit of the whole step, in seconds."""
    priority: int | None = None
    """Priority of the step's requests; None: the priority of the run."""
    lora: str | None = None
    """LoRA adapter of the step's requests; None: the adapter of the run."""
    model: str | None = None
    """Model of the step, by its name on a backend with several models; None: the model of the run."""

    def checked(self) -> Self:
        """Return self; raise `InvalidRequest` for a name, timeout, priority, adapter or model of another
        type, and for a timeout or priority out of range."""
        for field, wanted in (("name", str), ("timeout", float), ("lora", str), ("model", str)):
            try:
                msgspec.convert(getattr(self, field), wanted | None)
            except msgspec.ValidationError as error:
                raise InvalidRequest(f"{field}: {error}.", field=field) from None
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise InvalidRequest(
                f"timeout is {self.timeout}; it must be a number of seconds above 0.", field="timeout"
            )
        if self.priority is not None:
            checked_priority(self.priority)
        return self


class Gen(Request, frozen=True, kw_only=True, tag="gen"):
    """Append generated text, and set a variable to it."""

    options: dict[str, Any] = {}
    """Fields of `SamplingParams`. Fields not set here come from the options of the run."""
    constraint: Constraint | None = None
    stop: tuple[str, ...] = ()
    """Stop strings in addition to those in `options`."""
    thinking: Thinking | None = None
    """Thinking before the answer. None: the chat template decides, and thoughts are not separated from the
    answer."""


class Select(Request, frozen=True, kw_only=True, tag="select"):
    """Append the likeliest choice, and set a variable to it."""

    choices: tuple[str, ...]
    method: Method = "token_length_normalized"


class Decide(Request, frozen=True, kw_only=True, tag="decide"):
    """Set a variable to the answer to a question, or to the answers to the questions of an object's fields.

    Nothing is appended, unless `append` is set. Decisions in a row on one branch, with the same options, are
    one request.
    """

    question: Question | None = None
    fields: dict[str, Question] = {}
    """Instead of `question`: a question for each field."""
    append: bool = False
    """Whether the text of the answer's value is appended: the name of the option or level, ``True`` or
    ``False``."""
    layout: LayoutName = "auto"
    """The field of the same name in `ramify.questions.Decide`, as are `end` and `permutations`."""
    end: OptionEnd = "prefix"
    permutations: int = 1
    normalise: Normalisation = "sum"
    """The weights of the options."""

    @property
    def asked(self) -> dict[str, Question]:
        """Field → question; the field of a single question is empty."""
        return self.fields if self.question is None else {"": self.question}

    def checked(self) -> Self:
        if (self.question is None) == (not self.fields):
            raise InvalidRequest("A decide has either a question or fields.", field="question")
        if len(self.fields) > MAX_QUESTIONS:
            raise InvalidRequest(
                f"There are {len(self.fields)} questions; at most {MAX_QUESTIONS} are accepted.",
                field="fields",
            )
        for field, question in self.asked.items():
            question.check(f"fields.{field}" if field else "question")
        if self.append and self.fields:
            raise InvalidRequest("The answers to several questions cannot be appended.", field="append")
        if not isinstance(self.permutations, int) or not 0 < self.permutations <= MAX_OPTIONS:
            raise InvalidRequest(
                f"permutations is {self.permutations!r}; it is 1 to {MAX_OPTIONS}.", field="permutations"
            )
        if self.permutations > 1 and self.layout == "isolated":
            raise InvalidRequest(
                "The layout isolated lists no options, so permutations has no effect.", field="permutations"
            )
        return super().checked()


class ToolDescription(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A tool, as described to the model."""

    name: str
    description: str = ""
    parameters: dict[str, Any]
    """A JSON Schema of type object."""
    strict: bool = True
    """Treatment of schema keywords that cannot be enforced: True refuses the schema; False ignores such
    keywords and reports them."""


class Tools(Node, frozen=True, kw_only=True, tag="tools"):
    """Append descriptions of tools to the open turn."""

    tools: tuple[ToolDescription, ...]


class CallTools(Request, frozen=True, kw_only=True, tag="call_tools"):
    """Generate tool calls, wait for the client's results, and append the results.

    `timeout` limits the model's turn, not the tools.
    """

    tools: tuple[ToolDescription, ...]
    max_calls: int = 4
    required: bool = True
    options: dict[str, Any] = {}


class Fork(Node, frozen=True, kw_only=True, tag="fork"):
    """Begin branches that share the content of this branch up to here."""

    children: tuple[int, ...]
    """The numbers of the new branches. No earlier fork may have used them."""


class Join(Limited, frozen=True, kw_only=True, tag="join"):
    """End branches.

    ``gather``: for each variable that the branches set, this branch gets a variable with the list of their
    values. ``append``: the text that each branch added is appended to this branch, in order.
    """

    children: tuple[int, ...]
    mode: Literal["gather", "append"] = "gather"


class Either(Node, frozen=True, kw_only=True, tag="either"):
    """Set a variable to the result of the first node in `of` that was not skipped.

    If all were skipped, this node is skipped as well.
    """

    name: str | None = None
    of: tuple[int, ...]


AnyNode = (
    Text
    | RoleBegin
    | RoleEnd
    | ScopeBegin
    | ScopeEnd
    | Gen
    | Select
    | Tools
    | CallTools
    | Decide
    | Fork
    | Join
    | Either
)
WITH_RESULT = Gen | Select | ScopeEnd | CallTools | Decide | Either


class Graph(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A program whose control flow is known before it runs. Conditions decide which nodes are skipped."""

    name: str = "program"
    arguments: tuple[str, ...] = ()
    """The names of the arguments. Every row must give all of them."""
    limits: tuple[Bounds, ...] = ()
    """Limits on parts of a run. The time of a limit begins with the first step to which the limit applies."""
    nodes: tuple[AnyNode, ...]

    def check(self, field: str = "graph") -> Graph:
        """Return self; raise `InvalidRequest` for the first wrong node, with its path, which begins with
        `field`."""
        _Check(self, field).check_nodes()
        return self

    def check_row(self, row: Mapping[str, Any], field: str) -> None:
        """Raise `InvalidRequest` unless `row` gives every argument and nothing else."""
        for name in self.arguments:
            if name not in row:
                raise InvalidRequest(f"{field} lacks the argument {name!r}.", field=field)
        for name, value in row.items():
            if name not in self.arguments:
                raise InvalidRequest(f"The graph has no argument {name!r}.", field=f"{field}.{name}")
            if not _is_json(value, f"{field}.{name}"):
                raise InvalidRequest(
                    f"{field}.{name} must be JSON, and holds something else: {value!r:.80}.",
                    field=f"{field}.{name}",
                )

    @property
    def width(self) -> int:
        """Most requests that one run can have in flight: the sum over branches of the widest step."""
        widest: dict[int, int] = {}
        for node in self.nodes:
            match node:
                case Gen():
                    size = node.options.get("n") or 1
                case Select() | CallTools() | Decide():
                    size = 1  # one request carries all choices, or all questions
                case _:
                    continue
            widest[node.branch] = max(widest.get(node.branch, 0), size)
        return sum(widest.values())


def _is_json(value: Any, field: str, depth: int = 0) -> bool:
    """Whether `value` is JSON.

    Raises `InvalidRequest` for a value that is nested deeper than `MAX_JSON_DEPTH`.
    """
    if depth > MAX_JSON_DEPTH:
        raise InvalidRequest(f"{field} is nested more than {MAX_JSON_DEPTH} deep.", field=field)
    match value:
        case str() | bool() | int() | None:
            return type(value) in (str, bool, int, type(None))
        case float():
            return math.isfinite(value)
        case list():
            return all(_is_json(item, field, depth + 1) for item in value)
        case dict():
            return all(type(key) is str and _is_json(item, field, depth + 1) for key, item in value.items())
    return False


class _Check:
    def __init__(self, graph: Graph, field: str) -> None:
        self.graph, self.field = graph, field
        self.parents: dict[int, int | None] = {0: None}
        self.depths = {0: 0}
        self.ended: set[int] = set()
        self.scopes: dict[tuple[int, str], tuple[Guard, ...]] = {}
        """(branch, name) of each open scope → the conditions of the node that begins it."""
        self.here = ""
        """The path of the node that is being checked."""

    def check_nodes(self) -> None:
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
        if len(self.graph.limits) > MAX_LIMITS or not all(self.graph.limits):
            raise InvalidRequest(
                f"There may be {MAX_LIMITS} limits, each with timeout, max_total_tokens or max_calls.",
                field=f"{self.field}.limits",
            )
        for index, node in enumerate(nodes):
            self.here = f"{self.field}.nodes[{index}]"
            if node.branch not in self.parents:
                self._wrong("branch", f"no earlier fork begins branch {node.branch}")
            if node.branch in self.ended:
                self._wrong("branch", f"branch {node.branch} has been joined")
            self._check_node(index, node)

    def _check_node(self, index: int, node: AnyNode) -> None:
        if isinstance(node, Limited):
            known = range(len(self.graph.limits))
            if len(set(node.limits)) < len(node.limits) or not all(one in known for one in node.limits):
                self._wrong("limits", f"they must be different indices below {len(known)}")
            if len(node.limits) > MAX_DEPTH:
                self._wrong("limits", f"more than {MAX_DEPTH} limits below each other")
        if isinstance(node, Request):
            with self._below(""):
                node.checked()
        for place, guard in enumerate(node.when):
            self._check_part(index, guard.value, f"when[{place}].value")
            if isinstance(node, Fork | Join | Either):
                self._wrong("when", "forks, joins and either cannot be skipped")
        match node:
            case Text():
                for place, part in enumerate(node.parts):
                    self._check_part(index, part, f"parts[{place}]")
            case ScopeBegin():
                self.scopes[node.branch, node.name] = node.when
            case ScopeEnd():
                if (node.branch, node.name) not in self.scopes:
                    self._wrong("name", f"the scope {node.name!r} has not begun in branch {node.branch}")
                if self.scopes.pop((node.branch, node.name)) != node.when:
                    self._wrong("when", f"the scope {node.name!r} began under other conditions")
            case Gen():
                self._check_gen(node)
            case Select():
                if not node.choices or not all(node.choices):
                    self._wrong("choices", "there must be choices, and none may be empty")
            case Tools():
                self._check_tools(node)
            case CallTools():
                self._check_tools(node)
                self._check_options(node.options)
                if node.max_calls < 1:
                    self._wrong("max_calls", f"it is {node.max_calls}, and must be at least 1")
            case Fork():
                self._check_fork(node)
            case Join():
                self._check_join(node)
            case Either():
                if not 0 < len(node.of) <= MAX_OF:
                    self._wrong("of", f"there must be 1 to {MAX_OF} nodes")
                for place, earlier in enumerate(node.of):
                    if isinstance(self._source(index, earlier, f"of[{place}]"), Either):
                        self._wrong(f"of[{place}]", f"node {earlier} is an either; name the nodes in it")
            case _:
                return  # a role is checked by its type, and by the chat template when it runs

    def _check_part(self, index: int, part: str | Argument | Result, where: str) -> None:
        if isinstance(part, Argument) and part.name not in self.graph.arguments:
            self._wrong(where, f"the graph has no argument {part.name!r}")
        if not isinstance(part, Result):
            return
        source = self._source(index, part.node, where)
        sources = [self.graph.nodes[one] for one in source.of] if isinstance(source, Either) else [source]
        outputs = {(source.options.get("n") or 1) if isinstance(source, Gen) else 1 for source in sources}
        if outputs != {1} and len(sources) > 1:
            self._wrong(where, f"a node that node {part.node} stands for has several outputs")
        (count,) = outputs
        if (part.index is None) != (count == 1) or not 0 <= (part.index or 0) < count:
            self._wrong(where, f"node {part.node} has {count} outputs, and index is {part.index}")
        if part.path and part.type is None:
            self._wrong(where, "a path needs the type of what is there")
        thinks = all(isinstance(one, Gen) and one.thinking is not None for one in sources)
        if part.thinking and (part.type is not None or not thinks):
            self._wrong(where, f"node {part.node} is no gen with thoughts")
        if any(isinstance(one, CallTools) for one in sources):
            self._wrong(where, "tool calls cannot be put into text")
        if part.type is None and any(isinstance(one, Decide) for one in sources):
            self._wrong(where, "a decide has no text; name what is meant, as by the path value and its type")
        if part.type is not None and (count > 1 or not all(isinstance(one, Gen | Decide) for one in sources)):
            self._wrong(where, "only a decide and the single output of a gen have values of a type in them")

    def _source(
        self, index: int, place: int, where: str
    ) -> Gen | Select | ScopeEnd | CallTools | Decide | Either:
        """Return the node `place`.

        Raises `InvalidRequest` unless it comes before node `index` and has a result.
        """
        if not 0 <= place < len(self.graph.nodes):
            self._wrong(where, f"there is no node {place}")
        if place >= index:
            self._wrong(where, f"node {place} does not come before this one, and a graph has no cycles")
        source = self.graph.nodes[place]
        if not isinstance(source, WITH_RESULT):
            self._wrong(where, f"node {place} has no result")
        return source

    def _check_tools(self, node: Tools | CallTools) -> None:
        names = [tool.name for tool in node.tools]
        if not names or len(set(names)) < len(names):
            self._wrong("tools", "there must be tools, and no name may be there twice")

    def _check_options(self, given: dict[str, Any]) -> SamplingParams:
        try:
            with self._below("options"):
                return msgspec.convert(given, SamplingParams, str_keys=True).check()
        except msgspec.ValidationError as error:
            self._wrong("options", str(error))

    def _check_gen(self, node: Gen) -> None:
        options = self._check_options(node.options)
        with self._below(""):
            msgspec.structs.replace(options, stop=(*options.stop, *node.stop)).check()
        if node.constraint is not None:
            with self._below("constraint"):
                node.constraint.check()
        if node.thinking is not None:
            with self._below(""):
                node.thinking.check()

    @contextlib.contextmanager
    def _below(self, where: str) -> Iterator[None]:
        """Prefix the field of each `InvalidRequest` in the block with the node's path and `where`."""
        try:
            yield
        except InvalidRequest as error:
            error.field = ".".join(filter(None, (self.here, where, error.field)))
            raise

    def _check_fork(self, node: Fork) -> None:
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

    def _check_join(self, node: Join) -> None:
        if not node.children:
            self._wrong("children", "a join has at least one branch")
        for child in node.children:
            if self.parents.get(child) != node.branch:
                self._wrong("children", f"branch {child} was not forked from branch {node.branch}")
            if child in self.ended:
                self._wrong("children", f"branch {child} has been joined")
            self.ended.add(child)

    def _wrong(self, where: str, problem: str) -> NoReturn:
        field = f"{self.here}.{where}"
        raise InvalidRequest(f"{field}: {problem}.", field=field)

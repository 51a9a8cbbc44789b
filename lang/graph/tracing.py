"""Symbolic tracing: a program's body is called once, on a state that records the steps in a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, CoroutineType, TracebackType
from typing import Any, NoReturn

import ramify.graph as graph
from ramify.errors import CompileError, InvalidRequest
from ramify.lang.graph.execute import Traced
from ramify.lang.graph.recorder import BY_STEPS, GraphBuilder, RecordedBranch, Submitted
from ramify.lang.graph.rewrite import rewritten
from ramify.lang.graph.symbolic import NotConcrete, Symbolic, SymbolicCalls, SymbolicText, SymbolicValue
from ramify.lang.program.nodes import ModelStep, VariableStep, name_of
from ramify.lang.program.variables import Variable
from ramify.lang.state.state import ProgramState


@dataclass(frozen=True)
class GraphPrefix:
    """The steps of a program before its control flow first depends on a result."""

    graph: graph.Graph | None
    """The graph of these steps; None if they contain no call, or if the body itself raised."""
    steps: dict[int, ModelStep]
    """The steps with a call, as in `Traced`."""
    submitted: list[Submitted]
    """The steps as the body appended them."""
    error: CompileError


def trace(body: Callable[..., Any], arguments: inspect.BoundArguments, unknown: Sequence[str]) -> Traced:
    """The graph of `body`, which is called once with `arguments`. The parameters named in `unknown` get their
    arguments in each run.

    Raises `CompileError`, which names the line, if the control flow of `body` depends on a result or on an
    unknown argument.
    """
    traced = trace_prefix(body, arguments, unknown)
    if isinstance(traced, GraphPrefix):
        raise traced.error
    return traced


def trace_prefix(
    body: Callable[..., Any], arguments: inspect.BoundArguments, unknown: Sequence[str] = ()
) -> Traced | GraphPrefix:
    """The graph that `trace` would return. If `trace` would raise `CompileError`, the steps before the
    operation that a graph cannot express."""
    builder = GraphBuilder(body.__name__)
    arguments.arguments.update((name, builder.argument(name)) for name in unknown)
    try:
        returned = _call(rewritten(body, builder.caught), TracedState(builder.root), arguments, builder)
        _check_returned(returned, builder)
        made = builder.made(tuple(unknown))
        made.check()
    except (NotConcrete, Exception) as error:
        return _prefix_of(builder, body.__code__, error)
    finally:
        builder.end_body()
    if builder.refused is not None:
        return _prefix_of(builder, body.__code__, builder.refused)
    return Traced(
        made,
        builder.lines,
        builder.steps,
        [limit.where for limit in builder.blocks],
        builder.values,
        builder.reads,
        builder.sources,
        returned,
    )


def _prefix_of(builder: GraphBuilder, code: CodeType, error: BaseException) -> GraphPrefix:
    refused = _compile_error(builder.refused or error, code)
    refused.__cause__ = error
    known = [place for place in builder.steps if place < builder.known]
    made: graph.Graph | None = None
    # If the body itself raised, there is no prefix: the side effects of calling it are unknown.
    if known and builder.refused is not None:
        made = builder.made(nodes=max(known) + 1)
    return GraphPrefix(made, builder.steps, builder.submitted, refused)


def _call(
    body: Callable[..., Any], state: TracedState, arguments: inspect.BoundArguments, builder: GraphBuilder
) -> Any:
    """Call the body and return its result. A body that is a coroutine function may await only its own steps,
    which are done at once."""
    result = body(state, *arguments.args, **arguments.kwargs)
    if type(result) is not CoroutineType:
        return result
    try:
        result.send(None)
    except StopIteration as end:
        return end.value
    finally:
        result.close()
    return builder.refuse_node("The program waits for something other than its own steps.")


PLAIN = (str, int, float, bool, bytes, type(None))
"""Types that cannot contain symbolic values."""


def _check_returned(value: Any, builder: GraphBuilder) -> None:
    """Refuse a return value that may hold symbolic values outside of lists, tuples and dicts. Only lists,
    tuples and dicts are searched for symbolic values."""
    kind = type(value)
    if issubclass(kind, Symbolic | TracedState) or kind in PLAIN:
        return
    if kind not in (list, tuple, dict):
        builder.refuse_node(
            f"The program returns a {kind.__name__}. What is not known yet can be returned in lists, "
            "tuples and dicts."
        )
    for item in [*value, *value.values()] if kind is dict else value:
        _check_returned(item, builder)


class TracedState(ProgramState):
    """The state of a body that is traced. Reading a result gives a symbolic value. Methods that would return
    anything else about a run, such as `text` or `usage`, are refused."""

    _branch: RecordedBranch

    def __getitem__(self, name: str | VariableStep) -> Any:
        return self._read_of(name).value

    def _read_of(self, name: str | VariableStep) -> Variable:
        variable = self._branch.variable(name_of(name))
        builder = self._branch.builder
        builder.reads.append((variable, bool(builder.guards)))
        return variable

    get_var = __getitem__

    def thinking(self, name: str | VariableStep) -> Any:
        return self._read_of(name).read_thinking()

    def get(self, name: str | VariableStep, kind: Any = None) -> Any:
        value = self[name]
        known = issubclass(type(value), SymbolicText) and kind is str
        if kind is None or known or (type(value) is SymbolicValue and value._kind is kind):
            return value
        return self._branch.builder.refuse_node(f"{name_of(name)!r} is read as another type than its own.")

    async def aget(self, name: str | VariableStep, kind: Any = None) -> Any:
        return self.get(name, kind)

    def call_tools(self, *args: Any, **options: Any) -> Any:
        calls: SymbolicCalls = super().call_tools(*args, **options)._read()  # type: ignore[assignment]
        builder = self._branch.builder
        builder.reads.append((calls._source.variable, bool(builder.guards)))
        return calls


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: TracedState, *args: Any, **kwargs: Any) -> NoReturn:
        self._branch.builder.refuse_node(f"The result of {name} is not known before the program runs.")

    return refuse


METHODS = (
    *("text", "messages", "error", "get_meta_info", "prompt_of", "cancel"),
    *("text_iter", "text_async_iter", "stream_objects", "partial", "events"),
)
for _name in METHODS:
    setattr(TracedState, _name, _refused(f"{_name}()"))
for _name in ("usage", "trace"):
    setattr(TracedState, _name, property(_refused(_name)))


def _compile_error(error: BaseException, code: CodeType) -> CompileError:
    if isinstance(error, CompileError):
        return error
    line = _line_of(error.__traceback__, code) or f"{code.co_filename}:{code.co_firstlineno}"
    if isinstance(error, NotConcrete | InvalidRequest):
        message, remedy = error.message, error.remedy
    else:
        message, remedy = f"The program raised {type(error).__name__} while it was traced: {error}", BY_STEPS
    return CompileError(f"{line}: {message}", line=line, remedy=remedy)


def _line_of(traceback: TracebackType | None, code: CodeType) -> str | None:
    """``file:line`` of the innermost frame whose code is in the file of the program; None if there is
    none."""
    found = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == code.co_filename:
            found = f"{code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found

"""Bodies that run the graph of a traced program, on a server that runs graphs or in this process."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from ramify.graph import Argument, Result
from ramify.graph_text import argument_at, argument_text
from ramify.lang.backends.base import Backend, RunsPrograms, Submission
from ramify.lang.calls.limits import tightest
from ramify.lang.graph.execute import Execution, Row, Traced
from ramify.lang.graph.symbolic import SymbolicArgument, SymbolicText, SymbolicValue
from ramify.lang.graph.tracing import TracedState, trace
from ramify.lang.program.nodes import ModelStep, ResultRef
from ramify.lang.program.variables import GatheredVariable, Skipped, Variable
from ramify.lang.state.state import ProgramState


def compile_body(
    body: Callable[..., Any], signature: inspect.Signature, given: Mapping[str, Any]
) -> tuple[Traced, inspect.Signature]:
    """Trace `body` with the arguments in `given` and the defaults of its parameters. Returns the traced
    program and the signature of the remaining parameters.

    Raises TypeError for arguments that the body does not take, and `CompileError` if the body cannot be
    traced.
    """
    bound = signature.bind_partial(**given)
    bound.apply_defaults()
    left = [parameter for parameter in signature.parameters.values() if parameter.name not in bound.arguments]
    traced = trace(body, bound, [parameter.name for parameter in left])
    return traced, inspect.Signature(left)


def body_of(traced: Traced, left: inspect.Signature, like: Callable[..., Any]) -> Callable[..., Any]:
    """A body that runs the graph of `traced`, and returns what `like`, the body that was traced, would
    return. `left` is the new body's signature."""

    @functools.wraps(like)
    def body(s: ProgramState, *args: Any, **kwargs: Any) -> Any:
        result = _Result(traced, s, left.bind(*args, **kwargs).arguments)
        for variable, conditional in result.reads():
            s._block_on(variable.ready)
            _check(variable, conditional)
        return result.value(traced.returned)

    return _signed(body, left)


def async_body_of(traced: Traced, left: inspect.Signature, like: Callable[..., Any]) -> Callable[..., Any]:
    """A coroutine function that does in the caller's event loop what the function returned by `body_of`
    does."""

    @functools.wraps(like)
    async def body(s: ProgramState, *args: Any, **kwargs: Any) -> Any:
        result = _Result(traced, s, left.bind(*args, **kwargs).arguments)
        for variable, conditional in result.reads():
            await s._wait_for(variable.ready)
            _check(variable, conditional)
        return result.value(traced.returned)

    return _signed(body, left)


def _check(variable: Variable, conditional: bool) -> None:
    """Raise the error of `variable` if its step failed. If the read is `conditional`, a skipped step is no
    error."""
    if not (conditional and isinstance(variable.error, Skipped)):
        variable.read()


def _signed(body: Callable[..., Any], left: inspect.Signature) -> Callable[..., Any]:
    state = inspect.Parameter("s", inspect.Parameter.POSITIONAL_ONLY)
    body.__signature__ = inspect.Signature([state, *left.parameters.values()])  # type: ignore[attr-defined]
    return body


def _start(traced: Traced, s: ProgramState, row: Row) -> Execution:
    """Submit all nodes of the graph with the arguments in `row`. If the backend runs graphs, the graph is
    also submitted to the backend. The steps in this process are then answered from the backend's run of the
    graph."""
    traced.graph.check_row(row, "arguments")
    root = s._branch
    run = root.run
    execution = Execution(traced, root, row)
    if runs_graphs(run.backend) and not stays_here(traced.steps):
        submission = Submission(
            traced.graph, dict(row), run.submitted_options, run.scope, tightest(run.limits), run.stream
        )
        run.backend = run.backend.submit_program(submission, lambda: execution.failed)
    execution.submit()
    return execution


BEFORE_THE_NEXT = {"backend", "choices_method", "retries"}
"""Arguments of a step that only this process can apply, before it sends the branch's next request."""


def runs_graphs(backend: Backend) -> TypeGuard[RunsPrograms]:
    """Whether graphs are submitted to `backend` as a whole. A backend with a store of answers gets each
    request separately."""
    return isinstance(backend, RunsPrograms) and getattr(backend, "answers", None) is None


def stays_here(steps: Mapping[int, ModelStep]) -> bool:
    """Whether the graph must run in this process, because a step has one of the arguments in
    `BEFORE_THE_NEXT`."""
    return any(BEFORE_THE_NEXT & step.local().keys() for step in steps.values())


def _parts(variable: Variable) -> Iterator[Variable]:
    if not isinstance(variable, GatheredVariable):
        yield variable
        return
    for part in variable.parts:
        yield from _parts(part)


class _Result:
    """The reads and the return value of the traced body, with the results of one run in place of symbolic
    values."""

    def __init__(self, traced: Traced, s: ProgramState, row: Row) -> None:
        self._traced, self._row = traced, row
        self._execution = _start(traced, s, row)

    def reads(self) -> Iterator[tuple[Variable, bool]]:
        """The reads in order: (variable of this run, whether the read is under a condition). The caller reads
        each variable, so that a failed step ends the program as it would end the body."""
        for variable, conditional in self._traced.reads:
            for part in _parts(variable):
                source = self._traced.sources.get(part)
                if isinstance(source, Result):
                    yield self._execution.outcomes[source.node], conditional

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind is SymbolicArgument and not (part := value.parts[0]).then:
            return argument_at(self._name(part), self._row[self._name(part)], part.path)
        if issubclass(kind, SymbolicText):
            return "".join([part if isinstance(part, str) else self._text(part) for part in value.parts])
        if issubclass(kind, SymbolicValue):
            return self._outcome(value._source).value()
        if kind is TracedState:
            return ProgramState(self._execution.branches[value._branch.number])
        if kind is dict:
            return {key: self.value(item) for key, item in value.items()}
        if kind in (list, tuple):
            return kind([self.value(item) for item in value])
        return value

    def _name(self, part: ResultRef) -> str:
        source = self._traced.sources[part.variable]
        assert isinstance(source, Argument)
        return source.name

    def _text(self, part: ResultRef) -> str:
        source = self._traced.sources[part.variable]
        if isinstance(source, Argument):
            return argument_text(source.name, self._row[source.name], part.path, part.then)
        return self._outcome(part).read()

    def _outcome(self, part: ResultRef) -> ResultRef:
        source = self._traced.sources[part.variable]
        assert isinstance(source, Result)
        return replace(part, variable=self._execution.outcomes[source.node])

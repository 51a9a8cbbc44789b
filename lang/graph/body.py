"""A traced program as a body: calling it runs the graph, remotely where the backend is a server."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from ramify.graph import Argument, Result, argument_at, argument_text
from ramify.lang.backends.base import Backend, RunsPrograms, Submission
from ramify.lang.calls.limits import tightest
from ramify.lang.graph.execute import Execution, Row, execute
from ramify.lang.graph.symbolic import SymbolicArgument, SymbolicText, SymbolicValue
from ramify.lang.graph.tracing import Traced, TracedState, trace
from ramify.lang.program.nodes import ModelStep, ResultRef
from ramify.lang.program.variables import GatheredVariable, Skipped, Variable
from ramify.lang.state.state import ProgramState


def compile_body(
    body: Callable[..., Any], signature: inspect.Signature, given: Mapping[str, Any]
) -> tuple[Traced, inspect.Signature]:
    """`body` traced with the arguments in `given`, and the signature of the remaining arguments.

    Raises TypeError for arguments that the body does not take, and `CompileError`.
    """
    bound = signature.bind_partial(**given)
    bound.apply_defaults()
    left = [parameter for parameter in signature.parameters.values() if parameter.name not in bound.arguments]
    traced = trace(body, bound, [parameter.name for parameter in left])
    return traced, inspect.Signature(left)


def body_of(traced: Traced, left: inspect.Signature, like: Callable[..., Any]) -> Callable[..., Any]:
    """A body that runs the graph of `like`, and returns the same as `like`."""

    @functools.wraps(like)
    def body(s: ProgramState, *args: Any, **kwargs: Any) -> Any:
        row = left.bind(*args, **kwargs).arguments
        execution = _start(traced, s, row)
        for variable, conditional in _read(traced, execution):
            s._block_on(variable.ready)
            if not (conditional and isinstance(variable.error, Skipped)):
                variable.read()
        return _Result(traced, execution, row).value(traced.returned)

    return _signed(body, left)


def async_body_of(traced: Traced, left: inspect.Signature, like: Callable[..., Any]) -> Callable[..., Any]:
    """`body_of` for the caller's event loop."""

    @functools.wraps(like)
    async def body(s: ProgramState, *args: Any, **kwargs: Any) -> Any:
        row = left.bind(*args, **kwargs).arguments
        execution = _start(traced, s, row)
        for variable, conditional in _read(traced, execution):
            await variable.ready.wait()
            if not (conditional and isinstance(variable.error, Skipped)):
                variable.read()
        return _Result(traced, execution, row).value(traced.returned)

    return _signed(body, left)


def _signed(body: Callable[..., Any], left: inspect.Signature) -> Callable[..., Any]:
    state = inspect.Parameter("s", inspect.Parameter.POSITIONAL_ONLY)
    body.__signature__ = inspect.Signature([state, *left.parameters.values()])  # type: ignore[attr-defined]
    return body


def _start(traced: Traced, s: ProgramState, row: Row) -> Execution:
    """Submit the whole graph: here, and to the backend if it runs graphs itself."""
    traced.graph.check_row(row, "arguments")
    root = s._branch
    run = root.run
    execution: Execution | None = None
    if runs_graphs(run.backend) and not stays_here(traced.steps):
        run.backend = run.backend.submit_program(
            Submission(
                traced.graph, dict(row), run.submitted_options, run.scope, tightest(run.limits), run.stream
            ),
            lambda: execution is None or execution.failed,
        )
    execution = execute(
        traced.graph,
        root,
        row,
        steps=traced.steps,
        lines=traced.lines,
        values=traced.values,
        blocks=traced.blocks,
    )
    return execution


BEFORE_THE_NEXT = {"backend", "choices_method", "retries"}
"""Arguments of a step that this process honours before the next request of the branch is sent."""


def runs_graphs(backend: Backend) -> TypeGuard[RunsPrograms]:
    """Whether the backend takes graphs. With a store of answers, each request is sent by itself."""
    return isinstance(backend, RunsPrograms) and getattr(backend, "answers", None) is None


def stays_here(steps: Mapping[int, ModelStep]) -> bool:
    """Whether a step names a backend, or needs a function of this process before the next request."""
    return any(BEFORE_THE_NEXT & step.local().keys() for step in steps.values())


def _read(traced: Traced, execution: Execution) -> Iterator[tuple[Variable, bool]]:
    """(variable that the body reads, whether under a condition), in order. Reading the variable of a failed
    step ends the program."""
    for variable, conditional in traced.reads:
        for part in _parts(variable):
            source = traced.sources.get(part)
            if isinstance(source, Result):
                yield execution.outcomes[source.node], conditional


def _parts(variable: Variable) -> Iterator[Variable]:
    if not isinstance(variable, GatheredVariable):
        yield variable
        return
    for part in variable.parts:
        yield from _parts(part)


class _Result:
    """The return value of the traced body, with a run's results in place of symbolic values."""

    def __init__(self, traced: Traced, execution: Execution, row: Row) -> None:
        self._traced, self._execution, self._row = traced, execution, row

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
        """`part`, with this run's variable in place of that of the trace."""
        source = self._traced.sources[part.variable]
        assert isinstance(source, Result)
        return replace(part, variable=self._execution.outcomes[source.node])

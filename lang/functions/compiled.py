"""Compiled programs: functions that run as graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ParamSpec, Self, TypeVar

from ramify.lang.functions.async_function import AsyncFunction
from ramify.lang.functions.function import Function
from ramify.lang.functions.program import Program
from ramify.lang.graph.tracing import Traced
from ramify.lang.graph.view import GraphView
from ramify.lang.state.state import ProgramState

P = ParamSpec("P")
R = TypeVar("R")


class _Compiled(Program[P, R]):
    """Base of `Compiled` and `AsyncCompiled`. The signature lacks the parameters that were given a value at
    compile time."""

    traced: Traced

    def __init__(
        self, traced: Traced, left: inspect.Signature, body: Callable[..., Any], bound: Mapping[str, Any]
    ) -> None:
        super().__init__(self._graph_body(traced, left, body), bound)
        self.traced = traced

    def graph(self) -> GraphView:
        """The graph of the program, which can be printed, drawn and sent to a server."""
        local = {place: step.local() for place, step in self.traced.steps.items()}
        return GraphView(self.traced.graph, self.traced.lines, local)

    def compile(self, **given: Any) -> Self:
        """A copy of the program with values bound to some of its parameters or to options of `run`."""
        return self._with(given)

    def _calling(self, bound: inspect.BoundArguments, compiled: bool) -> Callable[[ProgramState], Any]:
        return super()._calling(bound, False)


class Compiled(_Compiled[P, ProgramState], Function[P]):
    """A program that runs as a graph; made by `Function.compile`."""


class AsyncCompiled(_Compiled[P, Coroutine[Any, Any, ProgramState]], AsyncFunction[P]):
    """An async program that runs as a graph; made by `AsyncFunction.compile`."""

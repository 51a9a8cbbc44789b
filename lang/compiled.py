"""Programs that have been compiled: functions that run as graphs, and show them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

from ramify.lang.graph_body import async_body_of, body_of
from ramify.lang.graph_view import GraphView
from ramify.lang.program import AsyncFunction, Function
from ramify.lang.state import ProgramState
from ramify.lang.tracing import Traced

P = ParamSpec("P")


class Compiled(Function[P]):
    """A program that runs as a graph; made by `Function.compile`. Its parameters are what was not given."""

    def __init__(
        self, traced: Traced, left: inspect.Signature, body: Callable[..., Any], bound: Mapping[str, Any]
    ) -> None:
        super().__init__(body_of(traced, left, body), bound)
        self._traced = traced

    def graph(self) -> GraphView:
        """The graph, to look at and to send."""
        return GraphView(self._traced.graph, self._traced.lines)

    def compile(self, **given: Any) -> Compiled[...]:
        """Itself, with arguments or options of `run` given."""
        return self._with(given)

    def _calling(self, bound: inspect.BoundArguments, compiled: bool) -> Callable[[ProgramState], Any]:
        return super()._calling(bound, False)


class AsyncCompiled(AsyncFunction[P]):
    """`Compiled` for the caller's event loop; made by `AsyncFunction.compile`."""

    def __init__(
        self, traced: Traced, left: inspect.Signature, body: Callable[..., Any], bound: Mapping[str, Any]
    ) -> None:
        super().__init__(async_body_of(traced, left, body), bound)
        self._traced = traced

    def graph(self) -> GraphView:
        """The graph, to look at and to send."""
        return GraphView(self._traced.graph, self._traced.lines)

    def compile(self, **given: Any) -> AsyncCompiled[...]:
        """Itself, with arguments or options of `run` given."""
        return self._with(given)

    def _calling(self, bound: inspect.BoundArguments, compiled: bool) -> Callable[[ProgramState], Any]:
        return super()._calling(bound, False)

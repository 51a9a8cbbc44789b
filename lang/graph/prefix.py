"""Speculative submission: a program's first steps run at the server as a graph, while its body runs here.

A body that branches on a result has no graph of all its steps. Tracing finds the steps before the first such
decision, and the graph of these steps is submitted to the server at once. Then the body is called as usual:

    graph at the server    text, gen a, gen b
    steps of the body      text, gen a, gen b, (reads b) gen c
    requests               a, b: answered from the graph's results; c: sent separately

From the first step that differs from the graph on, each request is sent separately.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any, cast

from ramify.errors import InvalidRequest, ProgramError
from ramify.lang.backends.base import Backend, RunsPrograms, Submission, Wrapper
from ramify.lang.backends.router import model_of
from ramify.lang.calls.limits import tightest
from ramify.lang.graph.body import runs_graphs, stays_here
from ramify.lang.graph.tracing import GraphPrefix
from ramify.lang.program.branch import Branch
from ramify.lang.program.nodes import Decide, Interpolated, Step, Text
from ramify.lang.program.run import Run
from ramify.lang.program.variables import Variable
from ramify.lang.state.state import ProgramState
from ramify.lang.tools.tool import Tool
from ramify.lang.trace.calls import CURRENT, Call
from ramify.messages import Generate, TextChunk
from ramify.model_info import ModelInfo

OF_THIS_PROCESS = ("line", "parse", "kind", "validate")
"""Fields of a step that do not change the step's request."""


def submit_prefix(s: ProgramState, prefix: GraphPrefix) -> ProgramState:
    """Submit `prefix` for the run of `s`, if the run's backend is a server that runs graphs. Returns `s`."""
    run = s._branch.run
    graph = prefix.graph
    if graph is None or not runs_graphs(run.backend) or stays_here(prefix.steps):
        return s
    if any(isinstance(step, Decide) or step.node.model for step in prefix.steps.values()):
        return s  # decisions may form other requests than those of a graph, whose steps are known
    try:
        graph.check()
    except InvalidRequest:  # too large for one graph: the body runs without a submitted prefix
        return s
    submission = Submission(graph, {}, run.submitted_options, run.scope, tightest(run.limits), run.stream)
    run.backend = _PrefixBackend(run, prefix, run.backend, submission)
    return s


class _PrefixBackend(Wrapper):
    def __init__(self, run: Run, prefix: GraphPrefix, backend: RunsPrograms, submission: Submission) -> None:
        self._run = run
        self._backend = cast(Backend, backend)
        self._server = backend.submit_program(submission, self._is_other)
        self._ahead = deque(prefix.submitted)
        """The steps of the graph that the body has not reached yet."""
        self._parted = False
        self._same: list[Variable] = []
        """The variables of the body's steps that match a step of the graph."""
        self._of: dict[Variable, Variable] = {}
        """Variable of a step of the graph → variable of the matching step of the body."""
        self._lock = threading.Lock()
        self._goes_on = False
        """Whether any request was sent separately, outside the graph."""
        run.watch = self._watch

    def model(self, name: str) -> Backend:
        """The backend of another model. No step of the graph has one."""
        return model_of(self._backend, name)

    async def info(self) -> ModelInfo:
        return await self._backend.info()

    async def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        answered = self._is_answered(CURRENT.get())
        self._goes_on |= not answered
        backend = self._server if answered else self._backend
        async with aclosing(cast("AsyncGenerator[TextChunk, None]", backend.generate(request))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def tools_returned(self, place: str, results: Sequence[str]) -> None:
        returned = getattr(self._server, "tools_returned", None)
        places = [variable.call.place for variable in self._same if variable.call is not None]
        if returned is not None and place in places:
            await returned(place, results)

    async def abort(self, rid: str) -> bool | None:
        backend = self._server if self._is_answered(CURRENT.get()) else self._backend
        abort = getattr(backend, "abort", None)
        return None if abort is None else await abort(rid)

    async def end_program(self, program: str) -> None:
        await self._server.end_program(program)
        if self._goes_on:
            await self._backend.end_program(program)

    async def aclose(self) -> None:
        """Do nothing: the caller who opened the backend closes it."""

    def _is_answered(self, call: Call | None) -> bool:
        """Whether the request of `call` belongs to a step that matches a step of the graph. If so, the
        graph's run answers the request."""
        while call is not None and call.parent is not None and call.parent.kind not in ("program", "fork"):
            call = call.parent
        return any(variable.call is call for variable in self._same)

    def _is_other(self) -> bool:
        return self._parted or bool(self._ahead) or _has_failed(self._run.root)

    def _watch(self, branch: Branch, step: Step, variable: Variable | None) -> None:
        with self._lock:
            if self._parted or not self._ahead:
                return
            key, node, known = self._ahead.popleft()
            self._parted = key != branch.key or not self._is_same(node, step)
            if not self._parted and variable is not None and known is not None:
                self._of[known] = variable
                self._same.append(variable)

    def _is_same(self, node: Step, step: Step) -> bool:
        if isinstance(node, Interpolated):
            return isinstance(step, Text) and step.value == self._text(node)
        return type(node) is type(step) and all(
            _comparable(getattr(node, field.name)) == _comparable(getattr(step, field.name))
            for field in fields(step)
            if field.name not in OF_THIS_PROCESS
        )

    def _text(self, node: Interpolated) -> str | None:
        """The text of `node` with the results inserted; None if a result is not ready, or its step has
        failed."""
        parts = [
            part if isinstance(part, str) else replace(part, variable=self._of[part.variable])
            for part in node.parts
        ]
        if not all(isinstance(part, str) or part.variable.ready.is_set() for part in parts):
            return None
        try:
            return "".join([part if isinstance(part, str) else part.read() for part in parts])
        except ProgramError:
            return None


def _comparable(value: Any) -> Any:
    """`value` in a form that can be compared between runs: branches as keys, and tools as descriptions."""
    match value:
        case tuple():
            return list(map(_comparable, value))
        case Branch():
            return value.key
        case Tool():
            return value.described
    return value


def _has_failed(branch: Branch) -> bool:
    return branch.error is not None or any(map(_has_failed, branch.children))

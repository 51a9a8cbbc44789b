"""What sync and async programs have in common: arguments, what is bound to them, and how a run begins."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, Self

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.lang.backends.base import Backend
from ramify.lang.batch import results, runs
from ramify.lang.calls.options import NAMES, read_options
from ramify.lang.graph.body import compile_body
from ramify.lang.graph.prefix import submit_prefix
from ramify.lang.graph.tracing import Traced, trace_prefix
from ramify.lang.program.refused import refused
from ramify.lang.program.run import Run, find_backend
from ramify.lang.program.state import ProgramState
from ramify.messages import ModelInfo

P = ParamSpec("P")

RESERVED = ("backend", "stream", "cache_scope", "compiled")
"""Arguments of `run` that no program can have as its own."""


NOTHING_LEFT = inspect.Signature()


@dataclass(frozen=True)
class Settings:
    """How to run, as given to `run` beside the program's own arguments."""

    options: dict[str, Any]
    backend: Backend
    stream: bool
    scope: str
    compiled: bool


@dataclass(frozen=True)
class Started:
    """A run that has begun."""

    run: Run
    state: ProgramState
    """For its caller."""
    body: Callable[[], Any]
    """Calls the program's body; raises TypeError or `InvalidRequest` where its arguments do not fit."""


@dataclass(frozen=True)
class Batch:
    """How to run many rows."""

    settings: Settings
    common: Mapping[str, Any]
    """The arguments that all rows share."""
    limit: int
    """Most rows that run at once."""
    progress: bool
    plan: results.Plan | None
    """How it is written to a results file, if it is."""


class Program(Generic[P]):
    """What sync and async programs have in common: their signature and what is bound to it."""

    _graph_body: Callable[[Traced, inspect.Signature, Callable[..., Any]], Callable[..., Any]]
    """Makes a body that runs a graph."""

    def __init__(self, body: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        self.body = body
        self.bound = dict(bound or {})
        parameters = list(inspect.signature(body).parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise TypeError(
                f"{body.__qualname__} takes no state; its first parameter is the state, usually `s`."
            )
        self._signature = inspect.Signature(parameters[1:])
        self.arg_names = [parameter.name for parameter in parameters[1:]]
        for name in RESERVED:
            if name in self.arg_names:
                raise TypeError(f"{body.__qualname__} cannot have a parameter {name!r}: run() has one.")
        functools.update_wrapper(self, body)  # type: ignore[arg-type]

    trace = refused("trace", "Use compile().")
    cache = refused("cache", "The runtime finds shared prefixes by itself.")

    def _sort(self, kwargs: Mapping[str, Any], of: str) -> tuple[Settings, dict[str, Any]]:
        """Tell the run's settings from the program's own arguments, with what is bound filled in."""
        given = {**self.bound, **kwargs}
        backend, stream = given.pop("backend", None), given.pop("stream", False)
        scope, compiled = given.pop("cache_scope", ""), given.pop("compiled", False)
        own = {name: given.pop(name) for name in list(given) if name in self.arg_names or name not in NAMES}
        options = read_options(given, of=of)
        return Settings(options, find_backend(backend), stream, scope, compiled), own

    def _on_state(self, state: ProgramState, *args: Any, **kwargs: Any) -> Any:
        """Call the body on the state of another program, with what is bound filled in."""
        given = {**self.bound, **kwargs}
        for name in given:
            if name not in self.arg_names and name in (*NAMES, *RESERVED):
                raise UnsupportedField(
                    f"{self.body.__qualname__} runs as a part of another program, so {name} has no effect.",
                    field=name,
                    remedy="Give it to the run of that program.",
                )
        bound = self._signature.bind(*args, **given)
        return self.body(state, *bound.args, **bound.kwargs)

    def _compile(self, given: Mapping[str, Any]) -> tuple[Traced, inspect.Signature, dict[str, Any]]:
        """The program traced, the signature of what is left to be given, and what stays bound."""
        bound = self._bind(given)
        own = {name: bound.pop(name) for name in self.arg_names if name in bound}
        return *compile_body(self.body, self._signature, own), bound

    def _calling(self, bound: inspect.BoundArguments, compiled: bool) -> Callable[[ProgramState], Any]:
        """What runs the program on a state: its body, or its graph where it is to be compiled and has one."""
        if compiled:
            traced = trace_prefix(self.body, copy.copy(bound))
            if isinstance(traced, Traced):
                return self._graph_body(traced, NOTHING_LEFT, self.body)
            return lambda s: self.body(submit_prefix(s, traced), *bound.args, **bound.kwargs)
        return lambda s: self.body(s, *bound.args, **bound.kwargs)

    def _start(
        self,
        settings: Settings,
        info: ModelInfo,
        arguments: Callable[[], inspect.BoundArguments],
        *,
        asynchronous: bool = False,
    ) -> Started:
        """Begin a run; `arguments` gives those of the body, or raises where they do not fit."""
        run = Run(
            self.body.__name__,
            settings.backend,
            info,
            settings.options,
            scope=settings.scope,
            stream=settings.stream,
            asynchronous=asynchronous,
        )
        inside = ProgramState(run.root)

        def body() -> Any:
            return self._calling(arguments(), settings.compiled)(inside)

        return Started(run, ProgramState(run.root, outside=True), body)

    def _start_row(self, of: Batch, info: ModelInfo, row: Any, *, asynchronous: bool = False) -> Started:
        """`_start` for a row of a batch."""
        arguments = functools.partial(self._row, of.common, row)
        return self._start(of.settings, info, arguments, asynchronous=asynchronous)

    def _batch(
        self,
        options: Mapping[str, Any],
        num_threads: int | Literal["auto"],
        concurrency: int | None,
        progress: bool,
        out: str | os.PathLike[str] | None = None,
        **writing: Any,
    ) -> Batch:
        """What is asked of `run_batch`, checked before any row runs; `writing` is for `out` only."""
        settings, common = self._sort(options, "run_batch")
        if "stream" in options:
            raise InvalidRequest("A batch does not stream.", field="stream")
        for name in common:
            if name not in self.arg_names:
                raise UnsupportedField(f"run_batch has no option {name!r}.", field=name)
        limit = runs.limit(num_threads, concurrency)
        if out is None:
            for name, value in writing.items():
                if value is not None and value is not False:
                    raise InvalidRequest(f"{name} needs out.", field=name)
            return Batch(settings, common, limit, progress, None)
        plan = results.Plan(
            out=out,
            program=self.body.__qualname__,
            columns=self.arg_names,
            same={"arguments": common, "options": settings.options},
            concurrency=limit,
            progress=progress,
            **writing,
        )
        return Batch(settings, common, limit, progress, plan)

    def _row(self, common: Mapping[str, Any], row: Any) -> inspect.BoundArguments:
        """A row of a batch as arguments: a mapping by name, a list or tuple by position."""
        if isinstance(row, Mapping):
            return self._signature.bind(**{**common, **row})
        if isinstance(row, list | tuple):
            return self._signature.bind(*row, **common)
        raise InvalidRequest(
            f"A row must be a mapping, a list or a tuple, not {type(row).__name__}.", field="rows"
        )

    def _bind(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        for name in bound:
            if name not in self.arg_names and name not in NAMES and name not in RESERVED:
                raise TypeError(f"{self.body.__qualname__} has no parameter {name!r} to bind.")
        return {**self.bound, **bound}

    def _with(self, bound: Mapping[str, Any]) -> Self:
        other = copy.copy(self)
        other.bound = self._bind(bound)
        return other

"""The base of sync and async programs: their arguments and options, and the start of a run."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack

from ramify.bounds import Bounds
from ramify.errors import InvalidRequest, ProgramError, UnsupportedField
from ramify.lang.backends.base import Backend
from ramify.lang.backends.router import on_model
from ramify.lang.batch import keys, results, runs
from ramify.lang.batch.checkpoint import refuse_changed
from ramify.lang.batch.fingerprint import Record, record_of
from ramify.lang.calls.limits import LIMITS, Limit, Limits, combined
from ramify.lang.calls.limits import NAMES as BOUNDS
from ramify.lang.common.unsupported import unsupported
from ramify.lang.functions.arguments import RunKeywords, Runs
from ramify.lang.graph.body import compile_body
from ramify.lang.graph.execute import Traced
from ramify.lang.graph.prefix import submit_prefix
from ramify.lang.graph.tracing import trace_prefix
from ramify.lang.graph.view import GraphView
from ramify.lang.program.nodes import On
from ramify.lang.program.place import PLACE, Place
from ramify.lang.program.run import Run, find_backend
from ramify.lang.state.state import ProgramState
from ramify.model_info import ModelInfo
from ramify.sampling_options import ELSEWHERE, NAMES, read_options
from ramify.spelling import nearest, parameters_of

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B")

RESERVED = ("backend", "model", "stream", "cache_scope", "compiled")
"""Arguments of `run` whose names a program's own parameters cannot have."""

NO_PARAMETERS = inspect.Signature()


@dataclass(frozen=True)
class Settings:
    """The arguments of `run` other than the program's own arguments."""

    options: dict[str, Any]
    backend: Backend
    stream: bool
    scope: str
    compiled: bool
    bounds: Bounds
    """The bounds given to `run`, which hold for each run."""
    limits: Limits
    """The limits of the ``with`` blocks around the call of `run`."""


@dataclass(frozen=True)
class Started:
    """A run that has begun."""

    run: Run
    state: ProgramState
    body: Callable[[], Any]
    """A function that calls the program's body. Raises TypeError or `InvalidRequest` if the arguments do not
    fit the body's parameters."""


@dataclass(frozen=True)
class Batch:
    """The arguments of `run_batch`."""

    settings: Settings
    common: Mapping[str, Any]
    """The program's arguments that are the same for all rows, by name."""
    limit: int
    progress: bool
    give_up_after: float | None
    plan: results.Plan | None
    """The results file and the options of writing the file; None for a batch without a results file."""
    place: Place | None = None
    """The place in a program at which the batch was started; the rows become part of that program's trace.
    None for a batch that no program has started, and for a batch with a results file."""

    def in_order(self, rows: Iterable[Any]) -> runs.Batch:
        return runs.Batch(rows, self.limit, self.progress, self.give_up_after)


class Program(Runs[P, R, B]):
    """The base of sync and async programs: a body, its signature, and bound arguments."""

    _graph_body: Callable[[Traced, inspect.Signature, Callable[..., Any]], Callable[..., Any]]
    """The function that makes a body that runs a traced graph: `body_of` or `async_body_of`."""
    _asynchronous: ClassVar[bool]
    traced: Traced | None = None

    def __init__(
        self, body: Callable[Concatenate[ProgramState, P], B], bound: Mapping[str, Any] | None = None
    ) -> None:
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
        functools.update_wrapper(self, body)

    trace = unsupported("trace", "Use compile().")
    cache = unsupported("cache", "The runtime finds shared prefixes by itself.")

    def with_options(self, **options: Unpack[RunKeywords]) -> Self:
        """A copy of the program with a default backend or default sampling options. The types of its
        parameters stay the same."""
        return self._with(options)

    def _sort(self, kwargs: Mapping[str, Any], of: str) -> tuple[Settings, dict[str, Any]]:
        given = {**self.bound, **kwargs}
        backend, model = given.pop("backend", None), given.pop("model", None)
        stream = given.pop("stream", False)
        scope, compiled = given.pop("cache_scope", ""), given.pop("compiled", False)
        bounds = Bounds(**{name: given.pop(name, None) for name in BOUNDS if name not in self.arg_names})
        own = {name: given.pop(name) for name in list(given) if name in self.arg_names or name not in NAMES}
        self._refuse_unknown(own, of)
        options = read_options(given, of=of)
        found = find_backend(backend)
        if model is not None:
            found = on_model(found, model)
        return Settings(options, found, stream, scope, compiled, bounds, LIMITS.get()), own

    def _refuse_unknown(self, own: Iterable[str], of: str) -> None:
        """Refuse a name in `own` that is neither a parameter of the program nor an option of the method `of`.

        Raises TypeError, as Python does for function calls; for `run_batch`, where the rows have the
        arguments, `UnsupportedField`.
        """
        parameters = self._signature.parameters.values()
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
            return
        for name in own:
            if name not in self.arg_names:
                known = [*self.arg_names, *sorted(NAMES), *RESERVED, *BOUNDS]
                known += parameters_of(getattr(self, of))
                remedy = nearest(name, known, ELSEWHERE)
                if of == "run_batch":
                    raise UnsupportedField(f"run_batch has no option {name!r}.", field=name, remedy=remedy)
                raise TypeError(
                    f"{self.body.__qualname__} has no parameter {name!r}. {remedy or ''}".rstrip()
                )

    def _on_state(self, state: ProgramState, *args: Any, **kwargs: Any) -> B:
        given = {**self.bound, **kwargs}
        on = On(given.pop("backend", None), given.pop("model", None))
        for name in given:
            if name not in self.arg_names and name in (*NAMES, *RESERVED, *BOUNDS):
                raise UnsupportedField(
                    f"{self.body.__qualname__} runs as a part of another program, so {name} has no effect.",
                    field=name,
                    remedy="Call it in a block: with rm.limit(...)."
                    if name in BOUNDS
                    else "Give it to the run of that program.",
                )
        bound = self._signature.bind(*args, **given)
        return self.body(state._on(on), *bound.args, **bound.kwargs)

    def _compile(self, given: Mapping[str, Any]) -> tuple[Traced, inspect.Signature, dict[str, Any]]:
        """The traced program, the signature of the parameters that still need arguments, and the bound
        options of `run`."""
        bound = self._bind(given)
        own = {name: bound.pop(name) for name in self.arg_names if name in bound}
        return *compile_body(self.body, self._signature, own), bound

    def _calling(self, bound: inspect.BoundArguments, compiled: bool) -> Callable[[ProgramState], Any]:
        if compiled:
            traced = trace_prefix(self.body, copy.copy(bound))
            if isinstance(traced, Traced):
                return self._graph_body(traced, NO_PARAMETERS, self.body)
            return lambda s: self.body(submit_prefix(s, traced), *bound.args, **bound.kwargs)
        return lambda s: self.body(s, *bound.args, **bound.kwargs)

    def _start(
        self,
        settings: Settings,
        info: ModelInfo,
        arguments: Callable[[], inspect.BoundArguments],
        place: Place | None,
        *,
        in_batch: bool = False,
    ) -> Started:
        """Begin a run. `place` is the place in another program that starts this one; None if no program
        starts it. `arguments` returns the body's arguments; if `arguments` raises an error, the run fails
        with that error."""
        around = None if place is None else place.run()
        limits = settings.limits if around is None else combined(around.limits, settings.limits)
        if settings.bounds:
            limits = (*limits, Limit(settings.bounds, f"the run of {self.body.__name__!r}"))
        run = Run(
            self.body.__name__,
            settings.backend,
            info,
            settings.options,
            scope=settings.scope,
            stream=settings.stream,
            asynchronous=self._asynchronous,
            place=place,
            in_batch=in_batch,
            limits=limits,
        )
        inside = ProgramState(run.root)

        def body() -> Any:
            return self._calling(arguments(), settings.compiled)(inside)

        return Started(run, ProgramState(run.root, outside=True), body)

    def _start_row(self, batch: Batch, info: ModelInfo, row: Any) -> Started:
        def arguments() -> inspect.BoundArguments:
            try:
                return self._row(batch.common, row)
            except (TypeError, InvalidRequest) as error:
                raise ProgramError(f"The row was not run: {error}") from error

        return self._start(batch.settings, info, arguments, batch.place, in_batch=True)

    def _refused_row(self, batch: Batch, info: ModelInfo, error: ProgramError, row: Any) -> ProgramState:
        started = self._start_row(batch, info, row)
        started.run.reject(error)
        return started.state

    def _batch(
        self,
        options: Mapping[str, Any],
        num_threads: int | Literal["auto"],
        concurrency: int | None,
        progress: bool,
        give_up_after: float | None,
        out: str | os.PathLike[str] | None = None,
        **writing: Any,
    ) -> Batch:
        """The arguments of `run_batch`, checked before any row runs. The arguments in `writing` may be given
        only with `out`."""
        settings, common = self._sort(options, "run_batch")
        if "stream" in options:
            raise InvalidRequest("A batch does not stream.", field="stream")
        limit = runs.limit(num_threads, concurrency)
        if give_up_after is not None and not give_up_after >= 0:
            raise InvalidRequest(
                f"give_up_after is {give_up_after}; it must be seconds, or None for no limit.",
                field="give_up_after",
            )
        if out is None and writing.get("dry_run"):
            out = os.devnull  # no rows are done
        if out is None:
            for name, value in writing.items():
                if value is not None and value is not False:
                    raise InvalidRequest(f"{name} needs out.", field=name)
            return Batch(settings, common, limit, progress, give_up_after, None, PLACE.get())
        plan = results.Plan(
            out=out,
            program=self.body.__qualname__,
            columns=self.arg_names,
            concurrency=limit,
            progress=progress,
            give_up_after=give_up_after,
            **{name: value for name, value in writing.items() if value is not None},
        )
        batch = Batch(settings, common, limit, progress, give_up_after, plan)
        if plan.jsonl.exists():  # before an engine starts
            refuse_changed(plan.jsonl, self._record(batch, None, {}), plan.key, plan.rerun)
        return batch

    def _record(self, batch: Batch, info: ModelInfo | None, loras: Mapping[str, str]) -> Record:
        settings = batch.settings
        return record_of(self, settings.options, batch.common, settings.backend, info, loras)

    def _row(self, common: Mapping[str, Any], row: Any) -> inspect.BoundArguments:
        """The arguments of a row, which has them by name (a mapping) or by position (a list or tuple). Raises
        `InvalidRequest` for any other row."""
        if isinstance(row, Mapping):
            return self._signature.bind(**{**common, **row})
        if isinstance(row, list | tuple):
            return self._signature.bind(*row, **common)
        if isinstance(row, keys.Unreadable):
            raise InvalidRequest(f"{row}", field="rows")
        raise InvalidRequest(
            f"A row must be a mapping, a list or a tuple, not {type(row).__name__}.", field="rows"
        )

    def _bind(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        for name in bound:
            if name not in (*self.arg_names, *NAMES, *RESERVED, *BOUNDS):
                raise TypeError(f"{self.body.__qualname__} has no parameter {name!r} to bind.")
        return {**self.bound, **bound}

    def _with(self, bound: Mapping[str, Any]) -> Self:
        other = copy.copy(self)
        other.bound = self._bind(bound)
        return other


class CompiledProgram(Program[P, R, B]):
    """Base of `Compiled` and `AsyncCompiled`. The signature has only the parameters without a value at
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

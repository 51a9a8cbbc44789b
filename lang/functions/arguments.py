"""Arguments of `run`, as type checkers see them.

`run` takes the program's own parameters (P) and options at once: ``judge.run(essay="…", backend=engine)``.
PEP 612 allows parameters in front of those of P, and none behind them. So the overloads below state the
options in front. The `Never` before the options refuses every positional argument, so only their names can be
given (docs/decisions/0087-check-arguments-beside-options.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, Literal, Never, ParamSpec, TypeVar, Unpack, overload

from ramify.lang.backends.base import Backend
from ramify.lang.state.state import ProgramState
from ramify.sampling_options import SamplingKeywords

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
B = TypeVar("B")
S_co = TypeVar("S_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)
B_co = TypeVar("B_co", covariant=True)
A1 = TypeVar("A1")
A2 = TypeVar("A2")
A3 = TypeVar("A3")


class RowKeywords(SamplingKeywords, total=False):
    """Options of `run` and of `run_batch`, which takes them for all rows."""

    backend: Backend | str | None
    model: str | None
    cache_scope: str
    compiled: bool
    timeout: float | None
    max_total_tokens: int | None
    max_calls: int | None
    priority: int | None
    lora: str | None
    n: int | None
    max_tokens: int | None


class RunKeywords(RowKeywords, total=False):
    """Options of `run` and of `with_options`."""

    stream: bool


class BatchKeywords(RowKeywords, total=False):
    """Options of `run_batch`."""

    num_threads: int | Literal["auto"]
    concurrency: int | None
    progress_bar: bool
    progress: bool
    give_up_after: float | None


class FileKeywords(BatchKeywords, total=False):
    """Options of `run_batch` that writes a file."""

    key: str | None
    look_ahead: int | None
    rerun: str | None
    trace: str | os.PathLike[str] | None
    trace_rows: int | None


class Signature(Generic[S_co, R_co, B_co]):
    """The types of a program: its parameters as a `Callable`, the result of `run`, the result of the body.

    An overload of `Runs` whose `self` is a `Signature` names the types of the first parameters. mypy solves
    them in a `Callable`, and not in a ParamSpec.
    """


class Runs(Signature[Callable[P, R], R, B], Generic[P, R, B]):
    """The base of programs. P are the parameters, R is the result of `run`, B is the result of the body."""

    @overload
    def __call__(self, state: ProgramState, /, *args: P.args, **kwargs: P.kwargs) -> B: ...
    @overload
    def __call__(
        self,
        state: ProgramState,
        options_by_name: Never = ...,
        /,
        backend: Backend | str | None = ...,
        model: str | None = ...,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> B: ...
    @overload
    def __call__(
        self: Signature[Callable[Concatenate[A1, Q], Any], Any, B],
        state: ProgramState,
        first: A1,
        options_by_name: Never = ...,
        /,
        backend: Backend | str | None = ...,
        model: str | None = ...,
        *args: Q.args,
        **kwargs: Q.kwargs,
    ) -> B: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]  # it takes all of them
        """Run the program, as `run` does.

        If the first argument is the state of another program, append this program's steps to that state
        instead, and return the result of the body. `backend` and `model` are then those of the appended
        steps.
        """
        if args and isinstance(args[0], ProgramState):
            return self._on_state(*args, **kwargs)
        return self._run(*args, **kwargs)

    @overload
    def run(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def run(
        self,
        options_by_name: Never = ...,
        /,
        backend: Backend | str | None = ...,
        model: str | None = ...,
        stream: bool = ...,
        cache_scope: str = ...,
        compiled: bool = ...,
        timeout: float | None = ...,
        max_total_tokens: int | None = ...,
        max_calls: int | None = ...,
        priority: int | None = ...,
        lora: str | None = ...,
        n: int | None = ...,
        max_tokens: int | None = ...,
        max_new_tokens: int | None = ...,
        min_tokens: int | None = ...,
        min_new_tokens: int | None = ...,
        temperature: float | None = ...,
        top_k: int | None = ...,
        top_p: float | None = ...,
        min_p: float | None = ...,
        repetition_penalty: float | None = ...,
        presence_penalty: float | None = ...,
        frequency_penalty: float | None = ...,
        logit_bias: Mapping[int, float] | None = ...,
        seed: int | None = ...,
        sampling_seed: int | None = ...,
        stop: str | Sequence[str] | None = ...,
        stop_token_ids: Sequence[int] | None = ...,
        ignore_eos: bool | None = ...,
        logprobs: int | None = ...,
        prompt_logprobs_start: int | None = ...,
        return_logprob: bool | None = ...,
        top_logprobs_num: int | None = ...,
        logprob_start_len: int | None = ...,
        return_text_in_logprobs: bool | None = ...,
        skip_special_tokens: bool | None = ...,
        token_healing: bool | None = ...,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R: ...
    @overload
    def run(
        self: Signature[Callable[Concatenate[A1, Q], Any], R, Any],
        first: A1,
        options_by_name: Never = ...,
        /,
        backend: Backend | str | None = ...,
        model: str | None = ...,
        stream: bool = ...,
        cache_scope: str = ...,
        compiled: bool = ...,
        timeout: float | None = ...,
        max_total_tokens: int | None = ...,
        max_calls: int | None = ...,
        priority: int | None = ...,
        lora: str | None = ...,
        n: int | None = ...,
        max_tokens: int | None = ...,
        max_new_tokens: int | None = ...,
        min_tokens: int | None = ...,
        min_new_tokens: int | None = ...,
        temperature: float | None = ...,
        top_k: int | None = ...,
        top_p: float | None = ...,
        min_p: float | None = ...,
        repetition_penalty: float | None = ...,
        presence_penalty: float | None = ...,
        frequency_penalty: float | None = ...,
        logit_bias: Mapping[int, float] | None = ...,
        seed: int | None = ...,
        sampling_seed: int | None = ...,
        stop: str | Sequence[str] | None = ...,
        stop_token_ids: Sequence[int] | None = ...,
        ignore_eos: bool | None = ...,
        logprobs: int | None = ...,
        prompt_logprobs_start: int | None = ...,
        return_logprob: bool | None = ...,
        top_logprobs_num: int | None = ...,
        logprob_start_len: int | None = ...,
        return_text_in_logprobs: bool | None = ...,
        skip_special_tokens: bool | None = ...,
        token_healing: bool | None = ...,
        *args: Q.args,
        **kwargs: Q.kwargs,
    ) -> R: ...
    @overload
    def run(
        self: Signature[Callable[[A1, A2], Any], R, Any],
        first: A1,
        second: A2,
        /,
        **options: Unpack[RunKeywords],
    ) -> R: ...
    @overload
    def run(
        self: Signature[Callable[[A1, A2, A3], Any], R, Any],
        first: A1,
        second: A2,
        third: A3,
        /,
        **options: Unpack[RunKeywords],
    ) -> R: ...
    def run(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]
        """Run the program and wait for all its steps. The body runs in this thread, or in this event loop if
        it is async.

        In addition to the program's own arguments, `run` takes `backend`, `stream` (run the body in a new
        thread or task and return at once), `cache_scope`, and default sampling options for every `gen`. With
        `compiled`, the body is traced to a graph, and the graph runs. If the body cannot be traced, the body
        is called a second time, and its steps run when they are appended. `timeout`, `max_total_tokens` and
        `max_calls` limit the run, as in `limit`. If the program itself has a parameter with one of these
        three names, the argument is passed to that parameter.

        If the body raises an exception, on Ctrl-C, or if an async run is cancelled, the requests in flight
        are aborted and the exception is raised. The error of a step is raised when its variable is read.
        """
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> R:
        raise NotImplementedError

    def _on_state(self, state: ProgramState, *args: Any, **kwargs: Any) -> B:
        raise NotImplementedError

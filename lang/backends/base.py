"""The interface of backends, and the optional one of backends that run whole graphs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ramify.bounds import Bounds
from ramify.graph import Graph
from ramify.messages import Generate, ModelInfo, TextChunk


@runtime_checkable
class Backend(Protocol):
    """Runs generations. All methods are called on Ramify's background loop (`ramify.loop`).

    A backend that cannot honour a constraint or an option raises `UnsupportedNode` naming it;
    nothing is dropped silently. A backend with a prefix cache may also have a coroutine
    ``await_tools(program, branch, tools)``: the branch continues when these tools have returned. One that
    can end a request early and still tell its cost has a coroutine ``abort(rid)``: the chunks of `generate`
    then end soon, with finish reason "abort" and the usage. It returns False for a request that it has not
    sent yet; `generate` is closed then.
    Where tools run elsewhere, a coroutine ``tool_results(place, calls)`` returns their results as text; one
    that wants to know results has a coroutine ``tools_returned(place, results)``. A place is that of the call
    in the tree of calls (`Call.place`).

    With an attribute `retry`, a `ramify.retry.Retry`, requests are sent again after errors that are
    `transient`. With an attribute `answers`, a `ramify.answers.AnswerStore`, answers are kept there and found
    again. One that honours `Generate.priority` has an attribute ``priority``: of requests for which the
    program sets none, or None. In a batch None stands for `ramify.priority.BATCH`. One
    that has LoRA adapters has an attribute ``lora``, that of requests for which the program sets none, and a
    coroutine ``lora_revisions()``: name → what changes with the adapter.
    """

    async def info(self) -> ModelInfo:
        """The served model; raises when the backend is not reachable."""
        ...

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        """The chunks of one generation; the last has `finish` set.

        An async generator: `aclose` (or cancelling its consumer) aborts the request. Raises a
        `RamifyError` where the generation fails.
        """
        ...

    async def end_program(self, program: str) -> None:
        """The program run with this id has ended; its leases can be released."""
        ...

    async def aclose(self) -> None:
        """Release what the backend holds."""
        ...


class Wrapper:
    """A base of backends that stand before another one: its optional attributes are those of `_backend`."""

    PASSED_ON = frozenset(("abort", "answers", "await_tools", "lora", "lora_revisions", "priority", "retry"))
    PASSED_ON |= {"takes_messages", "tool_results", "tools_returned"}
    _backend: Backend

    def __getattr__(self, name: str) -> Any:
        if name in self.PASSED_ON:
            return getattr(self._backend, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


@dataclass(frozen=True)
class Submission:
    """A graph to run once, and how."""

    graph: Graph
    arguments: Mapping[str, Any]
    """By name, as JSON."""
    options: Mapping[str, Any]
    """Sampling options, as fields of `SamplingParams`, ``priority`` and ``lora``, for every gen that does not
    set its own."""
    scope: str
    bounds: Bounds
    """What the run may spend."""
    stream: bool
    """Send text as it is generated, not only when a request has ended."""


@runtime_checkable
class RunsPrograms(Protocol):
    """A backend that runs whole graphs remotely."""

    def submit_program(self, submission: Submission, failed: Callable[[], bool]) -> Backend:
        """A backend for the same graph run locally: its requests get the answers of the remote run.

        `failed` is called at the end of the program: True where the local run failed or took another course,
        so that the remote run is cancelled.
        """
        ...

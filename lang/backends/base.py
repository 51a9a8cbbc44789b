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

    A backend that cannot honour a constraint or an option raises `UnsupportedNode` naming it; nothing is
    dropped silently. A backend with a prefix cache may also have a coroutine ``await_tools(program, branch,
    tools)``: the branch continues when these tools have returned. One that can end a request early and still
    tell its cost has a coroutine ``abort(rid)``: the chunks of `generate` then end soon, with finish reason
    "abort" and the usage. Where tools run elsewhere, a coroutine ``tool_results(place, calls)`` returns their
    results as text; one that wants to know results has a coroutine ``tools_returned(place, results)``. A
    place is the call's position in the tree of calls (`Call.place`).

    With an attribute `retry`, a `ramify.retry.Retry`, requests are sent again after errors that are
    `transient`. With an attribute `answers`, a `ramify.answers.AnswerStore`, answers are kept there and found
    again. One that honours `Generate.priority` has an attribute ``priority``: the default for requests
    without one, or None. In a batch None stands for `ramify.priority.BATCH`. One that has LoRA adapters has
    an attribute ``lora``, the default adapter of requests, and a coroutine ``lora_revisions()``: name →
    revision, which changes with the adapter's weights.
    """

    async def info(self) -> ModelInfo:
        """Return the served model; raises if the backend is not reachable."""
        ...

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        """Yield the chunks of one generation; the last has `finish` set.

        An async generator: `aclose` (or cancelling its consumer) aborts the request. Raises a
        `RamifyError` where the generation fails.
        """
        ...

    async def end_program(self, program: str) -> None:
        """Release the leases of the program run with this id, which has ended."""
        ...

    async def aclose(self) -> None:
        """Release what the backend holds."""
        ...


class Wrapper:
    """Base of a backend that wraps another one, `_backend`, and passes on its optional attributes."""

    PASSED_ON = frozenset(("abort", "answers", "await_tools", "lora", "lora_revisions", "priority", "retry"))
    PASSED_ON |= {"takes_messages", "tool_results", "tools_returned"}
    _backend: Backend

    def __getattr__(self, name: str) -> Any:
        if name in self.PASSED_ON:
            return getattr(self._backend, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


@dataclass(frozen=True)
class Submission:
    """A graph to run once, with its arguments and options."""

    graph: Graph
    arguments: Mapping[str, Any]
    """Argument name → value as JSON."""
    options: Mapping[str, Any]
    """Sampling options, as fields of `SamplingParams`, ``priority`` and ``lora``, for every gen that does not
    set its own."""
    scope: str
    bounds: Bounds
    """Time, tokens and calls that the run may spend."""
    stream: bool
    """Whether text is sent as it is generated, not only when a request has ended."""


@runtime_checkable
class RunsPrograms(Protocol):
    """A backend that runs whole graphs remotely."""

    def submit_program(self, submission: Submission, failed: Callable[[], bool]) -> Backend:
        """Start the graph remotely; returns a backend on which the same graph run locally gets the remote
        answers.

        `failed` is called at the end of the program: True where the local run failed or took another course,
        so that the remote run is cancelled.
        """
        ...

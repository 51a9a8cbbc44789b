"""What a program runs on: the methods that every backend has, and those of one that takes whole graphs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ramify.graph import Graph
from ramify.messages import Generate, ModelInfo, TextChunk


@runtime_checkable
class Backend(Protocol):
    """Runs generations. All methods are called on Ramify's background loop (`ramify.loop`).

    A backend that cannot honour a constraint or an option raises `UnsupportedNode` naming it;
    nothing is dropped silently. One that keeps pages may have a fifth, ``await_tools(program, branch,
    tools)``, a coroutine: the branch of that key goes on when these tools have returned.
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
        """The program run with this id is over; its leases may go."""
        ...

    async def aclose(self) -> None:
        """Release what the backend holds."""
        ...


@dataclass(frozen=True)
class Submission:
    """A graph to run once, and how."""

    graph: Graph
    arguments: Mapping[str, str]
    options: Mapping[str, Any]
    """Sampling options, as fields of `SamplingParams`, for every gen that does not set its own."""
    scope: str
    stream: bool
    """Text is wanted as it comes, not only when a request has ended."""


@runtime_checkable
class RunsPrograms(Protocol):
    """A backend that runs whole graphs at its own end."""

    def submit_program(self, submission: Submission, failed: Callable[[], bool]) -> Backend:
        """What the same graph then runs on here: its requests are answered with what they came to there.

        `failed` says, at the end of the program, whether it went otherwise here than there.
        """
        ...

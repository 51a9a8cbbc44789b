"""What a program runs on: the two methods that every backend has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable

from ramify.messages import Generate, ModelInfo, TextChunk


@runtime_checkable
class Backend(Protocol):
    """Runs generations. All methods are called on Ramify's background loop (`ramify.loop`).

    A backend that cannot honour a constraint or an option raises `UnsupportedNode` naming it;
    nothing is dropped silently.
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

"""The interface of backends, and a further interface of backends that can run whole graphs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ramify.bounds import Bounds
from ramify.graph import Graph
from ramify.messages import Generate, TextChunk
from ramify.model_info import ModelInfo


@runtime_checkable
class Backend(Protocol):
    """The interface of a backend, which runs generations. All methods are called on Ramify's background loop
    (`ramify.loop`).

    A backend that cannot honour a constraint or an option raises `UnsupportedNode`, which names the
    constraint or option; nothing is dropped silently.

    Optional coroutines:

    - ``await_tools(program, branch, tools)``, of a backend with a prefix cache: called when these tools are
      about to run. The branch `branch` of the run `program` continues when the tools have returned.

    - ``abort(rid)``, of a backend that can end a request early and still report its usage: the chunks of
      `generate` then end soon, with finish reason "abort" and the usage.

    - ``tool_results(place, calls)``, of a backend whose tools run elsewhere: returns the results of `calls`
      as text. `place` is the place of the request that generated `calls` (`Call.place`).

    - ``tools_returned(place, results)``: called with the results of tools that ran in this process.

    Optional attributes:

    - ``retry``, a `ramify.retry.Retry`: the policy by which requests are sent again after `transient` errors.

    - ``answers``, a `ramify.answers.AnswerStore`: the store in which answers are kept. A request that equals
      an earlier one is answered from the store.

    - ``priority``, of a backend that honours `Generate.priority`: the default priority of requests. None
      stands for 0, and in a batch for `ramify.priority.BATCH`.

    - ``model(name)``, of a backend with several models: the backend whose requests go to the model `name`;
      the same object for the same name. Raises `NotFound` for a name that is
      known to be unknown.

    - ``pins``: True for a backend that keeps the prefix of a request whose hint is `ProgramHint.pinned`.

    - ``lora``, of a backend with LoRA adapters: the default adapter of requests. Such a backend also has a
      coroutine ``lora_revisions()``, which returns name → revision. A revision changes with the adapter's
      weights.
    """

    async def info(self) -> ModelInfo:
        """Describe the served model; raises a `RamifyError` if the backend is not reachable."""
        ...

    def generate(self, request: Generate) -> AsyncIterator[TextChunk]:
        """Yield the chunks of one generation; the last has `finish` set.

        The request is aborted if this async generator is closed (`aclose`) or its consumer is cancelled.
        Raises a `RamifyError` if the generation fails.
        """
        ...

    async def end_program(self, program: str) -> None:
        """Release the leases of the run with the id `program`. The run has ended."""
        ...

    async def aclose(self) -> None:
        """Release the connections, files and processes of the backend."""
        ...


class Wrapper:
    """Base class of backends that wrap another backend, `_backend`. A wrapper has the optional attributes and
    methods of `_backend`."""

    PASSED_ON = frozenset(("abort", "answers", "await_tools", "lora", "lora_revisions", "priority", "retry"))
    PASSED_ON |= {"pins", "takes_messages", "tool_results", "tools_returned"}
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
    """The defaults of the graph's gens: fields of `SamplingParams`, ``priority`` and ``lora``."""
    scope: str
    bounds: Bounds
    """Limits on the time, tokens and calls of the run."""
    stream: bool
    """Whether text is sent as it is generated. Otherwise the text of a request is sent when the request has
    ended."""


@runtime_checkable
class RunsPrograms(Protocol):
    """A backend that runs whole graphs remotely."""

    def submit_program(self, submission: Submission, failed: Callable[[], bool]) -> Backend:
        """Start the graph remotely.

        Returns a backend for a local run of the same graph. This backend answers requests with the answers of
        the remote run.

        `failed` is called at the end of the program, and returns True if the local run failed or took another
        path than the remote run. The remote run is then cancelled.
        """
        ...

"""Events of a run, as `ProgramState.events` yields them: text, tool calls, retries, and ends of steps.

    for event in state.events():
        match event:
            case rm.events.Text(text=text):
                print(text, end="")
            case rm.events.ToolCalled(name=name, arguments=arguments):
                print(f"{name}({arguments})")

`step` is the name of the step's variable; None for a step without a name. `branch` has an index for each fork
on the way to the branch, counted over all branches that its parent has forked: ``()`` is the program itself,
``(0,)`` its first branch, ``(1, 0)`` the first branch of its second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ramify.errors import ProgramError

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Appended:
    """Text that the program appended: prompts, marks of chat turns, and results of tools."""

    text: str
    branch: Path = ()


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A step of the model (`gen`, `select`, `decide`, `call_tools`) begins. Exactly one `StepEnded` or
    `StepFailed` follows. A step that is skipped, because an earlier step failed, has no events."""

    step: str | None
    branch: Path = ()


@dataclass(frozen=True, slots=True)
class Text:
    """The next text of a step's output, without thoughts and without tool calls."""

    step: str | None
    text: str
    branch: Path = ()


@dataclass(frozen=True, slots=True)
class Thought:
    """The next text of the thoughts before a step's output."""

    step: str | None
    text: str
    branch: Path = ()


@dataclass(frozen=True, slots=True)
class CallText:
    """The next text of tool calls as the model writes them, such as ``<tool_call>``. `ToolCalled` has each
    call when it is complete."""

    step: str | None
    text: str
    branch: Path = ()


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """The model has written a call. The calls of a turn run when the turn is complete. `ToolReturned` or
    `ToolFailed` with the same `id` follows, unless the step fails before this call runs."""

    step: str | None
    id: str
    """Unique in the run."""
    name: str
    """The name of the tool."""
    arguments: dict[str, Any]
    """The arguments as plain JSON values; empty if the model wrote no JSON object."""
    branch: Path = ()


@dataclass(frozen=True, slots=True)
class ToolReturned:
    """A call has returned."""

    step: str | None
    id: str
    name: str
    result: Any
    shown: str
    """The text that the model is shown."""
    seconds: float
    """The time that the function ran."""
    branch: Path = ()


@dataclass(frozen=True, slots=True)
class ToolFailed:
    """A call has failed. `error` is the function's exception, the error of invalid arguments, or `Cancelled`.
    The step fails as well if it is cancelled or has ``errors="raise"``."""

    step: str | None
    id: str
    name: str
    error: Exception
    seconds: float
    """The time that the function ran."""
    branch: Path = ()


@dataclass(frozen=True, slots=True)
class Retried:
    """The output of a step with `retries` is not valid, and the model generates again. The error of the last
    attempt is that of `StepFailed`."""

    step: str | None
    output: str
    """The rejected text, of which no `Text` has come."""
    error: Exception
    branch: Path = ()


@dataclass(frozen=True, slots=True)
class Recovered:
    """The program has called `recover`: the content is that before the statement that failed with `error`.
    Texts that have come since that statement are no part of the content any more."""

    error: ProgramError
    branch: Path = ()


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step has set its variable to `value`."""

    step: str | None
    value: Any
    branch: Path = ()


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step has failed or was cancelled."""

    step: str | None
    error: ProgramError
    branch: Path = ()


Event = (
    Appended
    | StepStarted
    | Text
    | Thought
    | CallText
    | ToolCalled
    | ToolReturned
    | ToolFailed
    | Retried
    | Recovered
    | StepEnded
    | StepFailed
)

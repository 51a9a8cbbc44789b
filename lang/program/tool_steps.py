"""The parts of a `call_tools` step: the request for the calls, and running the functions concurrently."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ramify.constraint import Constraint
from ramify.errors import Cancelled, InvalidConstraint, InvalidRequest
from ramify.lang.calls.limits import LIMITS
from ramify.lang.calls.request import Output, all_of
from ramify.lang.calls.session import Target
from ramify.lang.program import events, retries
from ramify.lang.program.nodes import CallTools
from ramify.lang.program.place import placed
from ramify.lang.program.sending import send
from ramify.lang.program.step_output import CallsOutput
from ramify.lang.prompt.view import View
from ramify.lang.tools.forms import WrittenCalls
from ramify.lang.tools.tool import ToolCall, shown
from ramify.lang.trace.calls import Call
from ramify.lang.trace.spans import tool_span
from ramify.sampling_params import SamplingParams
from ramify.tool_calls.grammar import naming_tools, tool_at

if TYPE_CHECKING:
    from ramify.lang.program.branch import Branch

logger = logging.getLogger(__name__)

SHOWN_ERROR = "Error: {kind}: {message}"

_warned: set[tuple[str, str | None]] = set()
"""The program and line of each `call_tools` about which a warning was logged."""


def in_turns(branch: Branch) -> bool:
    """Whether the calls are written as chat turns: the model has a chat template, and the branch has turns or
    is empty. Raises `InvalidRequest` inside an open turn."""
    dialogue = branch.content.dialogue
    if dialogue.role is not None:
        raise InvalidRequest(
            f"call_tools writes turns of its own, and a {dialogue.role} turn is open.",
            remedy=f"End it with {dialogue.role}_end().",
        )
    chats = branch.run.info.chat_format is not None
    return chats and (bool(dialogue.messages) or branch.content.tail is None)


def warn_of_untold(branch: Branch, step: CallTools, turns: bool) -> None:
    """Log a warning about tools of `step` that no turn has described to the model, once for each program and
    line. Without `turns`, a tool counts as described if its name is in the text."""
    place = (branch.run.root.call.name, step.line)
    untold = [tool.name for tool in step.tools if tool.name not in branch.content.dialogue.tools]
    if not untold or place in _warned:
        return
    if not turns and all(name in branch.text for name in untold):
        return
    _warned.add(place)
    remedy = "Write system(..., tools=...) or user(..., tools=...) before it."
    logger.warning(
        "%s calls tools at %s that no turn has told the model of: %s. The model is held to their names and "
        "arguments, but does not know what they do. %s",
        *place,
        ", ".join(untold),
        remedy if turns else "Describe them in the prompt.",
    )


async def send_calls(
    branch: Branch,
    step: CallTools,
    call: Call,
    view: View[Target],
    sampling: SamplingParams,
    constraint: Constraint,
    follow: CallsOutput,
) -> Output:
    """Send the request in which the model writes the calls of `step`. In errors and reports about a tool's
    schema, the tool is named."""
    described = [tool.described for tool in step.tools]
    try:
        output = await send(branch, call, view, sampling, constraint, follow, next_use="tool")
    except InvalidConstraint as error:
        found = tool_at(error.pointer, described)
        if found is None:
            raise
        message = f"The parameters of the tool {described[found[0]].name}: {error.message}"
        raise InvalidConstraint(message, pointer=found[1], remedy=error.remedy) from error
    if output.enforcement is None:
        return output
    return dataclasses.replace(output, enforcement=naming_tools(output.enforcement, described))


async def run_calls(
    branch: Branch, step: CallTools, target: Target, call: Call, written: WrittenCalls, ids: Sequence[str]
) -> list[ToolCall]:
    """Run the calls in `written` concurrently, and return them with their results in the same order. `call`
    is the request in which the model of `target` wrote them, and `ids` are their ids in events. If
    `step.raises`, the first error is raised."""
    await_tools = getattr(target.backend, "await_tools", None)
    if await_tools is not None and written:
        await await_tools(branch.run.program, branch.key, tuple(dict.fromkeys(name for name, _ in written)))
    elsewhere = getattr(target.backend, "tool_results", None)
    if elsewhere is not None:
        for name, arguments in written:
            branch.call.child("tool", name, None, branch.run.clock(), line=step.line).arguments = arguments
        results = await elsewhere(call.place, written)
        return [
            ToolCall(name, {}, None, None, text) for (name, _), text in zip(written, results, strict=True)
        ]
    calls = await all_of(
        _run_call(branch, step, name, arguments, id)
        for (name, arguments), id in zip(written, ids, strict=True)
    )
    tools_returned = getattr(target.backend, "tools_returned", None)
    if tools_returned is not None:
        await tools_returned(call.place, [one.shown for one in calls])
    return calls


async def _run_call(branch: Branch, step: CallTools, name: str, arguments: str, id: str) -> ToolCall:
    run = branch.run

    def failed(error: Exception) -> None:
        took = run.clock() - call.start_s
        branch.note(events.ToolFailed(step.variable, id, name, error, took, branch.path))

    tool = next((one for one in step.tools if one.name == name), None)
    call = branch.call.child("tool", name, None, run.clock(), line=step.line)
    call.arguments = arguments
    given: dict[str, object] = {}
    LIMITS.set(branch.limits)  # for programs that the function runs; the task of the call ends with it
    try:
        if tool is None:
            raise ValueError(f"There is no function {name}.")
        given = tool.read(arguments)
        async with tool.slot:
            call.start_s = run.clock()
            with placed(run, call), tool_span(call):
                result = await tool.run(given, run.caller_loop)
        text = shown(result)
        call.text = text
        took = run.clock() - call.start_s
        branch.note(events.ToolReturned(step.variable, id, name, result, text, took, branch.path))
        return ToolCall(name, given, result, None, text)
    except asyncio.CancelledError:
        call.error = "cancelled"
        failed(Cancelled(f"The call of {name} was cancelled."))
        raise
    except Exception as error:
        call.error = str(error) or type(error).__name__
        failed(error)
        if step.raises:
            raise ToolFailed(name, call) from error
        text = SHOWN_ERROR.format(kind=type(error).__name__, message=retries.describe(error))
        return ToolCall(name, given, None, error, text)
    finally:
        call.end_s = run.clock()


class ToolFailed(Exception):
    """The error of a tool whose function raised an exception. That exception is the cause."""

    def __init__(self, name: str, call: Call) -> None:
        super().__init__(f"The tool {name} raised {call.error}")

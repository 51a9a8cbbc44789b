"""A turn of tool calls: the model writes the calls, the functions run concurrently, the results are appended.

In a chat the calls are an assistant turn. If the model's own template writes tools in a way that can be
appended (`ChatFormat.tools`), calls and results follow the template, with a tool turn for each result. If
not, they are in the generic format of `ramify.tool_calls`, with all results in one user turn. In a program
without turns they are plain text in the generic format.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ramify.errors import InvalidRequest
from ramify.lang.calls import retries
from ramify.lang.calls.chat import Dialogue, begin_turn, end_turn
from ramify.lang.calls.request import all_of
from ramify.lang.calls.transcript import Piece, append_text
from ramify.lang.program.nodes import CallTools
from ramify.lang.tools.forms import CallForm, JsonCalls, TaggedCalls, Tools, WrittenCalls, native_instructions
from ramify.lang.tools.tool import ToolCall, shown
from ramify.lang.trace.calls import Call
from ramify.messages import ToolPieces
from ramify.tool_calls.formats import FORMATS, GENERIC

if TYPE_CHECKING:
    from ramify.lang.program.branch import Branch
    from ramify.lang.program.run import Run

logger = logging.getLogger(__name__)

RESULTS = "user"
"""The role of the turn of results where the template has no tool turns."""
SHOWN_ERROR = "Error: {kind}: {message}"
"""The result of a failed tool."""

_warned: set[tuple[str, str | None]] = set()
"""Program and line of each `call_tools` that a warning was given for."""


def form_of(run: Run) -> CallForm:
    """The form of calls for the model that `run` runs on."""
    if run.takes_messages:
        return JsonCalls()
    chat = run.info.chat_format
    native = chat is not None and chat.tools is not None
    return TaggedCalls(FORMATS[chat.tool_format]) if chat is not None and native else TaggedCalls()


def pieces_of(branch: Branch, form: CallForm) -> ToolPieces | None:
    """The texts of the model's own template for tools; None where `form` is generic."""
    chat = branch.run.info.chat_format
    native = isinstance(form, TaggedCalls) and form.form.native
    return chat.tools if native and chat is not None else None


def describe(branch: Branch, form: CallForm, tools: Tools) -> tuple[Dialogue, Piece | None]:
    """Append the descriptions of `tools` to the open turn; returns the new content of the branch."""
    dialogue, tail = branch.dialogue, branch.tail
    dialogue = replace(dialogue, tools=dialogue.tools | {tool.name for tool in tools})
    pieces = pieces_of(branch, form)
    if pieces is None:
        text = form.instructions(tools)
        if tail is not dialogue.start:
            text = "\n\n" + text  # the turn begins with the caller's own content
        return dialogue, append_text(tail, text if dialogue.role else text + "\n")
    if dialogue.role != "system" or dialogue.messages:
        raise InvalidRequest(
            f"The chat template of {branch.run.info.name} describes tools in the first system turn.",
            remedy="Write system(..., tools=...) at the beginning.",
        )
    text = native_instructions(pieces, tools)
    if pieces.place == "user":
        return replace(dialogue, pending=text), tail
    return dialogue, append_text(tail, text)


def in_turns(branch: Branch) -> bool:
    """Whether the branch is a chat. Raises `InvalidRequest` inside an open turn."""
    dialogue = branch.dialogue
    if dialogue.role is not None:
        raise InvalidRequest(
            f"call_tools writes turns of its own, and a {dialogue.role} turn is open.",
            remedy=f"End it with {dialogue.role}_end().",
        )
    chats = branch.run.info.chat_format is not None
    return chats and (bool(dialogue.messages) or branch.tail is None)


def warn_of_untold(branch: Branch, node: CallTools, turns: bool) -> None:
    """Warn, once for each program and line, of tools that no turn has described to the model. A program
    without turns describes them in its own words, so there the names count."""
    place = (branch.run.root.call.name, node.line)
    untold = [tool.name for tool in node.tools if tool.name not in branch.dialogue.tools]
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


def open_calls(branch: Branch, opening: str, turns: bool) -> Piece | None:
    """The content of the branch before the generation; opens the assistant turn in a chat."""
    tail = branch.tail
    if turns:
        branch.dialogue, tail = begin_turn(branch.dialogue, tail, "assistant", branch.run.info)
    return append_text(tail, opening)


def append_results(branch: Branch, form: CallForm, calls: list[ToolCall], turns: bool) -> Piece | None:
    """The content of the branch after the results; ends the assistant turn in a chat."""
    tail, info = branch.tail, branch.run.info
    pieces = pieces_of(branch, form)
    results = "\n".join(call.shown.join(GENERIC.result) for call in calls)
    if not turns:
        return append_text(tail, f"\n{results}\n" if calls else "\n")
    dialogue, tail = end_turn(branch.dialogue, tail, "assistant", info)
    if pieces is not None:
        for call in calls:
            text = json.dumps(call.shown, ensure_ascii=False)[1:-1] if pieces.quoted else call.shown
            dialogue, tail = begin_turn(dialogue, tail, "tool", info)
            dialogue, tail = end_turn(dialogue, append_text(tail, text), "tool", info, content=call.shown)
    elif calls:
        dialogue, tail = begin_turn(dialogue, tail, RESULTS, info)
        dialogue, tail = end_turn(dialogue, append_text(tail, results), RESULTS, info)
    branch.dialogue = dialogue
    return tail


async def run_calls(branch: Branch, node: CallTools, written: WrittenCalls) -> list[ToolCall]:
    """Run all calls concurrently and return them in order. With `node.raises` the first error is raised."""
    await_tools = getattr(branch.run.backend, "await_tools", None)
    if await_tools is not None and written:
        await await_tools(branch.run.program, branch.key, tuple(dict.fromkeys(name for name, _ in written)))
    return await all_of(_run_call(branch, node, name, arguments) for name, arguments in written)


async def _run_call(branch: Branch, node: CallTools, name: str, arguments: str) -> ToolCall:
    run = branch.run
    tool = next((one for one in node.tools if one.name == name), None)
    call = branch.call.child("tool", name, None, run.clock(), line=node.line)
    call.arguments = arguments
    given: dict[str, object] = {}
    try:
        if tool is None:
            raise ValueError(f"There is no function {name}.")
        given = tool.read(arguments)
        async with tool.slot:
            call.start_s = run.clock()
            result = await tool.run(given, run.caller_loop)
        text = shown(result)
        call.text = text
        return ToolCall(name, given, result, None, text)
    except asyncio.CancelledError:
        call.error = "cancelled"
        raise
    except Exception as error:
        call.error = str(error) or type(error).__name__
        if node.raises:
            raise ToolFailed(name, call) from error
        text = SHOWN_ERROR.format(kind=type(error).__name__, message=retries.describe(error))
        return ToolCall(name, given, None, error, text)
    finally:
        call.end_s = run.clock()


class ToolFailed(Exception):
    """A tool raised an exception, which is the cause."""

    def __init__(self, name: str, call: Call) -> None:
        super().__init__(f"The tool {name} raised {call.error}")

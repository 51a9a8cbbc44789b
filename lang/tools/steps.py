"""A turn of tool calls: the model writes the calls, the functions run concurrently, the results are appended.

In a chat the calls are an assistant turn. If the model's own template writes tools in a way that can be
appended (`ChatFormat.tools`), calls and results follow the template, with a tool turn for each result. If
not, they are in the generic format of `ramify.tool_calls`, with all results in one user turn. In a program
without turns they are plain text in the generic format.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from ramify.constraint import Constraint
from ramify.errors import InvalidConstraint, InvalidRequest
from ramify.lang.calls import retries
from ramify.lang.calls.chat import Dialogue, begin_turn, end_turn
from ramify.lang.calls.limits import LIMITS
from ramify.lang.calls.request import Output, all_of, send
from ramify.lang.calls.target import Target
from ramify.lang.calls.transcript import Piece, append_marked, append_output, append_text, marked
from ramify.lang.calls.view import View
from ramify.lang.program.nodes import CallTools
from ramify.lang.program.place import placed
from ramify.lang.program.variables import Variable
from ramify.lang.tools.forms import CallForm, JsonCalls, TaggedCalls, Tools, WrittenCalls, native_instructions
from ramify.lang.tools.tool import ToolCall, shown
from ramify.lang.trace.calls import Call
from ramify.messages import ToolPieces
from ramify.sampling_params import SamplingParams
from ramify.tool_calls.formats import FORMATS, GENERIC
from ramify.tool_calls.grammar import naming_tools, tool_at

if TYPE_CHECKING:
    from ramify.lang.program.branch import Branch

logger = logging.getLogger(__name__)

RESULTS = "user"
"""The role of the turn of results where the template has no tool turns."""
SHOWN_ERROR = "Error: {kind}: {message}"
"""The result of a failed tool."""

_warned: set[tuple[str, str | None]] = set()
"""Program and line of each `call_tools` that a warning was given for."""


def form_of(target: Target) -> CallForm:
    """The form of calls for a model."""
    if target.takes_messages:
        return JsonCalls()
    chat = target.info.chat_format
    native = chat is not None and chat.tools is not None
    return TaggedCalls(FORMATS[chat.tool_format]) if chat is not None and native else TaggedCalls()


def pieces_of(target: Target) -> ToolPieces | None:
    """The texts of the model's own template for tools; None where its form of calls is generic."""
    form, chat = form_of(target), target.info.chat_format
    native = isinstance(form, TaggedCalls) and form.form.native
    return chat.tools if native and chat is not None else None


class Describe(msgspec.Struct, frozen=True):
    """The mark of `describe`."""

    tools: Tools

    def write(self, dialogue: Dialogue, tail: Piece | None, target: Target) -> tuple[Dialogue, Piece | None]:
        return describe(dialogue, tail, target, self.tools)


def describe(
    dialogue: Dialogue, tail: Piece | None, target: Target, tools: Tools
) -> tuple[Dialogue, Piece | None]:
    """Append the descriptions of `tools` to the open turn."""
    dialogue = replace(dialogue, tools=dialogue.tools | {tool.name for tool in tools})
    pieces = pieces_of(target)
    if pieces is None:
        text = form_of(target).instructions(tools)
        if tail is not dialogue.start:
            text = "\n\n" + text  # the turn begins with the caller's own content
        return dialogue, append_marked(tail, text if dialogue.role else text + "\n", Describe(tools))
    if dialogue.role != "system" or dialogue.messages:
        raise InvalidRequest(
            f"The chat template of {target.info.name} describes tools in the first system turn.",
            remedy="Write system(..., tools=...) at the beginning.",
        )
    text = native_instructions(pieces, tools)
    if pieces.place == "user":
        return replace(dialogue, pending=text), append_marked(tail, "", Describe(tools))
    return dialogue, append_marked(tail, text, Describe(tools))


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


async def send_calls(
    branch: Branch,
    node: CallTools,
    call: Call,
    view: View,
    sampling: SamplingParams,
    constraint: Constraint,
    variable: Variable,
) -> Output:
    """`send` for the calls of `node`. What it tells of a schema names the tool and the place in that."""
    described = [tool.described for tool in node.tools]
    try:
        output = await send(branch, call, view, sampling, constraint, variable, next_use="tool")
    except InvalidConstraint as error:
        found = tool_at(error.pointer, described)
        if found is None:
            raise
        message = f"The parameters of the tool {described[found[0]].name}: {error.message}"
        raise InvalidConstraint(message, pointer=found[1], remedy=error.remedy) from error
    if output.enforcement is None:
        return output
    return dataclasses.replace(output, enforcement=naming_tools(output.enforcement, described))


def open_calls(view: View, opening: str, turns: bool) -> View:
    """`view` before the generation of calls: in a chat, with the assistant turn opened."""
    dialogue, tail = view.dialogue, view.tail
    if turns:
        dialogue, tail = begin_turn(dialogue, tail, "assistant", view.target.info)
    tail = append_text(tail, opening)
    return view._replace(dialogue=dialogue, tail=tail, until=tail)


class CallTurn(msgspec.Struct, frozen=True):
    """A turn of calls with its results: the mark of all of its pieces."""

    opening: str
    output: Output
    words: str
    """What the model said beside its calls."""
    written: WrittenCalls
    shown: tuple[str, ...]
    """The results."""
    turns: bool
    """The calls and the results are turns of a chat, not plain text."""

    def append(self, dialogue: Dialogue, tail: Piece | None, target: Target) -> tuple[Dialogue, Piece | None]:
        """`write` with this turn as the mark of what is appended."""
        dialogue, written = self.write(dialogue, tail, target)
        return dialogue, marked(written, tail, self)

    def write(self, dialogue: Dialogue, tail: Piece | None, target: Target) -> tuple[Dialogue, Piece | None]:
        info, pieces = target.info, pieces_of(target)
        if self.turns:
            dialogue, tail = begin_turn(dialogue, tail, "assistant", info)
        tail = self._append_calls(tail, target)
        results = "\n".join(result.join(GENERIC.result) for result in self.shown)
        if not self.turns:
            text = f"\n{results}\n" if self.shown else "\n"
            target.check_text(dialogue, text)
            return dialogue, append_text(tail, text)
        dialogue, tail = end_turn(dialogue, tail, "assistant", info)
        if pieces is not None:
            for result in self.shown:
                text = json.dumps(result, ensure_ascii=False)[1:-1] if pieces.quoted else result
                dialogue, tail = begin_turn(dialogue, tail, "tool", info)
                dialogue, tail = end_turn(dialogue, append_text(tail, text), "tool", info, content=result)
        elif self.shown:
            dialogue, tail = begin_turn(dialogue, tail, RESULTS, info)
            dialogue, tail = end_turn(dialogue, append_text(tail, results), RESULTS, info)
        return dialogue, tail

    def _append_calls(self, tail: Piece | None, target: Target) -> Piece | None:
        """The output as the model that generated it wrote it; for one with another form, in that form."""
        output, form = self.output, form_of(target)
        if form != form_of(output.target):
            return append_text(tail, form.write(self.words, self.written))
        tail = append_text(tail, self.opening)
        if target is not output.target:
            return append_output(tail, output.text, (), 0, "")
        return append_output(tail, output.text, output.ids, output.kept_ids, output.tail)


async def run_calls(
    branch: Branch, node: CallTools, target: Target, call: Call, written: WrittenCalls
) -> list[ToolCall]:
    """Run the calls that `target` has written in `call` concurrently and return them in order. With
    `node.raises` the first error is raised."""
    await_tools = getattr(target.backend, "await_tools", None)
    if await_tools is not None and written:
        await await_tools(branch.run.program, branch.key, tuple(dict.fromkeys(name for name, _ in written)))
    elsewhere = getattr(target.backend, "tool_results", None)
    if elsewhere is not None:
        for name, arguments in written:
            branch.call.child("tool", name, None, branch.run.clock(), line=node.line).arguments = arguments
        results = await elsewhere(call.place, written)
        return [
            ToolCall(name, {}, None, None, text) for (name, _), text in zip(written, results, strict=True)
        ]
    calls = await all_of(_run_call(branch, node, name, arguments) for name, arguments in written)
    tools_returned = getattr(target.backend, "tools_returned", None)
    if tools_returned is not None:
        await tools_returned(call.place, [one.shown for one in calls])
    return calls


async def _run_call(branch: Branch, node: CallTools, name: str, arguments: str) -> ToolCall:
    run = branch.run
    tool = next((one for one in node.tools if one.name == name), None)
    call = branch.call.child("tool", name, None, run.clock(), line=node.line)
    call.arguments = arguments
    given: dict[str, object] = {}
    LIMITS.set(branch.limits)  # for programs that the function runs; the task of the call ends with it
    try:
        if tool is None:
            raise ValueError(f"There is no function {name}.")
        given = tool.read(arguments)
        async with tool.slot:
            call.start_s = run.clock()
            with placed(run, call):
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

"""The text of a turn of tool calls, and of the descriptions of tools, in the form that each model reads.

In a chat the calls are an assistant turn. If the tools of the model's chat template can be written piece by
piece (`ChatFormat.tools`), calls and results follow the template, with a tool turn for each result. Otherwise
calls and results are in the generic format of `ramify.tool_calls`, with all results in one user turn. In a
program without turns, calls and results are plain text in the generic format.
"""

from __future__ import annotations

import json

import msgspec
from msgspec.structs import replace

from ramify.errors import InvalidRequest
from ramify.lang.calls.request import Output
from ramify.lang.prompt.chat import Content, begin_turn, end_turn
from ramify.lang.prompt.transcript import Piece, append_marked, append_output, append_text, marked
from ramify.lang.prompt.view import M, PromptModel, View
from ramify.lang.tools.forms import JsonCalls, TaggedCalls, Tools, WrittenCalls, native_instructions
from ramify.model_info import ToolPieces
from ramify.tool_calls.formats import FORMATS, GENERIC

RESULTS = "user"
"""The role of the turn that holds the results, if the chat template has no tool turns."""


def form_of(target: PromptModel) -> TaggedCalls | JsonCalls:
    """The form in which the model of `target` reads and writes calls."""
    if target.takes_messages:
        return JsonCalls()
    chat = target.info.chat_format
    native = chat is not None and chat.tools is not None
    return TaggedCalls(FORMATS[chat.tool_format]) if chat is not None and native else TaggedCalls()


def pieces_of(target: PromptModel) -> ToolPieces | None:
    """The texts for tools of the chat template of `target`; None if its calls are in the generic format or in
    JSON."""
    form, chat = form_of(target), target.info.chat_format
    native = isinstance(form, TaggedCalls) and form.form.native
    return chat.tools if native and chat is not None else None


class Describe(msgspec.Struct, frozen=True):
    """The mark of the piece that `describe` appends."""

    tools: Tools

    def write(self, content: Content, target: PromptModel) -> Content:
        return describe(content, target, self.tools)


def describe(content: Content, target: PromptModel, tools: Tools) -> Content:
    """Append the descriptions of `tools` to the open turn."""
    dialogue, tail = content.dialogue, content.tail
    dialogue = replace(dialogue, tools=dialogue.tools | {tool.name for tool in tools})
    pieces = pieces_of(target)
    if pieces is None:
        text = form_of(target).instructions(tools)
        if tail is not dialogue.start:
            text = "\n\n" + text  # the turn begins with the caller's own content
        text = text if dialogue.role else text + "\n"
        return Content(append_marked(tail, text, Describe(tools)), dialogue)
    if dialogue.role != "system" or dialogue.messages:
        raise InvalidRequest(
            f"The chat template of {target.info.name} describes tools in the first system turn.",
            remedy="Write system(..., tools=...) at the beginning.",
        )
    text = native_instructions(pieces, tools)
    if pieces.place == "user":
        dialogue, text = replace(dialogue, pending=text), ""
    return Content(append_marked(tail, text, Describe(tools)), dialogue)


def open_calls(view: View[M], opening: str, turns: bool) -> View[M]:
    """`view` with `opening`, the beginning of the calls, appended. If `turns`, an assistant turn is begun
    first. The model generates the rest of the calls."""
    content = view.content
    if turns:
        content = begin_turn(content, "assistant", view.target.info)
    content = content.at(append_text(content.tail, opening))
    return view._replace(content=content, until=content.tail)


class CallTurn(msgspec.Struct, frozen=True):
    """A turn of calls with its results, and the mark of all pieces that the turn appends."""

    opening: str
    output: Output
    words: str
    written: WrittenCalls
    shown: tuple[str, ...]
    turns: bool
    """Whether the calls and the results are chat turns; otherwise they are plain text."""

    def append(self, content: Content, target: PromptModel) -> Content:
        """Append the turn as `write` does, and set this object as the mark of the appended pieces."""
        written = self.write(content, target)
        return written.at(marked(written.tail, content.tail, self))

    def write(self, content: Content, target: PromptModel) -> Content:
        info, pieces = target.info, pieces_of(target)
        if self.turns:
            content = begin_turn(content, "assistant", info)
        content = content.at(self._append_calls(content.tail, target))
        results = "\n".join(result.join(GENERIC.result) for result in self.shown)
        if not self.turns:
            text = f"\n{results}\n" if self.shown else "\n"
            target.check_text(content.dialogue, text)
            return content.at(append_text(content.tail, text))
        content = end_turn(content, "assistant", info)
        if pieces is not None:
            for result in self.shown:
                text = json.dumps(result, ensure_ascii=False)[1:-1] if pieces.quoted else result
                content = begin_turn(content, "tool", info)
                content = content.at(append_text(content.tail, text))
                content = end_turn(content, "tool", info, written=result)
        elif self.shown:
            content = begin_turn(content, RESULTS, info)
            content = end_turn(content.at(append_text(content.tail, results)), RESULTS, info)
        return content

    def _append_calls(self, tail: Piece | None, target: PromptModel) -> Piece | None:
        """Append the calls as they were generated. If `target` has another form of calls, append them in the
        form of `target`."""
        output, form = self.output, form_of(target)
        if form != form_of(output.target):
            return append_text(tail, form.write(self.words, self.written))
        tail = append_text(tail, self.opening)
        if target is not output.target:
            return append_output(tail, output.text, (), 0, "")
        return append_output(tail, output.text, output.ids, output.kept_ids, output.tail)

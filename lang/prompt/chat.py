"""Chat turns, written by appending text.

`ChatFormat` holds the texts that the model's chat template writes before and after the content of a turn of
each role. A turn appends these texts around its content, so no template is rendered while a program runs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from ramify.errors import InvalidRequest, UnsupportedNode
from ramify.lang.prompt.thinking import thinking_of, without_thoughts
from ramify.lang.prompt.transcript import Continued, Piece, append_marked, append_text, ends_on_token, text_of
from ramify.messages import ChatMessage, Thinking
from ramify.model_info import ChatFormat, ModelInfo

if TYPE_CHECKING:
    from ramify.lang.prompt.view import PromptModel


class Dialogue(msgspec.Struct, frozen=True):
    """The turns of a branch so far. The object is frozen, so that forks can share it."""

    messages: tuple[ChatMessage, ...] = ()
    role: str | None = None
    start: Piece | None = None
    """The last piece before the open turn's content; None between turns."""
    asked: Piece | None = None
    """The last piece before the latest user turn. Some templates keep only the thoughts after this piece."""
    thought: bool = False
    """Whether there are thoughts, or marks of thoughts, after `asked`."""
    reasoning: str = ""
    """The thoughts of the open turn, for backends that take messages."""
    pending: str = ""
    """Text to write at the beginning of the next user turn: the descriptions of tools, if the template puts
    descriptions there."""
    tools: frozenset[str] = frozenset()
    """The names of the tools that the turns so far describe."""

    @property
    def previous(self) -> str:
        return self.messages[-1].role if self.messages else ""


class Content(msgspec.Struct, frozen=True):
    """The content of a branch: its pieces up to `tail`, and its turns."""

    tail: Piece | None = None
    dialogue: Dialogue = Dialogue()

    def at(self, tail: Piece | None) -> Content:
        """A content with the turns of this one and the pieces up to `tail`."""
        return Content(tail, self.dialogue)


class Begin(msgspec.Struct, frozen=True):
    """The mark of the piece that `begin_turn` appends."""

    role: str
    tools: bool

    def write(self, content: Content, target: PromptModel) -> Content:
        return begin_turn(content, self.role, target.info, tools=self.tools)


class End(msgspec.Struct, frozen=True):
    """The mark of the piece that `end_turn` appends."""

    role: str

    def write(self, content: Content, target: PromptModel) -> Content:
        return end_turn(content, self.role, target.info)


_begin, _end = functools.cache(Begin), functools.cache(End)


def begin_turn(content: Content, role: str, info: ModelInfo, *, tools: bool = False) -> Content:
    """Begin a turn of `role`. Raises `InvalidRequest` if a turn is open, or if the model's template has no
    turn of `role` after the previous turn. `tools`: whether the turn will describe tools."""
    dialogue, tail = content.dialogue, content.tail
    if dialogue.role is not None:
        raise InvalidRequest(
            f"{turn(role).capitalize()} begins inside {turn(dialogue.role)}.",
            remedy=f"End it with {dialogue.role}_end().",
        )
    key = f"{dialogue.previous}>{role}"
    prefix = _format_of(info).prefix.get(key)
    if prefix is None:
        after = f"after {turn(dialogue.previous)}" if dialogue.previous else "at the start"
        raise InvalidRequest(f"The chat template of {info.name} has no {role} turn {after}.")
    if role == "user":
        if dialogue.thought and thinking_of(info).kept == "user":
            tail = without_thoughts(tail, dialogue.asked)
        dialogue = replace(dialogue, asked=tail, thought=False)
    pieces = _format_of(info).tools
    if tools and pieces is not None and not dialogue.messages:
        prefix = pieces.start
    pending = dialogue.pending
    if pending and role == "user":
        prefix, pending = prefix + pending, ""
    boundary = pending == dialogue.pending
    tail = append_marked(tail, prefix, _begin(role, tools), boundary=boundary)
    return Content(tail, replace(dialogue, role=role, start=tail, pending=pending))


class Thought(msgspec.Struct, frozen=True):
    """The mark of the piece with the thoughts of the model `by`. Other models are not shown the thoughts."""

    by: PromptModel
    thinking: Thinking
    thoughts: str
    """The thoughts without marks and without surrounding white space."""
    text: str
    """The generated text from the thoughts through the marks after them. The text also has `head`, so that it
    ends at the end of a token."""
    ids: tuple[int, ...]
    """The tokens of `text`; empty if the backend does not report them."""
    head: str
    """Text at the beginning of the answer that is part of the last token of `ids`, if this token spans the
    end of the thoughts; usually empty."""

    def write(self, content: Content, target: PromptModel) -> Content:
        if target is not self.by:
            return content.at(append_text(content.tail, self.head))
        if target.takes_messages:
            reasoning = content.dialogue.reasoning + self.thoughts
            return Content(content.tail, replace(content.dialogue, reasoning=reasoning))
        content = open_answer(content, self.thinking, target.info)
        if not self.text:
            return content
        segment = self.ids or self.text
        return content.at(Piece(content.tail, segment, self.text, mark=self, generated=True, later=self.head))

    def append(self, content: Content, home: PromptModel) -> Content:
        """`content` with the thoughts appended, in the form that `home`, the model of the run, reads.
        Thoughts of another model are kept in the mark alone."""
        if home is self.by:
            return self.write(content, home)
        tail = content.tail
        return content.at(Piece(tail, self.head, self.head, ends_on_token(tail), mark=self))


def open_answer(content: Content, thinking: Thinking, info: ModelInfo) -> Content:
    """Append the mark that begins the thoughts, or, if `thinking` is off, the mark that keeps the model from
    thinking.

    At the beginning of an assistant turn, the piece before the turn's content is replaced by the text that
    the chat template writes for this setting of thinking.
    """
    if thinking.effort is not None:
        raise UnsupportedNode(
            f"{info.name} has no setting of effort.", field="thinking.effort", remedy="Use max_tokens."
        )
    marks, dialogue, tail = thinking_of(info), content.dialogue, content.tail
    if dialogue.role == "assistant" and tail is dialogue.start and tail and isinstance(tail.segment, str):
        prefix = tail.text.removesuffix(marks.default)
        text = prefix + (marks.on if thinking.enabled else marks.off)
        later, of = prefix + marks.past, tail.of or tail
        start = Piece(tail.before, text, text, True, tail.mark, later=later, of=of)
        return Content(start, replace(dialogue, start=start, thought=True))
    if not thinking.enabled:
        return content
    start = Piece(tail, marks.start, marks.start, True, Continued(), later="")
    return Content(start, replace(dialogue, thought=True))


def turn(role: str) -> str:
    """The name of a turn in error messages, such as ``a user turn`` or ``an assistant turn``."""
    return f"an {role} turn" if role == "assistant" else f"a {role} turn"


def end_turn(content: Content, role: str, info: ModelInfo, *, written: str | None = None) -> Content:
    """End the open turn, whose role must be `role`. `written` is the content of the finished message, if the
    template writes the content in another form. None: the text of the turn is the content."""
    dialogue, tail = content.dialogue, content.tail
    if dialogue.role != role:
        raise InvalidRequest(f"{role}_end() without {role}_begin().")
    if written is None:
        written = text_of(tail, dialogue.start, later=True).lstrip()
    message = ChatMessage(role=role, content=written, reasoning=dialogue.reasoning)
    if dialogue.thought and thinking_of(info).kept == "turn":
        tail = without_thoughts(tail, dialogue.start and dialogue.start.before)
        dialogue = replace(dialogue, thought=False)
    suffix = _format_of(info).suffix.get(role, "")
    tail = append_marked(tail, suffix, _end(role), boundary=True)
    messages = (*dialogue.messages, message)
    return Content(tail, replace(dialogue, messages=messages, role=None, start=None, reasoning=""))


def _format_of(info: ModelInfo) -> ChatFormat:
    if info.chat_format is None:
        raise InvalidRequest(
            f"{info.name} has no chat template, so it takes no system, user or assistant turns.",
            remedy="Append plain text, or use an instruction-tuned model.",
        )
    return info.chat_format


ROLES = ("system", "user", "assistant")


def chatml() -> ChatFormat:
    """The ChatML format, for backends whose chat template is not known."""
    return ChatFormat(
        prefix={f"{before}>{role}": f"<|im_start|>{role}\n" for before in ("", *ROLES) for role in ROLES},
        suffix=dict.fromkeys(ROLES, "<|im_end|>\n"),
        exact=False,
    )

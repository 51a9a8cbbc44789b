"""Chat turns as text that is only ever appended.

`ChatFormat` holds the text that the model's template writes before and after the content of each role. A turn
appends that text around its content, so no template is rendered while a program runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from ramify.errors import InvalidRequest
from ramify.lang.calls.transcript import Piece, append_marked, text_of
from ramify.messages import ChatFormat, ChatMessage, ModelInfo

if TYPE_CHECKING:
    from ramify.lang.calls.target import Target


class Dialogue(msgspec.Struct, frozen=True):
    """The turns so far. Frozen, so that forks share it."""

    messages: tuple[ChatMessage, ...] = ()
    """Finished turns."""
    role: str | None = None
    """The role of the open turn; None between turns."""
    start: Piece | None = None
    """The piece before the open turn's content."""
    pending: str = ""
    """Text at the beginning of the next user turn, where some templates describe the tools."""
    tools: frozenset[str] = frozenset()
    """The names of the tools that the turns describe."""

    @property
    def previous(self) -> str:
        return self.messages[-1].role if self.messages else ""


class Begin(msgspec.Struct, frozen=True):
    """The mark of `begin_turn`."""

    role: str
    tools: bool

    def write(self, dialogue: Dialogue, tail: Piece | None, target: Target) -> tuple[Dialogue, Piece | None]:
        return begin_turn(dialogue, tail, self.role, target.info, tools=self.tools)


class End(msgspec.Struct, frozen=True):
    """The mark of `end_turn`."""

    role: str

    def write(self, dialogue: Dialogue, tail: Piece | None, target: Target) -> tuple[Dialogue, Piece | None]:
        return end_turn(dialogue, tail, self.role, target.info)


def begin_turn(
    dialogue: Dialogue, tail: Piece | None, role: str, info: ModelInfo, *, tools: bool = False
) -> tuple[Dialogue, Piece | None]:
    """Open a turn; raises `InvalidRequest` where the model's template has no such turn.

    `tools` is set for a turn that describes tools.
    """
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
    pieces = _format_of(info).tools
    if tools and pieces is not None and not dialogue.messages:
        prefix = pieces.start
    pending = dialogue.pending
    if pending and role == "user":
        prefix, pending = prefix + pending, ""
    boundary = pending == dialogue.pending
    tail = append_marked(tail, prefix, Begin(role, tools), boundary=boundary)
    return replace(dialogue, role=role, start=tail, pending=pending), tail


def turn(role: str) -> str:
    """``a user turn``, ``an assistant turn``: for error messages."""
    return f"an {role} turn" if role == "assistant" else f"a {role} turn"


def end_turn(
    dialogue: Dialogue, tail: Piece | None, role: str, info: ModelInfo, *, content: str | None = None
) -> tuple[Dialogue, Piece | None]:
    """Close the open turn. `content` is its content where the template writes that in another form."""
    if dialogue.role != role:
        raise InvalidRequest(f"{role}_end() without {role}_begin().")
    written = text_of(tail, dialogue.start).lstrip() if content is None else content
    message = ChatMessage(role=role, content=written)
    suffix = _format_of(info).suffix.get(role, "")
    tail = append_marked(tail, suffix, End(role), boundary=True)
    messages = (*dialogue.messages, message)
    return replace(dialogue, messages=messages, role=None, start=None), tail


def _format_of(info: ModelInfo) -> ChatFormat:
    if info.chat_format is None:
        raise InvalidRequest(
            f"{info.name} has no chat template, so it takes no system, user or assistant turns.",
            remedy="Append plain text, or use an instruction-tuned model.",
        )
    return info.chat_format


ROLES = ("system", "user", "assistant")


def chatml() -> ChatFormat:
    """The ChatML format, for backends without a template."""
    return ChatFormat(
        prefix={f"{before}>{role}": f"<|im_start|>{role}\n" for before in ("", *ROLES) for role in ROLES},
        suffix=dict.fromkeys(ROLES, "<|im_end|>\n"),
        exact=False,
    )

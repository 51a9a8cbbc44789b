"""Chat turns as text that is only ever appended: the model's own template, taken apart into pieces.

`ChatFormat` says what stands before and after each role's content. Here those pieces are put in order;
no template is rendered again.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from ramify.errors import InvalidRequest
from ramify.lang.calls.transcript import Piece, append_text, text_of
from ramify.messages import ChatFormat, ChatMessage, ModelInfo


class Dialogue(msgspec.Struct, frozen=True):
    """The turns so far. Frozen, so that forks share it."""

    messages: tuple[ChatMessage, ...] = ()
    """Finished turns."""
    role: str | None = None
    """The turn that is open."""
    start: Piece | None = None
    """The open turn's content begins after this piece."""
    pending: str = ""
    """What the next user turn begins with: some templates tell of the tools there."""

    @property
    def previous(self) -> str:
        return self.messages[-1].role if self.messages else ""


def begin_turn(
    dialogue: Dialogue, tail: Piece | None, role: str, info: ModelInfo, *, tools: bool = False
) -> tuple[Dialogue, Piece | None]:
    """Open a turn; raises `InvalidRequest` where the model's template has no such turn.

    `tools`: it is a system turn that tells of tools.
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
    tail = append_text(tail, prefix, boundary=True)
    pending = dialogue.pending
    if pending and role == "user":
        tail, pending = append_text(tail, pending), ""
    return replace(dialogue, role=role, start=tail, pending=pending), tail


def turn(role: str) -> str:
    """A turn of `role`, for messages."""
    return f"an {role} turn" if role == "assistant" else f"a {role} turn"


def end_turn(
    dialogue: Dialogue, tail: Piece | None, role: str, info: ModelInfo, *, content: str | None = None
) -> tuple[Dialogue, Piece | None]:
    """Close the open turn. `content` is what it says, where the template shows it in another spelling."""
    if dialogue.role != role:
        raise InvalidRequest(f"{role}_end() without {role}_begin().")
    said = text_of(tail, dialogue.start).lstrip() if content is None else content
    message = ChatMessage(role=role, content=said)
    suffix = _format_of(info).suffix.get(role, "")
    tail = append_text(tail, suffix, boundary=True)
    return Dialogue(messages=(*dialogue.messages, message), pending=dialogue.pending), tail


def _format_of(info: ModelInfo) -> ChatFormat:
    if info.chat_format is None:
        raise InvalidRequest(
            f"{info.name} has no chat template, so it takes no system, user or assistant turns.",
            remedy="Append plain text, or use an instruction-tuned model.",
        )
    return info.chat_format


ROLES = ("system", "user", "assistant")


def chatml() -> ChatFormat:
    """The ChatML format, for backends that have no template of their own."""
    return ChatFormat(
        prefix={f"{before}>{role}": f"<|im_start|>{role}\n" for before in ("", *ROLES) for role in ROLES},
        suffix=dict.fromkeys(ROLES, "<|im_end|>\n"),
        exact=False,
    )

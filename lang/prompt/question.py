"""The place of questions behind a branch's content, which they never become a part of.

user turn, open or just ended     the question goes on in it, after an empty line
any other turn, or nothing        a new user turn; an open turn without content is left out
text without turns                plain text, as for a `gen`: the layout's own way of asking
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from ramify.decisions.layouts import BLANK_LINE
from ramify.lang.prompt.chat import Begin, Content, End, begin_turn, end_turn, open_answer
from ramify.lang.prompt.transcript import text_of
from ramify.messages import Thinking
from ramify.model_info import ModelInfo


class Place(NamedTuple):
    """A place for questions."""

    state: Content
    """The part of the content that the questions are about."""
    opened: Content
    """`state`, and the beginning of a new turn if the questions are in one."""
    opening: str | None
    """Text between `opened` and a question; None for a layout's own, as is `closing`."""
    closing: str | None
    """Text after a question, up to the answer: the end of the turn, and the beginning of an assistant turn
    without thoughts."""


def place_of_question(content: Content, info: ModelInfo) -> Place:
    """The place of questions about `content`. Raises `InvalidRequest` if the model's template has no user
    turn there."""
    content = _without_empty_turn(content)
    dialogue, tail = content.dialogue, content.tail
    turns = bool(dialogue.messages) or dialogue.role is not None
    if info.chat_format is None or (tail is not None and not turns):
        return Place(content, content, None, None)
    if dialogue.role is None and tail is not None and isinstance(tail.mark, End) and tail.mark.role == "user":
        again = replace(dialogue, messages=dialogue.messages[:-1], role="user")
        content = opened = Content(tail.before, again)
    elif dialogue.role == "user":
        opened = content
    else:
        ended = content if dialogue.role is None else end_turn(content, dialogue.role, info)
        opened = begin_turn(ended, "user", info)
    empty = opened.tail is not None and isinstance(opened.tail.mark, Begin)
    answer = begin_turn(end_turn(opened, "user", info, written=""), "assistant", info)
    answer = open_answer(answer, Thinking(enabled=False), info)
    return Place(content, opened, "" if empty else BLANK_LINE, text_of(answer.tail, opened.tail))


def finished(content: Content, info: ModelInfo) -> Content:
    """`content` with its open turn ended, for backends that take whole messages."""
    content = _without_empty_turn(content)
    role = content.dialogue.role
    return content if role is None else end_turn(content, role, info)


def _without_empty_turn(content: Content) -> Content:
    """`content` without an open turn that has no content, unless it is the user's."""
    dialogue, tail = content.dialogue, content.tail
    if dialogue.role in (None, "user") or tail is None or tail is not dialogue.start:
        return content
    return Content(tail.before, replace(dialogue, role=None, start=None))

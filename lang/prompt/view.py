"""The content of a branch as one model reads it.

A branch keeps its content as the run's own model reads it. Another model has its own chat template and
tokenizer, so the prompt for that model is written anew, piece by piece:

    piece of the branch                     the other model's prompt
    text                                    the same text
    ids that this model generated           the same ids
    ids that any other model generated      their text
    beginning or end of a turn, tools       what this model's template writes

A later prompt for the same model continues that model's last prompt, so the prefix stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from ramify.errors import UnsupportedNode
from ramify.lang.prompt.chat import Content, Dialogue
from ramify.lang.prompt.transcript import EMPTY, Generated, Piece, Prompt, append_text, pieces
from ramify.model_info import ModelInfo


@dataclass(eq=False, slots=True)
class PromptModel:
    """A model with its chat template, on a backend that takes either prompts, or only whole chat messages."""

    info: ModelInfo
    takes_messages: bool
    """Whether the backend takes only finished chat messages, no prompts."""

    def check_text(self, dialogue: Dialogue, text: str) -> None:
        """Raise `UnsupportedNode` if `text` is outside of turns and the backend takes only messages."""
        if self.takes_messages and dialogue.role is None and text.strip():
            raise UnsupportedNode(
                f"{self.info.name} takes whole messages only, and this text is in none: {text!r}.",
                remedy="Put it into system(...), user(...) or assistant(...).",
            )


M = TypeVar("M", bound=PromptModel)


class View(NamedTuple, Generic[M]):
    """The content of a branch as the model `target` reads it."""

    target: M
    content: Content
    until: Piece | None
    """The last piece of the branch that is in the view."""
    prompt: Prompt = EMPTY
    """The last prompt that was sent to `target`, which the next prompt continues."""


def extended(view: View[M], tail: Piece | None) -> View[M]:
    """`view` extended up to `tail`, a piece of the branch. If `view` ends at a piece before `tail`, only the
    pieces between are written; otherwise all pieces are written anew.

    Raises `InvalidRequest` for turns that the model's template lacks. Raises `UnsupportedNode` for text
    outside of turns, if the backend takes only messages.
    """
    target = view.target
    new = pieces(tail, view.until)
    if (new[0].before if new else tail) is not view.until:
        view, new = View(target, Content(), None), pieces(tail)
    content = view.content
    for piece in new:
        match piece.mark:
            case Generated(by=by, ids=ids) if by is target:
                content = content.at(Piece(content.tail, ids, piece.text))
            case None | Generated():
                target.check_text(content.dialogue, piece.text)
                content = content.at(append_text(content.tail, piece.text))
            case mark:
                content = mark.write(content, target)
    return View(target, content, tail, view.prompt)

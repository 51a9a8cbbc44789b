"""A model as prompts are written for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ramify.errors import UnsupportedNode
from ramify.messages import ModelInfo

if TYPE_CHECKING:
    from ramify.lang.prompt.chat import Dialogue


@dataclass(eq=False, slots=True)
class PromptModel:
    """A model, with its chat template, that reads prompts or whole messages."""

    info: ModelInfo
    takes_messages: bool
    """Whether the backend takes finished chat messages instead of prompts."""

    def check_text(self, dialogue: Dialogue, text: str) -> None:
        """Raise `UnsupportedNode` for text outside of turns that this backend cannot be sent."""
        if self.takes_messages and dialogue.role is None and text.strip():
            raise UnsupportedNode(
                f"{self.info.name} takes whole messages only, and this text is in none: {text!r}.",
                remedy="Put it into system(...), user(...) or assistant(...).",
            )

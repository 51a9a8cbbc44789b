"""A model for which prompts are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ramify.errors import UnsupportedNode
from ramify.messages import ModelInfo

if TYPE_CHECKING:
    from ramify.lang.prompt.chat import Dialogue


@dataclass(eq=False, slots=True)
class PromptModel:
    """A model with its chat template. Its backend takes prompts, or only whole chat messages."""

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

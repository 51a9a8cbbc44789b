"""A backend and its model, as one run of a program uses them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ramify.errors import UnsupportedNode
from ramify.lang.backends.base import Backend
from ramify.lang.calls.chat import Dialogue
from ramify.messages import ModelInfo


@dataclass(eq=False, slots=True)
class Target:
    """A model that a run sends requests to. One target is the run's own; steps may name others."""

    backend: Backend
    info: ModelInfo
    name: str
    """The name of the backend in its `Router`, else the model's."""
    priority: int = 0
    """Of requests for which neither the step nor the run sets one."""
    lora: str = ""
    """The LoRA adapter of requests for which neither the step nor the run sets one."""
    ended: list[str] = field(default_factory=list)
    """The keys of branches and forks that have ended since the last request to this backend."""

    @property
    def takes_messages(self) -> bool:
        """The backend takes finished chat messages instead of prompts."""
        return bool(getattr(self.backend, "takes_messages", False))

    def check_text(self, dialogue: Dialogue, text: str) -> None:
        """Raise `UnsupportedNode` for text outside of turns that this backend cannot be sent."""
        if self.takes_messages and dialogue.role is None and text.strip():
            raise UnsupportedNode(
                f"{self.info.name} takes whole messages only, and this text is in none: {text!r}.",
                remedy="Put it into system(...), user(...) or assistant(...).",
            )

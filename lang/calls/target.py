"""A backend and its model, as one run of a program uses them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ramify.lang.backends.base import Backend
from ramify.lang.prompt.model import PromptModel


@dataclass(eq=False, slots=True)
class Target(PromptModel):
    """A model that a run sends requests to. One target is the run's own; steps may name other backends."""

    backend: Backend
    name: str
    """The name of the backend in the run's `Router`; without a router, the name of the model."""
    priority: int = 0
    """The priority of requests if neither the step nor the run sets one."""
    lora: str = ""
    """The LoRA adapter of requests if neither the step nor the run sets one."""
    ended: list[str] = field(default_factory=list)
    """The keys of branches and forks that have ended since the last request to this backend."""

"""Names that users of SGLang's frontend may call and that are not there: each refuses by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ramify.errors import UnsupportedField

OTHER_BACKEND = "Use Engine, RuntimeEndpoint, OpenAI or ScriptedBackend."

REFUSED = {
    "image": "Only text models are served.",
    "video": "Only text models are served.",
    "separate_reasoning": "The whole output is one text; split it in the program.",
    "Runtime": "Use Engine, which runs the same processes in this program.",
    "ServerArgs": "Use the options of Engine, or of the command `ramify serve`.",
    "Anthropic": OTHER_BACKEND,
    "Crusoe": OTHER_BACKEND,
    "LiteLLM": OTHER_BACKEND,
    "VertexAI": OTHER_BACKEND,
}
"""Public name → what to do instead."""


def refuse(name: str, remedy: str) -> NoReturn:
    """Raise `UnsupportedField` for `name`."""
    raise UnsupportedField(f"{name} is not there.", field=name, remedy=remedy)


def refused(name: str, remedy: str) -> Callable[..., NoReturn]:
    """A function that refuses when it is called."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        refuse(name, remedy)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Not there. {remedy}"
    return call

"""Names of SGLang's frontend that Ramify lacks: calling one raises `UnsupportedField` with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ramify.errors import UnsupportedField

OTHER_BACKEND = "Use Engine, RuntimeEndpoint, OpenAI or ScriptedBackend."

UNSUPPORTED = {
    "image": "Only text models are served.",
    "video": "Only text models are served.",
    "Runtime": "Use Engine, which runs the same processes in this program.",
    "ServerArgs": "Use the options of Engine, or of the command `ramify serve`.",
    "Anthropic": OTHER_BACKEND,
    "Crusoe": OTHER_BACKEND,
    "LiteLLM": OTHER_BACKEND,
    "VertexAI": OTHER_BACKEND,
}


def unsupported(name: str, remedy: str) -> Callable[..., NoReturn]:
    """A function `name` that raises `UnsupportedField`, with `remedy`, when it is called."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedField(f"{name} is not there.", field=name, remedy=remedy)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Not supported. {remedy}"
    return call

"""Ramify: programs that make many calls to a language model, and the runtime that runs them.

Everything below can be used as ``import ramify as sgl``: names follow SGLang's frontend. What is heavy
(the engine, HTTP clients) is imported when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ramify.errors import (
    Cancelled,
    InvalidConstraint,
    InvalidRequest,
    ProgramError,
    RamifyError,
    UnsupportedField,
    UnsupportedNode,
)
from ramify.lang.api import (
    assistant,
    assistant_begin,
    assistant_end,
    flush_cache,
    function,
    gen,
    gen_int,
    gen_string,
    get_server_info,
    select,
    system,
    system_begin,
    system_end,
    tool,
    user,
    user_begin,
    user_end,
)
from ramify.lang.backends.base import Backend
from ramify.lang.batch_out import BatchSummary
from ramify.lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from ramify.lang.fork import ForkGroup
from ramify.lang.refused import REFUSED, refused
from ramify.lang.run import set_default_backend
from ramify.lang.state import ProgramState
from ramify.lang.tools import Tool, ToolCall

if TYPE_CHECKING:
    from ramify.lang.backends.endpoint import RuntimeEndpoint
    from ramify.lang.backends.openai import OpenAI
    from ramify.lang.backends.replay import NotRecorded, RecordingBackend, ReplayBackend
    from ramify.lang.backends.scripted import ScriptedBackend
    from ramify.runtime.engine import Engine

    __version__: str

_LAZY = {
    "Engine": "ramify.runtime.engine",
    "NotRecorded": "ramify.lang.backends.replay",
    "OpenAI": "ramify.lang.backends.openai",
    "RecordingBackend": "ramify.lang.backends.replay",
    "ReplayBackend": "ramify.lang.backends.replay",
    "RuntimeEndpoint": "ramify.lang.backends.endpoint",
    "ScriptedBackend": "ramify.lang.backends.scripted",
}

__all__ = [
    "Backend",
    "BatchSummary",
    "Cancelled",
    "Engine",
    "ForkGroup",
    "InvalidConstraint",
    "InvalidRequest",
    "NotRecorded",
    "OpenAI",
    "ProgramError",
    "ProgramState",
    "RamifyError",
    "RecordingBackend",
    "ReplayBackend",
    "RuntimeEndpoint",
    "ScriptedBackend",
    "Tool",
    "ToolCall",
    "UnsupportedField",
    "UnsupportedNode",
    "__version__",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "greedy_token_selection",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "tool",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    elif name in REFUSED:
        value = refused(name, REFUSED[name])
    elif name == "__version__":
        from importlib.metadata import version

        value = version("ramify")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

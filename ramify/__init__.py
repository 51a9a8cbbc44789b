"""Ramify: programs that make many calls to a language model, and the runtime that runs them.

Everything below can be used as ``import ramify as sgl``: names follow SGLang's frontend. A name is imported
when it is first used: the runtime's processes, which use none of them, start without the DSL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.errors import Cancelled as Cancelled
    from ramify.errors import CompileError as CompileError
    from ramify.errors import InvalidConstraint as InvalidConstraint
    from ramify.errors import InvalidRequest as InvalidRequest
    from ramify.errors import ProgramError as ProgramError
    from ramify.errors import RamifyError as RamifyError
    from ramify.errors import UnsupportedField as UnsupportedField
    from ramify.errors import UnsupportedNode as UnsupportedNode
    from ramify.lang.api import assistant as assistant
    from ramify.lang.api import assistant_begin as assistant_begin
    from ramify.lang.api import assistant_end as assistant_end
    from ramify.lang.api import flush_cache as flush_cache
    from ramify.lang.api import function as function
    from ramify.lang.api import gen as gen
    from ramify.lang.api import gen_int as gen_int
    from ramify.lang.api import gen_string as gen_string
    from ramify.lang.api import get_server_info as get_server_info
    from ramify.lang.api import select as select
    from ramify.lang.api import system as system
    from ramify.lang.api import system_begin as system_begin
    from ramify.lang.api import system_end as system_end
    from ramify.lang.api import tool as tool
    from ramify.lang.api import user as user
    from ramify.lang.api import user_begin as user_begin
    from ramify.lang.api import user_end as user_end
    from ramify.lang.backends.base import Backend as Backend
    from ramify.lang.backends.endpoint import RuntimeEndpoint as RuntimeEndpoint
    from ramify.lang.backends.openai import OpenAI as OpenAI
    from ramify.lang.backends.replay import NotRecorded as NotRecorded
    from ramify.lang.backends.replay import RecordingBackend as RecordingBackend
    from ramify.lang.backends.replay import ReplayBackend as ReplayBackend
    from ramify.lang.backends.scripted import ScriptedBackend as ScriptedBackend
    from ramify.lang.batch.results import BatchSummary as BatchSummary
    from ramify.lang.calls.choices import greedy_token_selection as greedy_token_selection
    from ramify.lang.calls.choices import token_length_normalized as token_length_normalized
    from ramify.lang.calls.choices import (
        unconditional_likelihood_normalized as unconditional_likelihood_normalized,
    )
    from ramify.lang.program.fork import ForkGroup as ForkGroup
    from ramify.lang.program.run import set_default_backend as set_default_backend
    from ramify.lang.program.state import ProgramState as ProgramState
    from ramify.lang.tools.tool import Tool as Tool
    from ramify.lang.tools.tool import ToolCall as ToolCall
    from ramify.runtime.engine import Engine as Engine

    __version__: str

_MODULES = {
    "ramify.errors": (
        "Cancelled",
        "CompileError",
        "InvalidConstraint",
        "InvalidRequest",
        "ProgramError",
        "RamifyError",
        "UnsupportedField",
        "UnsupportedNode",
    ),
    "ramify.lang.api": (
        "assistant",
        "assistant_begin",
        "assistant_end",
        "flush_cache",
        "function",
        "gen",
        "gen_int",
        "gen_string",
        "get_server_info",
        "select",
        "system",
        "system_begin",
        "system_end",
        "tool",
        "user",
        "user_begin",
        "user_end",
    ),
    "ramify.lang.backends.base": ("Backend",),
    "ramify.lang.backends.endpoint": ("RuntimeEndpoint",),
    "ramify.lang.backends.openai": ("OpenAI",),
    "ramify.lang.backends.replay": ("NotRecorded", "RecordingBackend", "ReplayBackend"),
    "ramify.lang.backends.scripted": ("ScriptedBackend",),
    "ramify.lang.batch.results": ("BatchSummary",),
    "ramify.lang.calls.choices": (
        "greedy_token_selection",
        "token_length_normalized",
        "unconditional_likelihood_normalized",
    ),
    "ramify.lang.program.fork": ("ForkGroup",),
    "ramify.lang.program.run": ("set_default_backend",),
    "ramify.lang.program.state": ("ProgramState",),
    "ramify.lang.tools.tool": ("Tool", "ToolCall"),
    "ramify.runtime.engine": ("Engine",),
}
"""Module → the public names that it holds: those imported above for type checkers."""

_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name == "__version__":
        from importlib.metadata import version

        value = version("ramify-llm")  # the distribution; `ramify` is what is imported
    elif name.startswith("_") or (value := _refused(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _refused(name: str) -> Any:
    from ramify.lang.program.refused import REFUSED, refused

    return refused(name, REFUSED[name]) if name in REFUSED else None


def __dir__() -> list[str]:
    return __all__


__all__ = sorted([*_HOMES, "__version__"])

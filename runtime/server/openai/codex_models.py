"""Entries of the model catalogue that Codex reads from ``GET /v1/models?client_version=…``.

Codex rejects the whole catalogue if a field of an entry is missing. The fields are those that Codex 0.171
and older versions need.
"""

from __future__ import annotations

from ramify.model_info import ChatFormat, ModelInfo
from ramify.runtime.model.tokenizer.thinking_format import SWITCHES
from ramify.runtime.server.openai.bodies import Body

INSTRUCTIONS = """\
You are a coding agent. You work in a user's project through the Codex command line: you run commands, read \
files and edit them with the tools that you are offered.

- Read the files that matter before you change them, and follow the AGENTS.md files of their folders.
- Make the smallest change that solves the task, in the style of the code around it.
- Check your work: run the tests or the program that you changed.
- When a command fails, read its output before you try another.
- Leave alone changes that are not yours. Commit, push or delete only what the user asks for.
- Go on until the task is done. Then say in a few sentences what you did, and what you could not check.
"""
"""The system prompt that Codex uses. Its catalogue has no entry without one."""

_EFFORTS = {
    "none": "Answers without reasoning",
    "low": "Reasons briefly",
    "medium": "Reasons",
    "high": "Reasons at length",
}


def codex_model(name: str, info: ModelInfo, priority: int) -> Body:
    """The entry of the model `name`. Codex lists models by `priority`."""
    efforts = _efforts(info.chat_format)
    return {
        "slug": name,
        "display_name": name,
        "description": None,
        "supported_reasoning_levels": [
            {"effort": effort, "description": _EFFORTS[effort]} for effort in efforts
        ],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": priority,
        "upgrade": None,
        "base_instructions": INSTRUCTIONS,
        "supports_reasoning_summaries": bool(efforts),
        "default_reasoning_summary": "none",
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        # Codex shortens the output of a command to this limit.
        "truncation_policy": {"mode": "tokens", "limit": min(10_000, info.context_length // 8)},
        "supports_parallel_tool_calls": True,
        "context_window": info.context_length,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }


def _efforts(chat_format: ChatFormat | None) -> list[str]:
    """The efforts that make a difference for a model with this chat template."""
    variables = () if chat_format is None else chat_format.variables
    efforts = ["none"] if any(name in variables for name in SWITCHES) else []
    if "reasoning_effort" in variables:
        return [*efforts, "low", "medium", "high"]
    return [*efforts, "medium"] if efforts else []

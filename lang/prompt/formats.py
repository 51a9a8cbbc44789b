"""Formats of chats and thoughts for models without a chat template of their own."""

from __future__ import annotations

from ramify.messages import ChatFormat, ThinkingFormat

DEFAULT_TOKENS = 1024
"""Most tokens of thoughts of a `gen` that gives no limit."""

PLAIN = ThinkingFormat()
"""Marks of thoughts for models whose chat template has none."""

ROLES = ("system", "user", "assistant")


def chatml() -> ChatFormat:
    """The ChatML format, for backends without a template."""
    return ChatFormat(
        prefix={f"{before}>{role}": f"<|im_start|>{role}\n" for before in ("", *ROLES) for role in ROLES},
        suffix=dict.fromkeys(ROLES, "<|im_end|>\n"),
        exact=False,
    )

"""The ``encrypted_content`` of reasoning items: the reasoning in a form that clients send back unread.

OpenAI encrypts it because it hides the reasoning. Here nothing is hidden and no key is held: the string is a
version mark and the text in base64.
"""

from __future__ import annotations

import base64
import binascii

MARK = "ramify1."


def sealed(reasoning: str) -> str:
    return MARK + base64.b64encode(reasoning.encode()).decode()


def unsealed(text: str) -> str | None:
    """The reasoning that `sealed` was given; None for any other string."""
    mark, _, data = text.partition(".")
    try:
        return base64.b64decode(data, validate=True).decode() if f"{mark}." == MARK else None
    except (binascii.Error, UnicodeDecodeError):
        return None

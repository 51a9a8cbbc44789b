"""The ``encrypted_content`` of reasoning items, which clients send back without reading it.

OpenAI encrypts this string, as it hides the reasoning. Here nothing is hidden and there is no key: the string
is a version mark, followed by the text in base64.
"""

from __future__ import annotations

import base64
import binascii

MARK = "ramify1."


def sealed(reasoning: str) -> str:
    return MARK + base64.b64encode(reasoning.encode()).decode()


def unsealed(text: str) -> str | None:
    """The reasoning in `text`, a result of `sealed`; None for any other string."""
    mark, _, data = text.partition(".")
    try:
        return base64.b64decode(data, validate=True).decode() if f"{mark}." == MARK else None
    except (binascii.Error, UnicodeDecodeError):
        return None

"""Texts for people to read: long ones shortened, and tokens that are a part of a character."""

from __future__ import annotations

import re

_BYTES = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")


def shortened(text: str, most: int) -> str:
    """`text` in at most `most` characters, the last one "…" where it is cut."""
    return text if len(text) <= most else text[: most - 1] + "…"


def token_text(data: bytes) -> str:
    r"""The text of a token of these bytes; ``bytes:\xe2\x80``, as OpenAI has it, where they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(text: str) -> bytes:
    """The bytes of the token whose `token_text` is `text`."""
    spelled = _BYTES.fullmatch(text)
    return text.encode() if spelled is None else bytes.fromhex(spelled[1].replace("\\x", ""))

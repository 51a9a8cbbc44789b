"""Helpers for texts: shortening, tokens that are a part of a character, and strings that are not Unicode."""

from __future__ import annotations

import re
from typing import Any

from ramify.errors import InvalidRequest

_BYTES = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")


def shortened(text: str, most: int) -> str:
    """`text`, cut to at most `most` characters. If it is cut, the last character is "…"."""
    return text if len(text) <= most else text[: most - 1] + "…"


def quoted(text: str) -> str:
    """`text` in quotes, as errors repeat what a client sent: at most 100 characters of it."""
    return shortened(repr(text), 100)


def plain(text: str) -> str:
    """`text` in printable ASCII, as headers and logs repeat what a client sent: at most 80 characters of
    it."""
    text = text if text.isascii() and text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 80 else text[:77] + "..."


def sentence(text: str) -> str:
    """`text` with a full stop appended, unless it ends with one of . ! ? and …."""
    return text if text.endswith((".", "!", "?", "…")) else text + "."


def token_text(data: bytes) -> str:
    r"""The text of a token with the bytes `data`.

    Bytes that are not UTF-8 are written as in OpenAI's API: ``bytes:\xe2\x80``.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_bytes(text: str) -> bytes:
    """The bytes of the token whose `token_text` is `text`."""
    spelled = _BYTES.fullmatch(text)
    return text.encode() if spelled is None else bytes.fromhex(spelled[1].replace("\\x", ""))


def not_unicode(message: Any) -> InvalidRequest:
    """The error for a message with a lone surrogate in its texts or keys, which UTF-8 cannot encode.

    message : the message, made of dicts, lists and texts
    """
    path = _half_in(message, "") or "the request"
    return InvalidRequest(
        f"{path} has half of a surrogate pair (\\ud800 to \\udfff), which is no character.",
        field=path,
        remedy='Decode the text with errors="replace", or write the whole character.',
    )


def _half_in(value: Any, path: str) -> str | None:
    """The path of the first text in `value` with a lone surrogate; None if there is none."""
    match value:
        case str():
            return path if any("\ud800" <= char <= "\udfff" for char in value) else None
        case dict():
            inside = ((key, f"{path}.{key}" if path else str(key)) for key in value)
            found = (_half_in(key, path) or _half_in(value[key], below) for key, below in inside)
        case list() | tuple():
            found = (_half_in(one, f"{path}[{index}]") for index, one in enumerate(value))
        case _:
            return None
    return next(filter(None, found), None)

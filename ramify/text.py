"""Texts for people to read, and texts that are none."""

from __future__ import annotations

from typing import Any

from ramify.errors import InvalidRequest


def shortened(text: str, most: int) -> str:
    """`text` in at most `most` characters, the last one "…" where it is cut."""
    return text if len(text) <= most else text[: most - 1] + "…"


def not_unicode(message: Any) -> InvalidRequest:
    """The error for a message with a half of a surrogate pair, which no UTF-8 can say, in its texts or keys.

    message : dicts, lists and texts
    """
    path = _half_in(message, "") or "the request"
    return InvalidRequest(
        f"{path} has half of a surrogate pair (\\ud800 to \\udfff), which is no character.",
        field=path,
        remedy='Decode the text with errors="replace", or write the whole character.',
    )


def _half_in(value: Any, path: str) -> str | None:
    """The path of the first text with a half of a surrogate pair."""
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

"""Texts for people to read, shortened; tokens that are a part of a character; and JSON that a model wrote."""

from __future__ import annotations

import json
import math
import re
from typing import Any

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


def read_json(text: str, *, strict: bool = True) -> Any:
    """The value of a JSON text that somebody else wrote, numbers with a fraction or exponent as finite
    floats.

    strict : refuse control characters in strings, as JSON does

    Raises ValueError for what is no JSON, for infinite numbers (1e400), for integers of more digits than
    Python reads, and for what is nested too deeply.
    """
    try:
        return json.loads(text, strict=strict, parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise ValueError("The JSON is nested too deeply.") from None


def finite(text: str) -> float:
    """The float of a text. Raises ValueError for infinity and NaN."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"The number {shortened(text, 24)} does not fit a double.")
    return value

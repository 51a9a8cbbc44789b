"""JSON texts that somebody else wrote (RFC 8259), and names in JSON pointers (RFC 6901)."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from ramify.text import shortened


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


def no_constant(name: str) -> NoReturn:
    """Raises ValueError for NaN, Infinity and -Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is no JSON number")


def escape(name: str) -> str:
    """`name` as a reference token of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")

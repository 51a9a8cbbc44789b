"""JSON texts from outside (RFC 8259), and names in JSON pointers (RFC 6901)."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from ramify.text import shortened


def read_json(text: str, *, strict: bool = True) -> Any:
    """Parse a JSON text from outside. Numbers with a fraction or exponent become finite floats.

    strict : whether to refuse control characters in strings, as the JSON standard does

    Raises ValueError if the text is not JSON, for infinite numbers (1e400), for integers of more digits than
    Python reads, and for values that are nested too deeply.
    """
    try:
        return json.loads(text, strict=strict, parse_float=finite, parse_constant=finite)
    except RecursionError:
        raise ValueError("The JSON is nested too deeply.") from None


def finite(text: str) -> float:
    """Parse a float. Raises ValueError for infinity and NaN."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"The number {shortened(text, 24)} does not fit a double.")
    return value


def no_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN, Infinity and -Infinity, which Python's parser accepts and JSON does not
    have."""
    raise ValueError(f"{name} is no JSON number")


def escape(name: str) -> str:
    """`name` as a reference token of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")

"""Texts: long ones, shortened for people to read, and JSON that a model wrote."""

from __future__ import annotations

import json
import math
from typing import Any


def shortened(text: str, most: int) -> str:
    """`text` in at most `most` characters, the last one "…" where it is cut."""
    return text if len(text) <= most else text[: most - 1] + "…"


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

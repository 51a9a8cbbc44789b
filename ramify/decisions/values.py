"""Values of options, as names that the model is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence


def option_names(values: Sequence[str | bool]) -> list[str]:
    """A name for each of `values`, which are different; True and "true" are different, too.

    A text is its own name, and the name of a bool is "true" or "false". If a bool would have the name of a
    text, all texts are written as JSON strings::

        True, "false"            true, false
        True, "true", "maybe"    true, "true", "maybe"
    """
    names = [_name(value) for value in values]
    bools = {_name(value) for value in values if isinstance(value, bool)}
    if bools.isdisjoint([value for value in values if isinstance(value, str)]):
        return names
    return [
        name if isinstance(value, bool) else json.dumps(value, ensure_ascii=False)
        for name, value in zip(names, values, strict=True)
    ]


def _name(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()

"""The right name for one that is not known: misspelt, or as SGLang and vLLM spell it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def nearest(name: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str | None:
    """A remedy for the unknown `name`, as a sentence; None where nothing known is like it.

    `elsewhere` maps names of SGLang and vLLM to the name here, or to a sentence where there is none.
    """
    here = (elsewhere or {}).get(name)
    if here is not None:
        return here if " " in here else f"Here it is {here}."
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]}?" if close else None

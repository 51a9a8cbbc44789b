"""Suggestions for an unknown name, which may be misspelt, or the name that SGLang or vLLM uses."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from ramify.errors import InvalidRequest

P = ParamSpec("P")
R = TypeVar("R")

CLOSE = 0.8
"""Least similarity (`difflib.SequenceMatcher.ratio`) at which a name is taken for a misspelling of another:
straem and stream have 0.83, options and stream_options 0.67."""
CLOSE_ALIKE = 0.6
"""Least similarity of names that begin with the same letter, as bgi and big do."""
SHARED = re.compile("-*(?:.*/)?")


def nearest(name: str, known: Iterable[str], elsewhere: Mapping[str, str] | None = None) -> str | None:
    """A sentence that suggests a known name for the unknown `name`; None if no known name is similar.

    `elsewhere` maps names in SGLang and vLLM to Ramify's name, or if Ramify has none, to a sentence.
    """
    here = (elsewhere or {}).get(name)
    if here is not None:
        return here if " " in here else f"Here it is {here}."
    similarity, close = max(((_similarity(one, name), one) for one in known), default=(0.0, ""))
    return f"Did you mean {close}?" if similarity else None


def _similarity(known: str, name: str) -> float:
    """Similarity of two names behind the dashes or folders that both begin with; 0 if they are not similar.

    --to and --lora have no letters in common, nor have #/$defs/a and #/$defs/b.
    """
    common = os.path.commonprefix([known, name])  # noqa: RUF071  # names, of which few are paths
    shared = len(SHARED.findall(common)[0])
    known, name = known[shared:], name[shared:]
    found = difflib.SequenceMatcher(None, known, name).ratio()
    return found if found >= (CLOSE_ALIKE if known[:1] == name[:1] else CLOSE) else 0.0


def check_word(field: str, word: object, known: Sequence[str]) -> None:
    """Raise `InvalidRequest` for `field` unless `word` is one of `known`."""
    if word not in known:
        raise InvalidRequest(
            f"{field} is {word!r}; it must be one of {', '.join(known)}.",
            field=field,
            remedy=nearest(str(word), known),
        )


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters of `function` that can be given by keyword."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind not in several and one.name != "self"]


def suggests(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function`: its TypeError for an unknown keyword suggests the most similar parameter."""
    known = parameters_of(function)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                of = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{of} has no parameter {name!r}. {nearest(name, known) or ''}".rstrip())
        return function(*args, **kwargs)

    return called

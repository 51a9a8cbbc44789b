"""Stop strings and stop tokens beside a constraint: refused where one could leave a text that the constraint
does not allow.

A stop string, or the text of a stop token, is read in the automaton from all states in which the answer may
not end (the constraint is "-?[0-9]+ ?|none"):

    "on"     n-o-n-…: the stop string would leave "n", and is refused
    " "      a space comes only where the text may end: the stop string leaves a whole text
    "\n"     no state reads it: it has no effect

In a grammar with rules the text may be incomplete in any state, and a return goes to every state that any
edge pushes. So every string that may cut an answer is refused, and with it some that cannot.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ramify.constraint import Constraint
from ramify.errors import InvalidRequest
from ramify.grammar.automaton.pushdown import PushdownAutomaton
from ramify.grammar.compile.foreign import Compiled
from ramify.grammar.vocabulary import Vocabulary

REGULAR = ("regex", "choices")
FREE = ("any_text", "triggered_tags")
"""Formats of structural tags that have free text, which stop strings are meant to end."""


def check_stops(
    constraint: Constraint,
    compiled: Compiled,
    vocabulary: Vocabulary,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
) -> None:
    """Raise `InvalidRequest` for a stop string, or a stop token of `vocabulary`, that may cut an answer that
    `constraint` allows.

    A token without text occurs in no answer. A structural tag with free text takes any stop, and so does a
    library whose automaton cannot be read (`Enforcement.may_be_cut`).
    """
    if not (stop or stop_token_ids) or compiled.engine != "pushdown":
        return
    if constraint.kind == "structural_tag" and _has_free_text(json.loads(constraint.source)):
        return
    automaton = PushdownAutomaton.from_bytes(compiled.payload)
    regular = constraint.kind in REGULAR
    stops = [("stop", f"stop string {text!r}", text.encode()) for text in stop]
    spelled = [(token, vocabulary.text_of(token)) for token in stop_token_ids]
    stops += [
        ("stop_token_ids", f"stop token {token}, {text.decode(errors='replace')!r},", text)
        for token, text in spelled
        if text
    ]
    for field, shown, text in stops:
        if may_cut(automaton, text, regular=regular):
            raise InvalidRequest(
                f"The {shown} may occur inside an answer that the {constraint.kind} allows, and would leave "
                "a part of it.",
                field=field,
                remedy="Leave it out, since the constraint says where the answer ends; or exclude it there.",
            )


def may_cut(automaton: PushdownAutomaton, text: bytes, *, regular: bool) -> bool:
    """Whether a text of `automaton` may contain `text` behind a beginning that is no text of `automaton`.
    `regular`: the automaton calls rules only for the bytes inside a character."""
    pushed = np.unique(automaton.arrays.push)
    pushed = pushed[pushed >= 0]
    here = np.flatnonzero(~automaton.arrays.final.astype(bool)) if regular else np.arange(automaton.states)
    returns = not regular
    for byte in text:
        here = _after(automaton, here, byte, pushed if returns else pushed[:0])
        returns = not regular or 0x80 <= byte < 0xC0  # the end of a character
    return bool(here.size)


def _after(automaton: PushdownAutomaton, here: np.ndarray, byte: int, pushed: np.ndarray) -> np.ndarray:
    """The states that may follow the states `here` when `byte` is read. A return leads to a state in
    `pushed`."""
    offsets, low, high, target, _, final, *_ = automaton.arrays
    seen = np.zeros(automaton.states, bool)
    found = [np.empty(0, target.dtype)]
    while here.size:
        seen[here] = True
        first, count = offsets[here], np.diff(offsets)[here]
        edges = np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())
        targets = target[edges[(low[edges] <= byte) & (byte <= high[edges])]]
        found.append(targets[targets >= 0])
        more = np.concatenate([~targets[targets < 0], pushed if final[here].any() else found[0]])
        here = np.unique(more[~seen[more]])
    return np.unique(np.concatenate(found))


def _has_free_text(tag: Any) -> bool:
    if isinstance(tag, list):
        return any(map(_has_free_text, tag))
    if not isinstance(tag, dict):
        return False
    if "structures" in tag or tag.get("type") in FREE:
        return True
    inner = (value for name, value in tag.items() if name not in ("json_schema", "schema"))
    return any(map(_has_free_text, inner))

"""The layout of decider checkpoints (Mapika's decider-ai 1.10, `decider_config.json`).

Example: a choice between "billing" and "returns", which is described as "broken goods". State and form are
tokenised apart. The label is the token behind the last "(".

    state    "Context:\\nMy order arrived broken."
    form     "\\n\\nQuestion: Which team?\\nOptions:\\n(A) billing\\n(B) returns: broken goods\\nAnswer: ("
    labels   A, B

Labels are A to Z, and then the pairs AA, AB, … that are one token each. From 11 options on, each label and
each option's text is tokenised apart. A predicate has the options no and yes, in this order. The levels of a
score are listed with their numbers. With `isolated_levels`, each is asked about by yes or no instead, and the
probabilities of yes are divided by their sum.

In the chat layout, state and question are the content of a user turn, and "Answer: (" begins the answer. The
package cuts states at 32,768 tokens; here they stay whole. It can also write questions before the state, at a
loss of accuracy; here the state is always first, so that its questions share it.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ramify.decisions.layouts import Form, Layout, Spelling, orders
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import ChatMessage, Generate, Segment
from ramify.questions import MAX_OPTIONS, Calibration, Option, Question, QuestionKind, Temperature

FILE = "decider_config.json"

Encode = Callable[[str], Sequence[int]]
"""Function from a text to its token ids, without special tokens."""

APART: tuple[int, ...] = ()
"""A segment without tokens, between texts that are tokenised apart."""
YES_NO = ("yes", "no")
LISTED = 10
"""Most options whose text is tokenised in one piece."""
NUMBERED = 8
"""Fewest elements of an array in a JSON state that are written with their positions."""
LEAST_TEMPERATURE = 0.05
KINDS: dict[str, QuestionKind] = {"choice": "choice", "noul": "predicate", "score": "score"}
"""The package's name of a kind of question → ours."""
NO_INSTRUCTIONS = "Which answer fits the context?"
"""The text of a question without instructions. The package refuses these, except predicates."""
NONE = ("none", "n/a", "none of these")
NONE_START = "none of the above"
NEUTRAL_NONE = "not listed here"
"""Text in place of an option that says that none fits. Early checkpoints take the usual words for a sign to
abstain."""


@dataclass(frozen=True)
class DeciderConfig:
    """The parts of `decider_config.json` that change a prompt or a probability."""

    chat: bool = False
    """Whether state and question are in a user turn of the chat template, and the label in the answer."""
    isolated_levels: bool = False
    neutral_none: bool = True
    temperatures: dict[str, Temperature] = field(default_factory=dict)

    @property
    def layout(self) -> str:
        return "decider-chat-1" if self.chat else "decider-1"

    @property
    def calibration(self) -> Calibration:
        """The temperatures, for the model of these files, whatever its fingerprint is."""
        return Calibration(model="", layout=self.layout, temperatures=self.temperatures, each_form=True)


def decider_config(content: Mapping[str, Any]) -> DeciderConfig:
    """The configuration in the JSON object `content`. Raises `InvalidRequest` for a layout or a temperature
    that the package refuses."""
    layout = content.get("layout", "chat" if content.get("chat_template") is True else "plain")
    if layout not in ("plain", "chat") or (layout == "plain" and content.get("chat_template") is True):
        raise _wrong("layout", layout, "plain or chat")
    return DeciderConfig(
        chat=layout == "chat",
        isolated_levels=bool(content.get("isolated_levels", False)),
        neutral_none=bool(content.get("neutralize_none", True)),
        temperatures=_temperatures(content),
    )


def _temperatures(content: Mapping[str, Any]) -> dict[str, Temperature]:
    by_type = content.get("temperature_by_type") or {}
    by_options = content.get("temperature_by_options")
    if not isinstance(by_type, dict) or not set(by_type) <= set(KINDS):
        raise _wrong("temperature_by_type", by_type, "a map with the keys choice, noul and score")
    if by_options is None:
        base = content.get("temperature", 1.0)
        return {
            ours: Temperature(base=_positive(by_type.get(theirs, base), f"temperature of {theirs}"))
            for theirs, ours in KINDS.items()
        }
    if by_type or not isinstance(by_options, dict) or not {"a", "b"} <= set(by_options) <= {"a", "b", "min"}:
        raise _wrong("temperature_by_options", by_options, "a map with a, b and min, without by_type")
    base, slope = (_finite(by_options[name], f"temperature_by_options.{name}") for name in ("a", "b"))
    least = _positive(by_options.get("min", LEAST_TEMPERATURE), "temperature_by_options.min")
    found = Temperature(base=base, slope=slope, least=least)
    # The levels of a score are questions with two options each where they are isolated.
    pair = Temperature(base=max(least, base + slope * math.log(2)))
    return {"choice": found, "predicate": found, "score": pair if content.get("isolated_levels") else found}


def _finite(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _wrong(name, value, "a finite number")
    return number


def _positive(value: Any, name: str) -> float:
    number = _finite(value, name)
    if number <= 0:
        raise _wrong(name, value, "a number above 0")
    return number


def _wrong(name: str, value: Any, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{FILE} has {name} = {value!r}; {expected} is expected.", field="model")


def numbered(value: Any) -> Any:
    """The JSON value `value` with the position of each element written into arrays of at least `NUMBERED`
    elements, as the package writes a state that is no text."""
    if isinstance(value, dict):
        return {name: numbered(each) for name, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) < NUMBERED:
        return [numbered(each) for each in value]
    return [
        {"_index": place, **(numbered(each) if isinstance(each, dict) else {"value": numbered(each)})}
        for place, each in enumerate(value)
    ]


def state_text(state: Any) -> str:
    """The text of a state: itself, or JSON in one line with `numbered` arrays."""
    return state if isinstance(state, str) else json.dumps(numbered(state), ensure_ascii=False)


PLAIN = ("", "\n")
"""The texts before the state, and between a question and its answer, in the plain layout."""


def decider_layout(config: DeciderConfig, encode: Encode, around: tuple[str, str] = PLAIN) -> Layout:
    """The layout of a checkpoint.

    encode : function from a text to its token ids, without special tokens
    around : for a chat layout, the texts before and after the content of a user turn, up to the answer
    """
    writer = _Writer(config, encode, around)
    return Layout(config.layout, writer.forms, writer.state)


class _Writer:
    def __init__(self, config: DeciderConfig, encode: Encode, around: tuple[str, str]) -> None:
        self._config, self._encode = config, encode
        self._before, self._after = around

    def state(self, request: Generate) -> tuple[Segment, ...]:
        prompt = request.prompt if request.chat is None else (_chat_text(request.chat),)
        before = (self._before, APART) if self._config.chat else ()
        return (*before, "Context:\n", *prompt)

    def forms(self, question: Question, permutations: int) -> Iterable[Form]:
        """A form for each order of the options, or for each isolated level."""
        text = question.instructions or NO_INSTRUCTIONS
        options = question.options
        if question.kind == "predicate":
            yes, no = (
                _text(*each) for each in zip(YES_NO, (one.description for one in options), strict=True)
            )
            return [self._form(text, {1: no, 0: yes})]
        if question.kind == "choice":
            texts = [_text(one.name, one.description) for one in options]
            return (
                self._form(text, {index: texts[index] for index in order})
                for order in orders(question, permutations)
            )
        levels = [_level(place, one) for place, one in enumerate(options)]
        if not self._config.isolated_levels:
            return [self._form(text, {place: f"{place}: {level}" for place, level in enumerate(levels)})]
        yes, no = YES_NO
        return [self._form(_about(text, level), {1: no, 0: yes}, place) for place, level in enumerate(levels)]

    def _form(self, question: str, options: Mapping[int, str], about: int = -1) -> Form:
        """options : index → text, in the order of the labels"""
        if len(options) > len(self._labels):
            raise UnsupportedField(
                f"A question has {len(options)} options; this checkpoint's tokenizer has "
                f"{len(self._labels)} labels of one token.",
                field="decide.questions",
            )
        wide = len(options) > LISTED
        apart = [APART] if wide or self._config.chat else []
        body: list[Segment] = [f"\n\nQuestion: {question}\nOptions:", *apart]
        spellings = []
        for (label, token), (option, text) in zip(self._labels, options.items(), strict=False):
            text = self._neutral(text)
            body += [APART, "\n(", (token,), f") {text}"] if wide else [f"\n({label}) {text}"]
            spellings.append(Spelling(option, (token,)))
        body += [*apart, f"{self._after}Answer: ("]
        return Form(tuple(body), tuple(spellings), about)

    def _neutral(self, text: str) -> str:
        plain = text.strip().lower()
        none = self._config.neutral_none and (plain in NONE or plain.startswith(NONE_START))
        return NEUTRAL_NONE if none else text

    @cached_property
    def _labels(self) -> list[tuple[str, int]]:
        """(label, token), for the first `MAX_OPTIONS` labels of one token."""
        letters = string.ascii_uppercase
        names = itertools.chain(letters, map("".join, itertools.product(letters, repeat=2)))
        found = ((name, self._encode(name)) for name in names)
        return list(itertools.islice(((name, ids[0]) for name, ids in found if len(ids) == 1), MAX_OPTIONS))


def _chat_text(chat: Sequence[ChatMessage]) -> str:
    """The state of a chat: the text of a single message, else the messages as JSON. Raises `UnsupportedField`
    for calls of tools, of which the package says nothing."""
    if any(turn.tool_calls or turn.role == "tool" for turn in chat):
        raise UnsupportedField(
            "Calls of tools have no place in the layout that this checkpoint was trained with.",
            field="messages",
            remedy="Write them into a text, or name another layout.",
        )
    if len(chat) == 1:
        return chat[0].content
    return state_text([{"role": turn.role, "content": turn.content} for turn in chat])


def _text(name: str, description: str) -> str:
    return f"{name}: {description}" if description else name


def _level(place: int, option: Option) -> str:
    """The text of a level. A name that is the level's number is left out."""
    if option.name == str(place) and option.description:
        return option.description
    return _text(option.name, option.description)


def _about(question: str, level: str) -> str:
    """The question about one level, whose text is without a leading number."""
    level = re.sub(r"^\s*-?\d+\s*:\s*", "", level)
    return f"{question}\nProposed answer: {level}\nDoes the proposed answer fit?"

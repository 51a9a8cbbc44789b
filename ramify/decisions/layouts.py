"""Layouts: the text of a question behind a state, and the spellings of its options.

Example: a choice "Which team?" with the options billing and returns (described as "goods sent back").

    verbatim-1                          labels-1                                isolated-1, first of two forms
    Which team?                         Which team?                             Which team?
    - billing                           A. billing                              Proposed answer: billing
    - returns: goods sent back          B. returns: goods sent back             Is the proposed answer right?
    Answer with exactly one of …        Answer with the letter of exactly …
    spellings: billing, returns         spellings: A, B                         spellings: Yes, yes, No, no

A `Form` is the text between `Decide.opening` and `Decide.closing`. A layout writes the forms of one question;
it sees neither other questions nor their number. A change of any text needs a new version.

The layout of a trained checkpoint (`ramify.decisions.trained`) is a `Layout` too. It has no opening and
closing: its forms begin right behind the state, and its `state` writes the state's segments.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ramify.messages import Generate, Segment
from ramify.questions import MAX_OPTIONS, Option, Question

BLANK_LINE, PLAIN_CLOSING = "\n\n", "\nAnswer:"
"""The texts around a question behind a plain prompt: `Decide.opening` and `closing` where they are None. A
question that goes on in a turn stands behind a blank line, too."""


class Spelling(NamedTuple):
    """A text that answers a question, and the option that it stands for."""

    option: int
    """The field of the same name in `FormScores.options`."""
    text: Segment
    """The text, or token ids, behind the form."""


class Form(NamedTuple):
    """A question as it is written once."""

    body: tuple[Segment, ...]
    """Neighbouring texts are tokenised together. Token ids, also an empty tuple of them, end a text."""
    spellings: tuple[Spelling, ...]
    about: int = -1
    """The field of the same name in `FormScores`."""


@dataclass(frozen=True)
class Layout:
    """A way to write questions."""

    name: str
    """Name and version: the field `layout` of `QuestionScores`."""
    forms: Callable[[Question, int], Iterable[Form]]
    """(question, `Decide.permutations`) → its forms. Many forms of a long question are written one by one, as
    they are read."""
    state: Callable[[Generate], tuple[Segment, ...]] | None = None
    """The segments of the state, if this layout writes the prompt itself: no chat template is rendered, and
    nothing stands between state, body and answer. None: the prompt stays as it is."""


YES = ("Yes", "yes")
NO = ("No", "no")
DEFAULT_INSTRUCTIONS = {
    "predicate": "Is this right?",
    "choice": "Which of these fits best?",
    "score": "Which of these levels fits best?",
}
"""Instructions of questions that have none, by kind."""


def written(question: Question, layout: str) -> str | None:
    """The text of the first form of `question` in the layout of this name and version; None for one that is
    not in `LAYOUTS`."""
    found = next((one for one in LAYOUTS.values() if one.name == layout), None)
    return None if found is None else "".join(map(str, next(iter(found.forms(question, 1))).body))


def verbatim(question: Question, permutations: int) -> Iterable[Form]:
    """A form for each order of the options. The options' names are the spellings."""
    return (_verbatim(question, order) for order in orders(question, permutations))


def _verbatim(question: Question, order: Sequence[int]) -> Form:
    if question.kind == "predicate":
        yes, no = question.options
        cases = [f"- {_described(name, one)}" for name, one in (("Yes", yes), ("No", no)) if one.description]
        return Form(
            _lines(_instructions(question), *cases, "Answer with exactly one word, Yes or No."), _yes_or_no()
        )
    options = question.options
    among = "levels, which are ordered from lowest to highest" if question.kind == "score" else "options"
    body = _lines(
        _instructions(question),
        *[f"- {_described(options[index].name, options[index])}" for index in order],
        f"Answer with exactly one of these {among}, as it is written, and nothing else.",
    )
    return Form(body, tuple([Spelling(index, options[index].name) for index in order]))


def labels(question: Question, permutations: int) -> Iterable[Form]:
    """A form for each order of the options. The spellings are labels: A, B, … in the order of the form."""
    return (_labels(question, order) for order in orders(question, permutations))


def _labels(question: Question, order: Sequence[int]) -> Form:
    names = ("Yes", "No") if question.kind == "predicate" else [one.name for one in question.options]
    given = list(zip(order, LABELS, strict=False))
    body = _lines(
        _instructions(question),
        *[f"{label}. {_described(names[index], question.options[index])}" for index, label in given],
        "Answer with the letter of exactly one of these options, and nothing else.",
    )
    return Form(body, tuple([Spelling(index, label) for index, label in given]))


def isolated(question: Question, permutations: int) -> Iterable[Form]:
    """A yes-or-no form about each option. A predicate, which is one such question, has one form."""
    if question.kind == "predicate":
        return verbatim(question, 1)
    return (
        Form(
            _lines(
                _instructions(question),
                f"Proposed answer: {_described(one.name, one)}",
                "Is the proposed answer right? Answer with exactly one word, Yes or No.",
            ),
            _yes_or_no(),
            about=index,
        )
        for index, one in enumerate(question.options)
    )


def order_count(question: Question, permutations: int) -> int:
    """The number of `orders` of the question's options."""
    return min(permutations, len(question.options)) if question.kind == "choice" else 1


def orders(question: Question, permutations: int) -> list[list[int]]:
    """The orders in which the options are listed: rotations of a choice's options, at equal distances.

    A choice of n options has at most n orders. Predicates and levels have one.
    """
    n, count = len(question.options), order_count(question, permutations)
    return [[(shift * n // count + place) % n for place in range(n)] for shift in range(count)]


def _label_names() -> Iterator[str]:
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_uppercase, repeat=length))


LABELS = tuple(itertools.islice(_label_names(), MAX_OPTIONS))
"""A to Z, then AA, AB, …"""

LAYOUTS = {
    "verbatim": Layout("verbatim-1", verbatim),
    "labels": Layout("labels-1", labels),
    "isolated": Layout("isolated-1", isolated),
}
"""The layouts for any model, by the name in `Decide.layout`."""


def _yes_or_no() -> tuple[Spelling, ...]:
    return tuple([Spelling(option, text) for option, texts in enumerate((YES, NO)) for text in texts])


def _instructions(question: Question) -> str:
    return question.instructions or DEFAULT_INSTRUCTIONS[question.kind]


def _described(name: str, option: Option) -> str:
    return f"{name}: {option.description}" if option.description else name


def _lines(*lines: str) -> tuple[str]:
    return ("\n".join(lines),)

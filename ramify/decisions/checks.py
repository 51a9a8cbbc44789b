"""Checks of a `Decide` before any work, and the places that their errors name.

An error's `field` is a path such as ``decide.questions[3].options[1].name``. A dialect with other names takes
such a path apart by `place_of`, and writes its own.
"""

from __future__ import annotations

import re
from typing import NamedTuple, get_args

from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import Generate
from ramify.questions import (
    MAX_OPTIONS,
    MAX_QUESTIONS,
    Decide,
    LayoutName,
    OptionEnd,
)
from ramify.spelling import check_word

_PLACE = re.compile(r"decide(?:\.questions\[(\d+)\](?:\.options\[(\d+)\])?)?(?:\.(.*))?")
_SET_BY_DECIDE = ("add_generation_prompt", "continue_final_message", "enable_thinking", "thinking")
"""Variables of chat templates that are set where questions are answered: an answer without thoughts is
begun."""


class Place(NamedTuple):
    """A field of a `Decide`, of one of its questions, or of one of a question's options."""

    question: int | None
    option: int | None
    name: str
    """Name of the field, such as "name"; empty for the question or option itself."""


def place_of(field: str | None) -> Place | None:
    """The place that an error's `field` names; None if it lies outside of `decide`."""
    found = _PLACE.fullmatch(field or "")
    if found is None:
        return None
    question, option = (None if index is None else int(index) for index in found.groups()[:2])
    return Place(question, option, found[3] or "")


def check_decide(request: Generate) -> Decide | None:
    """The questions of a request; None if it has none.

    Raises `InvalidRequest` for wrong questions and `UnsupportedField` for options that have no effect.
    """
    decide = request.decide
    if decide is None:
        return None
    if not 0 < len(decide.questions) <= MAX_QUESTIONS:
        raise InvalidRequest(
            f"{len(decide.questions)} questions are given; 1 to {MAX_QUESTIONS} are answered at a time.",
            field="decide.questions",
        )
    for index, question in enumerate(decide.questions):
        question.check(f"decide.questions[{index}]")
    check_word("decide.layout", decide.layout, get_args(LayoutName))
    check_word("decide.end", decide.end, get_args(OptionEnd))
    if not 0 < decide.permutations <= MAX_OPTIONS:
        raise InvalidRequest(
            f"permutations is {decide.permutations}; it is 1 to {MAX_OPTIONS}.", field="decide.permutations"
        )
    if decide.permutations > 1 and decide.layout == "isolated":
        raise UnsupportedField(
            "permutations has no effect in the layout isolated, where no options are listed.",
            field="decide.permutations",
            remedy="Leave it out.",
        )
    sampling = request.sampling
    for field, given in (
        ("max_tokens", sampling.max_tokens != 0),
        ("constraint", request.constraint is not None),
        ("preambles", bool(request.preambles)),
        ("choices", request.choices is not None),
        ("pooling", request.pooling is not None),
        ("fill", request.fill is not None),
        ("logprobs", sampling.logprobs is not None),
        ("prompt_logprobs_start", sampling.prompt_logprobs_start is not None),
    ):
        if given:
            raise UnsupportedField(
                f"{field} has no effect where questions are answered: nothing is generated.",
                field=field,
                remedy="Set it to 0." if field == "max_tokens" else "Leave it out.",
            )
    return decide


def check_template_variables(variables: dict[str, object]) -> None:
    """Raise `UnsupportedField` for a variable of the chat template that questions set themselves."""
    for name in _SET_BY_DECIDE:
        if name in variables:
            raise UnsupportedField(
                f"{name} has no effect where questions are answered: an answer without thoughts is begun.",
                field=f"template_kwargs.{name}",
                remedy="Leave it out.",
            )

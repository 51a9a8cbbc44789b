"""Typed questions about a prompt, and the scores that the model gives to their options.

    state       "Order 7 arrived broken. I want my money back."
    question    choice, "Which team handles it?", options billing, returns
    scores      ln P(billing) = -2.1, ln P(returns) = -0.3, each behind state and question

The prompt of a `Generate` with `decide` is the state. The tokenizer writes each question behind it in a
layout; nothing is generated. `ramify.decisions` makes answers of the scores.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from ramify.errors import InvalidRequest
from ramify.spelling import check_word

QuestionKind = Literal["predicate", "choice", "score"]
"""predicate: is a statement true; its options are true and false. choice: one of the options. score: one of
the options, which are ordered levels."""

LayoutName = Literal["auto", "verbatim", "labels", "isolated", "trained"]
"""verbatim: the options are listed, and their own tokens are scored. labels: the options are listed with
labels A, B, …, and the labels are scored. isolated: one yes-or-no question per option. trained: the layout
that the checkpoint was trained with. auto: trained where the checkpoint has a layout. Else verbatim, or
labels for a question with an option of more than 8 tokens or with options that have the same tokens."""

OptionEnd = Literal["prefix", "turn"]
"""The event that an option's tokens end. prefix: the tokens follow, and no longer option goes on with the
token after them. turn: the tokens follow, and then an end-of-turn token."""

Normalisation = Literal["sum", "mean", "pmi"]
"""The weight of an option, which its probability is proportional to. sum: its probability behind the prompt.
mean: the geometric mean of its tokens' probabilities. pmi: its probability divided by that behind an empty
state (arXiv 2104.08315)."""

MAX_QUESTIONS = 400
MAX_OPTIONS = 255


class Option(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An option of a question. `name` is the text that the model is to answer with."""

    name: str
    description: str = ""


class Question(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A question. The options of a predicate are two, true and then false; their names are not shown, and
    their descriptions say when each holds."""

    kind: QuestionKind
    instructions: str = ""
    options: tuple[Option, ...]

    def check(self, field: str = "question") -> Question:
        """Return self; raise `InvalidRequest`, with a path that begins with `field`, for an unknown kind, a
        wrong number of options, and options without a name or with the same name."""
        options = self.options
        check_word(f"{field}.kind", self.kind, get_args(QuestionKind))
        if self.kind == "predicate":
            if len(options) != 2:
                raise InvalidRequest(
                    f"A predicate has {len(options)} options; it has two, true and then false.",
                    field=f"{field}.options",
                )
            return self
        if not 0 < len(options) <= MAX_OPTIONS:
            raise InvalidRequest(
                f"A question has {len(options)} options; it has 1 to {MAX_OPTIONS}.", field=f"{field}.options"
            )
        first: dict[str, int] = {}
        for index, option in enumerate(options):
            place = f"{field}.options[{index}].name"
            if not option.name:
                raise InvalidRequest("An option is empty: it has no tokens.", field=place)
            if first.setdefault(option.name, index) != index:
                raise InvalidRequest(
                    f"Two options are named {option.name!r:.80}: {first[option.name]} and {index}.",
                    field=place,
                )
        return self


PREDICATE_OPTIONS = (Option(name="true"), Option(name="false"))
"""The options of a predicate without descriptions."""


class Decide(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Questions about the prompt of a `Generate`. Each is asked behind the prompt alone: an answer does not
    depend on the other questions."""

    questions: tuple[Question, ...]
    layout: LayoutName = "auto"
    end: OptionEnd = "prefix"
    permutations: int = 1
    """Number of orders of the options, over which probabilities are averaged. Predicates and levels keep
    their order."""
    opening: str | None = None
    """Text between the prompt and a question. None: for a chat, what continues its last user turn or begins a
    new one; for plain text, an empty line."""
    closing: str | None = None
    """Text after a question, up to the answer's first token. None: for a chat, the end of the turn and the
    beginning of an assistant turn without thoughts; for plain text, a line that ends in "Answer:"."""
    prompt_ids: bool = False
    """Whether the token ids of the state and of the questions are returned."""


class FormScores(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """Scores of one written form of a question. An option may have several spellings, each with a score."""

    options: tuple[int, ...]
    """Index of the option that each spelling stands for. In a form about one option: 0 for yes, 1 for no."""
    logprobs: tuple[float, ...]
    """Natural logarithm of each spelling's probability: the product over its tokens, and the mass of its
    end."""
    lengths: tuple[int, ...]
    """Number of tokens of each spelling."""
    about: int = -1
    """Index of the option that the form asks about by yes or no; -1 for a form about all options."""
    ids: tuple[int, ...] = ()
    """Token ids of the form, which follow those of the state; empty unless asked for."""


class QuestionScores(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """Scores of one question: a form for each order of its options, or for each option.

    An endpoint with a decision API gives probabilities in place of scores: `forms` is empty then. `forms` and
    `probabilities` are both empty if the endpoint's model declined to answer.
    """

    layout: str
    """Name and version of the layout in which the question was written, such as "verbatim-1". The path of a
    decision API, such as "/decisions", that does not tell its layout."""
    forms: tuple[FormScores, ...] = ()
    probabilities: tuple[float, ...] = ()
    """Probability of each option, as the endpoint gave it."""
    option_mass: float | None = None
    """Option mass that the endpoint gave with `probabilities`; None if it gave none."""


class DecisionScores(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True):
    """Scores of all questions, in their order."""

    questions: tuple[QuestionScores, ...]
    state_ids: tuple[int, ...] = ()
    """Token ids of the state; empty unless asked for."""


class Temperature(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Temperature for n options: ``max(least, base + slope * ln n)``."""

    base: float
    slope: float = 0.0
    least: float = 0.0


class Calibration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Temperatures that were fitted to labelled questions. A probability is proportional to the uncalibrated
    one to the power of 1 / temperature."""

    model: str
    """`ModelInfo.digest` of the model that the temperatures hold for."""
    layout: str
    """Name and version of the layout that the temperatures hold for."""
    temperatures: dict[str, Temperature]
    """By kind and number of options, such as "choice:4", or by kind alone, which holds for all other
    numbers."""
    each_form: bool = False
    """Whether the temperatures hold for the probabilities of each form, before those of forms are combined,
    instead of for the probabilities of the answer."""
    end: OptionEnd = "prefix"
    """The field of the same name in the `Decide`s that the temperatures hold for, as is `permutations`."""
    permutations: int = 1
    normalise: Normalisation = "sum"

"""Tokenisation of choices after a prompt: the tokens that are scored for each choice.

A choice is tokenised together with the end of the prompt's text, so its first token may contain that end:

    prompt           "Answer: "      →  Answer|:|␣
    prompt + choice  "Answer: Yes"   →  Answer|:|␣Yes
    shared 2 (Answer, :), ids [␣Yes], dropped 0: the score is that of ␣Yes after "Answer:".

`dropped` is the number of leading ids that only spell the end of the prompt: the prompt alone splits its end
into other tokens. These ids are computed and not scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ramify.engine_messages import ChoiceTokens
from ramify.errors import InvalidRequest, UnsupportedField
from ramify.messages import Choices, Generate, Segment

MAX_SCORED_CHOICES = 1024
TAIL = 128
"""Approximate number of characters at the end of the prompt's text that are tokenised again with each choice.
If this tail has other tokens alone than within the whole text, the whole text is used instead."""

Encode = Callable[[str, bool], Sequence[int]]
"""(text, whether it begins the prompt) → token ids."""
EncodeJoint = Callable[[str, bool], tuple[Sequence[int], Sequence[int]]]
"""(text, whether it begins the prompt) → token ids, and the position in the text, in characters, at which
each token ends."""


def check_choices(request: Generate, spelling: Mapping[str, str] = {}) -> Choices | None:
    """The choices of a request; None if it has none. Raises `InvalidRequest` for an empty choice or a wrong
    number of choices, and `UnsupportedField` for an option that has no effect when choices are scored.

    `spelling` maps our names of fields to the client's, for error messages.
    """
    choices = request.choices
    if choices is None:
        return None
    if not 0 < len(choices.texts) <= MAX_SCORED_CHOICES:
        raise InvalidRequest(
            f"{len(choices.texts)} choices are given; 1 to {MAX_SCORED_CHOICES} are scored at a time.",
            field="choices.texts",
        )
    if "" in choices.texts:
        place = choices.texts.index("")
        raise InvalidRequest("A choice is empty: it has no tokens.", field=f"choices.texts[{place}]")
    sampling = request.sampling
    for field, given, remedy in (
        ("max_tokens", sampling.max_tokens != 0, "Set it to 0."),
        ("constraint", request.constraint is not None, "Leave it out."),
        ("preambles", bool(request.preambles), "Leave them out."),
        ("logprobs", sampling.logprobs is not None, "Leave it out."),
        ("prompt_logprobs_start", sampling.prompt_logprobs_start is not None, "Leave it out."),
    ):
        if given:
            field = spelling.get(field, field)
            raise UnsupportedField(
                f"{field} has no effect where choices are scored: nothing is generated.",
                field=field,
                remedy=remedy,
            )
    return choices


def check_pooling(request: Generate) -> None:
    """Raise `UnsupportedField` for an option that has no effect when a prompt is embedded."""
    if request.pooling is None:
        return
    sampling = request.sampling
    for field, given in (
        ("max_tokens", sampling.max_tokens != 0),
        ("constraint", request.constraint is not None),
        ("preambles", bool(request.preambles)),
        ("choices", request.choices is not None),
        ("prompt_logprobs_start", sampling.prompt_logprobs_start is not None),
    ):
        if given:
            raise UnsupportedField(
                f"{field} has no effect where a prompt is embedded: nothing is generated.", field=field
            )


class ChoiceTokenizer:
    """Tokenises choices that follow one prompt.

    Parameters
    ----------
    encode, encode_joint
        Functions of the model's tokenizer.
    prompt
        Segments of the prompt.
    length
        Number of tokens of the prompt.
    exact
        Whether to keep all tokens of the prompt, so that no choice's first token contains any of its text.
    templated
        Whether a chat template has written the beginning of the prompt. Then no beginning-of-sequence token
        is added.
    """

    def __init__(
        self,
        encode: Encode,
        encode_joint: EncodeJoint,
        prompt: Sequence[Segment],
        length: int,
        *,
        exact: bool,
        templated: bool,
    ) -> None:
        self._encode, self._encode_joint = encode, encode_joint
        self._length = length
        self._exact = exact
        texts: list[str] = []
        for segment in reversed(prompt):
            if not isinstance(segment, str):
                break
            texts.append(segment)
        self._text = "".join(reversed(texts))
        self._first = len(texts) == len(prompt) and not templated
        """Whether the text `_text` begins the prompt."""
        self._tokens = self._encode(self._text, self._first) if self._text else ()
        self._take_tail()

    def _take_tail(self) -> None:
        """Replace a long text by its tail, if the tail has the same tokens alone as within the text."""
        place = self._text.rfind(" ", 0, max(len(self._text) - TAIL, 0))
        if place <= 0:
            return
        tail = self._encode(self._text[place:], False)
        if list(tail) == list(self._tokens[len(self._tokens) - len(tail) :]):
            self._text, self._tokens, self._first = self._text[place:], tail, False

    def tokens(self, choice: str) -> ChoiceTokens:
        """The tokens of `choice` after the prompt."""
        if self._text:
            ids, ends = self._encode_joint(self._text + choice, self._first)
            same = common(self._tokens, ids)
            if same == len(self._tokens) or not self._exact:
                places = range(same, len(ids))
                first = next((place for place in places if ends[place] > len(self._text)), len(ids))
                shared = self._length - len(self._tokens) + same
                return ChoiceTokens(shared=shared, ids=tuple(ids[same:]), dropped=first - same)
        ids = self._encode(choice, self._length == 0)
        return ChoiceTokens(shared=self._length, ids=tuple(ids))


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix of two sequences of tokens."""
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)

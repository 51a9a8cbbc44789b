"""The methods by which `select` decides among choices, from the log-probabilities of the choices' tokens.

The three methods and their names are taken from SGLang's frontend. Example, with the log-probabilities of the
tokens of two choices:

    "Paris"   [-1.0]        mean -1.0
    "Lyon"    [-0.2, -2.4]  mean -1.3
    token_length_normalized decides for "Paris": -1.0 > -1.3
    greedy_token_selection decides for "Lyon": -0.2 > -1.0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ramify.errors import BackendError
from ramify.graph import Method
from ramify.lang.trace.calls import Call
from ramify.lang.trace.outputs import token_logprobs
from ramify.messages import ChoiceScore, TokenLogprobs
from ramify.sampling_params import SamplingParams


@dataclass(frozen=True)
class Scored:
    """One choice with the log-probabilities of its tokens after the prompt. `unconditional`: the
    log-probabilities of the same tokens without a prompt; None if the method does not require them."""

    choice: str
    tokens: TokenLogprobs
    unconditional: TokenLogprobs | None = None

    @property
    def logprobs(self) -> list[float]:
        """The log-probability of each token (natural logarithm). The first token of a prompt has none, and
        counts as 0."""
        return [value or 0.0 for value in self.tokens.logprobs]

    @property
    def mean(self) -> float:
        """Mean log-probability of the tokens that have one; 0 if no token has one."""
        return _mean([value for value in self.tokens.logprobs if value is not None])


@dataclass(frozen=True)
class ChoicesDecision:
    """The index of the chosen choice, and the method's scores for `get_meta_info`."""

    index: int
    meta_info: dict[str, Any]


class ChoicesSamplingMethod:
    """A method that decides among scored choices. Ties go to the earlier choice."""

    requires_unconditional_logprobs = False

    def __call__(self, scored: Sequence[Scored]) -> ChoicesDecision:
        raise NotImplementedError

    def __repr__(self) -> str:
        return type(self).__name__


class TokenLengthNormalized(ChoicesSamplingMethod):
    """The method that decides for the choice with the highest mean log-probability of its tokens."""

    def __call__(self, scored: Sequence[Scored]) -> ChoicesDecision:
        return ChoicesDecision(_best([one.mean for one in scored]), {})


class GreedyTokenSelection(ChoicesSamplingMethod):
    """The method that decides for the choice that greedy decoding would follow, token by token.

    The log-probabilities of each shorter choice are padded, with the mean of that choice, to the length of
    the longest choice. So a choice that is a prefix of another choice can win.
    """

    def __call__(self, scored: Sequence[Scored]) -> ChoicesDecision:
        length = max(len(one.logprobs) for one in scored)
        matrix = [one.logprobs + [_mean(one.logprobs)] * (length - len(one.logprobs)) for one in scored]
        left = list(range(len(scored)))
        for position in range(length):
            highest = max(matrix[row][position] for row in left)
            left = [row for row in left if matrix[row][position] == highest]
        return ChoicesDecision(left[0], {"greedy_logprob_matrix": matrix})


class UnconditionalLikelihoodNormalized(ChoicesSamplingMethod):
    """The method that decides for the choice with the highest mean gain of its tokens: log-probability with
    the prompt minus log-probability without a prompt."""

    requires_unconditional_logprobs = True

    def __call__(self, scored: Sequence[Scored]) -> ChoicesDecision:
        gains = []
        for one in scored:
            assert one.unconditional is not None
            alone = [value or 0.0 for value in one.unconditional.logprobs]
            gains.append(_mean([given - base for given, base in zip(one.logprobs, alone, strict=True)]))
        return ChoicesDecision(_best(gains), {"normalized_unconditional_prompt_logprobs": gains})


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()

DEFAULT_METHOD: Method = "token_length_normalized"
METHODS: dict[Method, ChoicesSamplingMethod] = {
    "token_length_normalized": token_length_normalized,
    "greedy_token_selection": greedy_token_selection,
    "unconditional_likelihood_normalized": unconditional_likelihood_normalized,
}
"""The name of a method in the graphs of programs → the method."""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda index: scores[index])


SCORING = SamplingParams(max_tokens=0, temperature=0.0)


@dataclass(frozen=True)
class Choice:
    """The chosen choice. `ids` are the tokens of the choice; empty if the first of these tokens begins inside
    the prompt."""

    text: str
    ids: tuple[int, ...]
    meta: dict[str, Any]


def decide(
    found: Sequence[ChoiceScore], step: Call, choices: Sequence[str], method: ChoicesSamplingMethod
) -> Choice:
    """Record the scores `found` in `step`, and return the choice that `method` decides for. Raises
    `BackendError` if the backend has not returned all scores."""
    unconditional = method.requires_unconditional_logprobs
    if len(found) != len(choices) or (unconditional and any(one.unconditional is None for one in found)):
        raise BackendError("The backend returned no log-probabilities of the choices, which select needs.")
    step.finish = None  # nothing was generated
    step.choices = tuple(zip(choices, found, strict=True))
    scored = [Scored(text, score.tokens, score.unconditional) for text, score in step.choices]
    decision = method(scored)
    chosen = found[decision.index]
    return Choice(
        text=choices[decision.index],
        ids=chosen.tokens.ids if chosen.behind else (),
        meta={
            "choices": list(choices),
            "normalized_prompt_logprobs": [one.mean for one in scored],
            "input_token_logprobs": [token_logprobs(one.tokens) for one in scored],
            "unconditional_token_logprobs": [
                token_logprobs(one.unconditional) for one in scored if one.unconditional is not None
            ],
            **decision.meta_info,
        },
    )

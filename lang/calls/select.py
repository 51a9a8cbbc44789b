"""The request of a `select`, which scores all choices after the prompt.

A choice is scored by the log-probabilities of its tokens. If the prompt ends in text, the first token of a
choice may begin inside the prompt: "Answer: " + "Yes" may be tokenized as ["Answer", ":", " Yes"].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ramify.errors import BackendError
from ramify.lang.calls.choices import ChoicesSamplingMethod, Scored
from ramify.lang.trace.calls import Call
from ramify.lang.trace.meta_info import token_logprobs
from ramify.messages import Choices, ChoiceScore
from ramify.sampling_params import SamplingParams

SCORING = SamplingParams(max_tokens=0, temperature=0.0)


@dataclass(frozen=True)
class Choice:
    """The chosen choice. `ids` are its tokens; empty if its first token begins inside the prompt."""

    text: str
    ids: tuple[int, ...]
    meta: dict[str, Any]


def scoring_of(choices: Sequence[str], method: ChoicesSamplingMethod) -> Choices:
    """The choices as a request scores them, with unconditional log-probabilities if `method` requires
    them."""
    return Choices(texts=tuple(choices), unconditional=method.requires_unconditional_logprobs)


def decide(
    found: Sequence[ChoiceScore], step: Call, choices: Sequence[str], method: ChoicesSamplingMethod
) -> Choice:
    """The choice that `method` decides for by the scores `found`. The scores are recorded in `step`.

    Raises `BackendError` if the backend has not returned all scores.
    """
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

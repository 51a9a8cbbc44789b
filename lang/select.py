"""The requests of a `select`: one that caches the prompt, then one that scores each choice.

A choice is scored by the log-probabilities of its tokens behind the prompt. Where the prompt ends in
text, the first token of a choice may reach back into it ("Answer: " + "Yes" may hold the token " Yes"),
so scoring starts two tokens before the end, and the tokens that belong to the prompt are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ramify.errors import BackendError
from ramify.lang.calls import Output, all_of, send
from ramify.lang.choices import ChoicesSamplingMethod, Scored
from ramify.lang.meta import token_logprobs
from ramify.lang.trace import Call
from ramify.lang.transcript import Piece, ends_on_token
from ramify.messages import TokenLogprobs
from ramify.sampling import SamplingParams

if TYPE_CHECKING:
    from ramify.lang.branch import Branch

HEALED = 2
"""Tokens at the end of a prompt that a choice may change."""


@dataclass(frozen=True)
class Choice:
    """The choice made. `ids` are its tokens where they are exactly those behind the prompt, else empty."""

    text: str
    ids: tuple[int, ...]
    meta: dict[str, Any]


async def choose(branch: Branch, step: Call, choices: Sequence[str], method: ChoicesSamplingMethod) -> Choice:
    """Score `choices` after `step.prompt_end` and decide by `method`."""
    tail = step.prompt_end
    prompt_tokens = 0
    if tail is not None:
        prefix = step.child("prefix", step.name, tail, branch.run.clock())
        prompt_tokens = (
            await send(branch, prefix, SamplingParams(max_tokens=0, temperature=0.0), next_use="soon")
        ).usage.prompt_tokens
    exact = ends_on_token(tail)
    start = prompt_tokens if exact else max(prompt_tokens - HEALED, 0)
    scoring = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs_start=start)
    outputs = await all_of(
        send(branch, step.child("choice", choice, Piece(tail, choice, choice), branch.run.clock()), scoring)
        for choice in choices
    )
    runs = [_of_prompt(output) for output in outputs]
    dropped = [
        0 if exact else prompt_share(run.texts, choice, prompt_tokens - start)
        for run, choice in zip(runs, choices, strict=True)
    ]
    tokens = [_from(run, count) for run, count in zip(runs, dropped, strict=True)]
    alone: list[TokenLogprobs | None] = [None] * len(choices)
    if method.requires_unconditional_logprobs:
        scoring = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs_start=0)
        bare = await all_of(
            send(
                branch,
                step.child("unconditional", choice, Piece(None, run.ids, choice), branch.run.clock()),
                scoring,
                next_use="never",
            )
            for run, choice in zip(tokens, choices, strict=True)
        )
        alone = [_of_prompt(output) for output in bare]
    scored = [Scored(*row) for row in zip(choices, tokens, alone, strict=True)]
    decision = method(scored)
    index = decision.index
    behind_prompt = dropped[index] == prompt_tokens - start
    return Choice(
        text=choices[index],
        ids=tokens[index].ids if behind_prompt else (),
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


def prompt_share(texts: Sequence[str], choice: str, most: int) -> int:
    """How many of the first tokens belong to the prompt: those before the token that `choice` begins in.

    `texts` are the tokens from `most` before the prompt's end to the end of the choice. A tokenizer may
    not show the space that a token begins with, so spaces around the choice do not count.
    """
    needed = len(choice.strip())
    for count in range(min(most, len(texts)), -1, -1):
        if len("".join(texts[count:])) >= needed:
            return count
    return most


def _of_prompt(output: Output) -> TokenLogprobs:
    if output.prompt_logprobs is None:
        raise BackendError("The backend returned no log-probabilities of the prompt, which select needs.")
    return output.prompt_logprobs


def _from(run: TokenLogprobs, start: int) -> TokenLogprobs:
    """The tokens from position `start` on."""
    return TokenLogprobs(ids=run.ids[start:], logprobs=run.logprobs[start:], texts=run.texts[start:])

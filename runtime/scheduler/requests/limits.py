"""Limits of one engine on its requests, and the numbers that tune its scheduling."""

from __future__ import annotations

import dataclasses

from ramify.engine_messages import Submit
from ramify.errors import InvalidRequest, PromptTooLong, UnsupportedField


def tokens_apart(message: Submit) -> int:
    """The most tokens of the preambles that `max_tokens` does not count, with their ends."""
    return sum((one.max_tokens or 0) + len(one.end_ids) for one in message.preambles if one.uncounted)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one engine; `kv_tokens` is the number of tokens that all pages hold together."""

    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_tokens: int

    def max_tokens(self, message: Submit) -> int:
        """The number of tokens that the request may generate.

        Raises `PromptTooLong` where prompt and `max_tokens` do not fit, `InvalidRequest` for token ids
        outside of the vocabulary, `UnsupportedField` for options that exclude each other.
        """
        sampling = message.sampling
        prompt_len = len(message.ids)
        longest = min(self.context_length, self.kv_tokens)
        if prompt_len > longest or (prompt_len == longest and sampling.max_tokens != 0):
            raise PromptTooLong(
                f"The prompt has {prompt_len} tokens; this engine takes at most {longest - 1}"
                f" (context {self.context_length}, room in the KV pages for {self.kv_tokens}).",
                field="prompt",
                remedy="Shorten it, or give the engine a larger context_length or kv_memory_gb.",
            )
        room = longest - prompt_len
        apart = tokens_apart(message)
        if sampling.max_tokens is not None and sampling.max_tokens + apart > room:
            thoughts = f", {apart} of its preambles" if apart else ""
            raise PromptTooLong(
                f"The prompt's {prompt_len} tokens{thoughts} and max_tokens={sampling.max_tokens} exceed the"
                f" limit of {longest} tokens.",
                field="max_tokens",
                remedy=f"Ask for at most {room} tokens{' in all' if apart else ''}.",
            )
        for field, tokens in (
            ("prompt", message.ids),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", tuple(sampling.logit_bias)),
        ):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:
                raise InvalidRequest(
                    f"{field} has a token id outside of the vocabulary (0 … {self.vocab_size - 1}).",
                    field=field,
                )
        if message.constraint is not None and sampling.ignore_eos:
            raise UnsupportedField(
                "ignore_eos cannot be combined with a constraint: the constraint says where the output ends.",
                field="ignore_eos",
            )
        return room if sampling.max_tokens is None else sampling.max_tokens + apart

    def check_choices(self, longest: int, together: int) -> None:
        """Raises `PromptTooLong` where choices do not fit.

        longest : tokens of the prompt with its longest choice
        together : tokens that are computed for the prompt and all choices
        """
        most = min(self.context_length, self.kv_tokens)
        if longest > most:
            raise PromptTooLong(
                f"The prompt has {longest} tokens with its longest choice; this engine takes at most {most}.",
                field="choices.texts",
                remedy="Shorten the prompt or the choice.",
            )
        if together > self.kv_tokens:
            raise PromptTooLong(
                f"The prompt and its choices have {together} tokens together; there is room in the KV pages"
                f" for {self.kv_tokens}.",
                field="choices.texts",
                remedy="Score them in several requests, or give the engine a larger kv_memory_gb.",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Tuning:
    """Numbers that tune scheduling. They are no options: each was measured, and tests set others."""

    least_gain: float = 1.5
    """A draft token must promise this multiple of its cost."""
    draft_steps: int = 32
    """Steps of drafting, or of launching ahead, until the other one is tried for the first time."""
    trial_steps: int = 8
    """Steps in which the other one is tried."""
    patience_s: float = 0.5
    """Seconds of steps that requests of lower rank may sit out before they are owed their share."""
    ride: float = 1.25
    """Rows of lower rank may make a decoding step this many times as long."""
    window: int = 256
    """Waiting requests that the policy of admission looks at, the first ones: matching costs about 20 us
    each."""
    light_requests: int = 8
    """Most requests of a light flow: on two cores a step of 9 rows takes 1.6 times as long as one of 1."""
    least_state: int = 64
    """Tokens that a state must save at least. A mark costs a step, which takes as long as about 50 tokens of
    a prefill (CPU)."""
    piece_bytes: int = 8 << 20
    """Bytes of KV pages copied after one step, at least a page: 3 ms with the checksums on one core."""


TUNED = Tuning()
"""The measured numbers."""

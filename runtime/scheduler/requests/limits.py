"""Limits of one engine on its requests, and the numbers that tune its scheduling."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ramify.engine_messages import Submit
from ramify.errors import InvalidRequest, PromptTooLong, UnsupportedField
from ramify.model_info import MORE_ROOM

if TYPE_CHECKING:
    from ramify.runtime.scheduler.requests.decisions import Decisions


def tokens_apart(message: Submit) -> int:
    """The most tokens, including end texts, of the preambles that `max_tokens` does not count."""
    return sum((one.max_tokens or 0) + len(one.end_ids) for one in message.preambles if one.uncounted)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one engine; `kv_tokens` is the number of tokens that all pages hold together,
    `max_output_tokens` is `EngineConfig.max_output_tokens`, and `more_room` is `KvRoom.remedy`."""

    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_tokens: int
    max_output_tokens: int | None = None
    more_room: str = MORE_ROOM

    def max_tokens(self, message: Submit) -> int:
        """The number of tokens that the request may generate, preambles included.

        Raises `PromptTooLong` if prompt and `max_tokens` do not fit into the engine, `InvalidRequest` for a
        `max_tokens` over `max_output_tokens` and for token ids outside of the vocabulary, `UnsupportedField`
        for options that exclude each other.
        """
        sampling = message.sampling
        prompt_len = len(message.ids)
        longest = min(self.context_length, self.kv_tokens)
        if prompt_len > longest or (prompt_len == longest and sampling.max_tokens != 0):
            full = "" if prompt_len > longest else ", which leaves no room for an answer"
            pages = "" if longest == self.context_length else " The KV pages have no room for more."
            raise PromptTooLong(
                f"This model's maximum context length is {longest} tokens. However, your messages resulted in"
                f" {prompt_len} tokens{full}.{pages}",
                field="prompt",
                remedy=f"Send less text, or {self.more_room}.",
                lengths=(prompt_len, 0, longest),
            )
        room = longest - prompt_len
        most = room if self.max_output_tokens is None else min(room, self.max_output_tokens)
        apart = tokens_apart(message)
        asked = most if sampling.max_tokens is None else sampling.max_tokens + apart
        if message.cut_to_fit:
            asked = min(asked, most)
        thoughts = f", {apart} in preambles" if apart else ""
        if self.max_output_tokens is not None and asked > self.max_output_tokens:
            raise InvalidRequest(
                f"You requested {asked} output tokens (max_tokens={sampling.max_tokens}{thoughts}); a request"
                f" may have {self.max_output_tokens} here (max_output_tokens).",
                field="max_tokens",
                remedy=f"Ask for at most {self.max_output_tokens} tokens{' in all' if apart else ''}.",
            )
        if asked > room:
            raise PromptTooLong(
                f"This model's maximum context length is {longest} tokens. However, you requested"
                f" {prompt_len + asked} tokens ({prompt_len} in the messages{thoughts},"
                f" max_tokens={sampling.max_tokens}).",
                field="max_tokens",
                remedy=f"Reduce the length of the messages, or ask for at most {room} tokens"
                f"{' in all' if apart else ''}.",
                lengths=(prompt_len, asked, longest),
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
        return asked

    def check_choices(self, longest: int, together: int) -> None:
        """Raise `PromptTooLong` if the choices of a request do not fit into the engine.

        longest : the number of tokens of the prompt and the longest choice
        together : the number of tokens that are computed for the prompt and all choices
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
                remedy=f"Score them in several requests, or {self.more_room}.",
            )

    def check_decisions(self, decisions: Decisions, page_size: int) -> None:
        """Raise `PromptTooLong` for a question that does not fit behind its prompt, or whose branches do not
        fit into the KV pages one after the other. Raise `InvalidRequest` for wrong token ids."""
        state = len(decisions.ids)
        for form in decisions.forms.values():
            field, tokens = f"decide.questions[{form.question}]", form.longest
            if state + tokens > self.context_length:
                raise PromptTooLong(
                    f"This model's maximum context length is {self.context_length} tokens. However, the"
                    f" state resulted in {state} tokens, and a question with its longest option in"
                    f" {tokens}.",
                    field=field,
                    remedy=f"Send less text, or {self.more_room}.",
                    lengths=(state + tokens, 0, self.context_length),
                )
            least, greatest = form.vocabulary
            if least < 0 or greatest >= self.vocab_size:
                raise InvalidRequest(
                    f"{field} has a token id outside of the vocabulary (0 … {self.vocab_size - 1}).",
                    field=field,
                )
        needed = -(-state // page_size) + decisions.most_pages(page_size)
        if needed * page_size > self.kv_tokens:
            raise PromptTooLong(
                f"The state has {state} tokens. With the longest question it needs {needed} KV pages of"
                f" {page_size} tokens; there are {self.kv_tokens // page_size}.",
                field="decide.questions",
                remedy=f"Send less text, or {self.more_room}.",
                lengths=(needed * page_size, 0, self.kv_tokens),
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Tuning:
    """Numbers that tune scheduling. Users cannot set them: each was measured. Tests use other values."""

    least_gain: float = 1.5
    """A draft token must promise at least this multiple of its cost."""
    draft_steps: int = 32
    """The number of steps that draft, or launch ahead, before the other way is tried for the first time."""
    trial_steps: int = 8
    """The number of steps in which the other way is tried."""
    patience_s: float = 0.5
    """The seconds of steps that requests of lower rank sit out before they are paid back."""
    ride: float = 1.25
    """The rows of requests of lower rank may lengthen a decoding step at most by this factor."""
    window: int = 256
    """The policy of admission looks at this number of waiting requests, from the first on. Matching one of
    them costs about 20 us."""
    light_requests: int = 8
    """The most requests of a light flow. On two cores a step of 9 rows takes 1.6 times as long as a step of 1
    row."""
    least_state: int = 64
    """The least number of tokens that a state must save. Ending a prefill chunk at the state's position costs
    one more step, which takes as long as about 50 tokens of a prefill (CPU)."""
    piece_bytes: int = 8 << 20
    """Bytes of KV pages that are copied after one step; at least one page is copied. 8 MB take 3 ms with the
    checksums on one core."""


TUNED = Tuning()
"""The measured numbers."""

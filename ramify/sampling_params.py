"""Sampling options: the one definition from which defaults, checks and the wire form derive."""

from __future__ import annotations

import math

import msgspec

from ramify.errors import InvalidRequest

MAX_TOP_LOGPROBS = 64
MAX_CHOICES = 128
MAX_STOP_STRINGS = 64


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """How the tokens of one request are chosen.

    The order of operations is: logit bias and penalties, grammar mask, temperature, top-k, top-p,
    min-p, then one draw from a generator that belongs to the request alone, so that a seed gives
    the same tokens in any batch. ``temperature=0`` is greedy.
    """

    max_tokens: int | None = None
    """Most tokens to generate; 0 only caches the prompt; None means as many as the context holds."""
    min_tokens: int = 0
    """End-of-sequence and stop token ids are masked until this many tokens are out."""
    temperature: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one (arXiv 2407.01082)."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens in prompt or output (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the output (OpenAI API reference)."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output (OpenAI API reference)."""
    logit_bias: dict[int, float] = {}
    """Token id to a number added to its logit."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Output ends before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    """None: none. 0: of the chosen output tokens. k: also of the k most likely."""
    prompt_logprobs_start: int | None = None
    """None: none. p: log-probabilities of the prompt's tokens from position p on."""
    skip_special_tokens: bool = True
    token_healing: bool = True
    """A prompt that ends in text may have its last tokens replaced by longer ones that begin with them, so
    that the output goes on where a token could have. Prompts that end in ids or in a chat template never
    have."""

    @property
    def penalises(self) -> bool:
        """Logits depend on which tokens came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check(self) -> SamplingParams:
        """Return self; raise `InvalidRequest` naming the first field that is out of range."""
        for field, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, field)
            if not math.isfinite(value) or not low <= value <= high:
                raise _out_of_range(field, value, f"between {low:g} and {high:g}")
        if self.top_p == 0.0:
            raise _out_of_range("top_p", self.top_p, "above 0")
        if self.repetition_penalty == 0.0:
            raise _out_of_range("repetition_penalty", self.repetition_penalty, "above 0")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise _out_of_range("max_tokens", self.max_tokens, "0 or more")
        if self.min_tokens < 0:
            raise _out_of_range("min_tokens", self.min_tokens, "0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _out_of_range("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.top_k < 0:
            raise _out_of_range("top_k", self.top_k, "0 (off) or more")
        if not 1 <= self.n <= MAX_CHOICES:
            raise _out_of_range("n", self.n, f"between 1 and {MAX_CHOICES}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise _out_of_range("logprobs", self.logprobs, f"between 0 and {MAX_TOP_LOGPROBS}")
        if self.prompt_logprobs_start is not None and self.prompt_logprobs_start < 0:
            raise _out_of_range("prompt_logprobs_start", self.prompt_logprobs_start, "0 or more")
        for field in ("max_tokens", "min_tokens", "top_k", "prompt_logprobs_start"):
            value = getattr(self, field)
            if value is not None and value >= 2**63:  # messages hold no such number
                raise _out_of_range(field, value, "below 2**63")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise _out_of_range("seed", self.seed, "a 64-bit integer")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _out_of_range("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        if "" in self.stop:
            raise InvalidRequest("stop: an empty stop string would end every output.", field="stop")
        if any(token < 0 for token in self.stop_token_ids):
            raise _out_of_range("stop_token_ids", min(self.stop_token_ids), "0 or more")
        for token, bias in self.logit_bias.items():
            if token < 0 or not math.isfinite(bias) or abs(bias) > 100.0:
                raise _out_of_range("logit_bias", {token: bias}, "token ids mapped to -100 … 100")
        return self


def _out_of_range(field: str, value: object, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is {value!r}; it must be {wanted}.", field=field)

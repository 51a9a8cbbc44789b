"""Sampling options: names, defaults, limits and the wire form, in one definition."""

from __future__ import annotations

import math

import msgspec

from ramify.errors import InvalidRequest
from ramify.text import shortened

MAX_TOP_LOGPROBS = 64
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
"""Most characters of all stop strings together. They are bounded as after every token each is compared with
the end of the text."""
MAX_TOKEN_IDS = 4096
"""Most entries of logit_bias, and most of stop_token_ids. They are bounded as all entries are looked at for
every token."""


_RANGES = {
    "temperature": (0.0, 100.0, "between 0 and 100"),
    "top_p": (0.0, 1.0, "between 0 and 1"),
    "min_p": (0.0, 1.0, "between 0 and 1"),
    "repetition_penalty": (0.0, 100.0, "between 0 and 100"),
    "presence_penalty": (-2.0, 2.0, "between -2 and 2"),
    "frequency_penalty": (-2.0, 2.0, "between -2 and 2"),
    "max_tokens": (0, math.inf, "0 or more"),
    "min_tokens": (0, math.inf, "0 or more"),
    "top_k": (0, math.inf, "0 (off) or more"),
    "n": (1, MAX_N, f"between 1 and {MAX_N}"),
    "logprobs": (0, MAX_TOP_LOGPROBS, f"between 0 and {MAX_TOP_LOGPROBS}"),
    "prompt_logprobs_start": (0, math.inf, "0 or more"),
    "seed": (-(2**63), 2**64 - 1, "a 64-bit integer"),
}
"""Field → (least value, greatest value, text of the range in errors)."""


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Sampling options of one request.

    The order of operations is: logit bias and penalties, grammar mask, temperature, top-k, top-p, min-p, then
    one draw. Each request has its own random generator, so a seed gives the same tokens in any batch.
    ``temperature=0`` is greedy.
    """

    max_tokens: int | None = None
    """Most tokens to generate. 0 only caches the prompt; None generates until the context is full."""
    min_tokens: int = 0
    """End-of-sequence and stop token ids are masked until the output has this many tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens up to this total probability (arXiv 1904.09751); 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one (arXiv 2407.01082)."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in prompt or output (arXiv
    1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the output (OpenAI API reference)."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output (OpenAI API reference)."""
    logit_bias: dict[int, float] = {}
    """Token id → number that is added to the token's logit."""
    seed: int | None = None
    """Seed of this request's random numbers. None: the engine gives it one."""
    stop: tuple[str, ...] = ()
    """Output ends before the first of these strings."""
    stop_token_ids: tuple[int, ...] = ()
    """Output ends at the first of these tokens."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token, up to max_tokens."""
    n: int = 1
    """Independent outputs; output i has the seed ``seed + i``."""
    logprobs: int | None = None
    """Log-probabilities of the output. None: none. 0: of the sampled tokens. k: also of the k most likely
    tokens at each position."""
    prompt_logprobs_start: int | None = None
    """Log-probabilities of the prompt's tokens from this position on; None for none."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    token_healing: bool = True
    """Token healing: the last tokens of a prompt that ends in text may be replaced by tokens that begin with
    the same text and go beyond it. Prompts that end in token ids or in a chat template are never healed."""

    @property
    def penalises(self) -> bool:
        """Whether any penalty is set, so that logits depend on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check(self) -> SamplingParams:
        """Return self; raise `InvalidRequest` naming the first field that is out of range."""
        for field, (low, high, wanted) in _RANGES.items():
            value = getattr(self, field)
            if value is None and getattr(_DEFAULTS, field) is None:
                continue
            if not low <= value <= high:  # also true for NaN
                raise _out_of_range(field, value, wanted)
            if isinstance(value, int) and value >= 2**63 and high == math.inf:  # msgpack's integers end there
                raise _out_of_range(field, value, "below 2**63")
        for field in ("top_p", "repetition_penalty"):
            if getattr(self, field) == 0.0:
                raise _out_of_range(field, 0.0, "above 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _out_of_range("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise _out_of_range("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS}")
        if "" in self.stop:
            raise InvalidRequest("stop: an empty stop string would end every output.", field="stop")
        if (size := sum(map(len, self.stop))) > MAX_STOP_CHARACTERS:
            wanted = f"at most {MAX_STOP_CHARACTERS} characters together"
            raise _out_of_range("stop", f"{size} characters", wanted, "Stop at a shorter part of the text.")
        for field in ("stop_token_ids", "logit_bias"):
            if (size := len(getattr(self, field))) > MAX_TOKEN_IDS:
                remedy = "Constrain the output with a regex, or with choices."
                raise _out_of_range(field, f"{size} tokens", f"at most {MAX_TOKEN_IDS}", remedy)
        if any(token < 0 for token in self.stop_token_ids):
            raise _out_of_range("stop_token_ids", min(self.stop_token_ids), "0 or more")
        for token, bias in self.logit_bias.items():
            if token < 0 or not math.isfinite(bias) or abs(bias) > 100.0:
                raise _out_of_range("logit_bias", {token: bias}, "token ids mapped to -100 … 100")
        return self


_DEFAULTS = SamplingParams()


def _out_of_range(field: str, value: object, wanted: str, remedy: str | None = None) -> InvalidRequest:
    return InvalidRequest(
        f"{field} is {shortened(repr(value), 100)}; it must be {wanted}.", field=field, remedy=remedy
    )

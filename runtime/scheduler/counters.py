"""Counters of one scheduler since its start."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Ledger:
    """Tokens are counted when they are computed, found or chosen; seconds by the monotonic clock."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Tokens whose KV was computed: prompts, outputs, and what retraction made compute again."""
    output_tokens: int = 0
    forced_tokens: int = 0
    guessed_tokens: int = 0
    """Tokens computed on the chance that they come next."""
    accepted_tokens: int = 0
    """Of these, the ones that did."""
    retractions: int = 0
    step_s: float = 0.0
    model_s: float = 0.0

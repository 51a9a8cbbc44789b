"""Names of kernels that no card has timed yet: off until a figure says otherwise (docs/decisions/0098)."""

from typing import Literal

Trial = Literal["fused-rounding", "chunked-delta", "skinny-products", "dependent-launch", "library-prompts"]
UNFIXED: frozenset[Trial] = frozenset(("chunked-delta", "skinny-products", "library-prompts"))
"""Trials with which bits depend on the batch or on the chunks of a prompt."""

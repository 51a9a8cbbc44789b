"""How a mixture of experts chooses experts for a token. Imports no torch."""

from __future__ import annotations

import dataclasses
from typing import Literal

LEAST_SUM = 1e-20
"""Added to the sum that weights are divided by, as in DeepSeek-V3 and GLM-4.5, because all sigmoids of a row
may be 0. A sum of the largest softmax scores is not changed by so little, in float32 or float64."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """The rule that turns a token's logits, one for each expert, into `top_k` experts and their weights.

    Example: 4 experts, top_k 2, softmax scores 0.1, 0.5, 0.1, 0.3. Experts 1 and 3 are chosen, with the
    weights 0.5 and 0.3; normalised 0.625 and 0.375; with `scale` 2 then 1.25 and 0.75.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    """Divide the weights of the chosen experts by their sum."""
    scale: float = 1.0
    groups: int = 1
    """The number of groups of neighbouring experts. Experts are chosen from the `top_groups` groups with the
    largest sums of their two best scores (DeepSeek-V3, arXiv 2412.19437)."""
    top_groups: int = 1


@dataclasses.dataclass(frozen=True)
class ClampedGate:
    """The gate of gpt-oss: (u + 1) · g · sigmoid(alpha · g), where g is the gate, at most `limit`, and u the
    up projection, clamped to ± `limit`. SwiGLU is g · sigmoid(g) · u."""

    alpha: float
    limit: float

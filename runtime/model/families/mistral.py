"""Mistral."""

from __future__ import annotations

from ramify.runtime.model.families.llama import Llama


class Mistral(Llama):
    """Llama whose layers all see a sliding window, `ModelConfig.windows` (arXiv 2310.06825)."""

"""Granite 3."""

from __future__ import annotations

from ramify.runtime.model.families.llama import Llama


class Granite(Llama):
    """Llama with factors on embedding, residuals, scores and logits, all of them in the config."""

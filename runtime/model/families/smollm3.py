"""SmolLM3."""

from __future__ import annotations

from ramify.runtime.model.families.llama import Llama


class SmolLM3(Llama):
    """Llama in which every fourth layer embeds no positions, `ModelConfig.layer_ropes` (arXiv 2501.18795)."""

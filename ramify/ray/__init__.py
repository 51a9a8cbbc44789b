"""Ramify on a Ray cluster: batches on Ray Data. `import ramify.ray` imports no Ray; the first use does."""

from __future__ import annotations

from ramify.ray.data import map_program

__all__ = ["map_program"]

"""Ramify on a Ray cluster: batches on Ray Data.

Ray is imported at the first use, not by `import ramify.ray`.
"""

from __future__ import annotations

from ramify.ray.data import map_program

__all__ = ["map_program"]

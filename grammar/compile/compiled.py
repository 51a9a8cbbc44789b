"""What a compiler makes of a constraint."""

from __future__ import annotations

from typing import NamedTuple

from ramify.messages import Enforcement


class Compiled(NamedTuple):
    """The name of the engine, its payload, and how the grammar differs from the constraint."""

    engine: str
    payload: bytes
    enforcement: Enforcement = Enforcement()

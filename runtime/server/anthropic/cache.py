"""The marks ``cache_control``, and the figures of the cache in a usage."""

from __future__ import annotations

from typing import Literal

from ramify.messages import Usage
from ramify.runtime.server.fields import Fields
from ramify.runtime.server.leases import lease_seconds
from ramify.runtime.server.openai.bodies import Body
from ramify.runtime.server.tables.anthropic import MARK

Ttl = Literal["5m", "1h"]


class CacheMarks:
    """The marks of one request. A mark leases the whole prompt, wherever it stands."""

    def __init__(self) -> None:
        self.ttl: Ttl | None = None
        """The longest time that a mark asks for; None without marks."""

    @property
    def lease_s(self) -> float | None:
        """Seconds of the lease; None without marks."""
        return None if self.ttl is None else lease_seconds(self.ttl, "ttl")

    def take(self, item: Fields) -> None:
        """Take the field ``cache_control`` of `item`."""
        mark = item.take_object("cache_control")
        if mark is None:
            return
        mark.need("type", Literal["ephemeral"])
        ttl: Ttl = mark.take("ttl", Ttl, "5m")
        mark.finish(MARK)
        if self.ttl != "1h":
            self.ttl = ttl

    def input_usage(self, usage: Usage) -> Body:
        """The fields of a usage that count the prompt. The tokens of input, read and written add up to it.

        Each token that is computed is also kept. With marks it counts as written, else as input.
        """
        computed = usage.prompt_tokens - usage.cached_tokens
        written = 0 if self.ttl is None else computed
        return {
            "input_tokens": computed - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation": {
                "ephemeral_5m_input_tokens": written if self.ttl == "5m" else 0,
                "ephemeral_1h_input_tokens": written if self.ttl == "1h" else 0,
            },
        }

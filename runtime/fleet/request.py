"""What a fleet knows of one request, from its arrival to its end.

tokenised   `ids` is None: a tokenizer has been asked for them
waiting     no replica takes it yet
fetching    it has a replica, and is sent when its pages have come there, or will not
sent        its replica has it
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ramify.engine_messages import Abort
from ramify.messages import Generate
from ramify.radix.digest import Digests
from ramify.runtime.fleet.placement import Work

EXPECTED_OUTPUT = 64.0
"""Output tokens that a request is expected to take, at most its max_tokens."""
CHARACTERS = 4
"""Of a choice's text, per token."""


@dataclasses.dataclass(slots=True, eq=False)
class FleetRequest:
    request: Generate
    alone: bool = False
    """It is sent to a replica that has none but such ones."""
    ids: tuple[int, ...] | None = None
    """The prompt's."""
    replica: str = ""
    """Where it is placed; "" before."""
    sent: bool = False
    aborts: list[Abort] = dataclasses.field(default_factory=list)
    """Aborts that came before it was sent."""

    @property
    def coalesced(self) -> bool:
        """Its chunks are held back for a while, and come joined."""
        return self.request.every_s > 0

    @property
    def limits(self) -> list[str]:
        """The limits of tokens that it counts against, by their ids."""
        hint = self.request.hint
        return [] if hint is None else [one.id for one in hint.limits if one.max_total_tokens is not None]

    def work(self, digests: Digests, scope: str, page_size: int) -> Work:
        """What it is to a replica. `scope` is that of the prefix tree."""
        request, ids = self.request, self.ids or ()
        try:
            tokens = np.array(ids, np.int32)
        except OverflowError:
            ends: list[int] = []  # the replica refuses it
        else:
            ends = digests.page_ends(tokens, scope, page_size)
        most = request.sampling.max_tokens
        scored = 0 if request.choices is None else sum(map(len, request.choices.texts)) // CHARACTERS
        known = 0 if request.continues is None else len(request.continues.ids)
        return Work(
            rid=request.rid,
            digests=ends,
            tokens=len(ids) + scored + known,
            output=EXPECTED_OUTPUT if most is None else min(most, EXPECTED_OUTPUT),
            program="" if request.hint is None else request.hint.program,
        )

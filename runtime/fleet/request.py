"""A request in a fleet, from its arrival to its end.

tokenising   `ids` is None: a tokenizer has been asked for the prompt's token ids
waiting      no replica has been found for the request yet
fetching     it has a replica, and is sent when its cached pages have been moved there or the move has failed
sent         its replica has received it
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ramify.engine_messages import Abort
from ramify.messages import Generate
from ramify.radix.digest import Digests
from ramify.runtime.fleet.placement import Work

EXPECTED_OUTPUT = 64.0
"""Expected output tokens of a request; a smaller max_tokens takes its place."""
CHARACTERS = 4
"""Estimated characters per token in the texts of choices."""


@dataclasses.dataclass(slots=True, eq=False)
class FleetRequest:
    """The state of one request in the fleet."""

    request: Generate
    alone: bool = False
    """Whether the request is quarantined, so that it may run only on the isolation replica."""
    ids: tuple[int, ...] | None = None
    """Token ids of the prompt. None while they are being computed; empty if they are not needed, or if the
    tokenizer refused the prompt."""
    replica: str = ""
    """Name of the request's replica; "" before one has been chosen."""
    reserved: bool = False
    """Whether `Placement` has chosen the replica, and has reserved the request's work there."""
    sent: bool = False
    aborts: list[Abort] = dataclasses.field(default_factory=list)
    """Aborts that arrived before the request was sent."""

    @property
    def coalesced(self) -> bool:
        """Whether the request's chunks are held back for up to `every_s` seconds, and arrive joined."""
        return self.request.every_s > 0

    @property
    def limits(self) -> list[str]:
        """Ids of the token limits that the request counts against."""
        hint = self.request.hint
        return [] if hint is None else [one.id for one in hint.limits if one.max_total_tokens is not None]

    def work(self, digests: Digests, scope: str, page_size: int) -> Work:
        """The request's work for a replica. `scope` is the prefix tree's scope for the request."""
        request, ids = self.request, self.ids or ()
        try:
            tokens = np.array(ids, np.int32)
        except OverflowError:
            ends: list[int] = []  # an id does not fit into int32: the replica refuses the request
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

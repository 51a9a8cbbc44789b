"""A request in a fleet, from its arrival to its end.

tokenising   `ids` is None: a tokenizer has been asked for them
waiting      no replica takes it yet
fetching     it has a replica, and is sent when its pages have come there, or will not
sent         its replica has it
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
"""Characters of a choice's text for each token."""


@dataclasses.dataclass(slots=True, eq=False)
class FleetRequest:
    """One request: its place in the fleet, and the aborts that wait for it."""

    request: Generate
    alone: bool = False
    """Quarantined: runs only on the isolation replica."""
    ids: tuple[int, ...] | None = None
    """Token ids of the prompt; empty where there was nothing to choose by them."""
    replica: str = ""
    """Name of its replica; "" before it has one."""
    reserved: bool = False
    """`Placement` has chosen the replica, and counts the request's work there."""
    sent: bool = False
    aborts: list[Abort] = dataclasses.field(default_factory=list)
    """Aborts that came before it was sent."""

    @property
    def coalesced(self) -> bool:
        """Whether its chunks are held back for a while, and come joined."""
        return self.request.every_s > 0

    @property
    def limits(self) -> list[str]:
        """Ids of the token limits that it counts against."""
        hint = self.request.hint
        return [] if hint is None else [one.id for one in hint.limits if one.max_total_tokens is not None]

    def work(self, digests: Digests, scope: str, page_size: int) -> Work:
        """The request's work for a replica. `scope`: of the prefix tree."""
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

"""A request that has no replica yet, and the work that it will be."""

from __future__ import annotations

import dataclasses

import numpy as np

from ramify.messages import Generate
from ramify.radix.observe.digest import Digests
from ramify.ring_messages import Abort
from ramify.runtime.fleet.placement import Work

EXPECTED_OUTPUT = 64.0
"""Output tokens that a request is expected to take, at most its max_tokens."""
CHARACTERS = 4
"""Of a choice's text, per token."""


@dataclasses.dataclass(slots=True, eq=False)
class Unplaced:
    """`ids` are the prompt's, None while they are asked for. `aborts` came meanwhile."""

    request: Generate
    ids: tuple[int, ...] | None = None
    aborts: list[Abort] = dataclasses.field(default_factory=list)

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

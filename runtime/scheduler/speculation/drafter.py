"""Speculative decoding without a draft model: proposes draft tokens, which the next step verifies.

A draft token is accepted where the request's own draw, with its own random number and under its grammar, is
that very token. So outputs are the same as without speculation (for a draft model: Leviathan et al., arXiv
2211.17192). Three sources are looked through: the prefix tree, where an equal prompt went on before; the
request's own tokens; and recent outputs of its cache scope.

One more row costs little while reading the weights takes most of a step, and much in a full batch. So a draft
token is proposed where the probability that it is accepted outweighs the time that its row takes from all
requests of the step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ramify.radix.cache import PrefixCache
from ramify.runtime.scheduler.request import Request
from ramify.runtime.scheduler.speculation.acceptance import AcceptanceRates, StepCost
from ramify.runtime.scheduler.speculation.prompt_lookup import (
    CONTEXT,
    LONGEST_MATCH,
    RecentOutputs,
    copied,
    find,
)

log = logging.getLogger("ramify")

MOST = 15
"""Draft tokens of a request in one step."""
MOST_IN_STEP = 32
"""Draft tokens of all requests in one step: they add at most some 10 ms to the time between tokens."""
LEAST_GAIN = 1.5
"""A draft token must promise this multiple of its cost."""
FREE_PAGES = 4
"""Free pages a request below which there are no drafts: a draft is not worth a retraction."""
MAX_PAUSE = 1024
"""Steps between two lookups of a request at most."""
FIRST_RATES = {"tree": (0.6, 0.9), "own": (0.1, 0.8), "outputs": (0.05, 0.7)}
"""Acceptance rates of each source at a match of one token and of `LONGEST_MATCH`, until drafts have been
verified."""


class Draft(NamedTuple):
    """`tokens`, proposed for the positions from `position` on, as `length` tokens before them match."""

    source: str
    length: int
    position: int
    tokens: list[int]


class Drafter:
    """Proposes draft tokens to decoding requests, and learns from how many are accepted."""

    def __init__(self, cache: PrefixCache, *, enabled: bool) -> None:
        self._cache = cache
        self._enabled = enabled
        self._outputs = RecentOutputs()
        self._rates = AcceptanceRates(FIRST_RATES)
        self.cost = StepCost()

    def propose(self, running: Sequence[Request]) -> None:
        """Give each decoding request of a step the draft tokens that are worth their rows. After an error no
        request gets any more."""
        if not self._enabled:
            return
        decoding = [request for request in running if request.decoding]
        drafting = [request for request in decoding if request.may_speculate]
        if self._cache.available() <= FREE_PAGES * len(drafting):
            return
        with self._off_after_an_error():
            self._propose(drafting, sum(request.target_len - request.computed_len for request in decoding))

    def learn_cost(self, rows: int, seconds: float) -> None:
        """A step of decoding requests alone took `seconds`."""
        self.cost.learn(rows, seconds)

    def ended(self, request: Request) -> None:
        """Learn from the last draft, and remember the output."""
        if not self._enabled:
            return
        with self._off_after_an_error():
            self._learn(request)
            if request.output_len:
                self._outputs.add(request.scope, request.ids[max(0, request.prompt_len - CONTEXT) :])

    @contextlib.contextmanager
    def _off_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("speculation failed, and is off from now on")
            self._enabled = False

    def _propose(self, requests: Sequence[Request], rows: int) -> None:
        """rows : tokens that the step computes without drafts"""
        expected = float(len(requests))
        share = self.cost.of_a_row(rows) * LEAST_GAIN
        longest_pause = len(requests) - 1
        room = MOST_IN_STEP
        for request in requests:
            speculation = request.speculation
            if speculation.pause > 0:
                speculation.pause -= 1
                continue
            self._learn(request)
            most = min(MOST, room, request.budget_left - 1 - request.ahead_len)
            if most <= 0 or self._rates.best < share * expected:
                continue
            speculation.draft = draft = self._draft(request, most)
            worth: list[int] = []
            for token, chance in () if draft is None else self._chances(request, draft):
                if chance < share * expected:
                    break
                worth.append(token)
                expected += chance
                rows += 1
                share = self.cost.of_a_row(rows) * LEAST_GAIN
            if worth:
                request.add_draft(worth)
                room -= len(worth)
                speculation.next_pause = 1
            else:
                speculation.pause = min(speculation.next_pause, longest_pause)
                speculation.next_pause = min(2 * speculation.next_pause, MAX_PAUSE)

    def _draft(self, request: Request, most: int) -> Draft | None:
        """The likeliest draft of the three sources."""
        ids = request.target_ids
        end = ids[-LONGEST_MATCH:]
        found: list[Draft] = []
        following = self._cache.following(ids, request.scope, most)
        if following:
            # Equal prompts go on alike or not: the longer the outputs have been equal, the likelier.
            length = max(1, len(ids) - request.prompt_len)
            found.append(Draft("tree", length, len(ids), following))
        own = find(ids, end)
        if own is not None:
            found.append(Draft("own", own.length, len(ids), copied(ids, own.place, most)))
        other = self._outputs.find(request.scope, end)
        if other is not None:
            following = self._outputs.following(request.scope, other.place, most)
            found.append(Draft("outputs", other.length, len(ids), following))
        return max(found, key=lambda draft: self._rates.of(draft.source, draft.length), default=None)

    def _chances(self, request: Request, draft: Draft) -> Iterator[tuple[int, float]]:
        """Each draft token, and the probability that it and those before it are accepted."""
        chance = 1.0
        for i, token in enumerate(draft.tokens):
            general = self._rates.of(draft.source, draft.length + i)
            chance *= request.speculation.acceptance.rate(general)
            yield token, chance

    def _learn(self, request: Request) -> None:
        """Compare the last draft with what came, whether or not it was worth verifying."""
        speculation = request.speculation
        draft, speculation.draft = speculation.draft, None
        if draft is None:
            return
        came = request.ids[draft.position : draft.position + len(draft.tokens)].tolist()
        for i, (token, drafted) in enumerate(zip(came, draft.tokens, strict=False)):
            accepted = token == drafted
            self._rates.learn(draft.source, draft.length + i, accepted=accepted)
            speculation.acceptance.learn(accepted=accepted)
            if not accepted:
                return

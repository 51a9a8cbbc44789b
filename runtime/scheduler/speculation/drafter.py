"""Speculative decoding: proposes draft tokens, which the next step verifies.

A draft token is accepted if the request's own choice, by its own random number and under its grammar, is the
same token. So outputs are the same as without speculation. Prompt lookup searches three sources: the prefix
tree, which may hold the output of an equal earlier prompt; the request's own tokens; and recent outputs of
its cache scope. If there is a draft model (Leviathan et al., arXiv 2211.17192) or a draft head, and lookup
finds no token that is likelier than a token of this model, the draft model proposes.

One more row costs little while reading the weights takes most of a step, and much in a full batch. So a draft
token is proposed only if the probability that it is accepted outweighs the time that its row costs all
requests of the step. A decoding request without a draft has to wait for the drafts of other requests. While
there is such a request, drafts lengthen a step by a quarter at most (`StepDrafts`).
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ramify.runtime.executor.runner import Runner
from ramify.runtime.scheduler.requests.accounts import Counters
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.requests.pages import RequestPages
from ramify.runtime.scheduler.requests.parts import Draft
from ramify.runtime.scheduler.requests.request import Request, ScheduledRequest
from ramify.runtime.scheduler.speculation.acceptance import (
    LONGEST_MATCH,
    AcceptanceRates,
    DeviceRows,
    StepCost,
    StepDrafts,
    outcomes,
)
from ramify.runtime.scheduler.speculation.draft_head import HeadRunner
from ramify.runtime.scheduler.speculation.draft_model import DraftModel
from ramify.runtime.scheduler.speculation.model_drafts import MODEL, ModelDrafts

log = logging.getLogger("ramify")


CAPACITY = 8192
"""The number of output tokens remembered for each cache scope. Searching them takes about 8 us."""
SCOPES = 64
CONTEXT = LONGEST_MATCH
"""The number of prompt tokens remembered before each output, so that a match can find the output's first
tokens."""
_END = -1


class Found(NamedTuple):
    """A match: the last `length` tokens of the sequence equal the `length` tokens right before `place`."""

    place: int
    length: int


def find(tokens: np.ndarray, end: np.ndarray) -> Found | None:
    """The longest match of the last tokens of `end`, (n,) int32, in `tokens`, (m,) int32; of equally long
    ones, the last.

    A match at the very end of `tokens` does not count, because no token follows it. None if there is no
    match.
    """
    places = np.flatnonzero(tokens[:-1] == end[-1]) + 1
    if not len(places):
        return None
    length = 1
    for back in range(2, min(LONGEST_MATCH, len(end)) + 1):
        reaching = places[places >= back]
        longer = reaching[tokens[reaching - back] == end[-back]]
        if not len(longer):
            break
        places, length = longer, back
    return Found(int(places[-1]), length)


def copied(tokens: np.ndarray, place: int, count: int) -> list[int]:
    """`count` tokens of `tokens` from `place` on. If `tokens` ends before that, the copied part is repeated:
    from place 1 of "a b c", 5 tokens are "b c b c b"."""
    found = tokens[place : place + count].tolist()
    period = len(found)
    while len(found) < count:
        found.append(found[-period])
    return found


class RecentOutputs:
    """The last output tokens of ended requests, by cache scope."""

    def __init__(self) -> None:
        self._scopes: OrderedDict[str, _Ring] = OrderedDict()

    def remember(self, scope: str, tokens: np.ndarray) -> None:
        """Remember `tokens`, (n,) int32: the end of a prompt and its output."""
        ring = self._scopes.get(scope)
        if ring is None:
            ring = self._scopes[scope] = _Ring()
            if len(self._scopes) > SCOPES:
                self._scopes.popitem(last=False)
        self._scopes.move_to_end(scope)
        ring.add(tokens)

    def find(self, scope: str, end: np.ndarray) -> Found | None:
        ring = self._scopes.get(scope)
        return None if ring is None else find(ring.tokens, end)

    def following(self, scope: str, place: int, count: int) -> list[int]:
        """At most `count` tokens from `place` on, up to the end of the output that `place` is in."""
        found: list[int] = self._scopes[scope].tokens[place : place + count].tolist()
        return found[: found.index(_END)] if _END in found else found


class _Ring:
    """Outputs one after the other, each followed by an end mark. New outputs overwrite the oldest."""

    def __init__(self) -> None:
        self.tokens = np.full(CAPACITY, _END, dtype=np.int32)
        self._next = 0

    def add(self, tokens: np.ndarray) -> None:
        tokens = tokens[-(CAPACITY // 4) :]
        if self._next + len(tokens) + 1 > CAPACITY:
            self.tokens[self._next :] = _END
            self._next = 0
        stop = self._next + len(tokens)
        self.tokens[self._next : stop] = tokens
        self.tokens[stop] = _END
        self._next = stop + 1


FREE_PAGES = 4
"""Nothing is drafted unless more than this number of pages is available for each request: a draft is not
worth a retraction."""
MAX_PAUSE = 1024
"""The most steps between two lookups for a request."""
LOOKUPS = {"tree": (0.6, 0.9), "own": (0.1, 0.8), "outputs": (0.05, 0.7)}
"""For each source, the assumed acceptance rates at a match of one token and of `LONGEST_MATCH` tokens, until
drafts have been verified."""
FIRST_RATES = LOOKUPS | {MODEL: (0.3, 0.95)}
"""The assumed acceptance rates of all sources. The draft model's rates are for its least and greatest
confidence."""


class Drafter:
    """Proposes draft tokens for decoding requests, and learns from their acceptance."""

    def __init__(
        self,
        pages: RequestPages,
        limits: Limits,
        counters: Counters,
        clock: Callable[[], float],
        rows: DeviceRows,
        least_gain: float,
        draft_runner: Runner | None,
        *,
        enabled: bool,
    ) -> None:
        self.model: DraftModel | None = None
        if draft_runner is not None:
            kind = HeadRunner if draft_runner.model.hidden_input_width else DraftModel
            self.model = kind(draft_runner, pages, limits, counters, clock)
        self._cache, self._states = pages.cache, pages.states
        self._least_gain = least_gain
        self._enabled = enabled
        self._outputs = RecentOutputs()
        self._rates = AcceptanceRates(FIRST_RATES)
        self._by_model = None if self.model is None else ModelDrafts(self.model, self._rates, limits)
        self._drafting_s = 0.0
        self.cost = StepCost(rows)

    def propose_drafts(self, running: Sequence[Request]) -> None:
        """Give each decoding request of a step the draft tokens that are worth their rows. An error switches
        speculation off for good."""
        self._drafting_s = 0.0
        if not self._enabled or not running:
            return
        decoding = [request for request in running if request.decoding]
        drafting = [request for request in decoding if request.may_speculate]
        if self._cache.available() <= FREE_PAGES * len(drafting):
            return
        with self._off_after_an_error():
            rows = sum(request.target_len - request.computed_len for request in decoding)
            # After a rejected token, a model with states computes draft tokens a second time.
            gain = self._least_gain * (2 if self._states.present else 1)
            step = StepDrafts(self.cost, rows, float(len(drafting)), len(decoding), gain)
            self._propose_to(drafting, len(decoding), step)
            self._drafting_s = step.seconds

    def learn_cost(self, rows: int, seconds: float) -> None:
        """Learn from a step of decoding requests alone, which took `seconds`, drafting included."""
        self.cost.learn(rows, seconds - self._drafting_s)

    def observe_pass(self, plan: Sequence[ScheduledRequest], read: Callable[[], torch.Tensor]) -> None:
        """Take what the model's pass over `plan` gave.

        read : returns what a draft head reads: (tokens, width), in the order of `plan`
        """
        if self._enabled and isinstance(self.model, HeadRunner):
            with self._off_after_an_error():
                self.model.observe_pass(plan, read())

    def overwritten(self, pages: Sequence[int]) -> None:
        """Note that `pages` hold other tokens now."""
        if self.model is not None:
            self.model.overwritten(pages)

    def ended(self, request: Request) -> None:
        """Learn from the last draft of `request`, which ends, and remember its output for prompt lookup."""
        if not self._enabled:
            return
        with self._off_after_an_error():
            self._learn(request)
            if self._by_model is not None:
                self._by_model.learn(request)
            if request.output_len:
                self._outputs.remember(request.scope, request.ids[max(0, request.prompt_len - CONTEXT) :])

    @contextlib.contextmanager
    def _off_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("speculation failed, and is off from now on")
            self._enabled = False

    def _propose_to(self, requests: Sequence[Request], decoding: int, step: StepDrafts) -> None:
        found: list[Request] = []
        without: list[Request] = []
        for request in requests:
            looked_up = self._look_up(request, step, len(requests) - 1)
            (found if looked_up else without).append(request)
        if len(found) == decoding:
            step.lift()
        for request in found:
            self._add(request, step, step.most(request))
        if self._by_model is None:
            return
        if len(requests) == decoding:
            step.lift()  # the draft model drafts for all the other requests
        self._by_model.propose_drafts(without, step)

    def _look_up(self, request: Request, step: StepDrafts, longest_pause: int) -> bool:
        """Look up a draft for `request`, and give `request` the first tokens of the draft that are worth
        their rows. Returns True if there are any."""
        speculation = request.speculation
        if speculation.pause > 0:
            speculation.pause -= 1
            return False
        self._learn(request)
        if step.most(request) <= 0 or self._rates.best(LOOKUPS) < step.price:
            return False
        speculation.draft = self._draft(request, step.longest(request))
        speculation.by_model = False
        found = self._add(request, step, min(step.share, step.most(request)))
        if found:
            speculation.next_pause = 1
        else:
            speculation.pause = min(speculation.next_pause, longest_pause)
            speculation.next_pause = min(2 * speculation.next_pause, MAX_PAUSE)
        return found

    def _add(self, request: Request, step: StepDrafts, most: int) -> bool:
        """Give `request` up to `most` further tokens of its draft, while they are worth their rows. Returns
        True if it got any."""
        draft, had, by_model = request.speculation.draft, request.draft_len, self._by_model
        for place, (token, chance) in enumerate(self._chances(request, draft) if draft and most > 0 else ()):
            if place < had:
                continue
            if chance < step.price:
                break
            if not place and by_model is not None and by_model.is_better(request, chance, step):
                break
            step.add(request, token, chance)
            if request.draft_len == had + most:
                break
        return request.draft_len > had

    def _draft(self, request: Request, most: int) -> Draft | None:
        """The likeliest of the drafts from the three sources; None if there is no draft."""
        ids = request.target_ids
        end = ids[-LONGEST_MATCH:]
        found: list[Draft] = []
        following = self._cache.following(ids, request.scope, most)
        if following:
            # The longer the outputs behind equal prompts have been equal, the likelier they go on equally.
            length = max(1, len(ids) - request.prompt_len)
            found.append(looked_up("tree", length, len(ids), following))
        own = find(ids, end)
        if own is not None:
            found.append(looked_up("own", own.length, len(ids), copied(ids, own.place, most)))
        other = self._outputs.find(request.scope, end)
        if other is not None:
            following = self._outputs.following(request.scope, other.place, most)
            found.append(looked_up("outputs", other.length, len(ids), following))
        found = [draft for draft in found if draft.tokens]
        return max(found, key=lambda draft: self._rates.rate_of(draft.source, draft.grades[0]), default=None)

    def _chances(self, request: Request, draft: Draft) -> Iterator[tuple[int, float]]:
        """Yield each token of `draft` with the probability that it and all draft tokens before it are
        accepted."""
        chance = 1.0
        for token, grade in zip(draft.tokens, draft.grades, strict=True):
            general = self._rates.rate_of(draft.source, grade)
            chance *= request.speculation.acceptance.rate(general)
            yield token, chance

    def _learn(self, request: Request) -> None:
        """Learn acceptance rates from the draft of the last lookup and the tokens that were appended, even if
        the draft was not verified."""
        speculation = request.speculation
        draft, speculation.draft = speculation.draft, None
        if draft is not None:
            for grade, accepted in outcomes(request, draft):
                self._rates.learn(draft.source, grade, accepted=accepted)
                speculation.acceptance.learn(accepted=accepted)


def looked_up(source: str, length: int, position: int, tokens: list[int]) -> Draft:
    """A draft from `source`: `tokens`, which follow a match of `length` tokens."""
    return Draft(source, list(range(length, length + len(tokens))), position, tokens)

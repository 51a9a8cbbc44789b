"""Speculative decoding: proposes draft tokens, which the next step verifies.

A draft token is accepted where the request's own draw, with its own random number and under its grammar, is
that very token. So outputs are the same as without speculation. Prompt lookup looks through three sources:
the prefix tree, where an equal prompt went on before; the request's own tokens; and recent outputs of its
cache scope. Where it finds nothing, or nothing likelier than a draft model's token, the draft model proposes
if there is one (Leviathan et al., arXiv 2211.17192).

One more row costs little while reading the weights takes most of a step, and much in a full batch. So a draft
token is proposed where the probability that it is accepted outweighs the time that its row takes from all
requests of the step. A request without a draft waits for the drafts of others: while there is one, they
lengthen a step by a quarter at most (`StepDrafts`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from ramify.radix.cache import PrefixCache
from ramify.runtime.scheduler.limits import Limits
from ramify.runtime.scheduler.request import Request
from ramify.runtime.scheduler.speculation.acceptance import (
    ON_CPU,
    AcceptanceRates,
    DeviceRows,
    Draft,
    StepCost,
    StepDrafts,
    outcomes,
)
from ramify.runtime.scheduler.speculation.draft_model import DraftModel
from ramify.runtime.scheduler.speculation.model_drafts import MODEL, ModelDrafts
from ramify.runtime.scheduler.speculation.prompt_lookup import (
    CONTEXT,
    LONGEST_MATCH,
    RecentOutputs,
    copied,
    find,
)

log = logging.getLogger("ramify")

FREE_PAGES = 4
"""Free pages a request below which there are no drafts: a draft is not worth a retraction."""
MAX_PAUSE = 1024
"""Steps between two lookups of a request at most."""
LOOKUPS = {"tree": (0.6, 0.9), "own": (0.1, 0.8), "outputs": (0.05, 0.7)}
"""Acceptance rates of each source at a match of one token and of `LONGEST_MATCH`, until drafts have been
verified."""
FIRST_RATES = LOOKUPS | {MODEL: (0.3, 0.95)}
"""And those of a draft model at the least and the greatest confidence."""


class Drafter:
    """Proposes draft tokens to decoding requests, and learns from how many are accepted."""

    def __init__(
        self,
        cache: PrefixCache,
        limits: Limits,
        *,
        enabled: bool,
        model: DraftModel | None,
        rows: DeviceRows = ON_CPU,
    ) -> None:
        self._cache = cache
        self._enabled = enabled
        self._outputs = RecentOutputs()
        self._rates = AcceptanceRates(FIRST_RATES)
        self._by_model = None if model is None else ModelDrafts(model, self._rates, limits)
        self._drafting_s = 0.0
        self.cost = StepCost(rows)

    def propose(self, running: Sequence[Request]) -> None:
        """Give each decoding request of a step the draft tokens that are worth their rows. After an error no
        request gets any more."""
        self._drafting_s = 0.0
        if not self._enabled or not running:
            return
        decoding = [request for request in running if request.decoding]
        drafting = [request for request in decoding if request.may_speculate]
        if self._cache.available() <= FREE_PAGES * len(drafting):
            return
        with self._off_after_an_error():
            rows = sum(request.target_len - request.computed_len for request in decoding)
            step = StepDrafts(self.cost, rows, float(len(drafting)), len(decoding))
            self._propose(drafting, len(decoding), step)
            self._drafting_s = step.seconds

    def learn_cost(self, rows: int, seconds: float) -> None:
        """A step of decoding requests alone took `seconds`, with those of drafting."""
        self.cost.learn(rows, seconds - self._drafting_s)

    def ended(self, request: Request) -> None:
        """Learn from the last draft, and remember the output."""
        if not self._enabled:
            return
        with self._off_after_an_error():
            self._learn(request)
            if self._by_model is not None:
                self._by_model.learn(request)
            if request.output_len:
                self._outputs.add(request.scope, request.ids[max(0, request.prompt_len - CONTEXT) :])

    @contextlib.contextmanager
    def _off_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("speculation failed, and is off from now on")
            self._enabled = False

    def _propose(self, requests: Sequence[Request], decoding: int, step: StepDrafts) -> None:
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
            step.lift()  # it drafts for all the others together
        self._by_model.propose(without, step)

    def _look_up(self, request: Request, step: StepDrafts, longest_pause: int) -> bool:
        """Give `request` the first tokens of prompt lookup that are worth their rows, if there are any."""
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
        """Give `request` up to `most` further tokens of its draft, while they are worth their rows. Whether
        there were any."""
        draft, had = request.speculation.draft, request.draft_len
        for place, (token, chance) in enumerate(self._chances(request, draft) if draft and most > 0 else ()):
            if place < had:
                continue
            if chance < step.price or (not place and self._model_is_better(request, chance, step)):
                break
            step.add(request, token, chance)
            if request.draft_len == had + most:
                break
        return request.draft_len > had

    def _draft(self, request: Request, most: int) -> Draft | None:
        """The likeliest draft of the three sources."""
        ids = request.target_ids
        end = ids[-LONGEST_MATCH:]
        found: list[Draft] = []
        following = self._cache.following(ids, request.scope, most)
        if following:
            # Equal prompts go on alike or not: the longer the outputs have been equal, the likelier.
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
        return max(found, key=lambda draft: self._rates.of(draft.source, draft.grades[0]), default=None)

    def _chances(self, request: Request, draft: Draft) -> Iterator[tuple[int, float]]:
        """Each draft token, and the probability that it and those before it are accepted."""
        chance = 1.0
        for token, grade in zip(draft.tokens, draft.grades, strict=True):
            general = self._rates.of(draft.source, grade)
            chance *= request.speculation.acceptance.rate(general)
            yield token, chance

    def _model_is_better(self, request: Request, chance: float, step: StepDrafts) -> bool:
        return self._by_model is not None and self._by_model.is_better(request, chance, step)

    def _learn(self, request: Request) -> None:
        """Compare the last lookup's draft with what came, whether or not it was worth verifying."""
        speculation = request.speculation
        draft, speculation.draft = speculation.draft, None
        if draft is not None:
            for grade, accepted in outcomes(request, draft):
                self._rates.learn(draft.source, grade, accepted=accepted)
                speculation.acceptance.learn(accepted=accepted)


def looked_up(source: str, length: int, position: int, tokens: list[int]) -> Draft:
    """The draft of a match of `length` tokens."""
    return Draft(source, list(range(length, length + len(tokens))), position, tokens)

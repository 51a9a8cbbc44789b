"""When the draft model proposes, and how far: while a pass promises more tokens than its seconds cost.

Example: the step would take 10 ms for 1 token, a pass of the draft model 2 ms, and 80% of its tokens were
accepted so far.

    pass 1    0.8 tokens more for 20% of the step more      goes ahead (0.8 > 1.5 · 0.2 · 1)
    pass 3    0.5 tokens more for 14%, at 2.4 tokens        stops      (0.5 < 1.5 · 0.14 · 2.4)

Seconds are measured, those of the model's steps and those of the draft model's passes. So a draft model that
is slow, or whose tokens are seldom accepted, stops. From then on it has `PROBE_SHARE` of the time, in which
single tokens are drafted and compared with what comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.runtime.scheduler.limits import Limits
from ramify.runtime.scheduler.request import Request
from ramify.runtime.scheduler.speculation.acceptance import (
    LEARNING_RATE,
    MOST,
    MOST_ROWS,
    AcceptanceRates,
    Draft,
    StepDrafts,
    outcomes,
)
from ramify.runtime.scheduler.speculation.draft_model import DraftModel
from ramify.runtime.scheduler.speculation.prompt_lookup import LONGEST_MATCH

MODEL = "model"
"""The source of its drafts."""
FIRST_RATE = 0.7
"""The share of its tokens that is taken to be accepted until some have been verified."""
PROBE_SHARE = 0.01
"""The share of the time that a draft model has which does not pay."""
MOST_PROBE_S = 1.0
"""Seconds for probes are saved up to this number."""
READY = MOST + 2
"""A request that lacks no more tokens than this drafts at once: a step may leave that number."""


class ModelDrafts:
    """Draft tokens by the draft model, for the requests of a step together."""

    def __init__(self, model: DraftModel, rates: AcceptanceRates, limits: Limits) -> None:
        self._model = model
        self._rates = rates
        self._limits = limits
        self._rate = FIRST_RATE
        self._probe_s = 0.0
        self._drafts = False
        """The last pass paid."""

    def chance(self, request: Request) -> float:
        """The probability that the model's next token is accepted, before it is known."""
        return request.speculation.model_acceptance.rate(self._rate)

    def is_better(self, request: Request, chance: float, step: StepDrafts) -> bool:
        """A draft token for `request` promises more, its pass paid, than one of probability `chance`."""
        if not self._drafts or self._model.missing(request) > READY:
            return False
        return self.chance(request) - step.price_of(self._model.cost.of(1)) > chance

    def learn(self, request: Request) -> None:
        """Compare the last draft with what came."""
        speculation = request.speculation
        draft, speculation.model_draft = speculation.model_draft, None
        for grade, accepted in () if draft is None else outcomes(request, draft):
            self._rates.learn(MODEL, grade, accepted=accepted)
            self._rate += LEARNING_RATE * (accepted - self._rate)
            speculation.model_acceptance.learn(accepted=accepted)

    def propose(self, requests: Sequence[Request], step: StepDrafts) -> None:
        """Give `requests` the draft tokens that are worth their passes and rows, or probe."""
        began = self._model.seconds
        self._propose(requests, step)
        step.seconds = self._model.seconds - began

    def _propose(self, requests: Sequence[Request], step: StepDrafts) -> None:
        model = self._model
        model.begin()
        for request in requests:
            self.learn(request)
        self._probe_s = min(self._probe_s + PROBE_SHARE * step.cost.of(step.rows), MOST_PROBE_S)
        requests = [one for one in requests if one.pages.copy is None and step.most(one) > 0]
        worth = [one for one in requests if self.chance(one) >= step.price]
        if requests:
            self._drafts = self._pays({one: self.chance(one) for one in worth}, len(worth), step)
        if worth and self._drafts:
            missing = {request: model.missing(request) for request in worth}
            late = [one for one in worth if self._is_due(one, missing[one], step, len(requests))]
            self._draft([one for one in worth if missing[one] <= READY], step)
            if late:
                model.catch_up(late)
        elif requests and model.cost.of(1) <= self._probe_s:
            self._probe(min(requests, key=model.missing), step)

    def _pays(self, promised: Mapping[Request, float], rows: int, step: StepDrafts) -> bool:
        """A pass of `rows` tokens is worth its seconds, with the tokens that it is expected to give."""
        needed = step.price_of(self._model.cost.of(rows)) + step.price * len(promised)
        return bool(promised) and sum(promised.values()) >= needed

    def _is_due(self, request: Request, missing: int, step: StepDrafts, among: int) -> bool:
        """`request` lacks many tokens, and has decoded for as long as computing them takes. An output that
        has been long will be long: so this is worth its time, or takes at most as long as the output has."""
        cost, steps = self._model.cost, step.cost.of(step.rows) / among
        return missing > READY and cost.of(missing) <= request.output_len * steps

    def _draft(self, requests: Sequence[Request], step: StepDrafts, *, probing: bool = False) -> None:
        model, began = self._model, self._model.seconds
        drafts = {request: Draft(MODEL, [], request.target_len, []) for request in requests}
        chances = dict.fromkeys(requests, 1.0)
        rows = sum(map(model.missing, requests))
        while requests:
            promised = {one: chances[one] * self.chance(one) for one in requests}
            if not probing and not self._pays(promised, rows, step):
                break
            going = []
            for request, token, confidence in model.next_tokens(requests):
                grade = 1 + int(confidence * (LONGEST_MATCH - 1))
                drafts[request].tokens.append(token)
                drafts[request].grades.append(grade)
                acceptance = request.speculation.model_acceptance
                chances[request] *= acceptance.rate(self._rates.of(MODEL, grade))
                if chances[request] >= step.price and step.most(request) > 0:
                    request.speculation.by_model = True
                    step.add(request, token, chances[request])
                    if not probing and step.most(request) > 0 and not self._ends(request, token):
                        going.append(request)
            step.seconds = model.seconds - began
            requests, rows = going, len(going)
        for request, draft in drafts.items():
            request.speculation.model_draft = draft if draft.tokens else None

    def _probe(self, request: Request, step: StepDrafts) -> None:
        """Draft one token of `request`, or compute some that it lacks, if there are seconds for that."""
        missing = self._model.missing(request)
        seconds = self._model.cost.of(min(missing, MOST_ROWS))
        if seconds > self._probe_s:
            return
        self._probe_s -= seconds
        if missing > READY:
            self._model.catch_up([request])
        else:
            self._draft([request], step, probing=True)

    def _ends(self, request: Request, token: int) -> bool:
        return token in self._limits.eos_token_ids or token in request.sampling.stop_token_ids

"""The decision when passes of the draft model pay, by measured seconds and acceptance rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.requests.parts import Draft
from ramify.runtime.scheduler.requests.request import Request
from ramify.runtime.scheduler.speculation.acceptance import (
    LEARNING_RATE,
    LONGEST_MATCH,
    MOST,
    MOST_ROWS,
    AcceptanceRates,
    StepDrafts,
    outcomes,
)
from ramify.runtime.scheduler.speculation.draft_model import DraftModel

MODEL = "model"
"""The name of the draft model among the sources of drafts."""
FIRST_RATE = 0.7
"""The assumed acceptance rate of the draft model's tokens, until some have been verified."""
PROBE_SHARE = 0.01
"""While the draft model does not pay, this share of the time is spent on probes: drafts that test whether it
pays now."""
MOST_PROBE_S = 1.0
"""The most seconds that are saved up for probes."""
READY = MOST + 2
"""The draft model drafts for a request at once if it lacks the KV of at most this number of tokens, which one
step may add. If it lacks more, it must catch up first."""


class ModelDrafts:
    """Proposes draft tokens by the draft model, for all requests of a step together."""

    def __init__(self, model: DraftModel, rates: AcceptanceRates, limits: Limits) -> None:
        self._model = model
        self._rates = rates
        self._limits = limits
        self._rate = FIRST_RATE
        self._probe_s = 0.0

    def chance(self, request: Request) -> float:
        """The probability that the draft model's next token for `request` is accepted, estimated before that
        token is known."""
        return request.speculation.model_acceptance.rate(self._rate)

    def is_better(self, request: Request, chance: float, step: StepDrafts) -> bool:
        """True if a token by the draft model, less the cost of its pass, promises more than a looked-up token
        that is accepted with probability `chance`. False if the model lacks more than `READY` tokens."""
        if not self._model.pays or self._model.missing(request) > READY:
            return False
        return self.chance(request) - step.price_of(self._model.cost.seconds_of(1)) > chance

    def learn(self, request: Request) -> None:
        """Learn acceptance rates from the last draft and the tokens that were appended."""
        speculation = request.speculation
        draft, speculation.model_draft = speculation.model_draft, None
        for grade, accepted in () if draft is None else outcomes(request, draft):
            self._rates.learn(MODEL, grade, accepted=accepted)
            self._rate += LEARNING_RATE * (accepted - self._rate)
            speculation.model_acceptance.learn(accepted=accepted)

    def propose_drafts(self, requests: Sequence[Request], step: StepDrafts) -> None:
        """Give `requests` the draft tokens that are worth their passes and rows. If no draft token is, probe
        now and then."""
        began = self._model.seconds
        self._propose(requests, step)
        step.seconds = self._model.seconds - began

    def _propose(self, requests: Sequence[Request], step: StepDrafts) -> None:
        model = self._model
        model.begin_step()
        for request in requests:
            self.learn(request)
        self._probe_s = min(self._probe_s + PROBE_SHARE * step.cost.seconds_of(step.rows), MOST_PROBE_S)
        requests = [one for one in requests if one.pages.copy is None and step.most(one) > 0]
        worth = [one for one in requests if self.chance(one) >= step.price]
        if requests:
            model.pays = self._pays({one: self.chance(one) for one in worth}, len(worth), step)
        if worth and model.pays:
            missing = {request: model.missing(request) for request in worth}
            late = [one for one in worth if self._is_due(one, missing[one], step, len(requests))]
            self._draft([one for one in worth if missing[one] <= READY], step)
            if late:
                model.catch_up(late)
        elif requests and model.cost.seconds_of(1) <= self._probe_s:
            self._probe(min(requests, key=model.missing), step)

    def _pays(self, promised: Mapping[Request, float], rows: int, step: StepDrafts) -> bool:
        """True if a pass of `rows` tokens is worth its time. `promised` has the expected number of accepted
        tokens that the pass gives, by request."""
        needed = step.price_of(self._model.cost.seconds_of(rows)) + step.price * len(promised)
        return bool(promised) and sum(promised.values()) >= needed

    def _is_due(self, request: Request, missing: int, step: StepDrafts, among: int) -> bool:
        """True if the draft model is to catch up with `request`: the model lacks more than `READY` tokens,
        and `request` has decoded for as long as computing these tokens takes. A long output will probably get
        much longer. If not, the time lost is at most the time that the output has taken.

        missing : the number of tokens that the draft model lacks
        among : the number of requests that share the time of a step
        """
        cost, steps = self._model.cost, step.cost.seconds_of(step.rows) / among
        return missing > READY and cost.seconds_of(missing) <= request.output_len * steps

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
                chances[request] *= acceptance.rate(self._rates.rate_of(MODEL, grade))
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
        """Draft one token of `request`, if the saved seconds allow. If the draft model lacks more than
        `READY` tokens of `request`, compute some of these instead."""
        missing = self._model.missing(request)
        seconds = self._model.cost.seconds_of(min(missing, MOST_ROWS))
        if seconds > self._probe_s:
            return
        self._probe_s -= seconds
        if missing > READY:
            self._model.catch_up([request])
        else:
            self._draft([request], step, probing=True)

    def _ends(self, request: Request, token: int) -> bool:
        return token in self._limits.eos_token_ids or token in request.sampling.stop_token_ids

"""The scheduler: schedule, run, postprocess.

Continuous batching with one kind of work. Every request has tokens that are not computed yet; a step computes
some or all of them, and when it reaches the last one, the next token is sampled. Prefill chunks, decoding and
resumption after a retraction differ in the number of tokens only (Orca, OSDI 22; Sarathi-Serve, OSDI 24), so
one packed batch mixes them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ramify.engine_messages import Abort, Failed, GrammarFailed, GrammarReady, Reply, StepOutput, Submit
from ramify.errors import EngineError
from ramify.messages import Finish, SchedulerStats
from ramify.radix.cache import PrefixCache
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.runner import Runner
from ramify.runtime.scheduler.admission.admission import Admission
from ramify.runtime.scheduler.admission.chunk_size import ChunkSize
from ramify.runtime.scheduler.admission.flows import Flows
from ramify.runtime.scheduler.admission.policy import POLICIES
from ramify.runtime.scheduler.admission.precedence import Precedence, Turn
from ramify.runtime.scheduler.arrival import Arrivals
from ramify.runtime.scheduler.constraints.healing import Healer
from ramify.runtime.scheduler.constraints.masks import MaskFiller
from ramify.runtime.scheduler.control import Control
from ramify.runtime.scheduler.counters import Counters
from ramify.runtime.scheduler.forward import ForwardPass
from ramify.runtime.scheduler.lifecycle import Lifecycle
from ramify.runtime.scheduler.limits import Limits
from ramify.runtime.scheduler.outputs.appending import OutputAppender
from ramify.runtime.scheduler.outputs.next_tokens import RequestSampler
from ramify.runtime.scheduler.outputs.output import StepOutputs
from ramify.runtime.scheduler.outputs.scoring import ComputedSpan, Scorer
from ramify.runtime.scheduler.outputs.verification import Predicting, Verifier
from ramify.runtime.scheduler.overlap import OverlapScheduling
from ramify.runtime.scheduler.pages import RequestPages
from ramify.runtime.scheduler.programs.programs import Programs
from ramify.runtime.scheduler.request import Request, ScheduledRequest
from ramify.runtime.scheduler.speculation.acceptance import rows_of
from ramify.runtime.scheduler.speculation.alternation import Alternation
from ramify.runtime.scheduler.speculation.draft_model import DraftModel
from ramify.runtime.scheduler.speculation.drafter import Drafter
from ramify.runtime.scheduler.transfers import Transfers

if TYPE_CHECKING:
    from ramify.grammar.retokenize import Retokenizer
    from ramify.runtime.scheduler.constraints.grammars import GrammarStore

log = logging.getLogger("ramify")


class Scheduler:
    """Owns the requests of one engine. `reply` takes messages to the detokenizer other than step outputs.

    `config` has numbers for what depends on the device (`executor.device_defaults`).
    `draft_runner` has the draft model; the pages of its pool have the numbers of those in the model's.
    `kv_identity` tells KV apart (`ramify.runtime.kv_transfer.identity`); without it no page is transferred.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        runner: Runner,
        cache: PrefixCache,
        grammars: GrammarStore,
        reply: Callable[[Reply | Failed], None],
        clock: Callable[[], float] = time.monotonic,
        retokenizer: Retokenizer | None = None,
        healer: Healer | None = None,
        draft_runner: Runner | None = None,
        kv_identity: Callable[[], str] | None = None,
    ) -> None:
        assert config.max_running is not None
        assert config.chunk_tokens is not None
        self._config = config
        self._clock = clock
        self._runner = runner
        self._pages = pages = RequestPages(cache)
        self._programs = programs = Programs()
        self._outputs = StepOutputs()
        self.counters = counters = Counters(clock)
        draft_model = (
            None if draft_runner is None else DraftModel(draft_runner, pages, limits, counters, clock)
        )
        self._alternation = Alternation() if config.overlap and config.speculation else None
        self._drafter = Drafter(
            cache,
            limits,
            enabled=bool(config.speculation),
            model=draft_model,
            rows=rows_of(runner.device),
        )
        self._requests = requests = Lifecycle(
            pages,
            programs,
            self._outputs,
            grammars,
            self._drafter,
            counters,
            Flows(config.chunk_tokens),
            reply,
            clock,
        )
        self._precedence = Precedence(self._drafter.cost)
        target = None if config.itl_target_ms is None else config.itl_target_ms / 1e3
        self._chunks = ChunkSize(config.chunk_tokens, target, self._drafter.cost)
        self._admission = Admission(
            pages, POLICIES[config.policy](programs), config.max_running, requests.retract
        )
        self._scorer = Scorer(runner, pages, requests)
        sampler, masks = RequestSampler(runner, limits), MaskFiller()
        overlap = OverlapScheduling(runner, pages)
        self._forward = ForwardPass(runner, masks, overlap, pages.states, pages.page_size, draft_model)
        self._appender = OutputAppender(
            limits, self._outputs, sampler, counters, requests.finish, config.jump_forward
        )
        launching = overlap if config.overlap else None
        self._verifier = Verifier(
            runner,
            sampler,
            masks,
            self._appender,
            requests,
            counters,
            launching,
            self._chunks,
            self._alternation,
        )
        self._arrivals = Arrivals(
            limits,
            runner.adapters,
            grammars,
            retokenizer,
            healer,
            requests,
            self._appender,
            self._scorer,
            clock,
        )
        self._control = Control(pages, programs, requests, counters, runner.adapters, config.model, reply)
        self.transfers = transfers = Transfers(
            pages, runner.pool, limits, requests, reply, kv_identity, config.tensor_parallel
        )
        if draft_model is not None:
            transfers.overwritten = draft_model.overwritten
        pages.give_way = transfers.give_way
        self._handlers: dict[type, Callable[..., None]] = {
            Submit: self._arrivals.submit,
            Abort: requests.abort,
            GrammarReady: self._arrivals.grammar_answered,
            GrammarFailed: self._arrivals.grammar_answered,
            **self._control.handlers,
            **transfers.handlers,
        }

    @property
    def busy(self) -> bool:
        """A step would do something."""
        return bool(self._requests.running or self._requests.waiting or self.transfers.busy)

    def receive(self, message: object) -> None:
        self._handlers[type(message)](message)

    def compiler_died(self) -> None:
        self._arrivals.compiler_died()

    def stats(self) -> SchedulerStats:
        return self._control.stats()

    def step(self) -> StepOutput | None:
        """One step; None when it had nothing to tell."""
        began = self._clock()
        self._requests.end_exceeding(began)
        plan = self.schedule(began)
        if plan:
            rows = sum([stop - request.computed_len for request, stop in plan if request.decoding])
            accepted = self.counters.accepted_tokens
            try:
                hidden = self.run(plan)
            except Exception as error:
                self._fail_all([request for request, _ in plan], "The forward pass failed", error)
            else:
                self.postprocess(plan, hidden)
                if rows == len(hidden):
                    seconds = self._clock() - began
                    self._drafter.learn_cost(rows, seconds)
                    if self._alternation is not None:
                        self._alternation.learn(
                            1 + (self.counters.accepted_tokens - accepted) / len(plan), seconds
                        )
                else:
                    self._chunks.learn(rows, len(hidden) - rows, self._clock() - began)
            self.counters.steps += 1
            if self._alternation is not None:
                self._alternation.advance()
        output = self._outputs.take(self._clock())
        seconds = self._clock() - began
        self.counters.step_s += seconds
        self._precedence.end(seconds)
        self.transfers.advance()
        if self._config.check_pages:
            self._pages.cache.check()
        return output

    def schedule(self, now: float) -> list[ScheduledRequest]:
        """Give the running requests that take part, highest rank and oldest first, what they need, and
        admit waiting ones."""
        requests, precedence = self._requests, self._precedence
        requests.judge_flows()
        turn = precedence.begin(requests.running, requests.waiting, requests.flows.share)
        plan = self._schedule(turn, now)
        if not plan and turn.leaves_out:
            plan = self._schedule(precedence.begin_all(requests.running), now)
        return plan

    def _schedule(self, turn: Turn, now: float) -> list[ScheduledRequest]:
        plan: list[ScheduledRequest] = []
        requests, retractions = self._requests, self.counters.retractions
        requests.sitting_out = len(requests.running) - len(turn.first) if turn.leaves_out else None
        drafting = self._alternation is None or self._alternation.drafts
        self._drafter.propose(turn.first if drafting else ())
        decoding = (*turn.first, *turn.last) if self._chunks.target is not None else ()
        budget = self._chunks.of(
            sum(request.extend_len + request.computed_ahead for request in decoding if request.decoding)
        )
        budget, short_of_pages = self._go_on(turn.first, budget, plan)
        if not short_of_pages:
            joining = (turn.least, turn.most)
            for request in self._admission.next(requests.waiting, requests.running, budget, now, joining):
                requests.start(request, now)
                if request.extend_len == 0 and request.scoring is not None:
                    self._scorer.advance(request, now)
                elif request.extend_len == 0:
                    requests.finish(request, Finish(reason="length"))  # nothing to compute or to sample
                elif budget > 0:
                    budget -= self._take(request, budget, plan)
        self._go_on(turn.last, budget, plan)
        if self._pages.states.present:  # requests that were admitted may have marked those before them
            cut = self._pages.states.cut
            plan = [ScheduledRequest(request, cut(request, stop)) for request, stop in plan]
        if self.counters.retractions > retractions:
            return [scheduled for scheduled in plan if scheduled.request.pages.lock is not None]
        return plan

    def _go_on(
        self, running: Sequence[Request], budget: int, plan: list[ScheduledRequest]
    ) -> tuple[int, bool]:
        """Schedule `running`. Returns the budget that is left, and whether one of them was retracted."""
        retracted, page_size = False, self._pages.page_size
        for request in running:
            pages = request.pages
            if pages.lock is None:
                continue  # retracted in this step, for another one
            if request.target_len > len(pages.ids) * page_size and not self._make_room(request):
                retracted = True
            elif request.decoding:
                plan.append(ScheduledRequest(request, request.length + request.computed_ahead))
            elif budget > 0:
                budget -= self._take(request, budget, plan)
        return budget, retracted

    def run(self, plan: Sequence[ScheduledRequest]) -> torch.Tensor:
        """One forward pass: (tokens, hidden size), the states of the scheduled tokens in their order."""
        with self.counters.model_time():
            hidden = self._forward.run(plan)
        self.counters.computed_tokens += len(hidden)
        for request, _ in plan:
            if request.draft_len:
                self.counters.drafted(request)
        return hidden

    def postprocess(self, plan: Sequence[ScheduledRequest], hidden: torch.Tensor) -> None:
        """Record what was computed, choose and append tokens, and end what is done."""
        now = self._clock()
        next_row = 0
        predicting: Predicting = []
        spans: list[ComputedSpan] = []
        for request, stop in plan:
            start = request.computed_len
            first_row, next_row = next_row, next_row + stop - start
            if request.pages.lock is None:
                continue  # another span of its choices has failed in this step
            try:
                samples = stop == request.length + request.computed_ahead and request.budget_left > 0
                if request.wants_logprobs:
                    self._appender.report_computed(request, hidden[first_row:next_row], start, stop)
                if request.pooled is not None:
                    request.pooled.add(hidden[first_row:next_row], start)
                prefilled = start < request.prompt_len
                request.computed_len = min(stop, request.length)
                self._programs.serve(request, stop - start)
                if prefilled:
                    self._pages.commit(request)
                    self._pages.states.computed(request)
                if samples:
                    predicting.append((request, first_row + request.length - 1 - start))
                elif request.scoring is not None:
                    spans.append(ComputedSpan(request, start, stop, first_row))
                elif request.extend_len == 0:
                    self._requests.finish(request, Finish(reason="length"))
            except Exception as error:
                self._requests.fail_alone(request, error)
        if spans:
            with self.counters.model_time():
                self._scorer.read(spans, hidden, now)
        if predicting:
            try:
                self._verifier.choose(predicting, hidden, now)
            except Exception as error:
                self._fail_all([request for request, _ in predicting], "Choosing tokens failed", error)

    def _fail_all(self, requests: Sequence[Request], what: str, error: Exception) -> None:
        """Called while `error` is handled: what a step does for `requests` together failed. They end, and the
        engine goes on."""
        log.exception("%s", what)
        self._runner.check_device()  # a lost device ends this process; the next process gets it back
        for request in requests:
            self._requests.fail(request, EngineError(f"{what}: {error}"))

    def _take(self, request: Request, budget: int, plan: list[ScheduledRequest]) -> int:
        """Schedule as many tokens of `request` as `budget` allows, and return their number."""
        stop = self._pages.states.cut(request, request.chunk_stop(budget))
        plan.append(ScheduledRequest(request, stop))
        return stop - request.computed_len

    def _make_room(self, request: Request) -> bool:
        """Find pages for all tokens of `request`, if need be by retracting the newest requests of the lowest
        rank.

        False where `request` itself was retracted.
        """
        while not self._pages.grow(request):
            if request.drop_draft() or self._pages.give_way():
                continue
            last = self._requests.running[-1]
            self._requests.retract(last)
            if last is request:
                return False
        return True

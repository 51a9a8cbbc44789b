"""The scheduler: schedule, run, postprocess.

Continuous batching with one kind of work. Every request has tokens that are not computed yet. A step computes
some or all of them. If it computes the last of these tokens, the request's next token is sampled. Prefill
chunks, decoding and resumption after a retraction differ in the number of tokens only (Orca, OSDI 22;
Sarathi-Serve, OSDI 24), so one packed batch mixes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ramify.engine_messages import (
    Abort,
    Failed,
    GrammarFailed,
    GrammarReady,
    Reply,
    StepOutput,
    Submit,
    Woken,
)
from ramify.messages import SchedulerStats
from ramify.radix.cache import PrefixCache
from ramify.runtime.cold.store import ColdStore
from ramify.runtime.cold.tier import ColdTier
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.runner import Runner
from ramify.runtime.scheduler.control import Control
from ramify.runtime.scheduler.forward import ForwardPass
from ramify.runtime.scheduler.lifecycle import Arrivals, Lifecycle
from ramify.runtime.scheduler.plan import StepPlanner
from ramify.runtime.scheduler.requests.accounts import Counters
from ramify.runtime.scheduler.requests.constrained import Healer
from ramify.runtime.scheduler.requests.flows import Flows
from ramify.runtime.scheduler.requests.limits import TUNED, Limits, Tuning
from ramify.runtime.scheduler.requests.pages import RequestPages
from ramify.runtime.scheduler.requests.request import Request, ScheduledRequest
from ramify.runtime.scheduler.requests.sampling import RequestSampler
from ramify.runtime.scheduler.residency import Residency
from ramify.runtime.scheduler.results import StepResults
from ramify.runtime.scheduler.speculation.acceptance import rows_of
from ramify.runtime.scheduler.speculation.drafter import Drafter
from ramify.runtime.scheduler.transfers import Transfers

if TYPE_CHECKING:
    from ramify.grammar.retokenize import Retokenizer
    from ramify.runtime.scheduler.grammars import GrammarStore


class Scheduler:
    """Owns the requests of one engine. `reply` sends messages other than step outputs to the detokenizer.

    In `config`, the defaults that depend on the device are filled in (`executor.memory.with_defaults`).
    `draft_runner` runs the draft model. Page n of its pool holds the same tokens as page n of the model's
    pool. `kv_identity` returns the engine's KV identity (`ramify.runtime.kv_transfer.identity`). If
    `kv_identity` is None, no page is transferred. `cold` are the stores of the cold tier, whose thread calls
    `wake` when `step` has something to do for it. `residency` returns the memory of pages; if None,
    all pages stay.
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
        tuning: Tuning = TUNED,
        sampler: RequestSampler | None = None,
        cold: Sequence[ColdStore] = (),
        wake: Callable[[], None] = lambda: None,
        residency: Residency | None = None,
    ) -> None:
        assert config.chunk_tokens is not None
        self._clock = clock
        self._checked = cache if config.check_pages else None
        self.residency = residency
        self.counters = Counters(clock)
        self.cold: ColdTier[Request] | None = None
        if cold:
            self.cold = ColdTier(
                cold,
                cache,
                runner.pool,
                clock,
                piece_bytes=tuning.piece_bytes,
                overwritten=lambda pages: self.drafter.overwritten(pages),
                wake=wake,
            )
        pages = RequestPages(cache, tuning, self.cold)
        self.drafter = Drafter(
            pages,
            limits,
            self.counters,
            clock,
            rows_of(runner.device),
            tuning.least_gain,
            draft_runner,
            enabled=bool(config.speculation),
        )
        flows = Flows(config.chunk_tokens, tuning.light_requests)
        self.requests = Lifecycle(pages, grammars, self.drafter, self.counters, flows, reply, clock)
        self.transfers = Transfers(
            self.requests,
            runner.pool,
            limits,
            kv_identity,
            self.drafter.overwritten,
            config.tensor_parallel,
            tuning.piece_bytes,
        )
        self._runner = runner
        self.forward = ForwardPass(runner, pages, self.drafter.model)
        sampler = sampler or RequestSampler(runner, limits, pages.slots)
        self.results = results = StepResults(config, runner, limits, self.requests, self.forward, sampler)
        self.planner = StepPlanner(config, tuning, self.requests, self._give_way, results.advance)
        self._arrivals = Arrivals(
            limits,
            runner.adapters,
            retokenizer,
            healer,
            self.requests,
            results.appender,
            results.scorer,
            config.max_pinned_share,
        )
        self._control = Control(
            self.requests, runner.adapters, self.transfers, config.model, config.max_pinned_share
        )
        self._handlers: dict[type, Callable[..., None]] = {
            Submit: self._arrivals.submit,
            Abort: self.requests.abort,
            GrammarReady: self._arrivals.grammar_answered,
            GrammarFailed: self._arrivals.grammar_answered,
            Woken: lambda message: None,
            **self._control.handlers,
        }

    @property
    def busy(self) -> bool:
        """True if there are requests or transfers to work on."""
        if self.requests.running or self.requests.waiting or self.transfers.busy:
            return True
        return self.cold is not None and self.cold.busy

    @property
    def wait_s(self) -> float | None:
        """Seconds after which `step` is to be called though nothing is to be done; None for never."""
        waits = [part.wait_s for part in (self.cold, self.residency) if part is not None]
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def receive(self, message: object) -> None:
        self._handlers[type(message)](message)

    def compiler_died(self) -> None:
        self._arrivals.compiler_died()

    def stats(self) -> SchedulerStats:
        return self._control.stats()

    def step(self) -> StepOutput | None:
        """Run one step: schedule, run, postprocess. Returns None if there is nothing to send."""
        began = self._clock()
        requests = self.requests
        requests.end_exceeding(began)
        if self.residency is not None:
            self.residency.check(lambda: [*requests.running, *requests.waiting], requests.fail)
        plan = self.planner.schedule(began)
        if plan:
            self._compute(plan, began)
        output = requests.outputs.take_output(self._clock())
        seconds = self._clock() - began
        self.counters.step_s += seconds
        self.planner.end_step(seconds, empty=not plan)
        self.transfers.copy_piece()
        if self.cold is not None:
            for request in self.cold.advance(computing=bool(plan)):
                self.requests.enqueue(request, hold=False)
        if self._checked is not None:
            self._checked.check()
        return output

    def _compute(self, plan: Sequence[ScheduledRequest], began: float) -> None:
        rows = sum([scheduled.tokens for scheduled in plan if scheduled.request.decoding])
        accepted = self.counters.accepted_tokens
        try:
            hidden = self.run_pass(plan)
        except Exception as error:
            self.results.fail_all([request for request, *_ in plan], "The forward pass failed", error)
        else:
            self.results.read(plan, hidden, self._clock(), self.planner.ahead)
            accepted = self.counters.accepted_tokens - accepted
            seconds = self._clock() - began
            self.planner.learn(len(plan), rows, len(hidden) - rows, accepted, seconds)
            if self.cold is not None:
                self.cold.learn(rows, len(hidden) - rows, seconds)
        self.counters.steps += 1

    def _give_way(self) -> bool:
        return self.transfers.give_way() or (self.cold is not None and self.cold.give_way())

    def run_pass(self, plan: Sequence[ScheduledRequest]) -> torch.Tensor:
        """Run one forward pass. Returns the hidden states of the scheduled tokens, (tokens, hidden size), in
        the order of `plan`."""
        with self.counters.model_time():
            hidden = self.forward.run_plan(plan)
        self.counters.computed_tokens += len(hidden)
        self.drafter.observe_pass(plan, lambda: self._runner.read_by_head(hidden))
        for scheduled in plan:
            if scheduled.request.draft_len:
                self.counters.count_drafts(scheduled.request)
        return hidden

"""Results of a step: next tokens, verified known and draft tokens, and scores of choices.

Example: a request's sequence ends in 4, and the draft tokens 5 6 7 were computed after it. The hidden states
of 4, 5, 6 and 7 each predict a token. The state of 4 gives 5: this draft token is right, so the state of 5 is
used next. The state of 5 gives 6, and the state of 6 gives 9. So the step appends 5 6 9 to the sequence, and
7 is void. The tokens are the same as without a draft, because each is chosen with the request's own random
number and under its grammar.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ramify.engine_messages import Submit
from ramify.errors import EngineError
from ramify.kernels.machine.transfers import to_device
from ramify.kernels.reference.logits import log_sum
from ramify.kernels.registry import LogSum
from ramify.messages import Finish, ProgramHint
from ramify.runtime.config import EngineConfig
from ramify.runtime.executor.attention import index_select
from ramify.runtime.executor.runner import Runner
from ramify.runtime.scheduler.forward import ForwardPass
from ramify.runtime.scheduler.lifecycle import Lifecycle
from ramify.runtime.scheduler.outputs import OutputAppender
from ramify.runtime.scheduler.path_scores import ComputedWave, PathScorer
from ramify.runtime.scheduler.requests.choices import ChoiceTree, ScoredSpan, ScoringState
from ramify.runtime.scheduler.requests.limits import Limits
from ramify.runtime.scheduler.requests.parts import Logprob
from ramify.runtime.scheduler.requests.request import Request, ScheduledRequest
from ramify.runtime.scheduler.requests.sampling import LOGPROB_ROWS, RequestSampler, Sampled
from ramify.sampling_params import SamplingParams

log = logging.getLogger("ramify")


class ComputedSpan(NamedTuple):
    """A computed part of a request: positions ``[start, stop)``. The hidden states of these positions are in
    the rows of the step from `row` on."""

    request: Request
    start: int
    stop: int
    row: int


@dataclasses.dataclass(eq=False)
class Scorer:
    """Computes the scores of choices from hidden states, and enqueues the spans after each fork."""

    runner: Runner
    requests: Lifecycle

    def begin_scoring(self, head: Request, choices: ChoiceTree) -> None:
        """Enqueue the first spans of the `choices` of `head`, which has arrived."""
        choices.open.add(head)
        for span in choices.alone():
            self._branch(head, (), span)
        if head.length:
            self.requests.enqueue(head)
        else:
            self.advance(head, head.arrival)

    def read(self, computed: Sequence[ComputedSpan], hidden: torch.Tensor, now: float) -> None:
        """Record log-probabilities of tokens of choices, and `advance` requests whose spans are computed.

        hidden : (tokens, hidden size), the hidden states of the step
        """
        try:
            self._read(computed, hidden)
        except Exception as error:
            log.exception("scoring failed")
            for part in computed:
                self.requests.fail(part.request, EngineError(f"Scoring failed: {error}"))
            return
        for request, *_ in computed:
            if request.pages.lock is not None and request.extend_len == 0:
                with self.requests.failing_alone(request):
                    self.advance(request, now)

    def _read(self, computed: Sequence[ComputedSpan], hidden: torch.Tensor) -> None:
        rows: list[int] = []
        places: list[tuple[ScoredSpan, int]] = []
        for request, start, stop, row in computed:
            assert request.scoring is not None
            span = request.scoring.span
            wanted = [position for position in range(start, stop) if position in span.wanted]
            rows += [row + position - start for position in wanted]
            places += [(span, position) for position in wanted]
        tokens = [[token for token, _ in span.wanted[position]] for span, position in places]
        found = [
            log_probabilities(
                self.runner.logits(index_select(hidden, rows[first : first + LOGPROB_ROWS])),
                tokens[first : first + LOGPROB_ROWS],
                self.runner.ops.log_sum,
            )
            for first in range(0, len(rows), LOGPROB_ROWS)
        ]
        values = iter(torch.cat(found).tolist() if found else [])  # the one wait for the device
        for (span, position), some in zip(places, tokens, strict=True):
            span.note(position, list(itertools.islice(values, len(some))))

    def advance(self, request: Request, now: float) -> None:
        """Enqueue the spans that follow the span of `request`, which is computed and scored. If no spans are
        open any more, finish `request.head`."""
        assert request.scoring is not None
        head, choices = request.head, request.scoring.choices
        following = request.scoring.span.following()
        for span in following:
            self._branch(head, tuple(request.ids.tolist()), span)
        choices.open.remove(request)
        if request is not head:
            choices.done_tokens += len(request.scoring.span.tokens)
        if request is head and not choices.open:
            self.requests.finish(head, Finish(reason="length"))
            return
        if following:
            choices.resting.append(request)
        self.requests.pages.rest(request, now, awaited=bool(following))
        self.requests.stop(request)
        if not choices.open:
            self.requests.finish(head, Finish(reason="length"))

    def _branch(self, head: Request, before: tuple[int, ...], span: ScoredSpan) -> None:
        assert head.scoring is not None
        choices, hint = head.scoring.choices, head.hint
        submit = Submit(
            rid=f"{head.rid}/{next(choices.numbers)}",
            ids=before + span.tokens,
            sampling=SamplingParams(max_tokens=0),
            hint=hint and ProgramHint(program=hint.program, name=hint.name, session=hint.session),
            priority=head.priority,
        )
        request = Request(submit, arrival=head.arrival, max_tokens=0)
        request.adapter, request.scope = head.adapter, head.scope
        request.scoring, request.program = ScoringState(choices, span, head), head.program
        request.served_before, request.flow = head.served_before, head.flow
        # Only the head's statistics are reported: here `start` must not count a first pass.
        request.stats.first_pass, request.stats.cached_tokens = head.arrival, 0
        choices.open.add(request)
        self.requests.enqueue(request)


@torch.inference_mode()
def log_probabilities(
    logits: torch.Tensor, tokens: Sequence[Sequence[int]], log_sum: LogSum = log_sum
) -> torch.Tensor:
    """The log-probabilities of the tokens ``tokens[i]`` by row i of `logits`, (R, vocab): those of all rows
    in one flat float32 tensor on the device of `logits`. Does not wait for the device."""
    counts = torch.tensor([len(some) for some in tokens])
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    wanted = torch.tensor(list(itertools.chain.from_iterable(tokens)))
    rows, wanted = to_device(torch.stack([rows, wanted]), logits.device)
    logits = logits.float()
    return logits[rows, wanted] - log_sum(logits)[rows]


Predicting = list[tuple[Request, int]]
"""Requests, each with the row of the hidden state that predicts its next token."""

PlannedAhead = Callable[[Sequence[Request]], list[ScheduledRequest] | None]
"""A function from the requests whose next tokens are being chosen to the prompt chunks that the next step
computes beside these tokens, or to None if nothing is to be launched."""


class StepResults:
    """Records what a step has computed, chooses and verifies tokens, appends them, and ends requests that are
    done."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        limits: Limits,
        requests: Lifecycle,
        forward: ForwardPass,
        sampler: RequestSampler,
    ) -> None:
        self.appender = OutputAppender(
            limits, requests.outputs, sampler, requests.counters, requests.finish, config.jump_forward
        )
        self._runner = runner
        self._requests = requests
        self._sampler = sampler
        self._masks = forward.masks
        self._overlap = forward.overlap if config.overlap else None
        self.scorer = Scorer(runner, requests)
        self._paths = PathScorer(runner, requests)

    def advance(self, request: Request, now: float) -> None:
        """Advance or finish `request`, which was admitted and has nothing to compute."""
        if request.scoring is not None:
            self.scorer.advance(request, now)
        else:
            self._requests.finish(request, Finish(reason="length"))  # its max_tokens is 0

    def read(
        self, plan: Sequence[ScheduledRequest], hidden: torch.Tensor, now: float, planned_ahead: PlannedAhead
    ) -> None:
        """Read the hidden states of the scheduled tokens, (tokens, hidden size), in the order of `plan`.

        planned_ahead : the part of the next step that may be launched now (`StepPlanner.ahead`)
        """
        requests, pages = self._requests, self._requests.pages
        next_row = 0
        predicting: Predicting = []
        spans: list[ComputedSpan] = []
        waves: list[ComputedWave] = []
        decoded: list[Request] = []
        for scheduled in plan:
            request, start, stop, tokens, wave = scheduled
            first_row, next_row = next_row, next_row + tokens
            if request.pages.lock is None:
                continue  # it has ended in this step, when another of its spans failed
            if tokens == 1 and request.plain and stop == request.length > request.prompt_len:
                request.computed_len = stop
                decoded.append(request)
                predicting.append((request, first_row))
                continue
            if wave:
                requests.programs.serve(request, tokens)
                waves.append(ComputedWave(request, wave, first_row))
                continue
            try:
                samples = scheduled.samples
                if request.wants_logprobs:
                    self.appender.report_computed(request, hidden[first_row:next_row], start, stop)
                if request.pooled is not None:
                    request.pooled.take(self._runner.final(hidden[first_row:next_row]), start)
                prefilled = start < request.prompt_len
                request.computed_len = min(stop, request.length)
                requests.programs.serve(request, stop - start)
                if prefilled:
                    pages.commit(request)
                    pages.states.keep_copy(request)
                if samples:
                    predicting.append((request, first_row + request.length - 1 - start))
                elif request.scoring is not None:
                    spans.append(ComputedSpan(request, start, stop, first_row))
                elif request.extend_len == 0 and not request.branching:
                    requests.finish(request, Finish(reason="length"))
            except Exception as error:
                requests.fail_alone(request, error)
        requests.programs.serve_all(decoded)
        if spans:
            with requests.counters.model_time():
                self.scorer.read(spans, hidden, now)
        if waves:
            with requests.counters.model_time():
                self._paths.read(waves, hidden)
        if predicting:
            try:
                self._choose(predicting, hidden, now, planned_ahead)
            except Exception as error:
                self.fail_all([request for request, _ in predicting], "Choosing tokens failed", error)
        if pages.states.present:
            for request, *_ in plan:
                pages.states.settle(request)

    def _choose(
        self, predicting: Predicting, hidden: torch.Tensor, now: float, planned_ahead: PlannedAhead
    ) -> None:
        """Choose the next tokens of the requests in `predicting`, and append them. `hidden` (tokens, hidden
        size) are the hidden states of the step."""
        with self._requests.counters.model_time():
            # The logits of known and draft tokens are computed at once with those of the last token, so that
            # the weights of the LM head are read only once; most of these tokens are accepted. Rows are
            # ordered by their distance from the sequence's end. So the rows used together are a slice.
            ahead = [request.computed_ahead for request, _ in predicting]
            needed = [
                row + i
                for i in range(max(ahead) + 1)
                for (_, row), count in zip(predicting, ahead, strict=True)
                if i <= count
            ]
            states = hidden if needed == list(range(len(hidden))) else index_select(hidden, needed)
            logits = self._runner.logits(states, self._sampler.masks([request for request, _ in predicting]))
        place = {row: i for i, row in enumerate(needed)}
        while predicting:
            predicting = self._choose_once(predicting, logits, place, now, planned_ahead)

    def _choose_once(
        self,
        predicting: Predicting,
        logits: torch.Tensor,
        place: Mapping[int, int],
        now: float,
        planned_ahead: PlannedAhead,
    ) -> Predicting:
        """Choose tokens. ``logits[place[row]]`` are the logits of row `row` of the step's hidden states.

        Returns the requests whose known or draft tokens were accepted, each with the row of the hidden state
        that predicts its next token.
        """
        errors, ready = self._masks.errors, predicting
        if errors:
            ready = [(request, row) for request, row in predicting if request.rid not in errors]
            for request, _ in predicting:
                if request.rid in errors:
                    self._requests.fail(request, errors[request.rid])
        if not ready:
            return []
        requests = [request for request, _ in ready]
        counts = [self._sampler.at_once(request) if request.draft_len else 1 for request in requests]
        # In the order of the logits.
        wanted = [(i, ahead) for ahead in range(max(counts)) for i in range(len(ready)) if ahead < counts[i]]
        rows = [place[ready[i][1] + ahead] for i, ahead in wanted]
        first, last = rows[0], rows[0] + len(rows)
        chosen = self._sampler.next_tokens(
            [(requests[i], ahead) for i, ahead in wanted],
            logits[first:last] if rows == list(range(first, last)) else index_select(logits, rows),
            self._launcher(requests, planned_ahead) if len(rows) == len(requests) else None,
        )
        if self._overlap is not None:
            self._overlap.record([token for token, _ in chosen])
        tokens: list[list[Sampled]] = [[sampled] for sampled in chosen[: len(ready)]]
        for (i, _), sampled in zip(wanted[len(ready) :], chosen[len(ready) :], strict=True):
            tokens[i].append(sampled)
        more: Predicting = []
        for (request, row), some in zip(ready, tokens, strict=True):
            try:
                if request.plain and self.appender.accept_plain(request, some[0][0]):
                    continue
                on = 0
                for token, logprob in some:
                    following = self._append(request, token, logprob, now)
                    on += following
                    if not following:
                        break
                else:
                    more.append((request, row + on))
            except Exception as error:
                self._requests.fail_alone(request, error)
        self._masks.fill_now([request for request, _ in more])
        return more

    def _append(self, request: Request, token: int, logprob: Logprob | None, now: float) -> int:
        """Append a chosen token. Returns a distance in rows as `OutputAppender.accept_draft` does: 0 if the
        hidden state that predicts the next token has not been computed."""
        if token != request.next_ahead:
            self.appender.accept(request, token, logprob, now)
            return 0
        if not request.known_len:  # then it is a draft token
            self._requests.counters.count_accepted(request)
            return self.appender.accept_draft(request, token, logprob, now)
        return int(self.appender.accept_known(request, token, logprob))

    def _launcher(
        self, requests: Sequence[Request], planned_ahead: PlannedAhead
    ) -> Callable[[torch.Tensor], None] | None:
        """A function that takes the chosen tokens and launches a pass over these and the next prompt chunks;
        None if nothing is to be launched."""
        overlap = self._overlap
        if overlap is None or not overlap.idle:
            return None
        chunks = planned_ahead(requests)
        if chunks is None:
            return None

        def launch(tokens: torch.Tensor) -> None:
            with self._requests.counters.model_time():
                overlap.launch(requests, tokens, chunks)

        return launch

    def fail_all(self, requests: Sequence[Request], what: str, error: Exception) -> None:
        """Fail `requests`, because a pass or a choice of tokens for all of them has failed with `error`.
        Called inside the `except` block that handles `error`; `what` names the failure. Other requests
        continue."""
        log.exception("%s", what)
        self._runner.check_device()  # raises if the device is lost: only a new process can use it again
        for request in requests:
            self._requests.fail(request, EngineError(f"{what}: {error}"))
